import collections
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from glm53.sampling import SamplerState, SamplingParams, process_logits, processors

W = 37


def state(prompt=(), output=(), stop_ids=(), vocab_size=W, **fields):
    params = SamplingParams(**fields).resolve({})
    made = SamplerState(params, prompt_ids=prompt, stop_ids=stop_ids, vocab_size=vocab_size)
    for token in output:
        made.append(token)
    return made


def naive(logits, params, prompt, output, stop_ids):
    """One row in Python numbers, written from the definitions; -inf is dropped."""
    x = [float(v) for v in logits]
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else -math.inf for i, v in enumerate(x)]
    text = [*prompt, *output]
    for word in params.bad_words:
        *prefix, last = word
        if not prefix or (len(text) >= len(prefix) and text[-len(prefix) :] == prefix):
            x[last] = -math.inf
    if len(output) < params.min_new_tokens:
        for i in {*stop_ids, *params.stop_token_ids}:
            x[i] = -math.inf
    for i, bias in params.logit_bias:
        x[i] += bias
    for i in set(text):
        r = params.repetition_penalty
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
    for i, count in collections.Counter(output).items():
        x[i] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return x
    x = [v / params.temperature for v in x]
    if params.min_p:
        bound = max(x) + math.log(params.min_p)
        x = [v if v >= bound else -math.inf for v in x]
    if 0 < params.top_k < len(x):
        kth = sorted(x, reverse=True)[params.top_k - 1]
        x = [v if v >= kth else -math.inf for v in x]
    if params.top_p < 1:
        weights = [math.exp(v - max(x)) for v in x]
        total, kept = 0.0, set()
        for i in sorted(range(len(x)), key=lambda i: (-x[i], i)):
            kept.add(i)
            total += weights[i] / sum(weights)
            if total >= params.top_p:
                break
        x = [v if i in kept else -math.inf for i, v in enumerate(x)]
    return x


def assert_same(got_W, want, exact_support=True):
    want_W = torch.tensor(want)
    if exact_support:
        assert torch.equal(got_W.isinf(), want_W.isinf())
    torch.testing.assert_close(got_W, want_W.to(got_W.dtype), rtol=1e-5, atol=1e-5)


tokens = st.integers(0, W - 1)
field = {
    "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    "top_k": st.sampled_from([-1, 0, 1, 5, W, 99]),
    "top_p": st.sampled_from([0.01, 0.3137, 0.8713, 1.0]),
    "min_p": st.sampled_from([0.0, 0.0517, 0.3171]),
    "repetition_penalty": st.sampled_from([1.0, 0.7, 1.3]),
    "presence_penalty": st.sampled_from([0.0, 0.5, -1.5]),
    "frequency_penalty": st.sampled_from([0.0, 0.7, -0.3]),
    "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    "bad_words": st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=4),
    "allowed_token_ids": st.none() | st.lists(tokens, min_size=12, max_size=30),
    "min_new_tokens": st.sampled_from([0, 2, 4]),
    "stop_token_ids": st.lists(tokens, max_size=2),
}
requests = st.tuples(
    st.fixed_dictionaries({}, optional=field),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), max_size=3),
    st.lists(st.integers(0, 4), max_size=3),
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(requests, min_size=1, max_size=5), st.integers(0, 2**31))
def test_mixed_batch_equals_loops(batch, seed):
    logits_TW = 3 * torch.randn(len(batch), W, generator=torch.Generator().manual_seed(seed))
    before_TW = logits_TW.clone()
    rows, wanted = [], []
    for logits_W, (fields, prompt, output, extra) in zip(logits_TW, batch, strict=True):
        rows.append(state(prompt, output, stop_ids=[5], **fields).row(extra))
        params = SamplingParams(**fields).resolve({})
        wanted.append(naive(logits_W, params, prompt, [*output, *extra], [5]))
    got_TW = process_logits(logits_TW, rows)
    assert torch.equal(logits_TW, before_TW)
    for got_W, want in zip(got_TW, wanted, strict=True):
        if max(want) > -math.inf:
            assert_same(got_W, want)


