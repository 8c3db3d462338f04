"""Scheduling without a network: what a step holds, and where the pages are after it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.cache import PAGE_SIZE, PagePool
from glm53.request import Request
from glm53.scheduler import Chunk, Scheduler, pages_for
from tests.engines import make_request


def _scheduler(pages: int = 100, max_batch_tokens: int = 10**6, max_running: int = 5) -> Scheduler:
    return Scheduler(PagePool(pages), max_batch_tokens=max_batch_tokens, max_running=max_running)


def _request(prompt: int, new: int = 1000, request_id: int = 0, **arguments) -> Request:
    ids = [1] * prompt
    return make_request(ids, request_id=request_id, max_new_tokens=new, **arguments)


def _commit(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """What a step does to requests when the network has run."""
    for chunk in chunks:
        request = chunk.request
        request.num_computed += chunk.count
        if request.num_remaining:
            continue
        delta = request.finish("length") if request.prompt_only else request.accept(2, None)
        if delta.completion is not None:
            scheduler.remove(request)


def _audit(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    held = [page for request in scheduler.running for page in request.pages]
    assert len(held) == len(set(held))
    assert not any(request.pages for request in scheduler.waiting)
    references = [pool._references[page] for page in range(pool.num_pages)]
    assert references == [int(page in held) for page in range(pool.num_pages)]
    assert pool.num_free == pool.num_pages - len(held)


def _check_step(scheduler: Scheduler, chunks: list[Chunk]) -> None:
    """Everything that holds for any step at all."""
    rows = [chunk.count for chunk in chunks]
    assert all(rows) and sum(rows) <= scheduler.max_batch_tokens
    assert len(scheduler.running) <= scheduler.max_running
    requests = [chunk.request for chunk in chunks]
    assert len(set(requests)) == len(requests)
    assert set(requests) <= set(scheduler.running)
    for chunk in chunks:
        assert chunk.count <= chunk.request.num_remaining
        assert len(chunk.request.pages) >= pages_for(chunk.request.num_computed + chunk.count)
    decoding = [r for r in scheduler.running if r.num_remaining == 1 and r.num_computed]
    assert requests[: len(decoding)] == decoding, "decode rows of all, and first"
    order = [request.request_id for request in scheduler]
    assert order == sorted(order), "nobody overtakes"
    if order:
        assert order[0] in [request.request_id for request in requests], "the oldest goes on"


@pytest.mark.parametrize("tokens, pages", [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (129, 3)])
def test_pages_for(tokens, pages):
    assert PAGE_SIZE == 64
    assert pages_for(tokens) == pages


def test_an_empty_scheduler_schedules_nothing():
    assert _scheduler().schedule() == []


def test_decode_rows_come_before_prompts_that_are_older():
    scheduler = _scheduler(max_batch_tokens=70)
    slow, quick = _request(200, request_id=0), _request(3, request_id=1)
    scheduler.add(slow)
    _commit(scheduler, scheduler.schedule())
    scheduler.add(quick)
    _commit(scheduler, scheduler.schedule())  # 70 more of the slow one: no room for the quick
    chunks = scheduler.schedule()
    assert [(c.request, c.count) for c in chunks] == [(slow, 60), (quick, 3)]
    _commit(scheduler, chunks)
    third = _request(500, request_id=2)
    scheduler.add(third)
    chunks = scheduler.schedule()
    assert [(c.request, c.count) for c in chunks] == [(slow, 1), (quick, 1), (third, 68)]
    _commit(scheduler, chunks)
    chunks = scheduler.schedule()
    assert [(c.request, c.count) for c in chunks] == [(slow, 1), (quick, 1), (third, 68)]


@pytest.mark.parametrize("budget, rows", [(1, [1] * 7), (3, [3, 3, 1]), (7, [7]), (8, [7])])
def test_a_prompt_is_cut_into_chunks_of_the_budget(budget, rows):
    scheduler = _scheduler(max_batch_tokens=budget, max_running=1)
    scheduler.add(_request(7))
    found = []
    for _ in rows:
        chunks = scheduler.schedule()
        found += [chunk.count for chunk in chunks]
        _commit(scheduler, chunks)
    assert found == rows
    assert [chunk.count for chunk in scheduler.schedule()] == [1]


def test_max_running_is_never_exceeded():
    scheduler = _scheduler(max_running=3)
    for i in range(5):
        scheduler.add(_request(4, new=2, request_id=i))
    assert [c.request.request_id for c in scheduler.schedule()] == [0, 1, 2]
    scheduler.remove(scheduler.running[1])
    assert [c.request.request_id for c in scheduler.schedule()] == [0, 2, 3]


def test_admission_needs_the_pages_of_all_tokens():
    scheduler = _scheduler(pages=4, max_batch_tokens=10)
    scheduler.add(_request(65, new=20, request_id=0))
    scheduler.add(_request(129, new=20, request_id=1))
    scheduler.add(_request(1, new=20, request_id=2))
    chunks = scheduler.schedule()
    assert len(scheduler.running[0].pages) == 2, "pages for the prompt, not for its first chunk"
    assert [c.request.request_id for c in chunks] == [0]
    _commit(scheduler, chunks)
    scheduler.max_batch_tokens = 1000
    assert [c.request.request_id for c in scheduler.schedule()] == [0], "2 does not overtake 1"


def test_the_newest_is_preempted_and_waits_in_front():
    scheduler = _scheduler(pages=3)
    for i in range(3):
        scheduler.add(_request(64, new=30, request_id=i))
    _commit(scheduler, scheduler.schedule())
    old, middle, new = scheduler.running
    scheduler.add(_request(1, request_id=3, new=5))
    chunks = scheduler.schedule()  # three rows want a second page; the two newest pay
    assert [(c.request, c.count) for c in chunks] == [(old, 1)]
    assert list(scheduler.waiting)[:2] == [middle, new]
    assert [r.preemptions for r in (old, middle, new)] == [0, 1, 1]
    assert scheduler.num_preemptions == 2
    assert middle.num_computed == 0 and middle.pages == []
    assert middle.num_remaining == 65, "prompt and its first token are computed again"
    _check_step(scheduler, chunks)
    _audit(scheduler)


def test_a_request_that_is_the_newest_gives_up_its_own_pages():
    scheduler = _scheduler(pages=3)
    scheduler.add(_request(70, new=30, request_id=0))
    scheduler.add(_request(64, new=30, request_id=1))
    _commit(scheduler, scheduler.schedule())
    chunks = scheduler.schedule()
    assert [c.request.request_id for c in chunks] == [0]
    assert scheduler.pool.num_free == 1
    _audit(scheduler)


@pytest.mark.parametrize(
    "prompt, new, prompt_only, fits",
    [
        (64, 65, False, True),  # the last token is never fed back
        (64, 66, False, False),
        (128, 1, False, True),
        (129, 1, False, False),
        (128, 1, True, True),
        (129, 1, True, False),
    ],
)
def test_a_request_that_the_whole_cache_cannot_hold_is_refused(prompt, new, prompt_only, fits):
    scheduler = _scheduler(pages=2)
    request = _request(prompt, new, prompt_only=prompt_only)
    if fits:
        scheduler.add(request)
        while scheduler.running or scheduler.waiting:
            _commit(scheduler, scheduler.schedule())
        assert scheduler.pool.num_free == 2
        assert len(request.tokens) == prompt + (0 if prompt_only else new)
    else:
        with pytest.raises(ValueError, match=r"need 192 tokens of cache.* holds 128"):
            scheduler.add(request)
        assert list(scheduler) == []


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="max_running=0"):
        _scheduler(max_running=0)
    with pytest.raises(ValueError, match="max_batch_tokens=3"):
        _scheduler(max_batch_tokens=3, max_running=4)


def test_nothing_is_evicted_for_a_request_that_does_not_fit_anyway():
    scheduler = _scheduler(pages=6)
    scheduler.add(_request(130, prompt_only=True))
    (chunk,) = scheduler.schedule()
    chunk.request.num_computed = 130
    scheduler.share(chunk.request)
    scheduler.remove(chunk.request)
    assert len(scheduler.prefix) == scheduler.prefix.num_idle == 2
    running, large = (_request(length, 20, i) for i, length in ((1, 128), (2, 257)))
    running.tokens[0] = large.tokens[0] = 2  # nothing shared
    scheduler.add(running)
    _commit(scheduler, scheduler.schedule())
    scheduler.add(large)
    assert scheduler.schedule()[0].request is running, "which takes the sixth page for itself"
    assert scheduler.num_evictions == 0 and len(scheduler.prefix) == 2
    assert large in scheduler.waiting
    scheduler.remove(running)
    assert scheduler.schedule()[0].request is large
    assert scheduler.num_evictions == 1 and len(scheduler.prefix) == 1


@st.composite
def _scenarios(draw):
    pages = draw(st.integers(1, 7))
    max_running = draw(st.integers(1, 6))
    budget = draw(st.integers(max_running, max_running + 150))
    capacity = pages * PAGE_SIZE
    requests = []
    for i in range(draw(st.integers(1, 8))):
        # Near page borders, where growing happens.
        near = [n for n in (1, PAGE_SIZE, 2 * PAGE_SIZE, capacity) if n <= capacity]
        prompt = draw(st.integers(1, capacity) | st.sampled_from(near))
        new = draw(st.integers(1, min(80, capacity - prompt + 1)))
        prompt_only = draw(st.booleans()) and draw(st.booleans())
        arrival, cancelled = draw(st.integers(0, 40)), draw(st.none() | st.integers(0, 150))
        requests.append((i, prompt, new, prompt_only, arrival, cancelled))
    return pages, max_running, budget, requests


@settings(max_examples=150)
@given(scenario=_scenarios())
def test_any_load_ends_and_no_page_is_lost(scenario):
    pages, max_running, budget, planned = scenario
    scheduler = _scheduler(pages, budget, max_running)
    planned = sorted(planned, key=lambda plan: plan[4])
    everyone = []
    limit = 41 + sum(prompt + new for _, prompt, new, *_ in planned)  # the oldest never stands
    for step in range(limit):
        for _, prompt, new, prompt_only, arrival, cancelled in planned:
            if arrival == step:
                request = _request(prompt, new, len(everyone), prompt_only=prompt_only)
                everyone.append((request, cancelled))
                scheduler.add(request)
        for request, cancelled in everyone:
            if cancelled == step and request in list(scheduler):
                request.finish("cancelled")
                scheduler.remove(request)
                _audit(scheduler)
        chunks = scheduler.schedule()
        _check_step(scheduler, chunks)
        _audit(scheduler)
        assert bool(chunks) == bool(list(scheduler))
        _commit(scheduler, chunks)
        _audit(scheduler)
        if len(everyone) == len(planned) and not list(scheduler):
            break
    assert list(scheduler) == []
    assert scheduler.pool.num_free == pages
    assert scheduler.num_preemptions == sum(request.preemptions for request, _ in everyone)
    for request, cancelled in everyone:
        assert cancelled is not None or len(request.tokens) == request.max_tokens
