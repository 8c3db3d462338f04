"""The host-backed cache: every bit of the plain cache, and traffic that plain LRUs predict.

Nowhere is anything but NaN in host rows that nobody wrote, in rows beyond what a request has
computed, and in hot rows that are no slot's copy.
"""

import itertools

import pytest
import torch

import glm53
from glm53 import GLM53, SamplingParams, residency
from glm53.cache import PAGE_SIZE
from tests.engines import assert_idle, prompts_of, tiny_model, with_engine
from tests.residency import (
    assert_counts,
    assert_same,
    assert_same_hidden,
    poison_cache,
    poison_empty_rows,
    run,
)
from tests.speculation import agreeing_model, assert_mixed, force_drafts, ids_of, poison_stale

NEW = 12
GREEDY = SamplingParams(
    temperature=0, max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0, logprobs=4
)
TOPK = 7  # of the tiny model
SLOW = pytest.mark.slow
LENGTHS = (5, 40, 63)  # the last one crosses a page border with its first tokens


@pytest.fixture(scope="module")
def model() -> GLM53:
    return agreeing_model(1)


@pytest.fixture(scope="module")
def model_bf16() -> GLM53:
    return agreeing_model(1).to(torch.bfloat16)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(*LENGTHS)


_plain_runs: dict = {}


def _plain(model, prompts, params, arguments):
    """Completions and hidden states of the plain cache; kept: several tests compare with them."""
    key = (id(model), repr((prompts, params, arguments)))
    if key not in _plain_runs:
        _plain_runs[key] = model, *run(model, prompts, params, hot_tokens=None, **arguments)[:2]
    return _plain_runs[key][1:]


def _compare(model, prompts, params, hot_tokens, **arguments):
    """The engine of the host-backed run, after all there is to compare was compared."""
    expected, plain = _plain(model, prompts, params, arguments)
    got, watch, engine = run(model, prompts, params, hot_tokens=hot_tokens, **arguments)
    assert_same(got, expected)
    assert_same_hidden(watch, plain)
    assert_counts(engine, watch)
    if hot_tokens < 2 * TOPK:
        assert max(lru.widest for lru in watch.lrus.values()) > hot_tokens, "it all fitted"
    if params.speculative_tokens:
        assert_mixed(got)
    assert_idle(engine)
    return engine


GRID = list(itertools.product((TOPK, 13, 64 * 16), (0, 3), (1, 3), (7, 64, 1024), ("fp32", "bf16")))


def _grid(model, model_bf16, prompts, hot_tokens, k, batch, chunk, dtype):
    _compare(
        model if dtype == "fp32" else model_bf16,
        prompts,
        SamplingParams.override(GREEDY, speculative_tokens=k),
        hot_tokens,
        max_running=batch,
        max_batch_tokens=chunk,
    )


@pytest.mark.parametrize(
    ("hot_tokens", "k", "batch", "chunk", "dtype"),
    [
        (TOPK, 3, 3, 7, "fp32"),
        (TOPK, 0, 1, 1024, "bf16"),
        (13, 3, 3, 1024, "fp32"),
        (64 * 16, 3, 3, 64, "bf16"),
    ],
)
def test_equals_the_plain_cache(model, model_bf16, prompts, hot_tokens, k, batch, chunk, dtype):
    _grid(model, model_bf16, prompts, hot_tokens, k, batch, chunk, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("hot_tokens", "k", "batch", "chunk", "dtype"), GRID)
def test_equals_the_plain_cache_grid(
    model, model_bf16, prompts, hot_tokens, k, batch, chunk, dtype
):
    _grid(model, model_bf16, prompts, hot_tokens, k, batch, chunk, dtype)


@pytest.mark.parametrize(
    ("shared", "kv_cache_dtype"), [(False, torch.bfloat16), (True, torch.float32)]
)
def test_drafts_with_and_without_a_shared_selection(shared, kv_cache_dtype):
    """Also with a cache of another dtype than the model's."""
    model = agreeing_model(2, overrides={"index_share_for_mtp_iteration": shared})
    params = SamplingParams.override(GREEDY, speculative_tokens=3)
    _compare(model, prompts_of(17, 9), params, TOPK + 1, kv_cache_dtype=kv_cache_dtype)


