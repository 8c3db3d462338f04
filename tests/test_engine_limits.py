"""What goes wrong, and whom it concerns: one request, one call, never its neighbours."""

import threading

import pytest
import torch

from glm53 import GLM53, SamplingParams
from tests.engines import assert_idle, audit, greedy, prompts_of, tiny_model, with_engine
from tests.speculation import assert_mixed, force_drafts

NEW = 8  # the second step verifies 5 drafts, the last that has any 2
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
POISON = 100  # an id whose embedding is NaN; the prompts here do not hold it


@pytest.fixture(scope="module")
def model() -> GLM53:
    model = tiny_model(3, overrides={"max_position_embeddings": 100})
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
    return model


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(20, 9, 12)


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    outputs = [greedy(model, prompt, NEW) for prompt in prompts]
    assert not any(POISON in ids for ids in (*prompts, *outputs)), "choose another id"
    return outputs


@pytest.fixture
def own(model, prompts, expected) -> GLM53:
    """An engine of its own, idle again after the test. Drafts are accepted and rejected."""
    own = with_engine(model, kv_cache_tokens=64 * 3)
    _draft_some(own, prompts, expected)
    return own


def _draft_some(own: GLM53, prompts, expected) -> None:
    force_drafts(own.engine(), [p + ids for p, ids in zip(prompts, expected, strict=True)])


def _check(own: GLM53, prompts, expected) -> None:
    """The engine is idle and works."""
    assert_idle(own.engine())
    completions = own.generate(prompts, GREEDY)
    assert [list(c.token_ids) for c in completions] == expected
    assert_mixed(completions)
    assert_idle(own.engine())


BAD_PROMPTS = {
    "empty": ([], "the prompt is empty"),
    "too long": ([9] * 100, r"100 tokens.*max_position_embeddings.* 100"),
    "id above the vocabulary": ([9, 131], r"id 131, outside 0\.\.130"),
    "negative id": ([9, -1], r"id -1, outside 0\.\.130"),
    "text": ("text", "without a tokenizer"),
}


@pytest.mark.parametrize("bad, message", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_a_bad_prompt_fails_alone(own, prompts, expected, bad, message):
    completions = own.generate([prompts[0], bad, *prompts[1:]], GREEDY)
    failed = completions.pop(1)
    assert [list(c.token_ids) for c in completions] == expected
    assert failed.finish_reason == "error" and failed.token_ids == () and failed.text == ""
    single = torch.tensor(bad, dtype=torch.int64) if bad == [] else bad
    with pytest.raises(ValueError, match=message):
        own.generate(single, GREEDY)
    with pytest.raises(ValueError, match=message):
        own.engine().add(bad, GREEDY)
    with pytest.raises(ValueError, match=message):
        next(own.stream(single, GREEDY))
    with pytest.raises(ValueError) as error:
        own.generate(single, GREEDY)
    assert str(error.value) == failed.error
    _check(own, prompts, expected)


def test_a_prompt_that_fails_has_n_completions_too(own, prompts):
    good, bad = own.generate([prompts[0], [131]], temperature=1.0, seed=0, n=3, max_new_tokens=2)
    assert [c.index for c in good] == [c.index for c in bad] == [0, 1, 2]
    assert {c.finish_reason for c in bad} == {"error"}
    assert {c.error for c in good} == {None}


def test_the_models_limit_cuts_completions(own):
    (prompt,) = prompts_of(97)
    result = own.generate(prompt, GREEDY)
    assert (len(result.token_ids), result.finish_reason) == (3, "length")


def test_score_takes_a_prompt_of_the_full_length(own):
    assert own.score([9] * 100).shape == (99,)
    with pytest.raises(ValueError, match="101 tokens"):
        own.score([[9], [9] * 101])
    assert_idle(own.engine())


def test_a_request_larger_than_the_cache(model, prompts):
    own = with_engine(model, kv_cache_tokens=64)
    with pytest.raises(ValueError, match=r"need 128 tokens of cache.* holds 64"):
        own.generate(prompts[0], max_new_tokens=46)
    params = SamplingParams.override(GREEDY, bad_words=[[POISON]])
    assert len(own.generate(prompts[0], params, max_new_tokens=45).token_ids) == 45
    results = own.generate(prompts, params, max_new_tokens=50)
    assert [r.finish_reason for r in results] == ["error", "length", "length"]
    assert_idle(own.engine())


@pytest.mark.parametrize("item", [[1.5], [True], [[1, 2]], {"a": 1}, 1.5, None])
def test_what_is_no_prompt_at_all_is_refused(own, item):
    with pytest.raises(ValueError, match="a prompt must be text"):
        own.generate([[9], item], GREEDY)
    assert_idle(own.engine())


def test_the_engine_takes_no_fractions_of_ids(own):
    with pytest.raises(ValueError, match="must be text or token ids"):
        own.engine().add([1.5], GREEDY)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"temprature": 1}, "temperature"),
        ({"temperature": -1}, "temperature=-1"),
        ({"stop_token_ids": [131]}, r"stop_token_ids: id 131 is outside 0\.\.130"),
        ({"stop": "x"}, "stop: the model was loaded without a tokenizer"),
        ({"bad_words": ["x"]}, "no tokenizer"),
    ],
)
def test_bad_parameters_concern_the_whole_call(own, prompts, fields, message):
    for call in (own.generate, own.stream):
        with pytest.raises(ValueError, match=message):
            call(prompts[0], GREEDY, **fields)
    with pytest.raises(ValueError, match=message):
        own.generate(prompts, **fields)
    assert own.engine().num_unfinished == 0


