import math

import pytest
import torch

from glm53.sampling import (
    Sample,
    SamplerState,
    SamplingError,
    SamplingParams,
    exponential_noise,
    sample,
    sampler,
    token_logprobs,
    unusable_rows,
)


def state(vocab_size=4, prompt=(), stop_ids=(), index=0, **fields):
    return SamplerState(
        SamplingParams(**fields).resolve({}),
        prompt_ids=prompt,
        stop_ids=stop_ids,
        vocab_size=vocab_size,
        index=index,
    )


def chi_square(counts, probabilities):
    total = sum(counts)
    return sum(
        (c - total * p) ** 2 / (total * p)
        for c, p in zip(counts, probabilities, strict=True)
        if p > 0
    )


def draw(logits_W, request, count, chunk=200):
    """`count` consecutive positions of one request whose logits do not change."""
    drawn = []
    for _ in range(0, count, chunk):
        rows = [request.row([0] * i) for i in range(chunk)]
        drawn += [s.token_id for s in sample(logits_W.expand(chunk, -1), rows)]
        request.output_length += chunk
    return drawn


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, [0.5, 0.3, 0.2, 0.0]),
        ({"temperature": 2.0}, [0.5**0.5, 0.3**0.5, 0.2**0.5, 0.0]),
        ({"top_k": 2}, [0.5, 0.3, 0.0, 0.0]),
        ({"top_p": 0.6}, [0.5, 0.3, 0.0, 0.0]),
        ({"min_p": 0.5}, [0.5, 0.3, 0.0, 0.0]),
    ],
)
def test_draws_follow_the_distribution(fields, want):
    logits_W = torch.tensor([0.5, 0.3, 0.2, 0.0]).log()
    drawn = draw(logits_W, state(seed=3, **fields), 6000)
    counts = [drawn.count(i) for i in range(4)]
    probabilities = [p / sum(want) for p in want]
    assert all(c == 0 for c, p in zip(counts, probabilities, strict=True) if p == 0)
    assert chi_square(counts, probabilities) < 16.3  # 0.1% for 3 degrees of freedom


