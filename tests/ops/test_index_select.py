"""index_select: scores, canonical top-k, and what it may read."""

import importlib

import pytest
import torch

from glm53.ops import index_select
from glm53.ops.index_select import index_select_ref

OP = torch.ops.glm53.index_select.default
MODULE = importlib.import_module("glm53.ops.index_select")  # the package exports the function


def loop_select(q, weights, keys_by_request, request, lengths, index_topk):
    """Positions per row: fp64 scores, key by key; ties to the lower position."""
    out = []
    for t, (r, length) in enumerate(zip(request, lengths, strict=True)):
        scores = []
        for s in range(length):
            dots = q[t].double() @ keys_by_request[r][s].double()
            scores.append((weights[t].double() * dots.clamp(min=0)).sum().item())
        ranked = sorted(range(length), key=lambda s: (-scores[s], s))[:index_topk]
        out.append(sorted(ranked) + [-1] * (index_topk - len(ranked)))
    return torch.tensor(out, dtype=torch.int32).view(len(lengths), index_topk)


class Case:
    """Rows of several requests over pages that lie anywhere in a NaN-filled pool."""

    def __init__(self, rows, *, page_size=5, heads=17, dim=11, integer=False, seed=0):
        """rows: per request, the visible lengths of its rows."""
        g = torch.Generator().manual_seed(seed)

        def draw(*shape):
            if integer:
                return torch.randint(-2, 3, shape, generator=g).float()
            return torch.randn(*shape, generator=g)

        self.page_size = page_size
        self.lengths_list = [length for lengths in rows for length in lengths]
        self.request_list = [r for r, lengths in enumerate(rows) for _ in lengths]
        total = len(self.lengths_list)
        self.q, self.weights = draw(total, heads, dim), draw(total, heads)
        longest = [max(lengths, default=0) for lengths in rows]
        self.keys_by_request = [draw(length, dim) for length in longest]
        pages = [-(-length // page_size) for length in longest]
        pool = torch.randperm(sum(pages) + 3, generator=g).tolist()
        self.table = torch.full((len(rows), max(*pages, 1) + 1), -1, dtype=torch.int32)
        self.keys = torch.full(((sum(pages) + 3) * page_size, dim), torch.nan)
        for r, count in enumerate(pages):
            for i in range(count):
                page = pool.pop()
                self.table[r, i] = page
                part = self.keys_by_request[r][i * page_size : (i + 1) * page_size]
                self.keys[page * page_size : page * page_size + part.shape[0]] = part
        self.request = torch.tensor(self.request_list, dtype=torch.int32)
        self.lengths = torch.tensor(self.lengths_list, dtype=torch.int32)

    def args(self, index_topk):
        return (
            self.q,
            self.weights,
            self.keys,
            self.table,
            self.request,
            self.lengths,
            index_topk,
            self.page_size,
            self.page_size,
        )

    def select(self, index_topk):
        return index_select(
            *self.args(index_topk)[:6],
            index_topk=index_topk,
            page_size=self.page_size,
            block_stride=self.page_size,
        )

    def expected(self, index_topk):
        return loop_select(
            self.q,
            self.weights,
            self.keys_by_request,
            self.request_list,
            self.lengths_list,
            index_topk,
        )


MIXED = [[0, 1, 6, 7, 8, 20], [41], [], [3, 4, 33, 34, 35]]


@pytest.mark.parametrize("index_topk", [1, 7, 8, 40])
@pytest.mark.parametrize("integer", [False, True], ids=["random", "ties"])
def test_equals_loops_and_reference(index_topk, integer):
    case = Case(MIXED, heads=2 if integer else 17, integer=integer)
    expected = case.expected(index_topk)
    assert torch.equal(index_select_ref(*case.args(index_topk)), expected)
    assert torch.equal(case.select(index_topk), expected)


@pytest.mark.parametrize("index_topk", [1, 7, 8, 1000, 2048])
def test_any_k_around_the_length(index_topk):
    lengths = [0, 1, index_topk - 1, index_topk, index_topk + 1, index_topk + 77]
    case = Case([sorted(lengths)], page_size=64, heads=1, dim=1)
    # Scores are the identity of the key: the k largest keys must come back.
    case.q[:] = case.weights[:] = 1
    values = torch.randperm(index_topk + 77).float() + 1
    keys = case.keys.nan_to_num(0)
    positions = torch.arange(index_topk + 77)
    keys[case.table[0].long()[positions // 64] * 64 + positions % 64, 0] = values
    case.keys = torch.where(case.keys.isnan(), case.keys, keys)
    selected = case.select(index_topk)
    assert selected.dtype == torch.int32
    for row, length in zip(selected, sorted(lengths), strict=True):
        count = min(length, index_topk)
        best = values[:length].topk(count).indices.sort().values
        assert torch.equal(row[:count].long(), best)
        assert (row[count:] == -1).all()


@pytest.mark.parametrize("heads", [1, 2])
def test_ties_keep_the_lowest_positions(heads):
    """Every score is cut to exactly 0: the first index_topk positions win."""
    case = Case([[30, 31, 32]], heads=heads)
    case.q[:], case.keys[:] = -1, case.keys.abs()
    selected = case.select(9)
    assert torch.equal(selected, torch.arange(9, dtype=torch.int32).expand(3, 9))


def test_ties_below_a_strict_winner():
    case = Case([[20]], heads=1, dim=1)
    case.q[:] = case.weights[:] = 1
    for position, value in enumerate([0] * 10 + [5] + [0] * 5 + [7, 0, 0, 0]):
        case.keys[case.table[0, position // 5] * 5 + position % 5] = float(value)
    assert case.select(4).tolist() == [[0, 1, 10, 16]]


def test_negative_weights_rank_below_untouched_keys():
    """Head weights are signed, and the relu sits inside the head sum."""
    q = torch.tensor([[[1.0], [-1.0]]])
    weights = torch.tensor([[-1.0, 1.0]])
    keys = torch.tensor([[1.0], [-2.0], [3.0]])  # scores -1, +2, -3
    selected = index_select(
        q,
        weights,
        keys,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        index_topk=2,
        page_size=3,
        block_stride=1,
    )
    assert selected.tolist() == [[0, 1]]


def test_slots_are_all_written():
    """No entry is left to what the allocator held: run with poisoned fresh memory."""
    torch.use_deterministic_algorithms(True)  # fills every torch.empty
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        case = Case(MIXED, heads=1, integer=True)
        selected = case.select(9)
    finally:
        torch.use_deterministic_algorithms(False)
    for row, length in zip(selected.tolist(), case.lengths_list, strict=True):
        valid = row[: min(9, length)]
        assert len(set(valid)) == len(valid) and all(0 <= p < length for p in valid)
        assert all(p == -1 for p in row[len(valid) :])


def test_keys_beyond_a_row_are_not_seen():
    """What later rows of the same request wrote never reaches an earlier row, NaN included."""
    case = Case([[20, 40]])
    expected = case.expected(6)
    for position in range(20, 40):
        case.keys[case.table[0, position // 5] * 5 + position % 5] = torch.nan
    assert torch.equal(case.select(6)[0], expected[0])


def test_broken_scores_still_fill_valid_slots():
    case = Case([[30], [30]])
    healthy = case.select(8)[1]
    case.q[0] = torch.nan
    selected = case.select(8)
    assert torch.equal(selected[1], healthy)
    assert ((selected[0] >= 0) & (selected[0] < 30)).all()
    assert selected[0].unique().numel() == 8


@pytest.mark.parametrize("tile_keys", [1, 7, 16])
def test_tile_borders_change_nothing(monkeypatch, tile_keys):
    case = Case(MIXED, heads=17)
    expected = case.expected(7)
    monkeypatch.setattr(MODULE, "TILE_KEYS", tile_keys)
    for tile_elements in (1, 50, 300):
        monkeypatch.setattr(MODULE, "TILE_ELEMENTS", tile_elements)
        assert torch.equal(case.select(7), expected)


def test_contiguous_keys_as_one_page_per_request():
    """The uncached form: pages of one row each stride, block_table = first row of a request."""
    case = Case([[12, 13], [30, 31]])
    keys = torch.cat(case.keys_by_request)
    table = torch.tensor([[0], [13]], dtype=torch.int32)
    selected = index_select(
        case.q,
        case.weights,
        keys,
        table,
        case.request,
        case.lengths,
        index_topk=7,
        page_size=31,
        block_stride=1,
    )
    assert torch.equal(selected, case.expected(7))


def test_low_precision_inputs_are_scored_in_fp32():
    """Scores 1e-3 apart at magnitude 8 keep their order although bf16 cannot tell them apart."""
    q = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    weights = torch.tensor([[1e-3]])
    keys = torch.full((40, 1), 8000.0, dtype=torch.bfloat16)
    keys[[3, 29]] = 8064.0  # next bf16 value: scores 8.000 and 8.064, both 8.0 after a bf16 sum
    keys[[5, 6]] = 7968.0
    head_weights = torch.tensor([[1e-3, 1.0]])
    q2 = torch.cat([q, torch.zeros_like(q)], dim=1)
    table = torch.zeros(1, 1, dtype=torch.int32)
    request, lengths = torch.zeros(1, dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    for queries, w in ((q, weights), (q2, head_weights)):
        selected = index_select(
            queries, w, keys, table, request, lengths, index_topk=2, page_size=40, block_stride=1
        )
        assert selected.tolist() == [[3, 29]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_rows(dtype):
    case = Case([[3], [4]])
    empty = torch.empty(0, dtype=torch.int32)
    selected = index_select(
        case.q[:0].to(dtype),
        case.weights[:0],
        case.keys.to(dtype),
        case.table,
        empty,
        empty,
        index_topk=5,
        page_size=5,
        block_stride=5,
    )
    assert selected.shape == (0, 5) and selected.dtype == torch.int32


def test_index_topk_must_be_positive():
    case = Case([[3]])
    with pytest.raises(ValueError, match="index_topk"):
        case.select(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    case = Case([[0, 3, 12], [20]])
    case.q, case.keys = case.q.to(dtype), case.keys.to(dtype)
    torch.library.opcheck(OP, case.args(7))


def test_is_tagged_as_the_graph_break():
    assert torch.Tag.cudagraph_unsafe in OP.tags


def test_autocast_does_not_reach_the_scores():
    """In bf16 near ties are decided by rounding: other positions would be chosen."""
    case = Case([list(range(170, 200)), [77, 150]], seed=3)
    expected = case.select(40)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case.select(40), expected)
    low = index_select_ref(
        case.q.bfloat16(), case.weights, case.keys.bfloat16(), *case.args(40)[3:]
    )
    assert not torch.equal(low, expected)  # so that the case has something to get wrong
