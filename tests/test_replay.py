"""What generation records is replayed by a forward and by `score`."""

import pytest
import torch

from glm53 import Completion, SamplingParams, Trace
from tests.engines import assert_idle, prompts_of, tiny_model, with_engine
from tests.speculation import assert_mixed, force_drafts, sequences_of

LENGTHS = (40, 1, 9, 33)
NEW = 12
PARAMS = SamplingParams(
    temperature=1.0, seed=3, max_new_tokens=NEW, ignore_eos=True, logprobs=0, record=True
)
# Layers and sizes of the tiny model: MoE layers, full layers, index_topk, experts, and per token.
MOE, FULL, TOPK, EXPERTS, CHOSEN = [1, 2, 3], [0, 1, 3], 7, 6, 3


@pytest.fixture(scope="module")
def model():
    return tiny_model(3)


@pytest.fixture(scope="module")
def outs(model) -> list[Completion]:
    """Chunked prompts, mixed batches, drafts accepted and rejected."""
    own = with_engine(model, max_batch_tokens=11, max_running=3)
    plain = with_engine(model).generate(prompts_of(*LENGTHS), PARAMS, speculative_tokens=0)
    force_drafts(own.engine(), sequences_of(plain))
    outs = own.generate(prompts_of(*LENGTHS), PARAMS, speculative_tokens=3)
    assert_mixed(outs)
    assert_idle(own.engine())
    return outs


def _ids(completion: Completion) -> list[int]:
    return [*completion.prompt_token_ids, *completion.token_ids]


def _logprobs(completion: Completion) -> torch.Tensor:
    assert completion.logprobs is not None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return torch.tensor([row[i] for i, row in pairs])


def _trace(completion: Completion) -> Trace:
    assert completion.trace is not None
    return completion.trace


def _uncached(model, ids) -> Trace:
    trace = Trace()
    with torch.no_grad():
        model(torch.tensor([ids]), record=trace)
    return trace


def _assert_same(trace: Trace, other: Trace) -> None:
    for kind in ("selections", "experts"):
        first, second = getattr(trace, kind), getattr(other, kind)
        assert list(first) == list(second)
        assert all(torch.equal(rows, second[layer]) for layer, rows in first.items()), kind


def _perturbed(trace: Trace) -> Trace:
    """Other experts in the last MoE layer; every row of the first layer attends to position 0."""
    lone = torch.full_like(trace.selections[0], -1)
    lone[:, 0] = 0
    return Trace(
        trace.selections | {0: lone}, trace.experts | {3: (trace.experts[3] + 1) % EXPERTS}
    )


def test_a_row_for_every_token_that_was_fed(model, outs):
    """The seeds are such that no two scores nearly tie: decisions are those of one big forward."""
    for completion in outs:
        trace, ids = _trace(completion), _ids(completion)
        assert list(trace.selections) == FULL and list(trace.experts) == MOE
        for rows in trace.selections.values():
            assert rows.shape == (len(ids) - 1, TOPK) and rows.dtype == torch.int32
        for rows in trace.experts.values():
            assert rows.shape == (len(ids) - 1, CHOSEN) and rows.dtype == torch.int64
        _assert_same(trace, _uncached(model, ids[:-1]))


@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("arguments", [{}, {"max_batch_tokens": 5, "max_running": 2}])
def test_however_it_is_computed(model, outs, arguments, speculative):
    own = with_engine(model, **arguments)
    force_drafts(own.engine(), sequences_of(outs), (1, 3, 0))
    again = own.generate(prompts_of(*LENGTHS), PARAMS, speculative_tokens=speculative)
    if speculative:
        assert_mixed(again)
    for first, second in zip(outs, again, strict=True):
        assert first.token_ids == second.token_ids
        _assert_same(_trace(first), _trace(second))


def test_others_do_not_record(model):
    own = with_engine(model, max_batch_tokens=11, max_running=3)
    engine, prompts = own.engine(), prompts_of(*LENGTHS)
    ids = [
        engine.add(prompt, SamplingParams.override(PARAMS, record=i % 2 == 0))
        for i, prompt in enumerate(prompts)
    ]
    finished = engine.run()
    for i, request_id in enumerate(ids):
        completion = finished[request_id][0]
        assert (completion.trace is not None) == (i % 2 == 0)
        if completion.trace is not None:
            _assert_same(completion.trace, _uncached(model, _ids(completion)[:-1]))
    assert own.generate(prompts[0], max_new_tokens=2).trace is None


