"""Speculative decoding through the engine: the tokens of plain decoding whatever is drafted,
rejected rows that nothing reads, room, limits and counts; drafts against the oracle."""

import pytest
import torch

from glm53 import GLM53, SamplingParams
from glm53.scheduler import pages_for
from tests.engines import assert_idle, greedy, prompts_of, tiny_model, with_engine
from tests.reference import Reference
from tests.speculation import (
    agreeing_model,
    assert_mixed,
    check_counts,
    force_drafts,
    ids_of,
    oracle_drafts,
    poison_everything,
    poison_stale,
)
from tests.tiny import randomise

NEW = 24
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0)
# The tiny model attends to 7 keys; 63 and 64 cross a page border with their first tokens.
LENGTHS = (1, 3, 6, 7, 9, 30, 63, 64)


@pytest.fixture(scope="module")
def model() -> GLM53:
    return agreeing_model(1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_of(*LENGTHS)


@pytest.fixture(scope="module")
def plain(model, prompts) -> list[list[int]]:
    outputs = ids_of(with_engine(model).generate(prompts, GREEDY))
    assert outputs[4] == greedy(model, prompts[4], NEW)
    return outputs


def _poisoned(model: GLM53, **arguments) -> GLM53:
    own = with_engine(model, **arguments)
    poison_everything(own.engine())
    return own


def _run(own: GLM53, prompts, params, **fields):
    """Completions, with every row that is stale between two steps poisoned."""
    engine, stale, found = own.engine(), 0, {}
    for prompt in prompts:
        engine.add(prompt, SamplingParams.override(params, **fields))
    while engine.num_unfinished:
        for delta in engine.step():
            if delta.completion is not None:
                found[delta.request_id] = delta.completion
        check_counts(engine)
        stale += poison_stale(engine)
    assert stale > 0, "no row was ever stale"
    assert_idle(engine)
    return [found[i] for i in sorted(found)]


# --- equality with plain decoding ---


@pytest.mark.parametrize(("k", "batch"), [(1, 4), (3, 1), (5, 4), (8, 8)])
def test_greedy_tokens_are_those_of_plain_decoding(model, prompts, plain, k, batch):
    own = _poisoned(model, max_running=batch)
    completions = _run(own, prompts, GREEDY, speculative_tokens=k)
    assert ids_of(completions) == plain
    assert_mixed(completions)
    rates = {c.metrics.accepted for c in completions}
    assert len(rates) > 2, "requests of a batch are accepted differently"


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_grid(seed, k, batch):
    model = agreeing_model(seed)
    prompts = prompts_of(*range(1, 12), *range(20, 80, 7), seed=seed)
    assert len(prompts) == 20
    params = SamplingParams.override(GREEDY, max_new_tokens=40)
    expected = ids_of(with_engine(model).generate(prompts, params))
    own = _poisoned(model, max_running=batch, kv_cache_tokens=64 * 40)
    completions = _run(own, prompts, params, speculative_tokens=k)
    assert ids_of(completions) == expected
    assert_mixed(completions)


@pytest.mark.parametrize("pattern", [(0, 2, 1, 3), (3, 0), (0,), (3,)])
def test_forced_rejections(model, prompts, plain, pattern):
    """Also on a network whose own drafts are all wrong: the outcome depends on the drafts alone."""
    own = _poisoned(model)
    chosen = (1, 4, 6)
    force_drafts(
        own.engine(), {i: prompts[j] + plain[j] for i, j in enumerate(chosen)}, pattern=pattern
    )
    completions = _run(own, [prompts[j] for j in chosen], GREEDY, speculative_tokens=3)
    assert ids_of(completions) == [plain[j] for j in chosen]
    for completion in completions:
        metrics = completion.metrics
        assert len(completion.token_ids) == metrics.decode_steps + metrics.accepted
        if pattern == (0,):
            assert metrics.accepted == 0 < metrics.drafted
        elif pattern == (3,):
            assert metrics.accepted == metrics.drafted > 0
        else:
            assert metrics.drafted > metrics.accepted > 0
            assert metrics.accepted_at[0] >= metrics.accepted_at[-1] > 0
    assert own.engine().stats.accepted == sum(c.metrics.accepted for c in completions)
    assert own.engine().stats.drafted == sum(c.metrics.drafted for c in completions)


def test_the_mtp_layers_weights_change_the_acceptance_and_nothing_else(prompts, plain):
    other = agreeing_model(1)
    randomise(other.network.model.layers[-1], 77)
    completions = _run(_poisoned(other), prompts, GREEDY, speculative_tokens=3, logprobs=0)
    assert ids_of(completions) == plain
    good = _run(_poisoned(agreeing_model(1)), prompts, GREEDY, speculative_tokens=3)
    accepted = [sum(c.metrics.accepted for c in cs) for cs in (completions, good)]
    assert accepted[0] < accepted[1] / 4


@pytest.mark.parametrize("kind", [torch.nan, 0.0])
def test_a_broken_mtp_layer_still_gives_the_right_tokens(prompts, plain, kind):
    broken = agreeing_model(1)
    for parameter in broken.network.model.layers[-1].parameters():
        parameter.data.fill_(kind)
    completions = with_engine(broken).generate(prompts[3:6], GREEDY, speculative_tokens=3)
    assert ids_of(completions) == plain[3:6]
    assert sum(c.metrics.drafted for c in completions) > 0


# --- what is drafted ---


def _drafts_seen(own: GLM53, prompts, ks, params=GREEDY, **fields) -> dict:
    """(request, tokens so far) -> drafts, for every step of a run."""
    engine, seen = own.engine(), {}
    for prompt, k in zip(prompts, ks, strict=True):
        engine.add(prompt, SamplingParams.override(params, speculative_tokens=k, **fields))
    while engine.num_unfinished:
        engine.step()
        poison_stale(engine)
        for request in engine.scheduler.running:
            if request.drafts:
                seen[request.request_id, tuple(request.tokens)] = list(request.drafts)
    return seen


@pytest.mark.parametrize("shared", [True, False])
def test_drafts_of_every_step_equal_the_oracle(shared):
    """After 0, 2, 1 and 3 accepted drafts: rows of rejected ones are gone from the MTP layer."""
    model = agreeing_model(2, overrides={"index_share_for_mtp_iteration": shared})
    prompts = prompts_of(5, 17)
    params = SamplingParams.override(GREEDY, max_new_tokens=15)
    outputs = ids_of(with_engine(model).generate(prompts, params))
    own = _poisoned(model)
    engine = own.engine()
    sequences = {i: p + o for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))}
    real, made = engine._runner._draft, {}

    def draft(*arguments):
        found = real(*arguments)
        for request, drafts in found.items():
            news = [s.token_id for s in arguments[-1][request]]
            made[request.request_id, (*request.tokens, *news)] = list(drafts)
        return found

    engine._runner._draft = draft
    force_drafts(engine, sequences, (0, 2, 1, 3))
    completions = _run(own, prompts, params, speculative_tokens=3)
    assert_mixed(completions)
    oracle = Reference(model.config, model.network.state_dict())
    assert len(made) >= 10
    for (_, tokens), drafts in made.items():
        assert drafts == oracle_drafts(oracle, tokens, len(drafts)), len(tokens)