def test_nan_logits_fail_alone(own, prompts, expected):
    """One prompt holds the id; in the others nothing of it is seen, not even in reused pages."""
    poisoned = [*prompts[1], POISON]
    completions = own.generate([prompts[0], poisoned, *prompts[1:]], GREEDY)
    failed = completions.pop(1)
    assert [list(c.token_ids) for c in completions] == expected
    assert failed.finish_reason == "error" and failed.error == "a logit is NaN"
    assert failed.prompt_token_ids == tuple(poisoned) and failed.token_ids == ()
    assert own.generate(poisoned, GREEDY).error == "a logit is NaN"
    _check(own, prompts, expected)


def test_logits_that_turn_nan_later_keep_the_tokens_before(own, prompts, expected):
    forced = SamplingParams.override(GREEDY, logit_bias={POISON: 1e9}, logprobs=0)
    engine = own.engine()
    ids = [engine.add(prompts[0], GREEDY), engine.add(prompts[1], forced)]
    finished = engine.run()
    assert list(finished[ids[0]][0].token_ids) == expected[0]
    failed = finished[ids[1]][0]
    assert failed.token_ids == (POISON,) and len(failed.logprobs) == 1
    assert failed.error == "a logit is NaN"
    _check(own, prompts, expected)


@pytest.mark.parametrize("budget", [3, 1000])
def test_nan_prompt_logits(model, prompts, expected, budget):
    own = with_engine(model, max_batch_tokens=budget)
    _draft_some(own, prompts, expected)
    poisoned = [*prompts[1][:5], POISON, *prompts[1][5:]]
    good, bad = own.generate([prompts[0], poisoned], GREEDY, prompt_logprobs=0)
    assert list(good.token_ids) == expected[0] and len(good.prompt_logprobs) == len(prompts[0])
    assert bad.error == "prompt_logprobs: a logit is NaN"
    with pytest.raises(ArithmeticError, match="NaN"):
        own.score([prompts[0], poisoned])
    _check(own, prompts, expected)


def test_no_id_left_to_sample(own, prompts, expected):
    banned = [[i] for i in range(131) if i != 9]
    params = SamplingParams.override(GREEDY, bad_words=banned, allowed_token_ids=[10])
    result = own.generate(prompts[0], params)
    assert result.finish_reason == "error" and "no token is left" in result.error
    _check(own, prompts, expected)


def _break(monkeypatch, where, at: int, fault: BaseException) -> None:
    """The call number `at` of a module's forward raises, half way through what it does."""
    forward, calls = where.forward, []

    def broken(*arguments, **named):
        calls.append(1)
        out = forward(*arguments, **named)
        if len(calls) == at:
            raise fault
        return out

    monkeypatch.setattr(where, "forward", broken)


@pytest.mark.parametrize("fault", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("part", ["model", "lm_head"])
def test_a_step_that_raises_loses_nothing(own, prompts, expected, monkeypatch, fault, at, part):
    with monkeypatch.context() as patch:
        _break(patch, getattr(own.network, part), at, fault())
        with pytest.raises(fault):
            own.generate(prompts, GREEDY)
    _check(own, prompts, expected)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("part", ["model", "lm_head"])
def test_a_step_that_raised_can_be_repeated(own, prompts, expected, monkeypatch, at, part):
    """The requests of others, which no failing call cleans up."""
    engine = own.engine()
    ids = [engine.add(prompt, GREEDY, on_delta=None) for prompt in prompts]
    with monkeypatch.context() as patch:
        _break(patch, getattr(own.network, part), at, RuntimeError("boom"))
        with pytest.raises(RuntimeError, match="boom"):
            engine.run()
    audit(engine)
    finished = engine.run()
    assert [list(finished[i][0].token_ids) for i in ids] == expected
    _check(own, prompts, expected)


def test_prompt_logprobs_of_a_repeated_step_are_recorded_once(own, prompts, monkeypatch):
    reference = own.score(prompts)
    engine = own.engine()
    engine.add(prompts[0], SamplingParams.override(GREEDY, prompt_logprobs=0))
    with monkeypatch.context() as patch:
        _break(patch, own.network.lm_head, 2, RuntimeError("boom"))  # 1: the prompt's own logits
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    (result,) = next(iter(engine.run().values()))
    pairs = zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True)
    assert [row[i] for i, row in pairs] == pytest.approx(reference[0].tolist(), abs=1e-5)


