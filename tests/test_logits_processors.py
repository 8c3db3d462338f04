"""The caller's own functions over logits, against a plain loop."""

import pytest
import torch

from glm53 import SamplingParams
from tests.engines import assert_idle, logits_of, prompts_of
from tests.speculation import agreeing_model, assert_mixed, ids_of

PROMPT, OTHER = prompts_of(21, 13)


@pytest.fixture(scope="module")
def model():
    model = agreeing_model(3)
    yield model
    assert_idle(model.engine())


def no_repeats(token_ids, logits_W):
    """Depends on the whole prefix, and writes in place."""
    logits_W[token_ids] = float("-inf")
    return logits_W


def by_sum(token_ids, logits_W):
    """Depends on the whole prefix too, and returns a new tensor."""
    return logits_W - 4.0 * ((torch.arange(len(logits_W)) + sum(token_ids)) % 3 == 0)


def naive(model, prompt, count, *processors):
    ids = list(prompt)
    for _ in range(count):
        logits_W = logits_of(model, ids)[-1].float()
        for processor in processors:
            logits_W = processor(list(ids), logits_W.clone())
        ids.append(int(logits_W.argmax()))
    return ids[len(prompt) :]


FIELDS = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("processors", [(by_sum,), (no_repeats,), (by_sum, no_repeats)])
def test_equal_to_a_plain_loop_beside_others(model, processors, drafts):
    params = SamplingParams(speculative_tokens=drafts, **FIELDS)
    engine = model.engine()
    own = engine.add(PROMPT, SamplingParams.override(params, logits_processors=processors, n=2))
    others = engine.add(OTHER, params)
    finished = engine.run()
    expected = naive(model, PROMPT, 24, *processors)
    assert ids_of(finished[own]) == [expected, expected] != [naive(model, PROMPT, 24)] * 2
    assert ids_of(finished[others]) == [naive(model, OTHER, 24)]
    if drafts:
        assert_mixed([*finished[own], *finished[others]])


def test_each_row_is_given_its_own_prefix(model):
    seen = {}

    def record(token_ids, logits_W):
        assert logits_W.dtype == torch.float32 and logits_W.shape == (131,)
        seen[tuple(token_ids)] = logits_W.clone()
        token_ids.clear()  # ours to spoil
        return logits_W

    out = model.generate(PROMPT, logits_processors=[record], seed=1, **FIELDS | {"temperature": 1})
    assert out.metrics.drafted > out.metrics.accepted > 0
    ids = [*PROMPT, *out.token_ids]
    expected_SW = logits_of(model, ids)
    for length in range(len(PROMPT), len(ids)):
        torch.testing.assert_close(
            seen[tuple(ids[:length])], expected_SW[length - 1].float(), atol=2e-4, rtol=1e-4
        )


def test_after_bias_and_before_the_penalties(model):
    seen = []

    def record(token_ids, logits_W):
        seen.append(logits_W)
        return logits_W

    first = PROMPT[0]
    model.generate(
        PROMPT,
        logits_processors=[record],
        logit_bias={5: 100.0},
        bad_words=[[9]],
        repetition_penalty=3.0,
        max_new_tokens=1,
        top_k=2,
    )
    plain_W = logits_of(model, PROMPT)[-1]
    (got_W,) = seen
    assert got_W[5] == pytest.approx(float(plain_W[5]) + 100, abs=1e-3)
    assert got_W[9] == float("-inf")
    assert got_W[first] == pytest.approx(float(plain_W[first]), abs=1e-3)  # no penalty yet
    assert torch.isfinite(got_W).sum() == 130  # nor a top-k, nor later


def raises(token_ids, logits_W):
    if len(token_ids) == len(PROMPT) + 4:
        raise RuntimeError("boom")
    return logits_W


def nan(token_ids, logits_W):
    return logits_W * float("nan")


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    "processor, message, tokens",
    [
        (raises, "logits_processors: RuntimeError: boom", 4),
        (nan, "after processing: a logit is NaN", 0),
        (lambda ids, x: x[:7], "logits_processors: got shape [7], not logits [131]", 0),
        (lambda ids, x: None, "logits_processors: got NoneType, not logits [131]", 0),
        (lambda ids, x: x.fill_(float("-inf")), "no token is left", 0),
    ],
)
def test_a_function_that_fails_ends_its_completion_alone(model, processor, message, tokens, drafts):
    params = SamplingParams(speculative_tokens=drafts, **FIELDS)
    engine = model.engine()
    bad = engine.add(PROMPT, SamplingParams.override(params, logits_processors=[processor]))
    good = engine.add(OTHER, params)
    finished = engine.run()
    (failed,) = finished[bad]
    assert failed.finish_reason == "error" and message in failed.error
    assert list(failed.token_ids) == naive(model, PROMPT, 24)[:tokens]
    assert ids_of(finished[good]) == [naive(model, OTHER, 24)]


def test_any_float_type_comes_back_as_fp32(model):
    def doubled(token_ids, logits_W):
        return (logits_W.double() - torch.arange(131)).to(torch.float64)

    out = model.generate(PROMPT, logits_processors=[doubled], **FIELDS)
    assert list(out.token_ids) == naive(model, PROMPT, 24, doubled)
