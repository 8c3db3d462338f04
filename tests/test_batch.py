"""Batch: rows of dense and paged forwards, spelled out."""

import pytest
import torch

from glm53.batch import Batch

IDS = torch.arange(10, 22).view(3, 4)


def test_dense_rows_without_a_mask():
    batch = Batch.uncached(IDS[:2], None)
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert batch.positions.tolist() == [0, 1, 2, 3] * 2
    assert batch.request.tolist() == [0] * 4 + [1] * 4
    assert batch.lengths.tolist() == [1, 2, 3, 4] * 2
    assert batch.slots.tolist() == [-1] * 8
    assert batch.block_table.tolist() == [[0], [4]]
    assert (batch.page_size, batch.block_stride) == (4, 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_positions_are_left_out_wherever_they_are(dtype):
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 1, 0, 1]], dtype=dtype)
    batch = Batch.uncached(IDS, mask)
    assert batch.input_ids.tolist() == [12, 13, 14, 15, 16, 19, 21]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert batch.request.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert batch.lengths.tolist() == [1, 2, 1, 2, 3, 1, 2]
    assert batch.block_table.tolist() == [[0], [2], [5]]


def test_fully_masked_request_has_no_rows():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    batch = Batch.uncached(IDS, mask)
    assert batch.request.tolist() == [0, 0, 0, 0, 2]
    assert batch.block_table.tolist() == [[0], [4], [4]]


def test_paged_rows():
    """A chunk that crosses a page border, and a decode row of a request with fewer pages."""
    batch = Batch.paged([([7, 8, 9], 3, [5, 2]), ([4], 1, [0])], 4)
    assert batch.input_ids.tolist() == [7, 8, 9, 4]
    assert batch.positions.tolist() == [3, 4, 5, 1]
    assert batch.request.tolist() == [0, 0, 0, 1]
    assert batch.lengths.tolist() == [4, 5, 6, 2]
    assert batch.slots.tolist() == [23, 8, 9, 1]
    assert batch.block_table.tolist() == [[5, 2], [0, -1]]
    assert batch.page_size == batch.block_stride == 4


def test_dtypes_are_what_the_operators_take():
    for batch in (Batch.uncached(IDS, None), Batch.paged([([7], 0, [1])], 4)):
        assert batch.input_ids.dtype == batch.positions.dtype == batch.slots.dtype == torch.int64
        assert batch.request.dtype == batch.lengths.dtype == torch.int32
        assert batch.block_table.dtype == torch.int32


def test_dense_and_paged_rows_describe_the_same_place():
    """Both address forms name, for every visible position, the row where its key lies."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [1, 0, 0, 0]])
    dense = Batch.uncached(IDS, mask)
    tokens = [IDS[r][mask[r].bool()].tolist() for r in range(3)]
    pages = [[3, 1], [0, 4], [2]]
    paged = Batch.paged([(t, 0, p) for t, p in zip(tokens, pages, strict=True)], 2)
    assert torch.equal(dense.input_ids, paged.input_ids)
    assert torch.equal(dense.positions, paged.positions)
    for rows, batch in ((torch.arange(7), dense), (paged.slots, paged)):
        for t, (request, position) in enumerate(
            zip(batch.request.tolist(), batch.positions.tolist(), strict=True)
        ):
            page = batch.block_table[request, position // batch.page_size].item()
            at = page * batch.block_stride + position % batch.page_size
            assert rows[t].item() == at


def test_padding_rows_have_no_slot_and_see_nothing():
    batch = Batch.paged([([7, 8], 70, [3, 5]), ([9], 0, [1])], 64)
    padded = batch.pad(5, 4, 3)
    assert padded.num_rows == 5
    for name, value in dict(input_ids=0, positions=0, request=0, lengths=0, slots=-1).items():
        rows = getattr(padded, name)
        assert torch.equal(rows[:3], getattr(batch, name))
        assert rows[3:].tolist() == [value, value] and rows.dtype == getattr(batch, name).dtype
    table = [[3, 5, -1], [1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert padded.block_table.tolist() == table
    assert batch.pad(2, 1, 1).num_rows == 3  # never less than there is


def test_compact_keeps_the_pages_of_requests_with_rows():
    rows = [([1], 70, [4, 9]), ([2], 3, [7]), ([3], 100, [0, 2]), ([4, 5], 9, [8])]
    batch = Batch.paged(rows, 64)
    assert batch.compact(4) is batch
    some = batch.select(torch.tensor([2, 3, 4]))
    small = some.compact(3)
    assert small.request.tolist() == [0, 1, 1] and small.request.dtype == torch.int32
    assert small.block_table.tolist() == [[0, 2], [8, -1], [-1, -1]]
    assert small.slots is some.slots and small.lengths is some.lengths