@pytest.mark.parametrize("budget", [8, 33, 1000])
def test_chunks_and_company_do_not_change_the_drafts(model, prompts, budget):
    ks = [3] * len(prompts)
    alone = {}
    for i, prompt in enumerate(prompts):
        seen = _drafts_seen(_poisoned(model), [prompt], [3], max_new_tokens=10)
        alone |= {(i, tokens): drafts for (_, tokens), drafts in seen.items()}
    own = _poisoned(model, max_batch_tokens=budget, max_running=min(8, budget))
    seen = _drafts_seen(own, prompts, ks, max_new_tokens=10)
    common = seen.keys() & alone.keys()
    assert len(common) >= 30
    assert {key: seen[key] for key in common} == {key: alone[key] for key in common}
    assert own.engine().stats.max_rows <= budget


def test_requests_that_do_not_speculate_run_no_mtp_rows(model, prompts, plain, monkeypatch):
    """k = 0, 1, 3, 0 and a score in one batch; no id outside the vocabulary is embedded."""
    own = _poisoned(model)
    engine, mtp_rows, embedded = own.engine(), [], []
    draft, embed = model.network.draft, model.network.model.embed_tokens

    def counted(ids, *rest):
        mtp_rows.append(ids.numel())
        return draft(ids, *rest)

    monkeypatch.setattr(model.network, "draft", counted)
    hook = embed.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    engine.add(prompts[6], SamplingParams(prompt_logprobs=0), prompt_only=True)
    wanted = {engine.add(prompts[5], GREEDY): plain[5], engine.add(prompts[0], GREEDY): plain[0]}
    finished = engine.run()
    assert mtp_rows == [], "nobody speculates"
    assert {i: list(finished[i][0].token_ids) for i in wanted} == wanted

    engine.add(
        prompts[6], SamplingParams(prompt_logprobs=0, speculative_tokens=3), prompt_only=True
    )
    wanted = {}
    for i, k in ((1, 0), (2, 1), (4, 3), (7, 0)):
        params = SamplingParams.override(GREEDY, speculative_tokens=k)
        wanted[engine.add(prompts[i], params)] = (plain[i], k)
    engine.step()
    # Step 0 of both, then two more steps of the one that wants three.
    assert mtp_rows == [LENGTHS[2] + LENGTHS[4], 1, 1]
    finished = engine.run()
    hook.remove()
    for request_id, (output, k) in wanted.items():
        completion = finished[request_id][0]
        assert list(completion.token_ids) == output
        assert (completion.metrics.drafted > 0) == (k > 0)
        assert k > 0 or completion.metrics.decode_steps == NEW
        assert len(completion.metrics.accepted_at) == k
    assert_mixed([finished[i][0] for i, (_, k) in wanted.items() if k])
    ids = torch.cat([ids.flatten() for ids in embedded])
    assert 0 <= ids.min() and ids.max() < 131


