"""Who gets which delta, whoever steps, and cancelling at any moment."""

import gc
import signal

import pytest
import torch

from glm53 import GLM53, SamplingParams
from glm53.request import Delta
from tests.engines import assert_idle, greedy, prompts_of, tiny_model, with_engine

NEW = 5
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0)


@pytest.fixture(scope="module")
def model() -> GLM53:
    return tiny_model(3)


@pytest.fixture
def own(model) -> GLM53:
    return with_engine(model, kv_cache_tokens=64 * 8)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(20, 9, 12)


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    return [greedy(model, prompt, NEW) for prompt in prompts]


def _ids(deltas: list[Delta]) -> list[int]:
    return [i for delta in deltas for i in delta.token_ids]


def _check(own: GLM53, prompts, expected) -> None:
    assert_idle(own.engine())
    assert [list(c.token_ids) for c in own.generate(prompts, GREEDY)] == expected


# --- whose deltas they are ---

DRIVERS = {
    "generate": lambda model, prompt: model.generate(prompt, GREEDY, max_new_tokens=9),
    "stream": lambda model, prompt: list(model.stream(prompt, GREEDY, max_new_tokens=9)),
    "score": lambda model, prompt: model.score(prompt),
}


@pytest.mark.parametrize("drive", DRIVERS.values(), ids=DRIVERS)
def test_what_another_call_computed_waits_for_step(own, prompts, expected, drive):
    engine = own.engine()
    request_id = engine.add(prompts[0], GREEDY)
    drive(own, prompts[1])
    assert engine.num_unfinished == 1, "its end has not been fetched"
    deltas = []
    while engine.num_unfinished:
        deltas += engine.step()
    assert _ids(deltas) == expected[0]
    assert {delta.request_id for delta in deltas} == {request_id}
    assert [d.completion is not None for d in deltas] == [False] * (NEW - 1) + [True]
    assert list(deltas[-1].completion.token_ids) == expected[0]
    assert engine.step() == []
    _check(own, prompts, expected)


def test_run_after_another_call_has_everything(own, prompts, expected):
    engine = own.engine()
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    own.generate(prompts[0], GREEDY)
    finished = engine.run()
    assert [list(finished[i][0].token_ids) for i in ids] == expected
    assert engine.run() == {}


def test_deltas_of_a_listener_go_there_only(own, prompts, expected):
    engine, heard, returned = own.engine(), [], []
    listened = engine.add(prompts[0], GREEDY, on_delta=heard.append)
    other = engine.add(prompts[1], GREEDY)
    while engine.num_unfinished:
        returned += engine.step()
    assert _ids(heard) == expected[0] and {d.request_id for d in heard} == {listened}
    assert _ids(returned) == expected[1] and {d.request_id for d in returned} == {other}


def test_cancel_returns_what_was_not_fetched(own, prompts, expected):
    engine, heard = own.engine(), []
    first = engine.add(prompts[0], GREEDY)
    second = engine.add(prompts[1], GREEDY)
    listened = engine.add(prompts[2], GREEDY, on_delta=heard.append)
    engine.advance()
    engine.advance()
    deltas = engine.cancel(first)
    assert _ids(deltas) == expected[0][:2]
    assert deltas[-1].completion.finish_reason == "cancelled"
    assert engine.cancel(listened) == []
    assert heard[-1].completion.finish_reason == "cancelled"
    assert list(engine.run()[second][0].token_ids) == expected[1]
    _check(own, prompts, expected)


@pytest.mark.parametrize("fault", [LookupError, KeyboardInterrupt])
def test_a_listener_that_raises_costs_the_others_nothing(own, prompts, expected, fault):
    engine, seen = own.engine(), []

    def raising(delta):
        raise fault("listener")

    silent = engine.add(prompts[2], SamplingParams.override(GREEDY, max_new_tokens=1))
    bad = engine.add(prompts[0], GREEDY, on_delta=raising)
    engine.add(prompts[1], GREEDY, on_delta=seen.append)
    with pytest.raises(fault, match="listener"):
        engine.step()
    with pytest.raises(fault, match="listener"):
        own.generate(prompts[0], GREEDY)
    with pytest.raises(fault, match="listener"):
        engine.cancel(bad)
    finished = engine.run()
    assert _ids(seen) == expected[1] and seen[-1].completion is not None
    assert list(finished[silent][0].token_ids) == expected[2][:1]
    _check(own, prompts, expected)


def test_a_foreign_listener_that_raises_leaves_nothing_of_the_call(own, prompts, expected):
    engine = own.engine()

    def raising(delta):
        raise LookupError("listener")

    bad = engine.add(prompts[0], GREEDY, on_delta=raising)
    with pytest.raises(LookupError, match="listener"):
        own.generate(prompts, GREEDY, n=2, temperature=1.0)
    assert {request.request_id for request in engine.scheduler} == {bad}
    with pytest.raises(LookupError, match="listener"):
        engine.cancel(bad)
    _check(own, prompts, expected)


