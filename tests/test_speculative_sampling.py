"""Speculation under everything a request may ask of sampling: tokens, log-probabilities and ends
are those of plain decoding, in accepted drafts, at rejected ones and after them."""

import math

import pytest
import torch

from glm53 import GLM53, Completion, SamplingParams
from tests.engines import END, assert_idle, byte_tokenizer, prompts_of, with_engine
from tests.speculation import (
    agreeing_model,
    assert_mixed,
    force_drafts,
    ids_of,
    poison_everything,
)

NEW = 24
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0)
# Logits of about 30, summed in another order for every number of rows.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> GLM53:
    return agreeing_model(4)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(4, 9, 33, 60, seed=5)


@pytest.fixture(scope="module")
def greedy_ids(model, prompts) -> list[list[int]]:
    return ids_of(with_engine(model).generate(prompts, PLAIN, temperature=0))


def _both(model, prompts, k=3, **fields) -> list[Completion]:
    """Completions with speculation, once they are known to be those without."""
    expected = with_engine(model).generate(prompts, PLAIN, **fields)
    own = with_engine(model)
    poison_everything(own.engine())
    found = own.generate(prompts, PLAIN, **(fields | {"speculative_tokens": k}))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.text, mine.finish_reason) == (theirs.text, theirs.finish_reason)
        assert (mine.stop_reason, mine.error) == (theirs.stop_reason, theirs.error)
    assert_idle(own.engine())
    return found


def _constraints(ids: list[int]) -> dict[str, dict]:
    """Settings that reach into this greedy output."""
    return {
        "repetition": {"repetition_penalty": 1.5},
        "frequency": {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        "bias": {"logit_bias": {ids[3]: -100.0, ids[6]: 3.0}},
        "bad words": {"bad_words": [ids[2:4], ids[5:8], [ids[9]]]},
        "allowed": {"allowed_token_ids": sorted({*range(40), *ids[:5]})},
        "min tokens": {"min_new_tokens": 12, "stop_token_ids": ids[4:9], "ignore_eos": False},
    }


@pytest.mark.parametrize("name", _constraints(list(range(20))))
def test_constraints_under_greedy(model, prompts, greedy_ids, name):
    fields = _constraints(greedy_ids[2])[name]
    completions = _both(model, prompts, temperature=0, **fields)
    changed = [list(c.token_ids) != ids for c, ids in zip(completions, greedy_ids, strict=True)]
    assert changed[2], "the setting says nothing about this output"
    if name != "min tokens":
        assert_mixed(completions)
        return
    assert {c.finish_reason for c in completions} & {"stop"}
    assert all(len(c.token_ids) > 12 for c in completions)
    assert sum(c.metrics.drafted for c in completions) > 0


SAMPLED = {
    "plain": {},
    "nucleus": {"temperature": 0.7, "top_p": 0.8},
    "many": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.2,
        "logit_bias": {9: 2.0, 11: -100.0},
        "bad_words": [[9, 9], [12]],
    },
}


@pytest.mark.parametrize(("name", "k"), [("plain", 4), ("nucleus", 3), ("many", 1), ("many", 5)])
def test_a_seed_gives_the_tokens_of_plain_decoding(model, prompts, name, k):
    completions = _both(model, prompts, k, seed=7, **({"temperature": 0.6} | SAMPLED[name]))
    assert_mixed(completions)
    assert len({c.token_ids for c in completions}) == len(prompts)


def test_n_seeded_completions(model, prompts):
    params = SamplingParams.override(PLAIN, temperature=0.6, seed=3, n=3)
    (plain,) = with_engine(model).generate(prompts[1:2], params)
    (own,) = with_engine(model).generate(prompts[1:2], params, speculative_tokens=3)
    assert ids_of(own) == ids_of(plain)
    assert len({c.token_ids for c in own}) == 3
    assert_mixed(own)


def test_sampling_without_a_seed_accepts_drafts(model, prompts):
    """Acceptance by comparison with one draw, not with the likeliest token."""
    completions = with_engine(model).generate(
        prompts, PLAIN, temperature=0.6, speculative_tokens=3, max_new_tokens=60
    )
    assert_mixed(completions)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0, 0.6])
