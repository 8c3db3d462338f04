"""logical_to_physical: positions to cache rows through a block table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glm53.ops import logical_to_physical
from glm53.ops.index_select import logical_to_physical_ref

OP = torch.ops.glm53.logical_to_physical.default


def _call(logical, table, request, page_size, block_stride):
    return logical_to_physical(
        torch.tensor(logical, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(request, dtype=torch.int32),
        page_size=page_size,
        block_stride=block_stride,
    )


def test_pages_in_any_order():
    physical, counts = _call([[0, 3, 4, 9, -1]], [[2, 0, 7]], [0], 4, 4)
    assert physical.tolist() == [[8, 11, 0, 29, -1]]
    assert counts.tolist() == [4]
    assert physical.dtype == counts.dtype == torch.int32


def test_every_row_uses_its_own_request():
    physical, _ = _call([[1, 5]] * 3, [[9, 8], [1, 0]], [1, 0, 1], 4, 4)
    assert physical.tolist() == [[5, 1], [37, 33], [5, 1]]


def test_holes_stay_where_they_are():
    """-1 is not a suffix after filtering: positions keep their columns, counts skip them."""
    physical, counts = _call([[-1, 2, -1, 5, -1]], [[3, 1]], [0], 4, 4)
    assert physical.tolist() == [[-1, 14, -1, 5, -1]]
    assert counts.tolist() == [2]


@pytest.mark.parametrize("position", [-1, -7, 8, 11, 10**6])
def test_positions_without_a_page_are_masked(position):
    """Negative, on an absent page (-1), or beyond the table."""
    physical, counts = _call([[position, 2]], [[3, 1, -1]], [0], 4, 4)
    assert physical.tolist() == [[-1, 14]]
    assert counts.tolist() == [1]


def test_padded_page_stride():
    """Pages of several layers interleaved: physical rows between pages exceed the page size."""
    physical, _ = _call([[0, 3, 4, 7]], [[2, 5]], [0], 4, 10)
    assert physical.tolist() == [[20, 23, 50, 53]]


def test_contiguous_rows():
    """The uncached form: first row of the request + position."""
    physical, _ = _call([[0, 6]] * 2, [[0], [7]], [0, 1], 7, 1)
    assert physical.tolist() == [[0, 6], [7, 13]]


def test_no_rows():
    physical, counts = logical_to_physical(
        torch.empty(0, 5, dtype=torch.int32),
        torch.tensor([[0]], dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        page_size=4,
        block_stride=4,
    )
    assert physical.shape == (0, 5) and counts.shape == (0,)


@given(st.data(), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_equals_reference_and_loop(data, page_size, requests, pages):
    table = data.draw(
        st.lists(
            st.lists(st.integers(-1, 9), min_size=pages, max_size=pages),
            min_size=requests,
            max_size=requests,
        )
    )
    rows = data.draw(st.lists(st.integers(0, requests - 1), min_size=1, max_size=4))
    position = st.integers(-3, page_size * pages + 5)
    logical = [data.draw(st.lists(position, min_size=3, max_size=3)) for _ in rows]
    stride = data.draw(st.integers(1, 9))
    expected = []
    for r, positions in zip(rows, logical, strict=True):
        slots = dict(
            (page * page_size + offset, table[r][page] * stride + offset)
            for page in range(pages)
            for offset in range(page_size)
            if table[r][page] >= 0
        )
        expected.append([slots.get(p, -1) for p in positions])
    physical, counts = _call(logical, table, rows, page_size, stride)
    assert physical.tolist() == expected
    assert counts.tolist() == [sum(p >= 0 for p in row) for row in expected]
    reference = logical_to_physical_ref(
        torch.tensor(logical, dtype=torch.int32),
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
        page_size,
        stride,
    )
    assert torch.equal(physical, reference[0]) and torch.equal(counts, reference[1])


def test_opcheck():
    logical = torch.tensor([[0, 3, -1], [-1, 5, 99]], dtype=torch.int32)
    table = torch.tensor([[1, 0], [4, -1]], dtype=torch.int32)
    request = torch.tensor([1, 0], dtype=torch.int32)
    torch.library.opcheck(OP, (logical, table, request, 3, 3))
