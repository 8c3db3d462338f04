"""Proposing and verifying drafts, without an engine: the MTP steps against the loop-written oracle,
and what verification emits against probabilities worked out by hand."""

import copy
import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.model import Transformer
from glm53.sampling import Sample, SamplerState, SamplingParams, sample
from glm53.speculative import num_accepted, propose
from tests.reference import Reference
from tests.speculation import oracle_drafts
from tests.tiny import randomise, tiny_config

# --- proposing ---


class _Drafting:
    """Requests in one cache, whose target rows have been computed; `next_ids` follow their rows."""

    @torch.no_grad()
    def __init__(self, lengths, *, seed=0, config=None) -> None:
        self.config = config or tiny_config()
        self.network = randomise(Transformer(self.config), seed).eval()
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randint(131, (n + 1,), generator=generator).tolist() for n in lengths]
        # Pages in an order of their own, two for each request.
        pages = torch.randperm(2 * len(lengths), generator=generator).view(-1, 2).tolist()
        self.cache = KVCache(self.config, 2 * len(lengths), mtp=True, dtype=torch.float32)
        for layer in self.cache.layers:
            for tensor in filter(lambda t: t is not None, layer):
                tensor.fill_(math.nan)
        self.batch = Batch.paged(
            [(ids[:-1], 0, own) for ids, own in zip(self.tokens, pages, strict=True)], PAGE_SIZE
        )
        self.hidden_TD = self.network.model(self.batch, self.cache)
        self.next_ids_T = torch.tensor([i for ids in self.tokens for i in ids[1:]])
        self.last_rows = (torch.tensor(lengths).cumsum(0) - 1).tolist()

    @torch.no_grad()
    def propose(self, num_drafts: dict[int, int]) -> list[list[int]]:
        """num_drafts: request -> drafts; the others only fill the cache."""
        return propose(
            self.network,
            self.cache,
            self.batch,
            self.hidden_TD,
            self.next_ids_T,
            [self.last_rows[i] for i in num_drafts],
            list(num_drafts.values()),
        )

    def expected(self, num_drafts: dict[int, int]) -> list[list[int]]:
        oracle = Reference(self.config, self.network.state_dict())
        return [oracle_drafts(oracle, self.tokens[i], count) for i, count in num_drafts.items()]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_equal_the_oracle(shared, seed):
    """Lengths on both sides of index_topk (7), drafts over a page border (62 + 3)."""
    config = tiny_config(index_share_for_mtp_iteration=shared)
    case = _Drafting([62, 5, 23, 9], seed=seed, config=config)
    wanted = {2: 2, 0: 3, 1: 3} if seed else {0: 3, 1: 1, 2: 3, 3: 2}
    drafts = case.propose(wanted)
    assert [len(own) for own in drafts] == list(wanted.values())
    assert drafts == case.expected(wanted)
    assert len({tuple(own) for own in drafts}) == len(drafts)


def test_sharing_the_selection_or_not_makes_different_drafts():
    """Otherwise the test above would not tell the two apart."""
    kinds = [tiny_config(index_share_for_mtp_iteration=shared) for shared in (True, False)]
    first, second = (_Drafting([62, 23], config=c).propose({0: 5, 1: 5}) for c in kinds)
    assert [own[0] for own in first] == [own[0] for own in second]
    assert first != second


def test_shared_steps_write_no_index_key():
    for shared in (True, False):
        case = _Drafting([11], config=tiny_config(index_share_for_mtp_iteration=shared))
        case.propose({0: 4})
        latent, index_keys, _ = case.cache.layers[case.config.mtp_layer]
        own = case.batch.slots
        first = own[-1] + 1
        assert latent[own].isfinite().all() and index_keys[own].isfinite().all()
        assert latent[first : first + 3].isfinite().all(), "three more steps, one row each"
        assert index_keys[first : first + 3].isnan().all() == shared
        assert latent[first + 3].isnan().all() and index_keys[first + 3].isnan().all()


def test_each_request_keeps_its_own_selection_when_others_stop():
    """Drafts alone equal drafts in company, whoever stops first."""
    counts = {0: 2, 1: 5, 2: 1, 3: 4}
    together = _Drafting([30, 41, 17, 26], seed=3).propose(counts)
    for i, count in counts.items():
        assert _Drafting([30, 41, 17, 26], seed=3).propose({i: count}) == [together[i]]


def test_rows_without_drafts_only_fill_the_cache():
    case = _Drafting([9, 12], seed=2)
    heads = []
    case.network.lm_head.register_forward_hook(lambda module, args, out: heads.append(out))
    assert case.propose({}) == [] and heads == []
    latent, index_keys, _ = case.cache.layers[case.config.mtp_layer]
    assert latent[case.batch.slots].isfinite().all()
    assert index_keys[case.batch.slots].isfinite().all()
    unused = torch.ones(len(latent), dtype=torch.bool)
    unused[case.batch.slots] = False
    assert latent[unused].isnan().all()