def test_memory_of_a_step_is_not_kept(model):
    """The rows of the others, and of other layers, go with the step."""
    own = with_engine(model, max_batch_tokens=64)
    engine = own.engine()
    engine.add(prompts_of(5)[0], PARAMS)
    engine.add(prompts_of(59)[0], SamplingParams.override(PARAMS, record=False))
    engine.step()
    (request,) = [r for r in engine.scheduler if r.records]
    ((selections, experts),) = request._recording._parts
    assert selections.untyped_storage().nbytes() == 4 * len(FULL) * 5 * TOPK
    assert experts.untyped_storage().nbytes() == 8 * len(MOE) * 5 * CHOSEN
    engine.cancel(request.request_id)
    engine.run()


def test_several_completions_of_one_prompt(model):
    own = with_engine(model, max_batch_tokens=40, max_running=3)
    prompt = prompts_of(70)[0]
    outs = own.generate(prompt, PARAMS, n=3)
    assert len({c.token_ids for c in outs}) == 3
    for completion in outs:
        assert completion.metrics.cached_tokens == 0
        _assert_same(_trace(completion), _uncached(model, _ids(completion)[:-1]))


def test_a_recording_request_computes_its_prompt_and_lends_it(model):
    own = with_engine(model)
    prompt = prompts_of(130)[0]
    free = SamplingParams.override(PARAMS, record=False)
    own.generate(prompt, free)
    completion = own.generate(prompt, PARAMS)
    assert completion.metrics.cached_tokens == 0
    _assert_same(_trace(completion), _uncached(model, _ids(completion)[:-1]))
    lender = with_engine(model)
    lender.generate(prompt, PARAMS)
    assert lender.generate(prompt, free).metrics.cached_tokens == 128


def test_a_preemption_keeps_the_first_decisions(model):
    """Other weights while a request waits to be computed again: its rows so far keep theirs."""
    model = tiny_model(3)
    own = with_engine(model, kv_cache_tokens=64 * 2, prefix_caching=False)
    engine = own.engine()
    prompts = prompts_of(60, 62, seed=2)
    ids = [engine.add(p, PARAMS, on_delta=None) for p in prompts]
    finished, changed = {}, None
    while engine.num_unfinished:
        for delta in engine.step():
            if delta.completion is not None:
                finished[delta.request_id] = delta.completion
        if engine.scheduler.num_preemptions and changed is None:
            (request,) = engine.scheduler.waiting
            changed, before = len(request.tokens), _uncached(model, request.tokens[:-1])
            with torch.no_grad():
                model.network.model.layers[0].self_attn.indexer.wk.weight.neg_()
                model.network.model.layers[1].mlp.gate.weight.neg_()
    completion = finished[ids[1]]
    assert completion.metrics.preemptions == 1 and changed is not None
    trace, ids = _trace(completion), _ids(completion)
    assert trace.num_rows == len(ids) - 1 > changed
    _assert_same(trace.select(slice(0, changed - 1)), before)
    after = _uncached(model, ids[:-1])
    assert torch.equal(trace.selections[0][changed - 1 :], after.selections[0][changed - 1 :])
    assert not torch.equal(trace.selections[0], after.selections[0])


def test_a_stop_among_accepted_drafts_ends_the_trace(model, outs):
    """All drafts of the second step are right, those beyond the stop as well."""
    prompt, ids = prompts_of(*LENGTHS)[0], outs[0].token_ids
    stopped = []
    for stop in ids:
        own = with_engine(model)
        force_drafts(own.engine(), sequences_of(outs), (1, 8))
        out = own.generate(prompt, PARAMS, speculative_tokens=8, stop_token_ids=(stop,))
        assert out.token_ids == ids[: ids.index(stop) + 1]
        assert _trace(out).num_rows == len(prompt) + len(out.token_ids) - 1
        stopped.append(out)
    assert_mixed(stopped)