def test_consecutive_draws_are_independent():
    drawn = draw(torch.tensor([0.5, 0.3, 0.2]).log(), state(3, seed=8), 8000)
    pairs = [a * 3 + b for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
    p = [a * b for a in (0.5, 0.3, 0.2) for b in (0.5, 0.3, 0.2)]
    assert chi_square([pairs.count(i) for i in range(9)], p) < 26.1  # 0.1%, 8 degrees


def test_noise_is_exponential_in_ids_and_in_keys():
    keys_T1 = torch.tensor([state(seed=s).noise_key(p) for s in range(20) for p in range(20)])
    noise_TW = exponential_noise(keys_T1.unsqueeze(1), 101)
    assert noise_TW.min() > 0
    for values in (noise_TW.flatten(), noise_TW[:, 0], noise_TW[:, 100], noise_TW[7]):
        u = (-values).exp().sort().values
        n = len(u)
        distance = (u - (torch.arange(n) + 0.5) / n).abs().max()
        assert distance < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, 0.1%
    corner_T1 = torch.tensor([[0], [-1], [2**63 - 1], [-(2**63)]])
    assert exponential_noise(corner_T1, 7).isfinite().all()


def test_noise_is_splitmix64():
    """Against Python's unbounded integers; two known outputs of the published generator."""

    def splitmix(z):
        mask = 2**64 - 1
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert splitmix(gamma) == 0xE220A8397B1DCDAF  # first output for seed 0
    # With the last key the word of id 0 is 0, whose logarithm must be finite.
    for key in (0, -1, 1234567890123456789, -(2**63), (-gamma) % 2**64):
        words = [splitmix((key + (i + 1) * gamma) % 2**64) for i in range(50)]
        want = [-math.log(((word >> 12) + 0.5) / 2**52) for word in words]
        got = exponential_noise(torch.tensor([[key]]), 50)[0]
        torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_greedy_takes_the_highest_and_the_lowest_id_of_ties():
    logits_TW = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    rows = [state(temperature=0).row(), state(temperature=9e-6, seed=1).row()]
    assert [s.token_id for s in sample(logits_TW, rows)] == [1, 0]


def test_temperature_just_above_greedy_draws():
    got = draw(torch.zeros(4), state(temperature=1.1e-5, seed=0), 50, chunk=50)
    assert len(set(got)) == 4


def test_seeded_numbers_do_not_depend_on_the_batch():
    generator = torch.Generator().manual_seed(0)
    logits_PW = torch.randn(12, 50, generator=generator)
    fields = {"seed": 5, "top_p": 0.9, "temperature": 1.3}
    alone, mixed = state(50, **fields), state(50, **fields)
    others = [state(50, seed=6), state(50), state(50, temperature=0), state(50, top_k=3)]
    for position, logits_W in enumerate(logits_PW):
        want = sample(logits_W[None], [alone.row()])[0]
        here = position % 4
        rows = [s.row() for s in others[:here]] + [mixed.row()] + [s.row() for s in others[here:]]
        batch_TW = torch.randn(5, 50, generator=generator)
        batch_TW[here] = logits_W
        got = sample(batch_TW, rows)[here]
        assert got == want
        alone.append(want.token_id)
        mixed.append(got.token_id)


def test_verify_rows_draw_what_plain_decoding_draws():
    logits_TW = torch.randn(4, 30, generator=torch.Generator().manual_seed(4))
    plain, speculative = state(30, seed=9), state(30, seed=9)
    want = []
    for logits_W in logits_TW:
        want.append(sample(logits_W[None], [plain.row()])[0].token_id)
        plain.append(want[-1])
    rows = [speculative.row(want[:i]) for i in range(4)]
    assert [s.token_id for s in sample(logits_TW, rows)] == want


def test_seeds_completions_and_requests_differ():
    logits_W = torch.zeros(1000)

    def first(**fields):
        return draw(logits_W, state(1000, **fields), 20, chunk=20)

    assert first(seed=1) == first(seed=1)
    streams = [first(seed=1), first(seed=2), first(seed=1 + 2**32), first(seed=1, index=1)]
    streams += [first(), first(), first(seed=0)]
    assert len({tuple(s) for s in streams}) == len(streams)
    assert len(set(first(seed=1))) > 15  # positions differ


def test_chunks_do_not_change_results(monkeypatch):
    logits_TW = torch.randn(7, 11, generator=torch.Generator().manual_seed(1))
    rows = [state(11, seed=i, logprobs=i % 4).row() for i in range(7)]
    want = sample(logits_TW, rows)
    want_prompt = token_logprobs(logits_TW, torch.arange(7), 2)
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", 25)
    assert sample(logits_TW, rows) == want
    assert token_logprobs(logits_TW, torch.arange(7), 2) == want_prompt
    monkeypatch.setattr(sampler, "CHUNK_ELEMENTS", 1)
    assert sample(logits_TW, rows) == want


def test_raw_and_processed_logprobs():
    logits_TW = torch.tensor([[2.0, 1.0, 0.0]]).expand(2, -1)
    rows = [
        state(3, temperature=2.0, logprobs=3, logprobs_mode=mode).row()
        for mode in (None, "processed")
    ]
    raw, processed = sample(logits_TW, rows)
    assert raw.logprobs[0] == pytest.approx(-0.4076, abs=1e-4)
    assert processed.logprobs[0] == pytest.approx(-0.6803, abs=1e-4)


def test_raw_logprobs_ignore_every_step_and_processed_ones_none():
    fields = {
        "logit_bias": {1: 3.0},
        "top_k": 2,
        "repetition_penalty": 1.5,
        "bad_words": [[3]],
        "seed": 0,
        "logprobs": 4,
    }
    logits_TW = torch.tensor([[2.0, 1.0, 0.0, 1.5]]).expand(2, -1)
    rows = [state(prompt=[0], logprobs_mode=m, **fields).row() for m in ("raw", "processed")]
    raw, processed = sample(logits_TW, rows)
    lse = math.log(sum(math.exp(v) for v in (2.0, 1.0, 0.0, 1.5)))
    want = {0: 2 - lse, 3: 1.5 - lse, 1: 1 - lse, 2: -lse}
    assert raw.logprobs == pytest.approx(want)
    assert list(raw.logprobs) == [0, 3, 1, 2]
    lse = math.log(math.exp(4.0) + math.exp(2 / 1.5))
    assert processed.logprobs == pytest.approx({1: 4 - lse, 0: 2 / 1.5 - lse})


@pytest.mark.parametrize(
    ("top_n", "ids"), [(0, [5]), (1, [2, 5]), (3, [2, 0, 1, 5]), (6, [2, 0, 1, 3, 4, 5])]
)
def test_logprobs_hold_the_top_and_the_sampled_id_in_order(top_n, ids):
    logits_TW = torch.tensor([[1.0, 1.0, 4.0, 1.0, 0.5, -3.0]])
    request = state(6, temperature=0, logit_bias={5: 50.0}, logprobs=top_n)
    got = sample(logits_TW, [request.row()])[0]
    assert got.token_id == 5
    assert list(got.logprobs) == ids
    want_W = logits_TW[0].log_softmax(-1)
    assert got.logprobs == pytest.approx({i: float(want_W[i]) for i in ids}, rel=1e-6)


def test_no_logprobs_unless_asked_and_more_than_the_vocabulary_is_all_of_it():
    rows = [state(temperature=0).row(), state(temperature=0, logprobs=9).row()]
    plain, everything = sample(torch.zeros(2, 4), rows)
    assert plain == Sample(0, None)
    assert list(everything.logprobs) == [0, 1, 2, 3]


def test_ranking_ties_zeros_and_signs():
    logits_TW = torch.tensor([[-0.0, -2.0, 0.0, 3.0, -2.0, -0.5, 3.0]])
    got = token_logprobs(logits_TW, torch.tensor([0]), 7)[0]
    assert list(got) == [3, 6, 0, 2, 5, 1, 4]


def test_token_logprobs_equal_log_softmax():
    logits_TW = (4 * torch.randn(23, 41, generator=torch.Generator().manual_seed(0))).bfloat16()
    next_ids_T = torch.randint(41, (23,), generator=torch.Generator().manual_seed(1))
    want_TW = logits_TW.double().log_softmax(-1)
    got = token_logprobs(logits_TW, next_ids_T, 3)
    assert len(got) == 23
    for row, want_W, next_id in zip(got, want_TW, next_ids_T.tolist(), strict=True):
        bf16_ties = sorted(range(41), key=lambda i: (-float(want_W[i]), i))
        assert list(row)[:3] == bf16_ties[:3]
        assert set(row) == {*bf16_ties[:3], next_id}
        assert row == pytest.approx({i: float(want_W[i]) for i in row}, abs=1e-5)
    assert token_logprobs(logits_TW[:0], next_ids_T[:0], 3) == []


def test_token_logprobs_keep_an_impossible_prompt_token():
    logits_TW = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]])
    got = token_logprobs(logits_TW, torch.tensor([1]), 4)[0]
    assert list(got) == [2, 0, 1]
    assert got[1] == -math.inf


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 4, "top_p": 0.7, "logprobs": 2}])
@pytest.mark.parametrize(
    ("poison", "message"),
    [
        ([math.nan, 0, 0, 0], "NaN"),
        ([0, math.inf, 0, math.nan], "NaN"),
        ([0, math.inf, 0, 0], r"\+inf"),
        ([-math.inf] * 4, "every logit is -inf"),
    ],
)
def test_bad_row_fails_alone(fields, poison, message):
    logits_TW = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    want = sample(logits_TW, [state(**fields).row() for _ in range(3)])
    logits_TW[1] = torch.tensor(poison)
    first, bad, last = sample(logits_TW, [state(**fields).row() for _ in range(3)])
    assert (first, last) == (want[0], want[2])
    assert isinstance(bad, SamplingError)
    with pytest.raises(SamplingError, match=message):
        raise bad
    assert [bool(e) for e in unusable_rows(logits_TW)] == [False, True, False]


