"""Prefix caching: a hit changes nothing but the work."""

import pytest
import torch

from glm53 import SamplingParams
from glm53.cache import PAGE_SIZE
from tests.engines import assert_idle, audit, greedy, prompts_of, tiny_model, with_engine
from tests.speculation import agreeing_model, assert_mixed, force_drafts

NEW = 10
PLAIN = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _ids(completion):
    return list(completion.token_ids)


# The engine.


@pytest.fixture(scope="module")
def agreeing():
    return agreeing_model(1)


@pytest.mark.parametrize("speculative", [0, 3])
@pytest.mark.parametrize("shared", [0, 63, 64, 65, 128, 130])
def test_a_hit_is_whole_pages_and_changes_nothing(model, agreeing, shared, speculative):
    """Nor does it change a draft."""
    model = agreeing if speculative else model
    first, second = prompts_of(140, 139, seed=shared)
    second = first[:shared] + second[shared:]
    second[shared] = (first[shared] + 1) % 128
    params = SamplingParams.override(PLAIN, speculative_tokens=speculative, logprobs=3)
    cold = with_engine(model).generate(second, params)
    own = with_engine(model)
    own.generate(first, params)
    before = own.engine().stats.rows
    warm = own.generate(second, params)
    # With the MTP layer a page also depends on the token after it, which here differs.
    pages = (shared - bool(speculative)) // PAGE_SIZE if shared else 0
    assert warm.metrics.cached_tokens == pages * PAGE_SIZE
    computed, metrics = own.engine().stats.rows - before, warm.metrics
    steps = metrics.decode_steps - 1
    assert computed == len(second) - pages * PAGE_SIZE + steps + metrics.drafted
    assert metrics.drafted == cold.metrics.drafted
    assert metrics.accepted_at == cold.metrics.accepted_at
    if speculative:
        assert_mixed([warm])
    assert _ids(warm) == _ids(cold) == greedy(model, second, NEW)
    for found, wanted in zip(warm.logprobs, cold.logprobs, strict=True):
        assert set(found) == set(wanted)
        assert all(abs(found[i] - wanted[i]) < 3e-5 for i in found)
    assert_idle(own.engine())


def test_a_full_hit_still_computes_the_last_token(model):
    prompt = prompts_of(2 * PAGE_SIZE)[0]
    own = with_engine(model)
    cold = own.generate(prompt, PLAIN)
    warm = own.generate(prompt, PLAIN)
    assert cold.metrics.cached_tokens == 0
    assert warm.metrics.cached_tokens == PAGE_SIZE
    longer = own.generate([*prompt, 5], PLAIN)
    assert longer.metrics.cached_tokens == 2 * PAGE_SIZE
    assert _ids(warm) == _ids(cold)
    assert _ids(longer) == greedy(model, [*prompt, 5], NEW)


def test_generated_tokens_are_shared_too(model):
    prompt = prompts_of(60)[0]
    own = with_engine(model)
    answer = own.generate(prompt, SamplingParams.override(PLAIN, max_new_tokens=80))
    turn = [*prompt, *answer.token_ids, 7, 8, 9]
    assert own.generate(turn, PLAIN).metrics.cached_tokens == 2 * PAGE_SIZE
    assert _ids(own.generate(turn, PLAIN)) == greedy(model, turn, NEW)


def test_completions_of_one_prompt_share_it(model):
    prompt = prompts_of(150)[0]
    own = with_engine(model)
    params = SamplingParams.override(PLAIN, n=3, temperature=1.0, seed=4)
    completions = own.generate(prompt, params)
    assert [c.metrics.cached_tokens for c in completions] == [0, 128, 128]
    stats = own.engine().stats
    assert stats.rows == 150 + 2 * 22 + 3 * (NEW - 1)
    assert (stats.prompt_tokens, stats.cached_tokens) == (450, 256)
    alone = with_engine(model, prefix_caching=False).generate(prompt, params)
    assert [_ids(c) for c in completions] == [_ids(c) for c in alone]