def test_logprobs_are_those_of_plain_decoding(model, prompts, mode, temperature):
    fields = {"temperature": temperature, "seed": 1, "logprobs": 4, "prompt_logprobs": 2}
    fields |= {"logprobs_mode": mode, "repetition_penalty": 1.2, "top_k": 6}
    expected = with_engine(model).generate(prompts, PLAIN, **fields)
    found = with_engine(model).generate(prompts, PLAIN, **(fields | {"speculative_tokens": 3}))
    assert ids_of(found) == ids_of(expected)
    assert_mixed(found)
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine.logprobs) == len(mine.token_ids)
        rows = [*mine.logprobs, *mine.prompt_logprobs[1:]]
        others = [*theirs.logprobs, *theirs.prompt_logprobs[1:]]
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, abs=TOLERANCE)
        assert all(i in row for i, row in zip(mine.token_ids, mine.logprobs, strict=True))


# --- ends in the middle of accepted drafts ---


def _right_drafts(own: GLM53, prompt, ids, k=5, **fields):
    """One request all of whose drafts are right; its completion and its deltas."""
    engine, deltas = own.engine(), []
    force_drafts(engine, {0: [*prompt, *ids]}, (k,), own.config.vocab_size)
    params = SamplingParams.override(PLAIN, speculative_tokens=k, **fields)
    engine.add(prompt, params, on_delta=deltas.append)
    ((completion,),) = engine.run().values()
    assert_idle(engine)
    assert [d.completion for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert tuple(i for d in deltas for i in d.token_ids) == completion.token_ids
    assert "".join(d.text for d in deltas) == completion.text
    return completion, deltas


@pytest.mark.parametrize("ignored", [0, 4])
def test_a_stop_id_among_accepted_drafts(model, prompts, greedy_ids, ignored):
    """At every place of a step of six tokens; min_new_tokens postpones it."""
    ids, wasted = greedy_ids[2], 0
    for place in range(1, 8):
        fields = {"temperature": 0, "stop_token_ids": [ids[place]], "min_new_tokens": ignored}
        fields["logprobs"] = 1
        plain = with_engine(model).generate(prompts[2], PLAIN, **fields)
        # What would follow the stop is drafted, too.
        drafted = [*plain.token_ids, *ids]
        completion, deltas = _right_drafts(with_engine(model), prompts[2], drafted, **fields)
        assert completion.token_ids == plain.token_ids
        assert (completion.finish_reason, completion.stop_reason) == (
            plain.finish_reason,
            plain.stop_reason,
        )
        assert len(completion.logprobs) == sum(len(d.logprobs) for d in deltas)
        assert len(completion.logprobs) == len(completion.token_ids)
        metrics = completion.metrics
        assert metrics.decode_steps == 1 + math.ceil((len(plain.token_ids) - 1) / 6)
        # Drafts behind the stop were right as well, and are not counted: nobody got them.
        assert metrics.accepted == len(plain.token_ids) - metrics.decode_steps
        assert metrics.accepted == sum(metrics.accepted_at)
        wasted += metrics.drafted - metrics.accepted
        emitted = metrics.tokens_per_step * metrics.decode_steps
        assert emitted == pytest.approx(len(plain.token_ids))
    assert wasted > 0


@pytest.fixture(scope="module")
def spelling() -> tuple[GLM53, list[int], list[int]]:
    """A model with a tokenizer that writes letters: (model, prompt, greedy ids)."""
    model = agreeing_model(0, overrides={"vocab_size": 260, "eos_token_id": (END,)})
    own = GLM53(model.network, byte_tokenizer(), kv_cache_tokens=64 * 16)
    prompt = list(b"def f(x):")
    fields = {"temperature": 0, "allowed_token_ids": list(range(97, 123))}
    (ids,) = ids_of([own.generate(prompt, PLAIN, **fields)])
    assert len(set(ids)) > 8
    return own, prompt, ids


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_among_accepted_drafts(spelling, include):
    model, prompt, ids = spelling
    text = bytes(ids).decode()
    letters = {"temperature": 0, "allowed_token_ids": list(range(97, 123))}
    for start, end in [(1, 3), (2, 3), (4, 9), (6, 8), (7, 8), (11, 14)]:
        fields = letters | {"stop": text[start:end], "include_stop": include, "logprobs": 0}
        own, plain = (GLM53(model.network, model.tokenizer, kv_cache_tokens=640) for _ in "ab")
        expected = plain.generate(prompt, PLAIN, **fields)
        assert expected.finish_reason == "stop" and expected.text in text
        completion, deltas = _right_drafts(own, prompt, ids, **fields)
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text
        assert completion.stop_reason == expected.stop_reason == text[start:end]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(len(d.logprobs) == len(d.token_ids) for d in deltas)


def test_a_row_after_the_stop_may_have_no_token_left(model, prompts, greedy_ids):
    """Bad words forbid every token after the stop id. A step that verifies both must not fail."""
    ids = greedy_ids[2]
    place = next(i for i in range(3, 9) if ids[i] not in ids[:i])
    allowed = sorted(set(ids))
    fields = {
        "temperature": 0,
        "allowed_token_ids": allowed,
        "bad_words": [[ids[place], i] for i in allowed],
        "stop_token_ids": [ids[place]],
    }
    plain = with_engine(model).generate(prompts[2], PLAIN, **fields)
    assert plain.finish_reason == "stop" and list(plain.token_ids) == ids[: place + 1]
    completion, _ = _right_drafts(with_engine(model), prompts[2], ids, **fields)
    assert (completion.error, completion.finish_reason) == (None, "stop")
    assert completion.token_ids == plain.token_ids


def test_a_failing_row_fails_after_the_tokens_before_it(model, prompts, greedy_ids):
    """The same without a stop: an error, after the tokens that plain decoding delivers."""
    ids = greedy_ids[2]
    place = next(i for i in range(3, 9) if ids[i] not in ids[:i])
    allowed = sorted(set(ids))
    fields = {
        "temperature": 0,
        "allowed_token_ids": allowed,
        "bad_words": [[ids[place], i] for i in allowed],
    }
    plain = with_engine(model).generate(prompts[1:3], PLAIN, **fields)[1]
    assert plain.finish_reason == "error" and list(plain.token_ids) == ids[: place + 1]
    completion, _ = _right_drafts(with_engine(model), prompts[2], ids, **fields)
    assert completion.token_ids == plain.token_ids
    assert completion.error == plain.error and "no token is left" in completion.error


def test_an_error_at_a_rejected_row_is_no_error(model, prompts, greedy_ids):
    """A wrong draft after which no token is left: its row stands for nothing."""
    ids, other = greedy_ids[2], 127
    assert other not in ids
    own = with_engine(model)
    engine = own.engine()
    real = engine._runner._draft
    engine._runner._draft = lambda *a: {r: [other] * len(d) for r, d in real(*a).items()}
    allowed = sorted({*ids, other})
    fields = {"allowed_token_ids": allowed, "bad_words": [[other, i] for i in allowed]}
    completion = own.generate(
        prompts[2], PLAIN, temperature=0, logit_bias={other: -50.0}, speculative_tokens=3, **fields
    )
    assert (completion.error, completion.finish_reason) == (None, "length")
    assert list(completion.token_ids) == ids
    assert completion.metrics.accepted == 0 < completion.metrics.drafted


def test_nan_logits_of_one_request_leave_the_others_alone(model, prompts, greedy_ids, monkeypatch):
    """Rows of one request turn NaN while others verify drafts."""
    own = with_engine(model)
    engine = own.engine()
    params = SamplingParams.override(PLAIN, temperature=0, speculative_tokens=3)
    ids = [engine.add(prompt, params) for prompt in prompts]
    sampled, real = 0, engine._runner._sample

    def breaking(hidden_TD, sampling):
        nonlocal sampled
        sampled += 1
        if sampled == 4:
            hidden_TD = hidden_TD.clone()
            for chunk, row in sampling:
                if chunk.request.request_id == ids[1]:
                    hidden_TD[row : row + 1 + len(chunk.drafts)] = torch.nan
        return real(hidden_TD, sampling)

    monkeypatch.setattr(engine._runner, "_sample", breaking)
    finished = engine.run()
    for i, request_id in enumerate(ids):
        (completion,) = finished[request_id]
        if i == 1:
            assert "NaN" in completion.error
            count = len(completion.token_ids)
            assert 3 <= count < NEW and list(completion.token_ids) == greedy_ids[1][:count]
        else:
            assert list(completion.token_ids) == greedy_ids[i]
    assert_idle(engine)