def test_a_second_thread_is_refused(own, prompts, expected):
    engine = own.engine()
    caught = []

    def intrude(delta):
        def call():
            for action in (engine.step, lambda: engine.add([9]), lambda: engine.cancel(0)):
                with pytest.raises(RuntimeError, match="belongs to one thread") as error:
                    action()
                caught.append(error.value)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    engine.add(prompts[0], GREEDY, on_delta=intrude)
    (result,) = next(iter(engine.run().values()))
    assert list(result.token_ids) == expected[0]
    assert len(caught) == 3 * NEW
    _check(own, prompts, expected)


def test_a_thread_may_use_an_idle_engine(own, prompts, expected):
    found = []
    thread = threading.Thread(target=lambda: found.append(own.generate(prompts, GREEDY)))
    thread.start()
    thread.join()
    assert [list(c.token_ids) for c in found[0]] == expected
    _check(own, prompts, expected)


def test_a_step_within_a_step_is_refused(own, prompts, expected):
    engine = own.engine()
    errors = []

    def step_again(delta):
        for call in (engine.step, lambda: own.generate(prompts[1], GREEDY)):
            with pytest.raises(RuntimeError, match="on_delta callback") as error:
                call()
            errors.append(error.value)

    engine.add(prompts[0], GREEDY, on_delta=step_again)
    (result,) = next(iter(engine.run().values()))
    assert list(result.token_ids) == expected[0]
    assert len(errors) == 2 * NEW
    _check(own, prompts, expected)


def test_callbacks_may_add_and_cancel(own, prompts, expected):
    engine = own.engine()
    seen: dict[str, list] = {"first": [], "added": [], "victim": []}

    def first(delta):
        seen["first"].append(delta)
        if len(seen["first"]) == 2:
            engine.add(prompts[1], GREEDY, on_delta=seen["added"].append)
            engine.cancel(victim)

    engine.add(prompts[0], GREEDY, on_delta=first)
    victim = engine.add(prompts[2], GREEDY, on_delta=seen["victim"].append)
    engine.run()
    ids = {who: [i for d in deltas for i in d.token_ids] for who, deltas in seen.items()}
    assert ids["first"] == expected[0] and ids["added"] == expected[1]
    # The victim's second token was sampled in that step; it arrives before the end does.
    assert ids["victim"] == expected[2][:2]
    assert [d.completion is not None for d in seen["victim"]] == [False, False, True]
    last = seen["victim"][-1].completion
    assert last.finish_reason == "cancelled" and list(last.token_ids) == expected[2][:2]
    _check(own, prompts, expected)


def test_cancel(own, prompts, expected):
    engine = own.engine()
    assert engine.cancel(12345) == []
    waiting = engine.add(prompts[0], SamplingParams.override(GREEDY, n=2))
    other = engine.add(prompts[1], GREEDY)
    deltas = engine.cancel(waiting)
    assert [d.index for d in deltas] == [0, 1]
    assert {d.completion.finish_reason for d in deltas} == {"cancelled"}
    engine.step()
    running = engine.add(prompts[2], GREEDY)
    engine.step()
    (delta,) = engine.cancel(running)
    assert list(delta.completion.token_ids) == expected[2][:1]
    assert engine.cancel(running) == []
    finished = engine.run()
    assert list(finished[other][0].token_ids) == expected[1]
    _check(own, prompts, expected)


def test_cancelling_a_prompt_half_way(model, prompts, expected):
    own = with_engine(model, max_batch_tokens=7)
    _draft_some(own, prompts, expected)
    engine = own.engine()
    request_id = engine.add(prompts[0], SamplingParams.override(GREEDY, prompt_logprobs=0))
    engine.step()
    (delta,) = engine.cancel(request_id)
    assert delta.completion.token_ids == ()
    assert len(delta.completion.prompt_logprobs) == 1 + 7
    _check(own, prompts, expected)