def test_prompt_logprobs(model, prompts):
    params = SamplingParams.override(GREEDY, prompt_logprobs=3, speculative_tokens=3)
    _compare(model, prompts, params, 11, max_batch_tokens=16, max_running=3)


# --- rows that are written again ---


@pytest.mark.parametrize(
    ("hot_tokens", "pattern"),
    [(TOPK, (0, 2, 1, 3)), (64 * 16, (0, 2, 1, 3)), pytest.param(64 * 16, (0,), marks=SLOW)],
)
def test_forced_rejections(model, prompts, pattern, hot_tokens):
    """Rejected drafts leave hot rows of slots that the next step writes again."""
    plain = ids_of(with_engine(model).generate(prompts, GREEDY))
    params = SamplingParams.override(GREEDY, speculative_tokens=3)
    sequences = {i: p + o for i, (p, o) in enumerate(zip(prompts, plain, strict=True))}
    runs = [
        run(
            model,
            prompts,
            params,
            hot_tokens=size,
            prepare=lambda engine: force_drafts(engine, sequences, pattern),
        )
        for size in (None, hot_tokens)
    ]
    assert_same(runs[1][0], runs[0][0])
    assert_same_hidden(runs[1][1], runs[0][1])
    assert_counts(runs[1][2], runs[1][1])
    assert ids_of(runs[1][0]) == plain
    stats = runs[1][2].stats
    assert stats.drafted > stats.accepted == sum(c.metrics.accepted for c in runs[1][0])
    assert (stats.accepted > 0) == (pattern != (0,))


def test_a_page_of_another_request(model):
    """One page, five requests after each other, everything resident: each rewrites every row."""
    prompts = prompts_of(30, 40, 3, seed=5)
    engine = _compare(
        model, prompts, GREEDY, 200, kv_cache_tokens=PAGE_SIZE, max_running=1, prefix_caching=False
    )
    # What a request finds is its own: none of its slots is resident when it begins.
    rows = sum(len(p) + NEW - 1 for p in prompts)
    assert engine.stats.hot_misses <= 3 * rows


@pytest.mark.parametrize(
    "hot_tokens", [pytest.param(TOPK, marks=SLOW), 40, pytest.param(64 * 16, marks=SLOW)]
)
def test_preemption(model, hot_tokens):
    prompts = prompts_of(60, 61, 62, 60, seed=2)
    params = SamplingParams.override(GREEDY, speculative_tokens=3)
    engine = _compare(model, prompts, params, hot_tokens, kv_cache_tokens=64 * 3)
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize(
    ("hot_tokens", "k"),
    [
        (40, 3),
        (64 * 16, 0),
        *(pytest.param(*c, marks=SLOW) for c in ((TOPK, 0), (TOPK, 3), (40, 0), (64 * 16, 3))),
    ],
)
def test_shared_prefixes_and_evicted_pages(model, k, hot_tokens):
    a, b, c = prompts_of(140, 130, 130, seed=4)
    prompts = [a, b, a[:128] + b[:3], c, a[:64] + c[:10], b, a]
    params = SamplingParams.override(GREEDY, speculative_tokens=k)
    arguments = dict(kv_cache_tokens=64 * 6, max_running=1, max_batch_tokens=50)
    engine = _compare(model, prompts, params, hot_tokens, **arguments)
    assert engine.stats.cached_tokens > 0 and engine.stats.evictions > 0


def test_rows_of_a_shared_prefix_are_resident_once(model):
    """The second request's prompt is resident: nothing of it is fetched again."""
    (prompt,) = prompts_of(100)
    own = with_engine(model, kv_cache_hot_tokens=64 * 16)
    own.generate(prompt, GREEDY)
    before = own.engine().stats.hot_misses
    own.generate(prompt, GREEDY)
    computed = len(prompt) - PAGE_SIZE + NEW - 1
    assert own.engine().stats.hot_misses - before <= 3 * computed


# --- steps that end otherwise ---


