"""Prefix caching in the engine over both tiers: what a hit has computed, moved and changed.

The grid compares every case with a cold run of the same prompts.
"""

import functools
import itertools
import math

import pytest
import torch

from glm53 import SamplingParams
from glm53.cache import PAGE_SIZE, KVCache
from glm53.host_pages import HostPages
from tests.engines import assert_idle, audit, greedy, prompts_of, tiny_model, with_engine
from tests.speculation import assert_mixed, force_drafts, sequences_of
from tests.tiny import tiny_config

NEW = 6
# fp32, 4 layers: latents of 20 + 6, 3 index keys of 14; the MTP layer has one more of both.
PAGE_BYTES = {False: 64 * 4 * (4 * 26 + 3 * 14), True: 64 * 4 * (5 * 26 + 4 * 14)}
PLAIN = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True, speculative_tokens=0)
CHUNKS, SHARED, BATCHES, SPECULATIVE = (4, 7, 64), (0, 63, 64, 65, 128), (1, 3), (0, 3)
GRID = list(itertools.product(CHUNKS, SHARED, BATCHES, (False, True), SPECULATIVE, (False, True)))
# Every value of every axis, the host tier at every number of shared pages.
SAMPLE = [
    (64, 0, 3, True, 0, True),
    (7, 63, 1, True, 3, False),
    (64, 64, 3, True, 0, True),
    (64, 65, 3, True, 3, True),
    (64, 128, 1, False, 0, True),
    (7, 128, 3, True, 3, True),
    (64, 128, 3, True, 0, False),
    (4, 65, 1, True, 0, True),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def _ids(completion):
    return list(completion.token_ids)


def _prompts(shared):
    """A first prompt, and three that share so many tokens with it and not one more."""
    first, *others = prompts_of(140, 139, 141, 150, seed=shared)
    seconds = [first[:shared] + other[shared:] for other in others]
    for i, second in enumerate(seconds):
        second[shared] = (first[shared] + 1 + i) % 128
    return first, seconds


@pytest.fixture(scope="module")
def cold(model):
    """Completions of the prompts of `_prompts`, each alone, without speculation; -1: the first."""

    @functools.cache
    def run(shared, index):
        first, seconds = _prompts(shared)
        prompt = first if index < 0 else seconds[index]
        completion = with_engine(model).generate(prompt, PLAIN, logprobs=3)
        assert _ids(completion) == greedy(model, prompt, NEW)
        return completion

    return run


def _poison(engine, pages):
    for layer in engine._cache.layers:
        for tensor in layer:
            if tensor is not None:
                for page in pages:
                    tensor[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = math.nan


def _poison_free(engine):
    """NaN into every page that neither a request nor the prefix tree holds."""
    pool = engine.pool
    _poison(engine, [page for page in range(pool.num_pages) if not pool._references[page]])


def _poison_saved(engine):
    """From now on NaN in every page as soon as the host tier has it."""
    save = engine._host.save

    def poisoned(page, slot, kind):
        save(page, slot, kind)
        _poison(engine, [page])

    engine._host.save = poisoned


def _fill(own, count, params):
    """Other prompts, two full pages each."""
    for prompt in prompts_of(*[135] * count, seed=99):
        own.generate(prompt, params, max_new_tokens=1)


def _check(model, cold, chunk, shared, batch, evicting, speculative, hosted):
    params = SamplingParams.override(PLAIN, speculative_tokens=speculative)
    kind, (first, seconds) = bool(speculative), _prompts(shared)
    num_pages = 3 * batch + 1 if evicting else 32
    own = with_engine(
        model,
        kv_cache_tokens=num_pages * PAGE_SIZE,
        max_batch_tokens=chunk,
        prefix_host_bytes=50 * PAGE_BYTES[True] if hosted else None,
    )
    engine, stats = own.engine(), own.engine().stats
    if hosted:
        _poison_saved(engine)
    if kind:
        force_drafts(engine, sequences_of([cold(shared, i) for i in range(-1, batch)]))
    # With the MTP layer a page also depends on the token after it, which here differs.
    hit = max(0, shared - kind) // PAGE_SIZE
    others = num_pages // 2 + 1 if evicting else 0
    if not hosted:  # these are what is evicted
        _fill(own, others, params)
    earlier = own.generate(first, params)
    assert _ids(earlier) == _ids(cold(shared, -1))
    if hosted:
        _fill(own, others, params)
    path = engine.scheduler.prefix.match(first, kind, 2)
    assert [node.page is None for node in path] == [evicting and hosted] * 2
    _poison_free(engine)
    rows, cached = stats.rows, stats.cached_tokens
    completions = own.generate(seconds[:batch], params, logprobs=3)
    for i, completion in enumerate(completions):
        reference, metrics = cold(shared, i), completion.metrics
        assert metrics.cached_tokens == hit * PAGE_SIZE
        assert _ids(completion) == _ids(reference)
        for found, wanted in zip(completion.logprobs, reference.logprobs, strict=True):
            assert set(found) == set(wanted)
            assert all(abs(found[t] - wanted[t]) < 3e-5 for t in found)
        # The last prompt row samples too; every later step has one row and those of its drafts.
        rows += len(seconds[i]) - hit * PAGE_SIZE + metrics.decode_steps - 1 + metrics.drafted
        # Two steps draft 3: none of them is right, then two are.
        assert (metrics.drafted, metrics.accepted) == ((6, 2) if kind else (0, 0))
        assert metrics.preemptions == 0
    if kind:
        assert_mixed([earlier, *completions])
    assert stats.rows == rows
    assert stats.cached_tokens - cached == batch * hit * PAGE_SIZE
    assert (stats.evictions > 0) == evicting
    moved = hosted and evicting
    assert stats.pages_from_host == (hit if moved else 0)
    assert stats.host_cached_tokens == stats.pages_from_host * PAGE_SIZE
    assert stats.bytes_from_host == stats.pages_from_host * PAGE_BYTES[kind]
    assert stats.pages_to_host == (stats.evictions if moved else 0)
    assert stats.bytes_to_host == stats.pages_to_host * PAGE_BYTES[kind]
    assert stats.host_evictions == 0
    assert_idle(engine)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_hit_equals_a_cold_run(model, cold, case):
    _check(model, cold, *case)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_a_hit_equals_a_cold_run_everywhere(model, cold, case):
    _check(model, cold, *case)


@pytest.mark.parametrize("mtp", [False, True])
def test_a_slot_is_all_bytes_of_a_page(mtp):
    cache = KVCache(tiny_config(), 3, mtp=True, dtype=torch.float32)
    tensors = [t for layer in cache.layers for t in layer if t is not None]
    for tensor in tensors:
        tensor.normal_()
    before = [tensor.clone() for tensor in tensors]
    host = HostPages(cache, 2 * PAGE_BYTES[True] + 100)
    assert host.capacity == 2 and host._slots.nbytes == 2 * PAGE_BYTES[True]
    host._slots.fill_(0xFF)
    host.save(1, 1, mtp)
    for tensor in tensors:
        tensor[PAGE_SIZE:] = math.nan
    host.load(1, 2, mtp)
    for i, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        own = mtp or i < len(tensors) - 2  # the last two are the MTP layer's
        assert torch.equal(tensor[:PAGE_SIZE], old[:PAGE_SIZE])
        assert tensor[PAGE_SIZE : 2 * PAGE_SIZE].isnan().all()
        if own:
            assert torch.equal(tensor[2 * PAGE_SIZE :], old[PAGE_SIZE : 2 * PAGE_SIZE])
        else:
            assert tensor[2 * PAGE_SIZE :].isnan().all(), "nothing of it has moved"
    assert host.bytes_saved == host.bytes_loaded == PAGE_BYTES[mtp]


def test_sizes_that_make_no_sense_are_refused(model):
    with pytest.raises(ValueError, match=r"prefix_host_bytes=100: a page of 64 tokens needs 47616"):
        with_engine(model, prefix_host_bytes=100).engine()
    for value in (-1, 1.5, True):
        with pytest.raises(ValueError, match="prefix_host_bytes"):
            with_engine(model, prefix_host_bytes=value)
    with pytest.raises(ValueError, match=r"prefix_host_bytes=9.*prefix_caching=False"):
        with_engine(model, prefix_host_bytes=9, prefix_caching=False)
    assert with_engine(model, prefix_host_bytes=0).engine()._host is None


def _hosted(model, pages, slots, **arguments):
    arguments = {"kv_cache_tokens": pages * PAGE_SIZE, "max_running": 4} | arguments
    own = with_engine(model, prefix_host_bytes=slots * PAGE_BYTES[True], **arguments)
    _poison_saved(own.engine())
    return own


def test_the_host_tier_forgets_what_was_used_least_recently(model):
    own = _hosted(model, pages=3, slots=3)
    prompts = prompts_of(*[140] * 4, seed=7)
    for prompt in prompts:  # two full pages each: 8, for 3 + 3 places
        own.generate(prompt, PLAIN)
    stats, prefix = own.engine().stats, own.engine().scheduler.prefix
    assert [len(prefix.match(prompt, False, 2)) for prompt in prompts] == [0, 1, 2, 2]
    assert stats.host_evictions == 3 and stats.pages_to_host == stats.evictions == 6
    assert own.generate(prompts[1], PLAIN).metrics.cached_tokens == 64
    assert own.generate(prompts[3], PLAIN).metrics.cached_tokens == 128
    for prompt in prompts:
        assert _ids(own.generate(prompt, PLAIN)) == greedy(model, prompt, NEW)
    assert_idle(own.engine())


def test_completions_of_one_prompt_come_back_from_the_host_together(model):
    own = _hosted(model, pages=10, slots=20)
    (prompt,) = prompts_of(150)
    own.generate(prompt, PLAIN)
    _fill(own, 5, PLAIN)
    _poison_free(own.engine())
    params = SamplingParams.override(PLAIN, n=3, temperature=1.0, seed=4)
    completions = own.generate(prompt, params)
    assert [c.metrics.cached_tokens for c in completions] == [128] * 3
    assert own.engine().stats.pages_from_host == 2
    assert own.engine().stats.host_cached_tokens == 128
    alone = with_engine(model, prefix_caching=False).generate(prompt, params)
    assert [_ids(c) for c in completions] == [_ids(c) for c in alone]


@pytest.mark.parametrize("speculative", [0, 2])
def test_a_preempted_request_finds_its_own_pages_on_the_host(model, speculative):
    """The oldest grows to the whole cache, and takes what the tree kept for the others."""
    own = _hosted(model, pages=4, slots=8, max_running=3)
    engine, params = own.engine(), SamplingParams.override(PLAIN, speculative_tokens=speculative)
    prompts, news = prompts_of(120, 100, 100, seed=3), [100, 20, 20]
    outputs = [greedy(model, prompt, new) for prompt, new in zip(prompts, news, strict=True)]
    if speculative:
        force_drafts(engine, [p + o for p, o in zip(prompts, outputs, strict=True)], (0, 2, 1))
    wanted = [
        engine.add(prompt, SamplingParams.override(params, max_new_tokens=new))
        for prompt, new in zip(prompts, news, strict=True)
    ]
    finished = {}
    while engine.num_unfinished:
        for delta in engine.step():
            if delta.completion is not None:
                finished[delta.request_id] = delta.completion
        audit(engine)
        _poison_free(engine)
    assert engine.stats.preemptions > 0 and engine.stats.pages_from_host > 0
    for request_id, output in zip(wanted, outputs, strict=True):
        assert _ids(finished[request_id]) == output
    if speculative:
        assert_mixed([finished[i] for i in wanted])
    assert_idle(engine)


def test_new_weights_drop_both_tiers():
    model = tiny_model()
    own = _hosted(model, pages=3, slots=4)
    first, second = prompts_of(140, 140, seed=7)
    own.generate(first, PLAIN)
    own.generate(second, PLAIN)
    prefix = own.engine().scheduler.prefix
    assert [node.page is None for node in prefix.match(first, False, 2)] == [True, True]
    with torch.no_grad():
        model.network.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.mul_(1.5)
    for prompt in (first, second):
        completion = own.generate(prompt, PLAIN)
        assert completion.metrics.cached_tokens == 0
        assert _ids(completion) == greedy(model, prompt, NEW)
    assert_idle(own.engine())


def test_a_step_that_fails_loses_no_page_of_either_tier(model):
    own = _hosted(model, pages=3, slots=4)
    first, second = prompts_of(140, 140, seed=7)
    own.generate(first, PLAIN)
    own.generate(second, PLAIN)
    engine, layer = own.engine(), model.network.model.layers[2]

    def broken(module, inputs):
        raise OSError("broken")

    with layer.register_forward_pre_hook(broken), pytest.raises(OSError, match="broken"):
        own.generate(first, PLAIN)
    assert_idle(engine)
    completion = own.generate(first, PLAIN)
    assert completion.metrics.cached_tokens == 128
    assert _ids(completion) == greedy(model, first, NEW)
    load = engine._host.load

    def unreadable(slot, page, kind):
        raise OSError("unreadable")

    engine._host.load = unreadable
    with pytest.raises(OSError, match="unreadable"):
        own.generate(second, PLAIN)
    engine._host.load = load
    assert_idle(engine)
    completion = own.generate(second, PLAIN)
    assert completion.metrics.cached_tokens == 128
    assert _ids(completion) == greedy(model, second, NEW)
    assert_idle(engine)


def test_equal_prompts_computed_at_once_end_up_with_one_copy(model):
    """Neither could know of the other. The copy that goes must not be missed when pages run out."""
    own = with_engine(model, kv_cache_tokens=8 * PAGE_SIZE, max_batch_tokens=600)
    engine = own.engine()
    (prompt,) = prompts_of(60)
    params = SamplingParams.override(PLAIN, max_new_tokens=80)
    ids = [engine.add(prompt, params), engine.add([*prompt], params)]
    while any(request.num_remaining != 1 for request in engine.scheduler) or not engine.stats.steps:
        engine.step()
    while len(engine.scheduler.prefix or ()) < 1:
        engine.step()
    one, two = engine.scheduler.running
    assert one.pages[0] == two.pages[0]
    audit(engine)
    engine.cancel(ids[0])
    own.generate(prompts_of(300)[0], PLAIN, max_new_tokens=1)  # evicts what nobody uses
    completions = engine.run()
    assert _ids(completions[ids[1]][0]) == greedy(model, prompt, 80)
    assert own.generate([*prompt, *completions[ids[1]][0].token_ids], PLAIN).metrics.cached_tokens
    assert_idle(engine)


def test_drafts_take_pages_that_only_the_tree_holds(model):
    """Once the tree has every idle page, drafts go on across page borders."""
    params = SamplingParams.override(PLAIN, speculative_tokens=3, max_new_tokens=100)
    (prompt,) = prompts_of(20)
    plain = with_engine(model).generate(prompt, params, speculative_tokens=0)
    roomy = with_engine(model)
    own = with_engine(model, kv_cache_tokens=4 * PAGE_SIZE)
    _fill(own, 4, params)
    assert own.engine().pool.num_free == 1
    completions = []
    for each in (roomy, own):
        force_drafts(each.engine(), sequences_of([plain]))
        completions.append(each.generate(prompt, params))
    assert_mixed(completions)
    assert completions[1].metrics.drafted == completions[0].metrics.drafted
    assert [_ids(c) for c in completions] == [_ids(plain)] * 2


def test_layers_of_an_index_group_share_one_layout(model):
    cache = KVCache(tiny_config(), 3, mtp=True, dtype=torch.float32)
    for name, tensor in (
        ("latent", torch.empty(2 * PAGE_SIZE, 26)),
        ("latent", torch.empty(3 * PAGE_SIZE, 25)),
        ("latent", torch.empty(3 * PAGE_SIZE, 26, dtype=torch.bfloat16)),
        ("latent", torch.empty(26, 3 * PAGE_SIZE).T),
        ("index_keys", torch.empty(2 * PAGE_SIZE, 14)),
    ):
        layers = list(cache.layers)
        cache.layers[1] = layers[1]._replace(**{name: tensor})
        with pytest.raises(AssertionError):
            cache._check_index_groups()
        cache.layers = layers
    cache._check_index_groups()
    # A selection of another width: that of a group with another index_topk.
    layer, network = model.network.model.layers[1], model.network
    hook = layer.register_forward_hook(
        lambda module, args, out: (
            *out[:2],
            type(out[2])(out[2].logical[:, :-1], out[2].physical[:, :-1], out[2].counts),
        )
    )
    with hook, pytest.raises(AssertionError, match="another group"):
        network(torch.arange(12)[None])
