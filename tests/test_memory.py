"""Nothing is left behind: page, tensor, request, byte. And no step costs what the pool costs."""

import gc
import os
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from glm53 import GLM53, Completion, Delta, SamplingParams
from glm53.request import Request
from glm53.sampling import SamplerState
from tests.engines import assert_idle, prompts_of, tiny_model, with_engine
from tests.speculation import agreeing_model

STATM = Path("/proc/self/statm")


@pytest.fixture(scope="module")
def model() -> GLM53:
    return agreeing_model(3)


def _assert_mixed(model: GLM53) -> None:
    stats = model.engine().stats
    assert stats.drafted > stats.accepted > 0


def _census() -> Counter:
    gc.collect()
    kinds = (torch.Tensor, Request, SamplerState, Completion, Delta)
    found: Counter = Counter()
    for thing in gc.get_objects():
        for kind in kinds:
            if issubclass(type(thing), kind):
                found[kind.__name__] += 1
    return found


def _resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _mixed_load(model: GLM53, seed: int) -> int:
    """50 requests of every kind and end; how many there were."""
    prompts = prompts_of(*[1 + (seed + i) % 9 for i in range(40)], seed=seed)
    bad = [[], [131]]
    model.generate([*prompts[:20], *bad], temperature=0.8, top_p=0.9, max_new_tokens=3, logprobs=2)
    model.generate(
        prompts[20:28],
        temperature=1.0,
        n=2,
        max_new_tokens=2,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias={9: 1.0},
        bad_words=[[11, 12]],
    )
    model.score(prompts[28:36])
    for prompt in prompts[36:38]:
        for _ in model.stream(prompt, max_new_tokens=4, ignore_eos=True):
            break  # cancels
    engine = model.engine()
    ids = [engine.add(prompt, SamplingParams(prompt_logprobs=1)) for prompt in prompts[38:]]
    engine.step()
    for request_id in ids:
        engine.cancel(request_id)
    assert_idle(engine)
    return 50


def test_a_thousand_requests_leave_nothing(model):
    own = with_engine(model, kv_cache_tokens=64 * 8)
    for seed in range(3):
        _mixed_load(own, seed)
    before, resident = _census(), _resident_bytes() if STATM.exists() else None
    assert sum(_mixed_load(own, seed) for seed in range(20)) == 1000
    assert _census() == before
    _assert_mixed(own)
    if resident is not None:
        assert _resident_bytes() - resident < 8 << 20


def test_no_cycle_keeps_a_request(model):
    """Reference counts alone free it: at once, not when the collector comes by."""
    own = with_engine(model)
    engine = own.engine()
    prompts = prompts_of(4, 9, 70)
    references = []

    def watch() -> None:
        references.extend(map(weakref.ref, engine.scheduler))

    gc.disable()
    try:
        for prompt in prompts:
            engine.add(prompt, SamplingParams(max_new_tokens=2, n=2, temperature=1.0))
        watch()
        engine.run()
        stream = own.stream(prompts[0], max_new_tokens=5, ignore_eos=True)
        next(stream)
        watch()
        stream.close()
        request_id = engine.add(prompts[1])
        watch()
        engine.cancel(request_id)
        assert len(references) == 8
        assert [reference() for reference in references] == [None] * 8
    finally:
        gc.enable()


def test_the_model_drops_its_engine_with_the_cache(model):
    own = tiny_model(3)
    own.generate([9, 10], max_new_tokens=1)
    cache = weakref.ref(own.engine()._cache)
    own.to(torch.float32)
    gc.collect()
    assert cache() is None
    assert len(own.generate([9, 10], max_new_tokens=2, ignore_eos=True).token_ids) == 2


def _peak_bytes(engine, steps: int = 2) -> int:
    """Most bytes alive at once beyond what was alive before, over some steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(steps):
            engine.step()
    alive = peak = 0
    events = [e for e in profiler.events() or () if e.name == "[memory]"]
    for event in sorted(events, key=lambda event: event.time_range.start):
        alive += event.cpu_memory_usage
        peak = max(peak, alive)
    assert peak > 0, "the profiler saw no allocation"
    return peak


@pytest.mark.parametrize("hot_tokens", [None, 20])
def test_a_decode_step_allocates_nothing_of_the_pools_size(model, hot_tokens):
    peaks = []
    for pages in (4, 1024):
        own = with_engine(model, kv_cache_tokens=64 * pages, kv_cache_hot_tokens=hot_tokens)
        engine = own.engine()
        for prompt in prompts_of(30, 70):
            engine.add(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0))
        engine.step()
        peaks.append(_peak_bytes(engine))
        _assert_mixed(own)
    smallest_layer = min(t.nbytes for t in engine._cache.layers[0][:2] if t is not None)
    assert peaks[1] < smallest_layer / 4
    assert peaks[1] <= 1.1 * peaks[0]