def _drive(model, hot_tokens, act, **arguments):
    """Completions in order of their end, with `act(engine, step)` after every step."""
    own = with_engine(model, kv_cache_hot_tokens=hot_tokens, **arguments)
    engine, found = own.engine(), []
    poison_cache(engine)
    for prompt in prompts_of(20, 70, 33, seed=9):
        engine.add(prompt, SamplingParams.override(GREEDY, speculative_tokens=3))
    for step in itertools.count():
        if not engine.num_unfinished:
            return found, engine
        found += [d.completion for d in engine.step() if d.completion is not None]
        if hot_tokens is not None:
            poison_empty_rows(engine)
        poison_stale(engine)
        found += [d.completion for d in act(engine, step) or () if d.completion is not None]


def test_cancelled_in_the_middle(model):
    def act(engine, step):
        if step == 3:
            engine.add(prompts_of(66, seed=10)[0], GREEDY)
            return engine.cancel(1)

    expected, _ = _drive(model, None, act, kv_cache_tokens=64 * 5)
    got, engine = _drive(model, TOPK, act, kv_cache_tokens=64 * 5)
    assert "cancelled" in {c.finish_reason for c in got}
    assert_same(got, expected)
    assert_idle(engine)


def test_weights_change_in_the_middle():
    def act(engine, step):
        if step == 3:
            with torch.no_grad():
                engine._network.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.mul_(1.5)

    expected, _ = _drive(agreeing_model(1), None, act)
    got, _ = _drive(agreeing_model(1), 9, act)
    unchanged, _ = _drive(agreeing_model(1), 9, lambda engine, step: None)
    assert_same(got, expected)
    assert [c.logprobs for c in got] != [c.logprobs for c in unchanged]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    ("hot_tokens", "after"),
    [
        (TOPK, True),
        (64 * 16, False),
        pytest.param(TOPK, False, marks=SLOW),
        pytest.param(64 * 16, True, marks=SLOW),
    ],
)
def test_a_step_that_raises_is_repeated(model, monkeypatch, hot_tokens, after):
    """In each layer in turn, before or after its rows were fetched: no copy is believed in that
    a layer does not have."""
    expected, _ = _drive(model, None, lambda engine, step: None)
    real, state = residency.tiered_sparse_mla, {"calls": 0, "fail": None}

    def failing(*args, **kwargs):
        fails = state["calls"] == state["fail"]
        state["calls"] += 1
        if fails and not after:
            raise Interrupted
        out = real(*args, **kwargs)
        if fails:
            raise Interrupted
        return out

    monkeypatch.setattr(residency, "tiered_sparse_mla", failing)
    # 4 layers and 3 draft steps: every second step fails, each time one layer later.
    raised = set()

    def act(engine, step):
        state.update(calls=0, fail=step % 7)
        try:
            return engine.step()
        except Interrupted:
            raised.add(step % 7)
            poison_empty_rows(engine)
            return []
        finally:
            state["fail"] = None

    got, engine = _drive(model, hot_tokens, act)
    assert raised >= set(range(6))
    assert_same(got, expected)
    assert_idle(engine)


def test_another_dtype_makes_another_cache():
    model = tiny_model(3, kv_cache_hot_tokens=TOPK)
    (prompt,) = prompts_of(30)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        got = model.generate(prompt, GREEDY, speculative_tokens=3)
        plain = with_engine(model).generate(prompt, GREEDY, speculative_tokens=3)
        assert_same([got], [plain])
        assert {layer.hot.rows.dtype for layer in model.engine()._cache.layers} == {dtype}


# --- what is moved ---

ROW = 4 * 26  # bytes of a latent


