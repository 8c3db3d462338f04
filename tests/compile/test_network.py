"""The compiled network computes what the network computes, without ever compiling again."""

import re
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork
from glm53.compile.config import ALL_REWRITES
from glm53.compile.network import DYNAMIC
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config

BUCKETS = (1, 2, 4)
PAGES = 84


def caches() -> list[KVCache]:
    config = tiny_config()
    with torch.inference_mode(False):  # as an engine's cache, which outlives its steps
        return [KVCache(config, PAGES, mtp=True, dtype=torch.float32) for _ in range(2)]


def tensors(cache: KVCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer if tensor is not None]


@pytest.fixture(scope="module")
def compiled():
    """A network and its compiled form, warm, with a cache that the warm-up may have written to."""
    torch._dynamo.reset()
    network = randomise(Transformer(tiny_config())).eval()
    cache, _ = caches()
    for tensor in tensors(cache):
        tensor.fill_(torch.nan)
    ours = CompiledNetwork(network, CompileConfig(buckets=BUCKETS))
    codes: list[str] = []
    with (
        torch.inference_mode(),
        torch._inductor.config.patch(force_disable_caches=True),  # so that code is generated
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        lines = list(ours.warm_up(cache))
    return network, ours, cache, lines, codes


@pytest.fixture
def no_recompile():
    with torch.compiler.set_stance("fail_on_recompile"), torch.inference_mode():
        yield


def batch(length: int, requests: int, rows: int) -> Batch:
    """`rows` tokens each of requests of different lengths, at most `length` before them."""
    pages = torch.randperm(PAGES).tolist()
    width = PAGES // requests
    generator = torch.Generator().manual_seed(length)
    return Batch.paged(
        [
            (
                torch.randint(131, (rows,), generator=generator).tolist(),
                max(0, length - 3 * i),
                pages[i * width : (i + 1) * width],
            )
            for i in range(requests)
        ],
        PAGE_SIZE,
    )


def test_warm_up_writes_nothing_and_compiles_every_entry(compiled):
    _, ours, cache, lines, _ = compiled
    assert all(tensor.isnan().all() for tensor in tensors(cache))
    entries = [(e, b) for b in (*BUCKETS, DYNAMIC) for e in ("decoder", "head", "draft", "redraft")]
    assert len(lines) == len(entries) + 1 == ours.num_graphs  # and the index scores
    assert set(ours.calls) >= set(entries)


def test_no_graph_holds_a_copy_of_a_cache(compiled):
    """Caches are inputs, written in place: nothing with as many rows is allocated."""
    codes = compiled[-1]
    assert sum("glm53.cache_write" in code for code in codes) > len(BUCKETS)
    allocated = re.findall(r"empty_strided\w*\(\((\d+)", "".join(codes))
    assert len(allocated) > 100
    assert max(map(int, allocated)) < PAGES * PAGE_SIZE


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("requests", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [5, 6, 7, 20, 33, 400])
def test_equals_eager_without_recompiling(compiled, no_recompile, length, requests, rows):
    network, ours, *_ = compiled
    eager, twin = caches()
    for a, b in zip(tensors(eager), tensors(twin), strict=True):
        b.copy_(a.normal_())
    step = batch(length, requests, rows)
    bucket = next((b for b in BUCKETS if b >= requests * rows), DYNAMIC)
    before = ours.calls["decoder", bucket]

    expected = network.model(step, eager)
    result = ours.model(step, twin)
    assert ours.calls["decoder", bucket] == before + 1
    assert result.shape == expected.shape
    tolerance = 2e-5 * expected.abs().max()
    assert (result - expected).abs().max() <= tolerance
    assert (ours.lm_head(result) - network.lm_head(expected)).abs().max() <= tolerance

    ids = torch.randint(131, (step.num_rows,))
    hidden, selection = network.draft(ids, expected, step, eager)
    again, _ = network.draft(ids, hidden, step, eager, selection)
    our_hidden, our_selection = ours.draft(ids, expected, step, twin)
    our_again, _ = ours.draft(ids, our_hidden, step, twin, our_selection)
    assert torch.equal(our_selection.logical, selection.logical)
    assert (our_hidden - hidden).abs().max() <= tolerance
    assert (our_again - again).abs().max() <= tolerance
    # What was not written is bit for bit what it was: no padding row has a slot.
    written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    written[step.slots] = True
    for a, b in zip(tensors(eager), tensors(twin), strict=True):
        assert torch.equal(a[~written], b[~written])
        torch.testing.assert_close(b[written], a[written], rtol=1e-4, atol=1e-4)


def greedy(model, cache: KVCache, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Prompts at once, then a token of each per step."""
    tokens = [list(prompt) for prompt in prompts]
    width = PAGES // len(prompts)
    pages = [list(range(i * width, (i + 1) * width)) for i in range(len(prompts))]
    rows = [(prompt, 0, own) for prompt, own in zip(prompts, pages, strict=True)]
    for _ in range(steps):
        hidden_TD = model.model(Batch.paged(rows, PAGE_SIZE), cache)
        last = torch.tensor([len(new) for new, _, _ in rows]).cumsum(0) - 1
        chosen = model.lm_head(hidden_TD[last]).argmax(-1).tolist()
        rows = [([i], len(t), own) for i, t, own in zip(chosen, tokens, pages, strict=True)]
        for own_tokens, i in zip(tokens, chosen, strict=True):
            own_tokens.append(i)
    return tokens


@pytest.mark.parametrize("requests", [1, 3])
def test_greedy_tokens_equal(compiled, no_recompile, requests):
    """Of the random checkpoint; prompts longer than index_topk, of different lengths."""
    network, ours, *_ = compiled
    prompts = [torch.randint(131, (9 + 14 * i,)).tolist() for i in range(requests)]
    expected, results = (
        greedy(model, cache, prompts, 20)
        for model, cache in zip((network, ours), caches(), strict=True)
    )
    assert results == expected
    assert len({tuple(tokens[-20:]) for tokens in expected}) == requests


@pytest.mark.parametrize("requests", [1, 2, 3, 7])
def test_steps_of_generation_never_compile(compiled, no_recompile, requests):
    """Each runs the compiled decoder: nothing falls back."""
    _, ours, *_ = compiled
    cache, _ = caches()
    for tensor in tensors(cache):
        tensor.normal_()
    bucket = next((b for b in BUCKETS if b >= requests), DYNAMIC)
    for length in (5, 6, 7, 20, 33, 700):
        before = ours.calls.copy()
        for i in range(30):
            assert ours.model(batch(length + i, requests, 1), cache).isfinite().all()
        assert ours.calls - before == {("decoder", bucket): 30}


def test_weights_updated_in_place(compiled, no_recompile):
    network, ours, *_ = compiled
    eager, twin = caches()
    step = batch(0, 2, 1)
    before = ours.model(step, twin).clone()
    saved = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    try:
        network.load_state_dict({n: t * 1.25 for n, t in saved.items()})
        expected = network.model(step, eager)
        result = ours.model(step, twin)
    finally:
        network.load_state_dict(saved)
    assert (result - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert (result - before).abs().max() > 1e-2 * expected.abs().max()


def test_config_names_what_is_wrong():
    with pytest.raises(ValueError, match="cuda_graphs"):
        CompileConfig(cuda_graphs="no")
    for rewrites in (False, "skinny_linear", ("skinny_linear", "a"), (1,), ["skinny_linear"]):
        with pytest.raises(ValueError, match="rewrites"):
            CompileConfig(rewrites=rewrites)
    for buckets in ((), (0, 1), (2, 1), (1, 1), (1.0, 2), 4, None, "12", (True, 2), [1, 2]):
        with pytest.raises(ValueError, match="buckets"):
            CompileConfig(buckets=buckets)
    with pytest.raises(ValueError, match="'fold'"):
        CompileConfig(rewrites=("skinny_linear", "fold"))


def test_rewrites_of_a_device():
    """On a CPU an operator that fuses what Inductor fuses anyway only costs its call."""
    fused = {"norm_rope_cache", "index_query", "embed_eh_norm"}
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert set(CompileConfig().rewrites_on(cuda)) == set(ALL_REWRITES)
    assert set(CompileConfig().rewrites_on(cpu)) == set(ALL_REWRITES) - fused
    assert CompileConfig(rewrites=()).rewrites_on(cuda) == ()
    assert CompileConfig(rewrites=("index_query",)).rewrites_on(cpu) == ("index_query",)