@pytest.mark.parametrize("payload", ["latent", "index_keys"])
def test_shared_pages_really_are_read(model, payload):
    """Both payloads of a hit come from the cache: NaN in either one shows."""
    first, second = prompts_of(130, 131)
    second[:128] = first[:128]
    own = with_engine(model)
    own.generate(first, PLAIN)
    for layer in own.engine()._cache.layers:
        if getattr(layer, payload) is not None:
            getattr(layer, payload).fill_(torch.nan)
    warm = own.generate([second, [1, 2, 3]], PLAIN)
    assert warm[0].metrics.cached_tokens == 128
    changed = warm[0].finish_reason == "error" or _ids(warm[0]) != greedy(model, second, NEW)
    assert changed
    assert _ids(warm[1]) == greedy(model, [1, 2, 3], NEW)


def test_pages_made_without_the_mtp_layer_serve_no_speculation(model):
    first, second = prompts_of(130, 131)
    second[:130] = first
    own = with_engine(model)
    own.generate(first, PLAIN)
    speculative = SamplingParams.override(PLAIN, speculative_tokens=2)
    force_drafts(own.engine(), [second + greedy(model, second, NEW)])
    completions = [own.generate(second, speculative) for _ in range(2)]
    assert [c.metrics.cached_tokens for c in completions] == [0, 128]
    assert_mixed(completions)
    assert own.generate(second, PLAIN).metrics.cached_tokens == 128


def test_prompt_logprobs_and_scores_compute_every_row(model):
    prompt = prompts_of(130)[0]
    own = with_engine(model)
    own.generate(prompt, PLAIN)
    params = SamplingParams.override(PLAIN, prompt_logprobs=0)
    completion = own.generate(prompt, params)
    assert completion.metrics.cached_tokens == 0
    assert len(completion.prompt_logprobs) == 130
    cold = with_engine(model).score(prompt)
    assert (own.score(prompt) - cold).abs().max() < 3e-5


def test_new_weights_drop_what_was_cached(model):
    model = tiny_model()
    prompt = prompts_of(130)[0]
    own = with_engine(model)
    own.generate(prompt, PLAIN)
    with torch.no_grad():
        model.network.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.mul_(1.5)
    fresh = with_engine(model).generate(prompt, PLAIN)
    updated = own.generate(prompt, PLAIN)
    assert updated.metrics.cached_tokens == 0
    assert _ids(updated) == _ids(fresh)
    assert own.generate(prompt, PLAIN).metrics.cached_tokens == 128
    assert_idle(own.engine())


def test_a_request_under_way_shares_nothing_computed_with_old_weights():
    model = tiny_model()
    prompt = prompts_of(130)[0]
    own = with_engine(model)
    engine = own.engine()
    engine.add(prompt, SamplingParams.override(PLAIN, max_new_tokens=80))
    engine.step()
    with torch.no_grad():
        model.network.model.embed_tokens.weight.mul_(1.1)
    assert own.generate([3, 4, 5], PLAIN).finish_reason == "length"
    engine.run()
    completion = own.generate(prompt, PLAIN)
    assert completion.metrics.cached_tokens == 0
    assert_idle(engine)


def test_switched_off(model):
    own = with_engine(model, prefix_caching=False)
    prompt = prompts_of(130)[0]
    for _ in range(2):
        assert own.generate(prompt, PLAIN).metrics.cached_tokens == 0
    assert own.engine().pool.num_free == own.engine().pool.num_pages


@pytest.mark.parametrize("speculative", [0, 2])
def test_eviction_under_a_small_pool(model, speculative):
    """More distinct prefixes than pages: evictions happen, results and audits stay right."""
    own = with_engine(model, kv_cache_tokens=4 * PAGE_SIZE, max_running=2, max_batch_tokens=64)
    engine = own.engine()
    heads = prompts_of(70, 70, 70, seed=5)
    tails = prompts_of(*range(1, 10), seed=6)
    prompts = [heads[i // 3] + tail for i, tail in enumerate(tails)]
    params = SamplingParams.override(PLAIN, speculative_tokens=speculative)
    outputs = [greedy(model, prompt, NEW) for prompt in prompts]
    if speculative:
        force_drafts(engine, [p + o for p, o in zip(prompts, outputs, strict=True)])
    wanted = [engine.add(prompt, params) for prompt in prompts]
    finished = {}
    while engine.num_unfinished:
        for delta in engine.step():
            if delta.completion is not None:
                finished[delta.request_id] = delta.completion
        audit(engine)
    assert [_ids(finished[request_id]) for request_id in wanted] == outputs
    if speculative:
        assert_mixed(list(finished.values()))
    assert engine.stats.evictions > 0 and engine.stats.cached_tokens > 0
    assert_idle(engine)
