"""tiered_sparse_mla: sparse_mla to the last bit, whatever is fetched when; nothing else is read."""

import importlib

import pytest
import torch

from glm53.ops import sparse_mla, tiered_sparse_mla
from glm53.ops.tiered_sparse_mla import tiered_sparse_mla_ref

OP = torch.ops.glm53.tiered_sparse_mla.default
SPARSE_MLA = importlib.import_module("glm53.ops.sparse_mla")

VALUE_DIM, WIDTH, HEADS, SLOTS, SCALE = 6, 9, 5, 23, 0.37
SELECTED = [
    [0, 3, 4, 22, -1],
    [-1, -1, -1, -1, -1],
    [7, -1, -1, -1, -1],
    [-1, 5, -1, 2, -1],
    [1, 2, 3, 4, 5],
    [4, 5, 6, -1, -1],
    [22, -1, -1, -1, -1],
]
# Five hot rows. By hand: which slots each tile needs that are not there yet, and where they go.
TILES = [  # (end, {slot: hot row to fill}), then what the five rows hold
    (3, {0: 0, 3: 1, 4: 2, 22: 3, 7: 4}),  # 0 3 4 22 7
    (4, {5: 0, 2: 3}),  # 5 3 4 2 7
    (5, {1: 4}),  # 5 3 4 2 1
    (7, {6: 1, 22: 4}),  # 5 6 4 2 22
]
HOT_INDICES = [
    [0, 1, 2, 3, -1],
    [-1, -1, -1, -1, -1],
    [4, -1, -1, -1, -1],
    [-1, 0, -1, 3, -1],
    [4, 3, 1, 2, 0],
    [2, 0, 1, -1, -1],
    [4, -1, -1, -1, -1],
]


def _case(dtype=torch.float32, seed=0):
    """Queries, host rows (NaN where nobody selects), NaN hot rows, and the plan."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(len(SELECTED), HEADS, WIDTH, generator=g).to(dtype)
    host = torch.randn(SLOTS, WIDTH, generator=g).to(dtype)
    used = {slot for row in SELECTED for slot in row if slot >= 0}
    host[[slot for slot in range(SLOTS) if slot not in used]] = torch.nan
    hot = torch.full((5, WIDTH), torch.nan, dtype=dtype)
    indices = torch.tensor(HOT_INDICES, dtype=torch.int32)
    counts = (indices >= 0).sum(-1, dtype=torch.int32)
    ends, copies, fetch_ends = [end for end, _ in TILES], [], []
    for _, tile in TILES:
        copies += tile.items()
        fetch_ends.append(len(copies))
    sources, destinations = torch.tensor(copies).unbind(1)
    slots = torch.tensor(SELECTED, dtype=torch.int32)
    return (
        q,
        host,
        hot,
        slots,
        indices,
        counts,
        ends,
        sources,
        destinations,
        fetch_ends,
        VALUE_DIM,
        SCALE,
    )


def _run(case):
    names = ("tile_ends", "sources", "destinations", "fetch_ends", "value_dim", "scale")
    return tiered_sparse_mla(*case[:6], **dict(zip(names, case[6:], strict=True)))


def _plain(case):
    q, host, _, _, _, counts, *_ = case
    selected = torch.tensor(SELECTED, dtype=torch.int32)
    return sparse_mla(q, host, selected, counts, value_dim=VALUE_DIM, scale=SCALE)


# All queries in one tile of attention; three, which cuts through the tiles of copies; one.
@pytest.mark.parametrize("tile_elements", [1 << 22, 3 * 5 * WIDTH, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_sparse_mla(dtype, tile_elements, monkeypatch):
    monkeypatch.setattr(SPARSE_MLA, "TILE_ELEMENTS", tile_elements)
    case = _case(dtype)
    (out, lse), (expected_out, expected_lse) = _run(case), _plain(case)
    assert out.isfinite().all()
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)
    host, hot = case[1:3]
    assert torch.equal(hot, host[[5, 6, 4, 2, 22]])


def test_equals_the_reference():
    case, twin = _case(), _case()
    expected = tiered_sparse_mla_ref(*twin)
    torch.testing.assert_close(_run(case), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(case[2], twin[2])


def test_what_is_resident_is_not_fetched():
    """The last but one query again, without copies: the host rows may be gone by then."""
    case = _case()
    _run(case)
    q, host, hot, _, _, counts, *_ = case
    query, selected = q[5:6], torch.tensor(SELECTED[5:6], dtype=torch.int32)
    expected = sparse_mla(query, host, selected, counts[5:6], value_dim=VALUE_DIM, scale=SCALE)
    before = hot.clone()
    host.fill_(torch.nan)
    indices = torch.tensor([[2, 0, 1, -1, -1]], dtype=torch.int32)  # hot rows: 5 6 4 2 22
    none = torch.empty(0, dtype=torch.int64)
    plan = ([1], none, none, [0])
    got = _run((query, host, hot, selected, indices, counts[5:6], *plan, VALUE_DIM, SCALE))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert torch.equal(hot, before)


def test_no_rows():
    q, host, hot, slots, indices, counts, *_ = _case()
    none = torch.empty(0, dtype=torch.int64)
    case = (
        q[:0],
        host,
        hot,
        slots[:0],
        indices[:0],
        counts[:0],
        [],
        none,
        none,
        [],
        VALUE_DIM,
        SCALE,
    )
    for out, lse in (_run(case), tiered_sparse_mla_ref(*case)):
        assert out.shape == (0, HEADS, VALUE_DIM) and lse.shape == (0, HEADS)


def test_a_slot_past_the_end_raises():
    case = _case()
    case[7][0] = SLOTS
    with pytest.raises((IndexError, RuntimeError)):
        _run(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    q, host, hot, *rest = _case(dtype)
    torch.library.opcheck(OP, (q, host.nan_to_num(), hot.nan_to_num(), *rest))