# --- room and limits ---


@pytest.mark.parametrize(("budget", "running"), [(4, 4), (7, 4), (17, 3)])
def test_drafts_stay_within_the_budget_of_rows(model, prompts, plain, budget, running):
    own = _poisoned(model, max_batch_tokens=budget, max_running=running)
    completions = _run(own, prompts, GREEDY, speculative_tokens=5)
    assert ids_of(completions) == plain
    assert own.engine().stats.max_rows == budget
    if budget > running:
        assert_mixed(completions)


@pytest.mark.parametrize("pages", [2, 3, 5])
def test_preemption_changes_no_token(model, prompts, pages):
    prompts = prompts_of(60, 61, 62, 60, seed=2)
    expected = ids_of(with_engine(model).generate(prompts, GREEDY))
    own = _poisoned(model, kv_cache_tokens=64 * pages)
    completions = _run(own, prompts, GREEDY, speculative_tokens=3)
    assert ids_of(completions) == expected
    assert_mixed(completions)
    assert own.engine().stats.preemptions > 0
    assert completions[0].metrics.preemptions == 0, "the oldest is never preempted"


def test_drafts_stop_at_the_last_free_page(model):
    """Two requests, two pages: neither preempts the other for a page of drafts."""
    prompts = prompts_of(55, 56, seed=2)
    first = with_engine(model).generate(prompts, GREEDY)
    stops = [c.token_ids[6] for c in first]
    params = SamplingParams.override(GREEDY, stop_token_ids=stops)
    plain = _poisoned(model, kv_cache_tokens=64 * 2)
    expected = plain.generate(prompts, params)
    assert {c.finish_reason for c in expected} == {"stop"}
    own = _poisoned(model, kv_cache_tokens=64 * 2)
    seen = []
    for prompt in prompts:
        own.engine().add(prompt, SamplingParams.override(params, speculative_tokens=8))
    while own.engine().num_unfinished:
        own.engine().step()
        check_counts(own.engine())
        if own.engine().num_unfinished == 2:
            seen += [(len(r.tokens), len(r.drafts)) for r in own.engine().scheduler.running]
    assert plain.engine().stats.preemptions == own.engine().stats.preemptions == 0
    assert all(length + drafts <= 64 for length, drafts in seen)
    assert any(0 < drafts < 8 and length + drafts == 64 for length, drafts in seen)


def test_pages_held_for_drafts_are_given_up_before_anyone_is_preempted(model):
    """The oldest request holds the last page for drafts only; the newer one needs a row of it."""
    prompts = prompts_of(60, 63, seed=2)
    wanted = with_engine(model).generate(prompts, GREEDY)
    params = [
        SamplingParams.override(GREEDY, stop_token_ids=[wanted[0].token_ids[3]]),
        SamplingParams.override(GREEDY, max_new_tokens=20),
    ]
    assert wanted[0].token_ids[3] not in wanted[0].token_ids[:3]
    preemptions, outputs = [], []
    for k in (0, 5):
        engine = _poisoned(model, kv_cache_tokens=64 * 3).engine()
        for prompt, own in zip(prompts, params, strict=True):
            engine.add(prompt, SamplingParams.override(own, speculative_tokens=k))
        outputs.append([list(c.token_ids) for (c,) in dict(sorted(engine.run().items())).values()])
        preemptions.append(engine.stats.preemptions)
    assert outputs[0] == outputs[1]
    assert preemptions == [0, 0]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 7])
