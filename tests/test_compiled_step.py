"""One decode step as a single graph: torch.compile(fullgraph=True) equals eager, cache included."""

import copy

import pytest
import torch

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config


@torch.no_grad()
@pytest.mark.parametrize("backend", ["inductor"])
def test_paged_decode_steps(backend):
    config = tiny_config()
    model = randomise(Transformer(config, mtp=False)).eval()
    cache = KVCache(config, 3, mtp=False, dtype=torch.float32)
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(torch.nan)
    # The second request crosses a page border between the two steps.
    lengths, pages = (30, PAGE_SIZE - 1), ([2, -1], [1, 0])
    tokens = [torch.randint(131, (n + 2,)).tolist() for n in lengths]

    def batch(steps, start):
        rows = [
            (ids[n + start : n + start + steps], n + start, p)
            for ids, n, p in zip(tokens, lengths, pages, strict=True)
        ]
        return Batch.paged(rows, PAGE_SIZE)

    prompts = [(ids[:n], 0, p) for ids, n, p in zip(tokens, lengths, pages, strict=True)]
    model.model(Batch.paged(prompts, PAGE_SIZE), cache)
    twin = copy.deepcopy(cache)
    compiled = torch.compile(model.model, fullgraph=True, backend=backend, dynamic=False)
    for start in (0, 1):
        step = batch(1, start)
        with torch.compiler.set_stance("default" if start == 0 else "fail_on_recompile"):
            got = compiled(step, twin)
        expected = model.model(step, cache)
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    _assert_same_cache(cache, twin)


def _assert_same_cache(cache, twin):
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if a is not None:
                torch.testing.assert_close(b, a, equal_nan=True, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_no_recompilation_after_an_update_of_weights():
    """All of them in place, then one of them: nothing of the old ones is baked into the graph."""
    config = tiny_config()
    model = randomise(Transformer(config, mtp=False)).eval()
    other = randomise(Transformer(config, mtp=False), seed=1)
    weight = model.model.layers[1].self_attn.o_proj.weight
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    updates = [
        lambda: model.load_state_dict(other.state_dict()),
        lambda: weight.copy_(-2 * weight),
        lambda: bias.copy_(9 * torch.arange(6.0)),
    ]
    cache = KVCache(config, 1, mtp=False, dtype=torch.float32)
    ids = torch.randint(131, (34,)).tolist()
    model.model(Batch.paged([(ids[:30], 0, [0])], PAGE_SIZE), cache)
    twin = copy.deepcopy(cache)
    compiled = torch.compile(model.model, fullgraph=True, dynamic=False)
    compiled(Batch.paged([(ids[30:31], 30, [0])], PAGE_SIZE), twin)
    model.model(Batch.paged([(ids[30:31], 30, [0])], PAGE_SIZE), cache)
    for position, update in enumerate(updates, 31):
        step = Batch.paged([(ids[position : position + 1], position, [0])], PAGE_SIZE)
        before = model.model(step, copy.deepcopy(cache))
        update()
        with torch.compiler.set_stance("fail_on_recompile"):
            got = compiled(step, twin)
        expected = model.model(step, cache)
        assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert (got - before).abs().max() > 1e-2 * before.abs().max()
    _assert_same_cache(cache, twin)
