"""Residency against a plain LRU over sets and dicts, and against the rows that end up where."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.residency import Residency
from tests.residency import LRU, tiles_of

SLOTS, WIDTH = 17, 4


def _padded(selections: list[list[int]]) -> torch.Tensor:
    rows = [[*row, *[-1] * (WIDTH - len(row))] for row in selections]
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), WIDTH)


def _execute(plan, hot: list, host: list) -> None:
    """What one layer does, with a slot's number as its row; every selected row must be right."""
    assert len(plan.tile_ends) == len(plan.fetch_ends)
    start = first = 0
    for end, last in zip(plan.tile_ends, plan.fetch_ends, strict=True):
        for source, destination in zip(
            plan.sources[first:last].tolist(), plan.destinations[first:last].tolist(), strict=True
        ):
            hot[destination] = host[source]
        yield slice(start, end)
        start, first = end, last


selection = st.lists(st.integers(0, SLOTS - 1), max_size=WIDTH, unique=True).map(sorted)
forwards = st.lists(
    st.tuples(
        st.lists(st.integers(-1, SLOTS - 1), max_size=5, unique=True),  # slots written
        st.lists(selection, max_size=9),
    ),
    max_size=12,
)


@settings(max_examples=50)
@given(forwards=forwards, num_rows=st.integers(WIDTH, SLOTS + 3), layers=st.integers(1, 3))
def test_equals_a_plain_lru(forwards, num_rows, layers):
    """Rows rewritten at will: each layer reads what was written last, and counts are an LRU's."""
    residency = Residency(SLOTS, num_rows, "cpu")
    residency.num_layers = layers
    lru = LRU(num_rows)
    host = [(slot, 0) for slot in range(SLOTS)]
    hots = [[None] * num_rows for _ in range(layers)]
    for version, (written, selections) in enumerate(forwards, 1):
        residency.invalidate(torch.tensor(written, dtype=torch.int64))
        for slot in written:
            if slot >= 0:
                host[slot] = (slot, version)
        plan = residency.resolve(_padded(selections))
        lru.step(written, selections)
        assert plan.tile_ends == [tile.stop for tile in tiles_of(selections, num_rows)]
        assert (plan.indices >= 0).sum(1).tolist() == [len(row) for row in selections]
        for hot in hots:
            for tile in _execute(plan, hot, host):
                for row, slots in zip(plan.indices[tile].tolist(), selections[tile], strict=True):
                    assert [hot[i] for i in row[: len(slots)]] == [host[slot] for slot in slots]
            residency.done(plan, 8)
        assert (residency.hits, residency.misses) == (lru.hits, lru.misses)
    assert residency.fetched_bytes == 8 * layers * len(forwards)


def test_invalid_rows_are_the_first_to_go():
    residency = Residency(SLOTS, 4, "cpu")
    residency.num_layers = 1
    for written, selected, missing in (
        ([], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([2], [4], [4]),  # takes the place of 2, not of 0, the oldest
        ([], [0, 1, 3, 4], []),
        ([], [2], [2]),  # now 0 goes
        ([], [1, 2, 3, 4], []),
    ):
        residency.invalidate(torch.tensor(written, dtype=torch.int64))
        plan = residency.resolve(_padded([selected]))
        assert plan.sources.tolist() == missing
        residency.done(plan, 0)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_plan_that_a_layer_missed_leaves_nothing_resident(done):
    residency = Residency(SLOTS, 6, "cpu")
    residency.num_layers = 2
    plan = residency.resolve(_padded([[0, 1, 2]]))
    for _ in range(done):
        residency.done(plan, 0)
    plan = residency.resolve(_padded([[1, 2, 3]]))
    assert plan.sources.tolist() == ([3] if done == 2 else [1, 2, 3])


def test_only_the_last_plan_is_carried_out():
    residency = Residency(SLOTS, 6, "cpu")
    residency.num_layers = 1
    plans = [residency.resolve(_padded([[i]])) for i in range(2)]
    with pytest.raises(AssertionError):
        residency.done(plans[0], 0)
    residency.done(plans[1], 0)
    with pytest.raises(AssertionError):
        residency.done(plans[1], 0)


def test_a_row_wider_than_the_hot_set_is_caught():
    with pytest.raises(AssertionError):
        Residency(SLOTS, 3, "cpu").resolve(_padded([[0, 1, 2, 3]]))


def test_neighbours_that_select_alike_share_a_tile():
    """A thousand rows, each the four before it: 7 hot rows make tiles of 4 rows, not of one."""
    selections = [list(range(i, i + 4)) for i in range(1000)]
    residency = Residency(1003, 7, "cpu")
    residency.num_layers = 1
    plan = residency.resolve(_padded(selections))
    assert plan.tile_ends == list(range(4, 1001, 4))
    assert residency.misses == 1003  # every slot once: what a tile keeps is a hit
    assert residency.hits == 249 * 3


def test_nbytes():
    residency = Residency(SLOTS, 6, "cpu")
    assert residency.nbytes == 4 * (SLOTS + 1) + 6 * 16