def test_step_zero_takes_the_token_after_each_row_and_later_steps_the_post_norm_state():
    """The arguments of every MTP step, one hidden state per request that still drafts."""
    case, calls = _Drafting([9, 12, 5], seed=4), []
    draft = case.network.draft

    def recorded(ids, hidden, batch, *rest):
        calls.append((ids.tolist(), hidden, batch.positions.tolist()))
        calls[-1] += (draft(ids, hidden, batch, *rest),)
        return calls[-1][-1]

    case.network.draft = recorded
    drafts = case.propose({0: 1, 1: 3, 2: 2})
    assert len(calls) == 3
    assert calls[0][0] == case.next_ids_T.tolist() and calls[0][1] is case.hidden_TD
    assert calls[1][0] == [drafts[1][0], drafts[2][0]] and calls[2][0] == [drafts[1][1]]
    assert calls[1][2] == [12, 5] and calls[2][2] == [13]
    step_0, step_1 = calls[0][3][0], calls[1][3][0]
    assert torch.equal(calls[1][1], step_0[[case.last_rows[1], case.last_rows[2]]])
    assert torch.equal(calls[2][1], step_1[:1])
    assert not torch.allclose(step_1.pow(2).mean(-1), torch.ones(2)), "norm weights are not ones"


# --- verifying ---


@pytest.mark.parametrize(
    ("sampled", "drafts", "accepted"),
    [
        ([4], [], 0),
        ([4, 5], [4], 1),
        ([4, 5], [5], 0),
        ([1, 2, 3, 4], [1, 2, 3], 3),
        ([1, 2, 9, 4], [1, 2, 3], 2),
        ([1, 9, 3, 4], [1, 2, 3], 1),
        ([9, 2, 3, 4], [1, 2, 3], 0),
    ],
)
def test_num_accepted(sampled, drafts, accepted):
    assert num_accepted(sampled, drafts) == accepted


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8), st.integers(0, 2))
def test_num_accepted_is_the_common_prefix(pairs, last):
    sampled, drafts = [s for s, _ in pairs], [d for _, d in pairs]
    count = num_accepted([*sampled, last], drafts)
    assert sampled[:count] == drafts[:count]
    assert count == len(drafts) or sampled[count] != drafts[count]


def test_one_more_is_sampled_than_drafted():
    with pytest.raises(AssertionError):
        num_accepted([1, 2], [1, 2])


WEIGHTS = [
    [8.0, 5.0, 4.0, 2.0, 1.0, 1.0, 0.5, 0.0],
    [1.0, 9.0, 3.0, 3.0, 2.0, 4.0, 0.0, 1.0],
    [2.0, 2.0, 2.0, 7.0, 1.0, 3.0, 1.0, 5.0],
]
PROMPT = [0, 5, 5, 2]
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7, "temperature": 1.3},
    "min_p": {"min_p": 0.3, "temperature": 0.8},
    "penalties": {
        "repetition_penalty": 1.6,
        "presence_penalty": 0.4,
        "frequency_penalty": -0.9,
        "top_k": 5,
    },
    "bad_words": {"bad_words": [[1, 3], [2, 5], [5, 1], [2, 0]], "logit_bias": {3: 0.7}},
    "all": {
        "temperature": 0.9,
        "top_k": 6,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "bad_words": [[1, 3]],
    },
}


def _worked_out(weights, settings, output) -> list[float]:
    """The distribution sampled after PROMPT and `output`, in plain Python."""
    scores = [math.log(w) if w else -math.inf for w in weights]
    context = [*PROMPT, *output]
    for *before, last in settings.get("bad_words", ()):
        if context[len(context) - len(before) :] == before:
            scores[last] = -math.inf
    for token, bias in settings.get("logit_bias", {}).items():
        scores[token] += bias
    for i, score in enumerate(scores):
        factor = settings.get("repetition_penalty", 1)
        if i in context:
            score = score / factor if score > 0 else score * factor
        score -= settings.get("frequency_penalty", 0) * output.count(i)
        score -= settings.get("presence_penalty", 0) * (i in output)
        scores[i] = score / settings.get("temperature", 1)
    best = max(scores)
    p = [math.exp(score - best) for score in scores]
    p = [x if x >= settings.get("min_p", 0) else 0.0 for x in p]
    kth = sorted(p, reverse=True)[settings.get("top_k", len(p)) - 1]
    p = [x if x >= kth else 0.0 for x in p]
    total, kept = sum(p), 0.0
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        reached, kept = kept >= settings.get("top_p", 1) * total, kept + p[i]
        p[i] = 0.0 if reached else p[i]
    return [x / sum(p) for x in p]


def _fits(counts: list[int], probabilities: list[float]) -> bool:
    """Chi-square test at p > 0.001, and nothing where the probability is 0."""
    total = sum(counts)
    if any(c and not p for c, p in zip(counts, probabilities, strict=True)):
        return False
    expected = [total * p for p in probabilities]
    statistic = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)
    degrees = torch.tensor(sum(e > 0 for e in expected) - 1.0, dtype=torch.float64)
    above = torch.special.gammaincc(degrees / 2, torch.tensor(statistic / 2).double())
    return degrees == 0 or above.item() > 1e-3


