"""The engine against plain loops over the uncached model: same tokens in any company."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53 import GLM53, Completion, SamplingParams
from glm53.engine import Engine
from tests.engines import (
    assert_idle,
    audit,
    greedy,
    logits_of,
    prompts_of,
    tiny_model,
    with_engine,
)
from tests.speculation import assert_mixed, force_drafts, sequences_of

# The tiny model attends to 7 keys: every prompt here but the shortest is longer than that.
LENGTHS = (1, 3, 9, 30, 67)
NEW = 12
# Logits of about 10, summed in another order for every number of rows: 3e-6 of them.
TOLERANCE = 3e-5
GREEDY = SamplingParams(speculative_tokens=0, temperature=0, max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> GLM53:
    return tiny_model(3)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(*LENGTHS)


@pytest.fixture(scope="module")
def expected(model, prompts) -> list[list[int]]:
    """Greedy continuations by the naive loop, whose top two logits are never close."""
    outputs = [greedy(model, prompt, NEW) for prompt in prompts]
    for prompt, output in zip(prompts, outputs, strict=True):
        rows_TW = logits_of(model, prompt + output)[len(prompt) - 1 : -1]
        best, second = rows_TW.topk(2, dim=-1).values.unbind(-1)
        assert (best - second).min() > 1e-3, "choose another seed"
    assert len({tuple(output) for output in outputs}) == len(outputs)
    assert any(len(set(output)) > 3 for output in outputs)
    return outputs


def _poison(engine: Engine) -> None:
    for layer in engine._cache.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(math.nan)


def _ids(completions: list[Completion]) -> list[list[int]]:
    assert all(c.error is None for c in completions)
    return [list(completion.token_ids) for completion in completions]


def _by_id(finished: dict[int, list[Completion]]) -> list[list[int]]:
    return _ids([finished[request_id][0] for request_id in sorted(finished)])


@pytest.mark.parametrize(
    "budget, running", [(1, 1), (2, 2), (5, 1), (5, 3), (7, 5), (64, 5), (10_000, 64)]
)
def test_any_chunking_gives_the_naive_tokens(model, prompts, expected, budget, running):
    own = with_engine(model, max_batch_tokens=budget, max_running=running)
    engine = own.engine()
    _poison(engine)
    assert _ids(own.generate(prompts, GREEDY)) == expected
    assert engine.stats.max_rows == min(budget, sum(LENGTHS))
    assert engine.stats.rows == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
    assert_idle(engine)


@pytest.mark.parametrize("budget", [1, 5, 64, 10_000])
def test_chunked_logits_are_the_uncached_ones(model, budget):
    (prompt,) = prompts_of(70, seed=1)
    own = with_engine(model, max_batch_tokens=budget)
    params = SamplingParams(
        temperature=0, max_new_tokens=9, ignore_eos=True, logprobs=131, prompt_logprobs=131
    )
    _poison(own.engine())
    result = own.generate(prompt, params)
    reference_SW = logits_of(model, (*prompt, *result.token_ids)).log_softmax(-1)
    rows = [*result.prompt_logprobs[1:], *result.logprobs]
    found_SW = torch.tensor([[row[i] for i in range(131)] for row in rows])
    assert (found_SW - reference_SW[:-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("pages", [2, 3, 4])
def test_preemption_changes_no_token(model, pages):
    """Prompts that fit, and grow over the page border until they do not."""
    prompts = prompts_of(60, 61, 62, 60, seed=2)
    expected = [greedy(model, prompt, NEW) for prompt in prompts]
    own = with_engine(model, kv_cache_tokens=64 * pages)
    engine = own.engine()
    _poison(engine)
    params = SamplingParams.override(GREEDY, logprobs=0, prompt_logprobs=2)
    completions = own.generate(prompts, params)
    assert _ids(completions) == expected
    assert engine.stats.preemptions > 0
    assert engine.stats.preemptions == sum(c.metrics.preemptions for c in completions)
    assert completions[0].metrics.preemptions == 0, "the oldest is never preempted"
    for prompt, completion in zip(prompts, completions, strict=True):
        reference_SW = logits_of(model, (*prompt, *completion.token_ids)).log_softmax(-1)
        rows = [*completion.prompt_logprobs[1:], *completion.logprobs]
        assert len(rows) == len(reference_SW) - 1
        ids = [*prompt[1:], *completion.token_ids]
        found = torch.tensor([row[i] for row, i in zip(rows, ids, strict=True)])
        own_S = reference_SW[:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert (found - own_S).abs().max() < TOLERANCE
    assert_idle(engine)


@settings(max_examples=8)
@given(data=st.data())
def test_requests_that_join_and_leave_at_any_step(model, prompts, expected, data):
    budget = data.draw(st.integers(3, 80), label="budget")
    pages = data.draw(st.integers(2, 6), label="pages")
    own = with_engine(
        model,
        kv_cache_tokens=64 * pages,
        max_batch_tokens=budget,
        max_running=data.draw(st.integers(1, 3), label="running"),
    )
    engine = own.engine()
    _poison(engine)
    order = data.draw(st.permutations(range(len(prompts))), label="order")
    joins = {i: data.draw(st.integers(0, 20), label=f"join {i}") for i in order}
    leaves = {i: data.draw(st.none() | st.integers(0, 40), label=f"leave {i}") for i in order}
    request_ids, outputs = {}, {}
    for step in range(500):
        for i in order:
            if joins[i] == step:
                request_ids[engine.add(prompts[i], GREEDY)] = i
            if leaves[i] == step:
                for request_id in [r for r, j in request_ids.items() if j == i]:
                    for delta in engine.cancel(request_id):
                        outputs[i] = delta.completion
        before = engine.stats.rows
        for delta in engine.step():
            if delta.completion is not None:
                outputs[request_ids[delta.request_id]] = delta.completion
        assert engine.stats.rows - before <= budget
        audit(engine)
        if len(request_ids) == len(order) and not engine.num_unfinished:
            break
    assert_idle(engine)
    assert set(outputs) == set(order)
    for i, completion in outputs.items():
        if completion.finish_reason == "length":
            assert list(completion.token_ids) == expected[i]
        else:
            assert completion.finish_reason == "cancelled" and leaves[i] is not None
            assert list(completion.token_ids) == expected[i][: len(completion.token_ids)]


def test_many_requests_share_their_forwards(model):
    own = with_engine(model, max_batch_tokens=40)
    engine = own.engine()
    prompts = prompts_of(*[3] * 12)
    own.generate(prompts, GREEDY)
    assert engine.stats.steps == NEW
    assert engine.stats.rows == 12 * (3 + NEW - 1)
    assert engine.stats.max_rows == 36 <= 40


def test_the_first_delta_comes_before_the_second_forward(model, prompts, monkeypatch):
    forwards = []
    forward = model.network.model.forward

    def counted(*arguments):
        forwards.append(arguments[0].input_ids.numel())
        return forward(*arguments)

    monkeypatch.setattr(model.network.model, "forward", counted)
    own = with_engine(model)
    stream = own.stream(prompts[2], GREEDY)
    assert forwards == [], "nothing runs before it is asked"
    for count, delta in enumerate(stream, 1):
        assert len(forwards) == count and len(delta.token_ids) == 1
    assert forwards == [9] + [1] * (NEW - 1)


def test_greedy_ignores_seed_and_company(model, prompts, expected):
    sampled = SamplingParams(temperature=1.5, max_new_tokens=7, seed=5)
    engine = with_engine(model).engine()
    wanted = {}
    for i, prompt in enumerate(prompts):
        wanted[engine.add(prompt, SamplingParams.override(GREEDY, seed=i))] = expected[i]
        engine.add(prompt, sampled)
    finished = engine.run()
    assert {i: list(finished[i][0].token_ids) for i in wanted} == wanted


def test_a_seed_gives_the_same_tokens_in_any_company_and_under_preemption(model):
    prompts = prompts_of(60, 61, 62, seed=4)
    params = SamplingParams(temperature=1.0, max_new_tokens=20, seed=11, ignore_eos=True)
    plain = [
        with_engine(model).generate(prompt, params, speculative_tokens=0) for prompt in prompts
    ]
    alone = _ids(plain)
    assert len({tuple(ids) for ids in alone}) == 3
    own = with_engine(model, kv_cache_tokens=64 * 3, max_batch_tokens=50, max_running=7)
    force_drafts(own.engine(), sequences_of(plain))
    completions = own.generate(prompts, params)
    assert _ids(completions) == alone
    assert_mixed(completions)
    assert own.engine().stats.preemptions > 0
    other = SamplingParams.override(params, seed=12)
    assert _ids(own.generate(prompts, other)) != alone


def test_n_completions_differ_and_repeat(model, prompts):
    params = SamplingParams(temperature=1.0, max_new_tokens=6, seed=1, n=4, ignore_eos=True)
    first = with_engine(model).generate(prompts[3], params)
    assert [completion.index for completion in first] == [0, 1, 2, 3]
    assert len({completion.token_ids for completion in first}) > 1
    assert len({completion.prompt_token_ids for completion in first}) == 1
    lists = with_engine(model, max_running=2).generate([prompts[2], prompts[3]], params)
    assert [[c.index for c in result] for result in lists] == [[0, 1, 2, 3]] * 2
    assert _ids(lists[1]) == _ids(first)
    # The first of n draws what a single one draws.
    one = with_engine(model).generate(prompts[3], params, n=1)
    assert one.token_ids == first[0].token_ids


def test_seedless_completions_differ(model, prompts):
    params = SamplingParams(temperature=2.0, max_new_tokens=12, n=3, ignore_eos=True)
    assert len({c.token_ids for c in with_engine(model).generate(prompts[3], params)}) == 3


def test_raw_and_processed_logprobs(model, prompts):
    shape = {"temperature": 0.7, "top_k": 5, "seed": 3, "max_new_tokens": 8, "logprobs": 3}
    raw = with_engine(model).generate(prompts[3], ignore_eos=True, **shape)
    logits_SW = logits_of(model, (*prompts[3], *raw.token_ids))[len(prompts[3]) - 1 : -1]
    for row, token_id, logits_W in zip(raw.logprobs, raw.token_ids, logits_SW, strict=True):
        reference_W = logits_W.log_softmax(-1)
        ids = {*reference_W.topk(3).indices.tolist(), token_id}
        assert row == pytest.approx({i: float(reference_W[i]) for i in ids}, abs=TOLERANCE)
    processed = with_engine(model).generate(
        prompts[3], ignore_eos=True, logprobs_mode="processed", **shape
    )
    assert processed.token_ids == raw.token_ids
    for row, logits_W in zip(processed.logprobs, logits_SW, strict=True):
        kept = logits_W.topk(5)
        values = (kept.values / 0.7).log_softmax(-1).tolist()
        reference = dict(zip(kept.indices.tolist(), values, strict=True))
        assert set(list(reference)[:3]) <= set(row)
        assert row == pytest.approx({i: reference[i] for i in row}, abs=TOLERANCE)


@pytest.mark.parametrize("budget", [4, 64, 1000])
def test_prompt_logprobs(model, budget):
    (prompt,) = prompts_of(140, seed=5)  # more rows than logits are made for at once
    own = with_engine(model, max_batch_tokens=budget)
    result = own.generate(prompt, max_new_tokens=1, prompt_logprobs=2)
    assert result.logprobs is None
    assert result.prompt_logprobs[0] is None and len(result.prompt_logprobs) == 140
    reference_SW = logits_of(model, prompt).log_softmax(-1)
    for i, row in enumerate(result.prompt_logprobs[1:]):
        ids = {*reference_SW[i].topk(2).indices.tolist(), prompt[i + 1]}
        assert row == pytest.approx({j: float(reference_SW[i, j]) for j in ids}, abs=TOLERANCE)


@pytest.mark.parametrize("budget", [3, 64, 1000])
def test_score(model, prompts, budget):
    own = with_engine(model, max_batch_tokens=budget)
    scores = own.score(prompts)
    for prompt, score in zip(prompts, scores, strict=True):
        reference_SW = logits_of(model, prompt).log_softmax(-1)
        own_S = reference_SW[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert score.dtype == torch.float32 and score.shape == (len(prompt) - 1,)
        assert torch.allclose(score, own_S, rtol=0, atol=TOLERANCE)
    assert torch.allclose(own.score(torch.tensor(prompts[2])), scores[2], rtol=0, atol=TOLERANCE)
    assert own.engine().stats.rows == sum(LENGTHS) + LENGTHS[2], "scoring generates nothing"
    assert_idle(own.engine())


def test_new_weights_are_seen_by_the_next_generation(prompts):
    model, other = tiny_model(3), tiny_model(8)
    before = model.generate(prompts, GREEDY)
    for _ in range(2):
        for weights in (other, tiny_model(3)):
            model.load_state_dict(weights.state_dict())
            ids = torch.tensor([prompts[3]])
            assert torch.equal(model(ids), weights(ids))
            fresh = with_engine(weights).generate(prompts, GREEDY)
            assert _ids(model.generate(prompts, GREEDY)) == _ids(fresh)
    assert _ids(model.generate(prompts, GREEDY)) == _ids(before)
    assert _ids(other.generate(prompts, GREEDY)) != _ids(before)


def test_pages_used_before_hold_nothing_that_is_read(model, prompts, expected):
    own = with_engine(model, kv_cache_tokens=64 * 3)
    own.generate(prompts_of(50, 120, 60, seed=9), GREEDY)
    assert _ids(own.generate(prompts, GREEDY)) == expected


def test_a_bfloat16_cache_of_a_float32_model(model, prompts, expected):
    own = with_engine(model, kv_cache_dtype=torch.bfloat16)
    completions = own.generate(prompts, GREEDY, logprobs=0)
    assert own.engine()._cache.dtype == torch.bfloat16
    assert [len(c.token_ids) for c in completions] == [NEW] * len(prompts)
    # The first token of a one-token prompt depends on one rounded latent only.
    reference_W = logits_of(model, prompts[0])[-1].log_softmax(-1)
    ((token_id, logprob),) = completions[0].logprobs[0].items()
    assert logprob == pytest.approx(float(reference_W[token_id]), abs=0.05)
    assert logprob != float(reference_W[token_id])


def test_run_and_step_report_every_completion(model, prompts, expected):
    engine = with_engine(model).engine()
    assert engine.step() == [] and engine.run() == {}
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    assert engine.num_unfinished == len(prompts)
    assert len(set(ids)) == len(ids)
    assert _by_id(engine.run()) == expected