def test_an_error_within_run_loses_no_completion(own, prompts, expected):
    engine, calls = own.engine(), []

    def raising(delta):
        calls.append(delta)
        if len(calls) == 4:
            raise LookupError("listener")

    short = engine.add(
        prompts[0],
        GREEDY,
    )
    engine.add(prompts[1], SamplingParams.override(GREEDY, max_new_tokens=9), on_delta=raising)
    early = engine.add(prompts[2], SamplingParams.override(GREEDY, max_new_tokens=2))
    with pytest.raises(LookupError, match="listener"):
        engine.run()
    finished = engine.run()
    assert list(finished[short][0].token_ids) == expected[0]
    assert list(finished[early][0].token_ids) == expected[2][:2]


# --- cancelling while a step is under way ---


@pytest.mark.parametrize("part", ["embed_tokens", "norm"])
def test_cancelling_from_a_hook_ends_with_the_step(own, prompts, expected, part):
    engine, heard, returned, answers = own.engine(), [], [], []
    ids = [engine.add(prompts[0], GREEDY), engine.add(prompts[1], GREEDY, on_delta=heard.append)]
    kept = engine.add(prompts[2], GREEDY)
    engine.step()

    def cancel(*_):
        if not answers:
            answers.extend(engine.cancel(i) for i in ids)

    hook = getattr(own.model, part).register_forward_pre_hook(cancel)
    try:
        returned += engine.step()
    finally:
        hook.remove()
    assert answers == [[], []]
    assert {request.request_id for request in engine.scheduler} == {kept}
    (first,) = [d.completion for d in returned if d.completion is not None]
    for completion, tokens in ((first, expected[0]), (heard[-1].completion, expected[1])):
        assert completion.finish_reason == "cancelled"
        assert list(completion.token_ids) == tokens[:2]
    assert list(engine.run()[kept][0].token_ids) == expected[2]
    _check(own, prompts, expected)


def test_cancelling_from_a_hook_of_a_step_that_raises(own, prompts, expected):
    engine = own.engine()
    first, second = (engine.add(prompt, GREEDY) for prompt in prompts[:2])

    def broken(*_):
        engine.cancel(first)
        raise RuntimeError("boom")

    hook = own.model.norm.register_forward_pre_hook(broken)
    try:
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    finally:
        hook.remove()
    finished = engine.run()
    assert finished[first][0].finish_reason == "cancelled"
    assert list(finished[second][0].token_ids) == expected[1]
    _check(own, prompts, expected)


def test_cancelling_from_a_signal_handler(own, prompts, expected):
    engine = own.engine()
    first, second = (engine.add(prompt, GREEDY) for prompt in prompts[:2])
    before = signal.signal(signal.SIGUSR1, lambda *_: engine.cancel(first))
    hook = own.model.norm.register_forward_hook(lambda *_: signal.raise_signal(signal.SIGUSR1))
    try:
        finished = engine.run()
    finally:
        hook.remove()
        signal.signal(signal.SIGUSR1, before)
    assert finished[first][0].finish_reason == "cancelled"
    assert list(finished[second][0].token_ids) == expected[1]
    _check(own, prompts, expected)


def test_a_collected_stream_is_cancelled_within_a_step(own, prompts, expected):
    """A stream held in a cycle is closed by the collector: at any allocation."""
    engine = own.engine()
    stream = own.stream(prompts[0], GREEDY, max_new_tokens=2)  # ends in the step that cancels it
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    collected = []
    hook = own.model.norm.register_forward_pre_hook(lambda *_: collected.append(gc.collect()))
    gc.disable()
    try:
        result = own.generate(prompts[1], GREEDY)
    finally:
        gc.enable()
        hook.remove()
    assert list(result.token_ids) == expected[1]
    assert sum(collected) and engine.num_unfinished == 0
    _check(own, prompts, expected)


def test_a_step_from_a_hook_is_refused(own, prompts, expected):
    hook = own.model.norm.register_forward_pre_hook(lambda *_: own.engine().advance())
    try:
        with pytest.raises(RuntimeError, match="module hook"):
            own.generate(prompts[0], GREEDY)
    finally:
        hook.remove()
    _check(own, prompts, expected)


# --- what may be replaced ---


def test_a_new_head_is_what_generates(prompts):
    model = tiny_model(3)
    model.generate(prompts[0], GREEDY)
    head = torch.nn.Linear(60, 131, bias=False)
    model.lm_head = head
    assert model.network.lm_head is head and model.lm_head is head
    assert list(model.generate(prompts[0], GREEDY).token_ids) == greedy(model, prompts[0], NEW)
    with torch.no_grad():
        head.weight.zero_()
    assert not model(torch.tensor([prompts[0]])).any()
    assert set(model.generate(prompts[0], GREEDY).token_ids) == {0}


def test_a_new_decoder_is_what_generates(prompts):
    model, other = tiny_model(3), tiny_model(8)
    model.generate(prompts[0], GREEDY)
    model.model = other.model
    model.lm_head = other.lm_head
    ids = torch.tensor([prompts[0]])
    assert torch.equal(model(ids), other(ids))
    wanted = other.generate(prompts[0], GREEDY).token_ids
    assert model.generate(prompts[0], GREEDY).token_ids == wanted