def _verify(drafts, settings, draws, seed) -> list[list[int]]:
    """What `draws` verify steps emit after PROMPT, each at a position of its own.

    A row's numbers depend on its position, so every draw is a request that is further on.
    """
    params = SamplingParams(seed=seed, **settings).resolve({})
    first = SamplerState(params, prompt_ids=PROMPT, stop_ids=(), vocab_size=8)
    logits_RW = torch.tensor(WEIGHTS[: len(drafts) + 1]).log()
    rows_each, emitted, batch = len(drafts) + 1, [], 10_000
    for start in range(0, draws, batch):
        rows = []
        for draw in range(start, min(start + batch, draws)):
            state = copy.copy(first)
            state.output_length = rows_each * draw
            rows += [state.row(drafts[:i]) for i in range(rows_each)]
        samples = sample(logits_RW.repeat(len(rows) // rows_each, 1), rows)
        ids = [s.token_id for s in samples if isinstance(s, Sample)]
        for i in range(0, len(ids), rows_each):
            own = ids[i : i + rows_each]
            emitted.append(own[: 1 + num_accepted(own, drafts)])
    return emitted


def _check_emitted(drafts, settings, draws, seed=0) -> None:
    emitted = _verify(drafts, settings, draws, seed)
    assert len(emitted) == draws
    probabilities: list[float] = []
    for i in range(len(drafts) + 1):
        # The i-th token, of the steps whose first i drafts were accepted.
        reached = [ids[i] for ids in emitted if len(ids) > i]
        if i and probabilities[drafts[i - 1]] == 0:
            assert not reached, "a draft that cannot be sampled is never accepted"
            break
        probabilities = _worked_out(WEIGHTS[i], settings, drafts[:i])
        assert _fits([reached.count(token) for token in range(8)], probabilities)
        if i < len(drafts) and 0 < (p := probabilities[drafts[i]]) < 1:
            accepted = sum(token == drafts[i] for token in reached) / len(reached)
            assert abs(accepted - p) < 4 * math.sqrt(p * (1 - p) / len(reached))
            assert any(len(ids) == i + 1 for ids in emitted), "rejected"
            assert any(len(ids) > i + 1 for ids in emitted), "accepted"


@pytest.mark.parametrize(("drafts", "name"), [([0, 3], "plain"), ([1], "all"), ([2], "penalties")])
def test_emitted_tokens_follow_the_targets_distribution(drafts, name):
    _check_emitted(drafts, SETTINGS[name], 20_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "name"),
    [(draft, name) for draft in ([0], [6], [2, 1]) for name in ("plain", "top_p", "all")]
    + [([0, 3], name) for name in SETTINGS]
    + [([7], "plain"), ([2], "penalties"), ([5], "min_p")],
)
def test_emitted_tokens_follow_the_targets_distribution_closely(drafts, name):
    """200,000 verify steps; a draft likely, unlikely, or outside the nucleus changes nothing."""
    _check_emitted(drafts, SETTINGS[name], 200_000, seed=1)


def test_the_chi_square_test_notices():
    """It refuses what always accepting, exact-match acceptance of 90%, or a leak would emit."""
    p = _worked_out(WEIGHTS[0], {}, [])
    counts = [round(200_000 * x) for x in p]
    assert _fits(counts, p)
    assert not _fits([counts[0] + 3000, *counts[1:]], p)
    assert not _fits([200_000] + [0] * 7, p)
    assert not _fits([*counts[:-1], 1], p)


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_process_logits_after_their_own_prefix(name):
    """Row i of a step that verifies drafts samples what one that has emitted them samples."""
    drafts, settings = [1, 3, 2, 5, 1], SETTINGS[name]
    params = SamplingParams(seed=9, logprobs=8, logprobs_mode="processed", **settings).resolve({})
    state = SamplerState(params, prompt_ids=PROMPT, stop_ids=(), vocab_size=8)
    logits_TW = torch.tensor([*WEIGHTS, *WEIGHTS]).log()
    together = sample(logits_TW, [state.row(drafts[:i]) for i in range(6)])
    for i, found in enumerate(together):
        (alone,) = sample(logits_TW[i : i + 1], [state.row()])
        assert alone == found
        expected = _worked_out(WEIGHTS[i % 3], settings, drafts[:i])
        assert isinstance(found, Sample) and found.logprobs is not None
        assert {j: math.exp(x) for j, x in found.logprobs.items()} == pytest.approx(
            {j: x for j, x in enumerate(expected) if x}, abs=1e-6
        )
        if i < 5:
            state.append(drafts[i])


def test_params_say_how_many_drafts():
    assert SamplingParams(speculative_tokens=8).speculative_tokens == 8
    assert SamplingParams().resolve({}).speculative_tokens is None
    for wrong in (-1, 9, 2.0, True):
        with pytest.raises(ValueError, match="speculative_tokens"):
            dataclasses.replace(SamplingParams(), speculative_tokens=wrong)
