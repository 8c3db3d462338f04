"""batch_invariant: the logits of a request are the same bits in any company and any chunking."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53 import GLM53, Completion, SamplingParams
from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.tiles import TILE_ROWS, hidden_states, pack
from tests.engines import assert_idle, prompts_of, tiny_model, with_engine
from tests.speculation import assert_mixed, force_drafts, sequences_of
from tests.test_readme import ROOT

NEW = 8
PARAMS = SamplingParams(
    temperature=0, max_new_tokens=NEW, ignore_eos=True, logprobs=3, speculative_tokens=0
)
# index_topk of the tiny model is 7, of nano 64.
LENGTHS = (40, 1, 9, 30, 67, 16, 33)


@functools.cache
def _model(name: str, dtype: torch.dtype) -> GLM53:
    if name == "nano":
        folder = ROOT / "glm53" / "data" / "nano"
        return GLM53.from_pretrained(folder, dtype=dtype, progress=False)
    # Chosen experts differ, scores tie, nothing is a multiple of a vector.
    return GLM53(tiny_model(3).network.to(dtype)).eval()


MODELS = [("tiny", torch.float32), ("tiny", torch.bfloat16), ("nano", torch.float32)]


def _engine(model: GLM53, **arguments) -> GLM53:
    return with_engine(model, **({"batch_invariant": True} | arguments))


def _prompts(name: str) -> list[list[int]]:
    lengths = LENGTHS if name == "tiny" else (90, 1, 70)
    return prompts_of(*lengths, vocab_size=131 if name == "tiny" else 4000)


def _bits(completion: Completion) -> list[dict[int, float]]:
    """Log-probabilities: floats that compare equal are the same bits."""
    assert completion.error is None and completion.logprobs is not None
    return list(completion.logprobs)


@functools.cache
def _alone(name: str, dtype: torch.dtype) -> list[Completion]:
    """What each prompt gives as the only one, computed at once."""
    own = _engine(_model(name, dtype), prefix_caching=False)
    return [own.generate(prompt, PARAMS) for prompt in _prompts(name)]


QUICK = {
    ("tiny", torch.float32): {(5, 3), (1024, 0)},
    ("tiny", torch.bfloat16): {(7, 0)},
    ("nano", torch.float32): {(64, 3)},
}


@pytest.mark.parametrize(
    ("name", "dtype", "budget", "speculative"),
    [
        pytest.param(*model, *case, marks=() if case in QUICK[model] else pytest.mark.slow)
        for model in MODELS
        for case in itertools.product((5, 7, 64, 1024), (0, 3))
    ],
)
def test_any_batch_and_chunking(name, dtype, budget, speculative):
    prompts, alone = _prompts(name), _alone(name, dtype)
    own = _engine(_model(name, dtype), max_batch_tokens=budget, max_running=5)
    force_drafts(own.engine(), sequences_of(alone), vocab_size=own.config.vocab_size)
    params = SamplingParams.override(PARAMS, speculative_tokens=speculative)
    for group in (slice(0, 1), slice(0, 3), slice(0, 7)):
        outs = own.generate(prompts[group], params)
        assert [_bits(c) for c in outs] == [_bits(c) for c in alone[group]]
        if speculative:
            assert_mixed(outs)
    assert_idle(own.engine())


@pytest.mark.parametrize("name", ["tiny", "nano"])
def test_without_it_the_bits_do_depend_on_the_batch(name):
    """Or else the tests here would show nothing.

    In fp32: sums in bf16 models of these sizes are rounded to the same values on the CPUs tried.
    """
    prompts, model = _prompts(name), _model(name, torch.float32)
    alone = [_bits(with_engine(model).generate(prompt, PARAMS)) for prompt in prompts]
    together = with_engine(model, max_batch_tokens=64, max_running=5).generate(prompts, PARAMS)
    assert [_bits(c) for c in together] != alone


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_scores_are_the_log_probabilities_of_generation(name, dtype):
    own = _engine(_model(name, dtype), max_batch_tokens=23, max_running=5)
    force_drafts(own.engine(), sequences_of(_alone(name, dtype)), vocab_size=own.config.vocab_size)
    params = SamplingParams.override(PARAMS, speculative_tokens=2, prompt_logprobs=0)
    outs = own.generate(_prompts(name), params)
    assert_mixed(outs)
    scores = own.score([[*c.prompt_token_ids, *c.token_ids] for c in outs])
    for score, completion in zip(scores, outs, strict=True):
        rows = [*completion.prompt_logprobs[1:], *completion.logprobs]
        ids = [*completion.prompt_token_ids[1:], *completion.token_ids]
        assert score.tolist() == [row[i] for row, i in zip(rows, ids, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prefix_hit(dtype):
    model = _model("tiny", dtype)
    first, second = prompts_of(140, 139, seed=5)
    second[:130] = first[:130]
    cold = _engine(model).generate(second, PARAMS)
    own = _engine(model, max_batch_tokens=50, max_running=5)
    own.generate([first, [9, 10, 11]], PARAMS)
    warm = own.generate(second, PARAMS)
    assert warm.metrics.cached_tokens == 2 * PAGE_SIZE
    assert _bits(warm) == _bits(cold)
    # Pages of tokens that were generated, some by accepted drafts.
    params = SamplingParams.override(PARAMS, max_new_tokens=70)
    answer = _engine(model).generate(first, params)
    turn = [*first, *answer.token_ids, 9]
    cold = _engine(model).generate(turn, PARAMS)
    force_drafts(own.engine(), sequences_of([answer, cold]))
    drafted = own.generate(first, params, speculative_tokens=3)
    again = own.generate(turn, PARAMS, speculative_tokens=3)
    assert again.metrics.cached_tokens == 3 * PAGE_SIZE
    assert _bits(drafted) == _bits(answer) and _bits(again) == _bits(cold)
    assert_mixed([drafted, again])


@pytest.mark.parametrize("speculative", [0, 3])
def test_preemption(speculative):
    model = _model("tiny", torch.float32)
    prompts = prompts_of(60, 61, 62, 60, seed=2)
    params = SamplingParams.override(PARAMS, max_new_tokens=12)
    expected = [_engine(model).generate(prompt, params) for prompt in prompts]
    own = _engine(model, kv_cache_tokens=3 * PAGE_SIZE, max_batch_tokens=50, max_running=8)
    force_drafts(own.engine(), sequences_of(expected))
    outs = own.generate(prompts, params, speculative_tokens=speculative)
    assert [_bits(c) for c in outs] == [_bits(c) for c in expected]
    if speculative:
        assert_mixed(outs)
    assert own.engine().stats.preemptions > 0


def test_padding_is_never_stored_and_stale_memory_never_read():
    model = _model("tiny", torch.float32)
    own = _engine(model, max_batch_tokens=5, max_running=5)
    cache = own.engine()._cache
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(torch.nan)
    prompts = _prompts("tiny")[:3]
    alone = _alone("tiny", torch.float32)[:3]
    assert [_bits(c) for c in own.generate(prompts, PARAMS)] == [_bits(c) for c in alone]
    written = sum(len(prompt) + NEW - 1 for prompt in prompts)
    for layer in cache.layers[: model.config.num_hidden_layers]:
        assert int(layer.latent.isfinite().all(-1).sum()) == written


def test_decisions_recorded_are_those_of_the_rows():
    """By tiles or not: the same trace, near ties aside."""
    model, prompts = _model("tiny", torch.float32), _prompts("tiny")
    params = SamplingParams.override(PARAMS, record=True)
    plain = with_engine(model, max_batch_tokens=23, max_running=5).generate(prompts, params)
    tiled = _engine(model, max_batch_tokens=23, max_running=5).generate(prompts, params)
    for one, other in zip(plain, tiled, strict=True):
        assert one.trace.num_rows == other.trace.num_rows
        for kind in ("selections", "experts"):
            for layer, rows in getattr(one.trace, kind).items():
                assert torch.equal(rows, getattr(other.trace, kind)[layer])
        ids = [*one.prompt_token_ids, *one.token_ids]
        own = _engine(model, max_batch_tokens=23, max_running=5)
        assert torch.equal(own.score([ids], replay=[other.trace])[0], own.score(ids))


@settings(max_examples=100)
@given(data=st.data())
def test_packing(data):
    requests, positions = [], []
    for request in range(data.draw(st.integers(1, 6))):
        start = data.draw(st.integers(0, 40))
        for position in range(start, start + data.draw(st.integers(1, 50))):
            requests.append(request)
            positions.append(position)
    tiles = pack(requests, positions)
    where = {row: (i, place) for i, tile in enumerate(tiles) for place, row in enumerate(tile)}
    where.pop(-1, None)
    assert sorted(where) == list(range(len(positions)))
    assert sum(row >= 0 for tile in tiles for row in tile) == len(positions)
    for row, (tile, place) in where.items():
        assert place == positions[row] % TILE_ROWS
        if row and requests[row - 1] == requests[row]:
            before, left = where[row - 1]
            assert (before, left + 1) == (tile, place) or before < tile
    assert all(any(row >= 0 for row in tile) for tile in tiles)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [60, 1001, 6144])
def test_what_is_assumed_of_matrix_products(dim, dtype, threads):
    """A row of a product of this shape does not depend on what the other rows hold."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(dim)
        x, others = torch.randn(2, TILE_ROWS, dim, generator=generator).to(dtype)
        weight = torch.randn(77, dim, generator=generator).to(dtype)
        whole = F.silu(F.linear(x, weight))
        for row in range(TILE_ROWS):
            mixed = others.clone() * 1000
            mixed[(row + 1) % TILE_ROWS] = torch.nan
            mixed[row] = x[row]
            assert torch.equal(F.silu(F.linear(mixed, weight))[row], whole[row])
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_hidden_states_of_a_batch_bit_by_bit(threads):
    """All of the last layer, not the few logits that a completion shows; also of long contexts."""
    network = _model("tiny", torch.float32).network
    (ids,) = prompts_of(600, seed=8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pages = [list(range(10)), list(range(10, 20))]
        found = []
        for cuts in ([600], [37, 300, 316, 599, 600], [64, 600]):
            cache = KVCache(network.config, 20, mtp=False, dtype=torch.float32)
            parts, start = [], 0
            for stop in cuts:
                other = (ids[start // 2 : stop // 2] or [5], start // 2, pages[1])
                batch = Batch.paged([other, (ids[start:stop], start, pages[0])], PAGE_SIZE)
                parts.append(hidden_states(network, cache, batch)[len(other[0]) :])
                start = stop
            found.append(torch.cat(parts))
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)