def test_max_new_tokens_inside_a_step(model, prompts, plain, new):
    """All drafts are right, so a step would run over the end if it were let."""
    own = _poisoned(model)
    force_drafts(own.engine(), {0: prompts[5] + plain[5]}, (5,))
    engine = own.engine()
    deltas = []
    params = SamplingParams.override(GREEDY, max_new_tokens=new, speculative_tokens=5)
    engine.add(prompts[5], params, on_delta=deltas.append)
    ((completion,),) = engine.run().values()
    assert list(completion.token_ids) == plain[5][:new]
    assert completion.finish_reason == "length"
    assert [i for d in deltas for i in d.token_ids] == plain[5][:new]
    metrics = completion.metrics
    assert metrics.accepted == metrics.drafted == new - metrics.decode_steps
    # 1 token without drafts, then 5 + 1 a step; the last step drafts one less than it may emit.
    assert metrics.decode_steps == 1 + -(-(new - 1) // 6)


@pytest.mark.parametrize("length", [50, 58, 59, 62, 63])
def test_no_position_reaches_the_models_limit(length, monkeypatch):
    model = agreeing_model(1, overrides={"max_position_embeddings": 64})
    (prompt,) = prompts_of(length, seed=3)
    expected = with_engine(model).generate(prompt, GREEDY)
    assert len(expected.token_ids) == 64 - length and expected.finish_reason == "length"
    own, positions = _poisoned(model), []
    draft, forward = model.network.draft, model.network.model.forward

    def drafting(ids, hidden, batch, *rest):
        positions.append(int(batch.positions.max()))
        return draft(ids, hidden, batch, *rest)

    def computing(batch, *rest):
        positions.append(int(batch.positions.max()))
        return forward(batch, *rest)

    monkeypatch.setattr(model.network, "draft", drafting)
    monkeypatch.setattr(model.network.model, "forward", computing)
    force_drafts(own.engine(), {0: [*prompt, *expected.token_ids]}, (8,))
    completion = own.generate(prompt, GREEDY, speculative_tokens=8)
    assert completion.token_ids == expected.token_ids
    assert max(positions) == 62, "the last token is never fed back"
    assert pages_for(64) == 1 and own.engine().pool.num_pages > 1


# --- metrics and refusals ---


def test_metrics(model, prompts, plain):
    own = _poisoned(model)
    force_drafts(own.engine(), {0: prompts[5] + plain[5]}, (0, 2, 1, 3))
    params = SamplingParams.override(GREEDY, max_new_tokens=1 + 4 * 2 + 6 * 2)
    metrics = own.generate(prompts[5], params, speculative_tokens=3).metrics
    # One token of the prompt's step; then 1, 3, 2 and 4 tokens a step, twice.
    assert metrics.decode_steps == 9
    assert metrics.accepted == 12 and metrics.accepted_at == (6, 4, 2)
    assert metrics.drafted in (24, 23), "the last step may draft one less"
    assert metrics.tokens_per_step == pytest.approx(21 / 9)
    assert metrics.token_latency * 20 == pytest.approx(metrics.step_latency * 8)
    assert metrics.token_latency == pytest.approx(1 / metrics.tokens_per_second)
    without = with_engine(model).generate(prompts[5], params).metrics
    assert (without.drafted, without.accepted, without.accepted_at) == (0, 0, ())
    assert without.decode_steps == 21 and without.tokens_per_step == 1
    assert without.token_latency == pytest.approx(without.step_latency)


def test_defaults_and_checkpoints_without_mtp(prompts):
    model = tiny_model(0)
    assert model.engine().resolve(SamplingParams()).speculative_tokens == 5
    without = tiny_model(0, overrides={"num_nextn_predict_layers": 0})
    assert without.engine().resolve(SamplingParams()).speculative_tokens == 0
    with pytest.raises(ValueError, match=r"speculative_tokens=3.*no MTP layer"):
        without.generate(prompts[2], speculative_tokens=3)
    completion = without.generate(prompts[2], max_new_tokens=3, ignore_eos=True)
    assert len(completion.token_ids) == 3 and completion.metrics.drafted == 0
    assert_idle(without.engine())