def test_a_cancelled_prompt_has_the_rows_that_were_computed(model):
    own = with_engine(model, max_batch_tokens=11, max_running=1)
    engine, prompt = own.engine(), prompts_of(40)[0]
    request_id = engine.add(prompt, PARAMS)
    (delta,) = engine.cancel(request_id)
    assert delta.completion.trace == Trace()
    request_id = engine.add(prompt, PARAMS)
    engine.step()
    (delta,) = engine.cancel(request_id)
    _assert_same(delta.completion.trace, _uncached(model, prompt).select(slice(0, 11)))


def test_replay_in_a_forward(model, outs):
    """As a trainer does: the sequences padded to a batch, their traces joined."""
    sequences = [torch.tensor(_ids(c)) for c in outs]
    input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(ids) for ids in sequences], batch_first=True
    )
    lengths = [len(ids) for ids in sequences]
    replay, record = Trace.cat([_trace(c) for c in outs], lengths), Trace()
    logits = model(input_ids, mask, replay=replay, record=record)
    for kind in ("selections", "experts"):
        for layer, rows in getattr(record, kind).items():
            for part, completion in zip(rows.split(lengths), outs, strict=True):
                assert torch.equal(part[:-1], getattr(_trace(completion), kind)[layer])
                assert (part[-1] >= 0).any()  # decided by the forward
    losses = []
    for row, completion in zip(logits, outs, strict=True):
        ids, start = _ids(completion), len(completion.prompt_token_ids)
        found = row[: len(ids) - 1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (found[start - 1 :] - _logprobs(completion)).abs().max() < 1e-5
        losses.append(found.mean())
    torch.stack(losses).mean().backward()
    for name, parameter in model.network.model.layers[:4].named_parameters():
        if ".indexer." not in f".{name}":
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    model.zero_grad()
    changed = Trace.cat([_perturbed(_trace(c)) for c in outs], lengths)
    for part in (Trace(selections=changed.selections), Trace(experts=changed.experts)):
        assert (model(input_ids, mask, replay=part) - logits).abs().max() > 0.1


@pytest.mark.parametrize("budget", [3, 11, 1024])
@pytest.mark.parametrize("invariant", [False, True])
def test_replay_in_score(model, outs, budget, invariant):
    """Perturbed decisions in a mixed batch, against the same ones in a forward."""
    own = with_engine(model, max_batch_tokens=budget, max_running=3, batch_invariant=invariant)
    sequences = [_ids(c) for c in outs]
    traces = [_trace(outs[0]), None, _perturbed(_trace(outs[2])), _perturbed(_trace(outs[3]))]
    scores = own.score(sequences, replay=traces)
    for ids, trace, score in zip(sequences, traces, scores, strict=True):
        replay = None if trace is None else Trace.cat([trace], [len(ids)])
        with torch.no_grad():
            logits = model(torch.tensor([ids]), replay=replay)[0, :-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (score - expected).abs().max() < 1e-5
    for score, completion in zip(scores[:2], outs[:2], strict=True):
        assert (score[-NEW:] - _logprobs(completion)).abs().max() < 1e-5
    plain = own.score(sequences)
    assert (scores[2] - plain[2]).abs().max() > 0.1
    assert (own.score(sequences[2], replay=traces[2]) - scores[2]).abs().max() < 1e-5
    assert_idle(own.engine())


@torch.no_grad()
def test_rows_of_minus_one_are_free(model):
    ids = prompts_of(30)[0]
    other = _perturbed(_uncached(model, ids))
    rows = torch.where(torch.arange(30) % 3 == 0, torch.arange(30), -1)
    some, record = other.select(rows), Trace()
    model(torch.tensor([ids]), replay=some, record=record)
    for kind, width in (("selections", TOPK), ("experts", CHOSEN)):
        for layer, given in getattr(some, kind).items():
            assert (given[rows < 0] == -1).all() and given.shape == (30, width)
            assert torch.equal(getattr(record, kind)[layer][::3], getattr(other, kind)[layer][::3])
    # The first layer's free rows see nothing that was replayed.
    free = _uncached(model, ids)
    assert torch.equal(record.selections[0][rows < 0], free.selections[0][rows < 0])


def test_replayed_keys_are_not_shared_and_no_shared_keys_are_used(model):
    ids = prompts_of(140)[0]
    trace = _perturbed(_uncached(model, ids))
    own = with_engine(model)
    cold = own.score(ids)
    own.generate(ids, max_new_tokens=2, temperature=0, speculative_tokens=0)
    changed = own.score(ids, replay=trace)
    assert (changed - cold).abs().max() > 0.1
    assert (with_engine(model).score(ids, replay=trace) - changed).abs().max() < 1e-5
    fresh = with_engine(model)
    fresh.score(ids, replay=trace)
    assert len(fresh.engine().scheduler.prefix) == 0
    assert fresh.engine().pool.num_free == fresh.engine().pool.num_pages


def test_joining(model):
    first, second = (_uncached(model, ids) for ids in prompts_of(9, 5))
    both = Trace.cat([first, second, Trace()], [9, 6, 2])
    assert both.num_rows == 17
    assert torch.equal(both.experts[2][9:14], second.experts[2])
    assert (both.selections[0][14:] == -1).all()
    _assert_same(both.select(slice(0, 9)), first)
    _assert_same(Trace.cat([first, second]).select(slice(9, 14)), second)
    partly = Trace.cat([Trace(experts=first.experts), second], [9, 5])
    assert (partly.selections[1][:9] == -1).all()
    with pytest.raises(ValueError, match=r"traces\[1\] has 5 rows, lengths\[1\]=4"):
        Trace.cat([first, second], [9, 4])


def test_what_does_not_fit_is_refused(model):
    ids, own = prompts_of(9)[0], with_engine(model)
    trace = _uncached(model, ids)
    with pytest.raises(ValueError, match=r"replay has 7 rows; .* each of the 9 tokens"):
        own.score(ids, replay=trace.select(slice(0, 7)))
    bad = Trace(experts={1: trace.experts[1] + 6})
    with pytest.raises(ValueError, match=r"prompts\[1\]: experts\[1\]: .* in \[0, 6\)"):
        own.score([ids, ids], replay=[None, bad])
    with pytest.raises(ValueError, match="a list of prompts takes a list of traces"):
        own.score([ids, ids], replay=trace)
    with pytest.raises(ValueError, match="replay has 1 traces; there are 2 prompts"):
        own.score([ids, ids], replay=[trace])
    with pytest.raises(ValueError, match="one prompt takes one trace"):
        own.score(ids, replay=[trace])
    for wrong in (3, {}, "x"):
        with pytest.raises(ValueError, match=r"replay=.*: must be a Trace"):
            own.score(ids, replay=wrong)
        with pytest.raises(ValueError, match=r"prompts\[0\]: replay=.*: must be a Trace"):
            own.score([ids], replay=[wrong])
        with pytest.raises(ValueError, match=r"replay=.*: must be a Trace"):
            own.engine().add(ids, prompt_only=True, replay=wrong)
        with pytest.raises(ValueError, match=r"replay=.*: must be a Trace"):
            model(torch.tensor([ids]), replay=wrong)
    for kind, layer in (("selections", 0), ("selections", 3), ("experts", 2)):
        for rows in (trace.select(slice(0, 6)), trace.select(slice(0, 8))):
            ragged = trace.select(slice(0, 9))
            getattr(ragged, kind)[layer] = getattr(rows, kind)[layer]
            with pytest.raises(ValueError, match=r"\] has \d rows, layers before it have \d"):
                own.score(ids, replay=ragged)
            with pytest.raises(ValueError, match=r"\] has \d rows, layers before it have \d"):
                Trace.cat([ragged], [9])
        flat = trace.select(slice(0, 9))
        for wrong in ([[1]], getattr(flat, kind)[layer].flatten()):
            getattr(flat, kind)[layer] = wrong
            with pytest.raises(ValueError, match=rf"{kind}\[{layer}\]: must be a tensor"):
                own.score(ids, replay=flat)
    with pytest.raises(ValueError, match="replay: only the tokens of a prompt"):
        own.engine().add(ids, replay=trace)
    half = trace.experts[1].clone()
    half[4, 1] = -1
    with pytest.raises(ValueError, match=r"experts\[1\]: .* row 4 is"):
        own.score(ids, replay=Trace(experts={1: half}))
    twice = trace.experts[1].clone()
    twice[5, 2] = twice[5, 0]
    with pytest.raises(ValueError, match=r"experts\[1\]: .* must be distinct; row 5 is"):
        own.score(ids, replay=Trace(experts={1: twice}))
    assert_idle(own.engine())