@pytest.mark.parametrize(
    ("fields", "processor"),
    [
        ({"repetition_penalty": 1.3}, lambda: RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.6}, lambda: RepetitionPenaltyLogitsProcessor(0.6)),
        ({"top_k": 4}, lambda: TopKLogitsWarper(4)),
        ({"top_k": 500}, lambda: TopKLogitsWarper(500)),
        ({"top_p": 0.7}, lambda: TopPLogitsWarper(0.7)),
        ({"top_p": 1e-6}, lambda: TopPLogitsWarper(1e-6)),
        ({"min_p": 0.05}, lambda: MinPLogitsWarper(0.05)),
        ({"temperature": 0.3}, lambda: TemperatureLogitsWarper(0.3)),
        (
            {"bad_words": [[3], [8, 9], [2, 8, 10], [9, 11]]},
            lambda: NoBadWordsLogitsProcessor([[3], [8, 9], [2, 8, 10], [9, 11]], 99),
        ),
        (
            {"min_new_tokens": 3},
            lambda: MinNewTokensLengthLogitsProcessor(4, 3, [5, 6], device="cpu"),
        ),
        (
            {"min_new_tokens": 2},
            lambda: MinNewTokensLengthLogitsProcessor(4, 2, [5, 6], device="cpu"),
        ),
    ],
)
def test_equals_transformers(fields, processor):
    prompt, output = [1, 7, 7, 4], [2, 8]
    logits_TW = 3 * torch.randn(20, W, generator=torch.Generator().manual_seed(1))
    request = state(prompt, output, stop_ids=[5, 6], **fields)
    got_TW = process_logits(logits_TW, [request.row()] * 20)
    ids = torch.tensor([prompt + output] * 20)
    want_TW = processor()(ids, logits_TW.clone())
    torch.testing.assert_close(got_TW, want_TW)


def test_rows_without_wishes_cost_no_copy_and_are_untouched():
    logits_TW = torch.randn(3, W)
    assert process_logits(logits_TW, [state().row()] * 3) is logits_TW
    greedy = state(temperature=0, top_p=0.5, top_k=3, min_p=0.2)
    assert process_logits(logits_TW, [greedy.row()] * 3) is logits_TW
    mixed = process_logits(logits_TW, [state().row(), state(top_k=2).row(), state().row()])
    assert torch.equal(mixed[[0, 2]], logits_TW[[0, 2]])
    assert mixed[1].isfinite().sum() == 2


def test_low_precision_logits_are_processed_in_fp32():
    logits_TW = torch.randn(2, W).bfloat16()
    got_TW = process_logits(logits_TW, [state(temperature=0.3).row(), state().row()])
    assert got_TW.dtype == torch.float32
    torch.testing.assert_close(got_TW[0], logits_TW[0].float() / 0.3)


def test_extra_tokens_equal_appended_ones_and_leave_no_trace():
    fields = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "bad_words": [[1, 2], [3, 4, 6]],
        "min_new_tokens": 4,
        "temperature": 0.7,
    }
    drafts = [3, 4, 4, 1]
    logits_TW = torch.randn(5, W)
    plain, speculative = (state([9], [3], stop_ids=[7], **fields) for _ in range(2))
    want = []
    for i in range(5):
        want.append(process_logits(logits_TW[i : i + 1], [plain.row()])[0])
        if i < 4:
            plain.append(drafts[i])
    rows = [speculative.row(drafts[:i]) for i in range(5)]
    assert [row.position for row in rows] == [1, 2, 3, 4, 5]
    for _ in range(2):  # rejected drafts must not be remembered
        assert torch.equal(process_logits(logits_TW, rows), torch.stack(want))
    assert speculative.output_length == 1


def test_draft_sentinel_is_refused():
    with pytest.raises(AssertionError):
        state().row([3, -1])


def test_bad_word_prefix_may_begin_in_the_prompt():
    request = state([1, 2], bad_words=[[1, 2, 3]])
    logits_TW = torch.zeros(1, W)
    assert process_logits(logits_TW, [request.row()])[0].isinf().nonzero().tolist() == [[3]]
    request.append(0)
    assert not process_logits(logits_TW, [request.row()]).isinf().any()