def test_some_minus_infinity_is_fine():
    got = sample(torch.tensor([[-math.inf, 1.0, -math.inf, -math.inf]]), [state(logprobs=4).row()])
    assert got == [Sample(1, {1: 0.0})]


def test_constraints_that_leave_nothing_fail_that_row_alone():
    stuck = state(allowed_token_ids=[2], min_new_tokens=1, stop_ids=[2])
    bad, good = sample(torch.zeros(2, 4), [stuck.row(), state(temperature=0).row()])
    assert isinstance(bad, SamplingError)
    assert "after processing: every logit is -inf" in str(bad)
    assert good.token_id == 0


def test_biased_away_id_never_appears_in_verify_rows():
    request = state(12, seed=1, logit_bias={9: -100.0})
    logits_TW = torch.zeros(4, 12)
    logits_TW[:, 9] = 5.0
    for _ in range(100):
        samples = sample(logits_TW, [request.row([1, 2, 3][:i]) for i in range(4)])
        ids = [s.token_id for s in samples]
        assert 9 not in ids
        request.append(ids[0])


def test_no_rows():
    assert sample(torch.zeros(0, 4), []) == []


def test_unresolved_parameters_are_refused():
    with pytest.raises(AssertionError, match="resolved"):
        SamplerState(SamplingParams(), prompt_ids=[], stop_ids=[], vocab_size=4)