@pytest.mark.parametrize(
    ("lengths", "new", "chunk", "hits", "misses"),
    [
        # Prompt: 5 slots. Then a row each, which also reads the 5, the 6 before it.
        ((5,), 3, 1024, 5 + 6, 5 + 1 + 1),
        # Rows 0 and 1; 2 and 3, and the two before; 4, and four before.
        ((5,), 3, 2, 2 + 4 + 5 + 6, 2 + 2 + 1 + 1 + 1),
        # Tiles a0-a4 b0 b1 | b0-b4, for which a0-a2 go. Then a0-a5, of which a3 and a4 are left and
        # for which b0-b3 go, | b0-b5, of which b4 is left.
        ((5, 5), 2, 1024, 2 + 2 + 1, 7 + 3 + 4 + 5),
    ],
)
def test_moved_bytes(lengths, new, chunk, hits, misses):
    """By hand: nothing is longer than index_topk, so that every row before is selected. 7 hot rows
    for each of 4 layers in 3 index groups."""
    model = tiny_model(3, kv_cache_hot_tokens=7, max_batch_tokens=chunk, max_running=2)
    engine = model.engine()
    assert (engine.stats.hot_hits, engine.stats.hot_misses, engine.stats.fetched_bytes) == (0,) * 3
    model.generate(prompts_of(*lengths), GREEDY, max_new_tokens=new)
    assert engine.stats.hot_hits == 3 * hits
    assert engine.stats.hot_misses == 3 * misses
    assert engine.stats.fetched_bytes == 4 * misses * ROW


def test_a_plain_cache_has_no_traffic(model, prompts):
    own = with_engine(model)
    own.generate(prompts, GREEDY, speculative_tokens=3)
    stats = own.engine().stats
    assert (stats.hot_hits, stats.hot_misses, stats.fetched_bytes) == (0, 0, 0)
    assert all(layer.hot is None for layer in own.engine()._cache.layers)


def test_the_embedded_model():
    """S > index_topk = 64; the hot set has room for a few of the rows that decoding alternates."""
    folder = f"{glm53.__path__[0]}/data/nano"
    arguments = dict(kv_cache_tokens=1024, progress=False)
    text = "def median(values):\n    values = sorted(values)\n    middle = len(values) // 2\n" * 6
    prompts = [text, "class Stack:\n" + text[:200]]
    params = SamplingParams(temperature=0, max_new_tokens=12, speculative_tokens=3, logprobs=2)
    plain = GLM53.from_pretrained(folder, **arguments)
    expected = plain.generate(prompts, params)
    model = GLM53.from_pretrained(folder, kv_cache_hot_tokens=100, **arguments)
    got = model.generate(prompts, params)
    assert_same(got, expected)
    assert_mixed(got)
    stats = model.engine().stats
    assert len(got[0].prompt_token_ids) > 100
    assert 0 < stats.hot_misses < stats.hot_hits


# --- what is asked for ---


def test_sizes(monkeypatch):
    """kv_cache_bytes: latents in host memory and index keys; hot rows and maps come on top."""
    page = PAGE_SIZE * 4 * (5 * 26 + 4 * 14)
    extra = 9 * (5 * ROW + 4 * 16) + 4 * 4  # and 4 bytes a slot and index group
    model = tiny_model(kv_cache_tokens=None, kv_cache_bytes=2 * page + 9, kv_cache_hot_tokens=9)
    assert model.engine().pool.num_pages == 2
    assert model.engine()._cache.nbytes == 2 * page + extra + 2 * PAGE_SIZE * 16
    # By default a quarter of a CPU's memory, with everything counted.
    page += PAGE_SIZE * 16
    for room, pages in ((2 * page + extra, 2), (2 * page + extra - 1, 1), (page + extra - 1, None)):
        monkeypatch.setattr("glm53.options.available_bytes", lambda device, room=room: 4 * room)
        model = tiny_model(kv_cache_tokens=None, kv_cache_hot_tokens=9)
        if pages is None:
            with pytest.raises(MemoryError, match="a cache page does not fit"):
                model.engine()
        else:
            assert model.engine().pool.num_pages == pages


@pytest.mark.parametrize("bad", [TOPK - 1, 0, -1, 7.5, "many", True])
def test_a_hot_set_that_holds_no_selection_is_refused(bad):
    with pytest.raises(ValueError, match=r"kv_cache_hot_tokens=.*integer, at least index_topk=7"):
        tiny_model(kv_cache_hot_tokens=bad)
    folder = f"{glm53.__path__[0]}/data/nano"
    with pytest.raises(ValueError, match="index_topk=64"):
        GLM53.from_pretrained(folder, kv_cache_hot_tokens=bad, progress=False)