def test_ties_at_the_kth_are_kept():
    logits_TW = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    got_W = process_logits(logits_TW, [state(top_k=2, vocab_size=6).row()])[0]
    assert got_W.isfinite().tolist() == [False, True, True, True, True, False]


def test_top_p_ties_keep_the_lower_id_and_at_least_one():
    logits_TW = torch.zeros(2, 8)
    rows = [state(top_p=0.5, vocab_size=8).row(), state(top_p=1e-9, vocab_size=8).row()]
    got_TW = process_logits(logits_TW, rows)
    assert got_TW[0].isfinite().tolist() == [True] * 4 + [False] * 4
    assert got_TW[1].isfinite().tolist() == [True] + [False] * 7


def test_top_p_is_of_the_distribution_that_top_k_left():
    # p = .4 .3 .2 .1; top_k=2 leaves 4/7, 3/7: top_p=.5 keeps one, on the whole row it keeps two.
    logits_TW = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    both = process_logits(logits_TW, [state(top_k=2, top_p=0.5, vocab_size=4).row()])
    alone = process_logits(logits_TW, [state(top_p=0.5, vocab_size=4).row()])
    assert (both.isfinite().sum(), alone.isfinite().sum()) == (1, 2)


def test_min_p_is_after_temperature():
    logits_TW = torch.tensor([[0.0, -1.0, -3.0]])
    hot = process_logits(logits_TW, [state(min_p=0.3, temperature=2.0, vocab_size=3).row()])
    plain = process_logits(logits_TW, [state(min_p=0.3, temperature=1.0, vocab_size=3).row()])
    assert (hot.isfinite().sum(), plain.isfinite().sum()) == (2, 2)
    cold = process_logits(logits_TW, [state(min_p=0.3, temperature=0.5, vocab_size=3).row()])
    assert cold.isfinite().sum() == 1


@pytest.mark.parametrize("candidates", [1, 3, 8, 64])
def test_nucleus_wider_than_the_candidates(monkeypatch, candidates):
    logits_TW = torch.randn(6, W, generator=torch.Generator().manual_seed(2))
    logits_TW[0] = 0.0
    rows = [state(top_p=p).row() for p in (0.9, 0.05, 0.5, 0.99, 0.75, 0.2)]
    want_TW = process_logits(logits_TW, rows)
    assert 1 < want_TW[0].isfinite().sum() < W
    monkeypatch.setattr(processors, "NUCLEUS_CANDIDATES", candidates)
    assert torch.equal(process_logits(logits_TW, rows), want_TW)


def test_stop_ids_beyond_the_vocabulary_are_ignored():
    request = state(stop_ids=[W, W + 5, 2], min_new_tokens=1)
    got_W = process_logits(torch.zeros(1, W), [request.row()])[0]
    assert got_W.isinf().nonzero().tolist() == [[2]]


def test_bias_cannot_bring_back_what_is_forbidden():
    request = state(
        stop_ids=[2],
        min_new_tokens=1,
        bad_words=[[3]],
        allowed_token_ids=[2, 3, 4],
        logit_bias={2: 90.0, 3: 90.0, 5: 90.0},
    )
    got_W = process_logits(torch.zeros(1, W), [request.row()])[0]
    assert got_W.isfinite().nonzero().tolist() == [[4]]


def test_state_checks_ids_against_the_vocabulary():
    with pytest.raises(ValueError, match="allowed_token_ids: id 40"):
        state(allowed_token_ids=[40])


def test_append_costs_the_same_at_any_length():
    request = state([1], repetition_penalty=1.1, frequency_penalty=0.1, bad_words=[[1, 2, 3]])
    for token in range(3000):
        request.append(token % W)
    held = [v for v in vars(request).values() if isinstance(v, collections.deque | list | dict)]
    assert all(len(v) <= 3 for v in held)
    assert request.counts_W.sum() == 3000
