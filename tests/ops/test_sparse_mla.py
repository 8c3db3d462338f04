"""sparse_mla: attention over selected rows, and nothing but selected rows."""

import importlib
import math
from unittest import mock

import pytest
import torch

from glm53.ops import sparse_mla
from glm53.ops.sparse_mla import sparse_mla_ref

OP = torch.ops.glm53.sparse_mla.default
MODULE = importlib.import_module("glm53.ops.sparse_mla")  # the package exports the function

VALUE_DIM, ROPE, HEADS, ROWS, SCALE = 6, 3, 5, 23, 0.37


def _case(indices=None, *, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    if indices is None:
        indices = [
            [0, 3, 4, 22, -1],
            [-1, -1, -1, -1, -1],
            [7, -1, -1, -1, -1],
            [-1, 5, -1, 2, -1],
            [1, 2, 3, 4, 5],
        ]
    indices = torch.tensor(indices, dtype=torch.int32)
    q = torch.randn(indices.shape[0], HEADS, VALUE_DIM + ROPE, generator=g, dtype=torch.float64)
    rows = torch.randn(ROWS, VALUE_DIM + ROPE, generator=g, dtype=torch.float64)
    counts = (indices >= 0).sum(-1, dtype=torch.int32)
    return q.to(dtype), rows.to(dtype), indices, counts


def _run(case):
    return sparse_mla(*case, value_dim=VALUE_DIM, scale=SCALE)


def loop_attention(q, rows, indices, counts, value=lambda row: row):
    """Softmax spelled out per token and head, in fp64; of `value` of the rows."""
    out = torch.zeros(*q.shape[:2], VALUE_DIM, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            total = 0.0
            for i in indices[t].tolist():
                if i >= 0:
                    weight = math.exp(SCALE * torch.dot(q[t, h].double(), rows[i].double()).item())
                    total += weight
                    out[t, h] += weight * value(rows[i, :VALUE_DIM].double())
            if total:
                out[t, h] /= total
                lse[t, h] = math.log(total)
    return out, lse


@pytest.mark.parametrize("implementation", ["op", "reference"])
def test_equals_loops(implementation):
    case = _case()
    expected = loop_attention(*case)
    got = _run(case) if implementation == "op" else sparse_mla_ref(*case, VALUE_DIM, SCALE)
    torch.testing.assert_close(got[0].double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-6)


def test_fp64_is_computed_in_fp64():
    case = _case(dtype=torch.float64)
    got, expected = _run(case), loop_attention(*case)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["own", "shared"])
def test_half_precision_rounds_inputs_softmax_and_output(form, dtype):
    """Two roundings to nearest, of every weight and of the result: bounded by the unit roundoff
    times the sum of |weight * value|, each. Scores and the log of their sum are not rounded."""
    same = [[*range(20), -1]] * MODULE.MIN_SHARED_ROWS
    case = _case(same if form == "shared" else None, dtype=dtype)
    with mock.patch.object(MODULE, "_attend_shared", wraps=MODULE._attend_shared) as shared:
        out, lse = _run(case)
    assert shared.called == (form == "shared")
    assert out.dtype == dtype and lse.dtype == torch.float32
    expected_out, expected_lse = loop_attention(*case)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-6)
    weighed, _ = loop_attention(case[0], case[1], case[2], case[3], value=torch.abs)
    unit = torch.finfo(dtype).eps / 2
    assert ((out.double() - expected_out).abs() <= 2.01 * unit * weighed).all()


@pytest.mark.parametrize("form", ["own", "shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_another_dtype_are_not_rounded(dtype, form):
    """A cache in fp32 below a model in half precision, or autocast over one in fp32."""
    same = [[*range(20), -1]] * MODULE.MIN_SHARED_ROWS
    q, rows, indices, counts = _case(same if form == "shared" else None)
    case = q.to(dtype), rows, indices, counts
    out, lse = _run(case)
    expected_out, expected_lse = loop_attention(*case)
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), expected_out, rtol=rounding, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-6)


def test_rows_without_a_key_give_zero_and_minus_infinity():
    out, lse = _run(_case())
    assert torch.equal(out[1], torch.zeros(HEADS, VALUE_DIM))
    assert (lse[1] == -torch.inf).all()
    assert lse[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("indices", [[[-1, -1]] * 3, []], ids=["all empty", "no rows"])
def test_nothing_selected_at_all(indices):
    q, rows, _, _ = _case()
    indices = torch.tensor(indices, dtype=torch.int32).view(-1, 2)
    counts = torch.zeros(indices.shape[0], dtype=torch.int32)
    out, lse = _run((q[: indices.shape[0]], rows * torch.nan, indices, counts))
    assert out.shape == (indices.shape[0], HEADS, VALUE_DIM)
    assert not out.any() and (lse == -torch.inf).all()


def test_one_key_returns_its_value():
    case = _case()
    rows = case[1]
    torch.testing.assert_close(_run(case)[0][2], rows[7, :VALUE_DIM].expand(HEADS, -1))


def test_every_row_that_nobody_selected_may_be_nan():
    q, rows, indices, counts = _case()
    expected = _run((q, rows, indices, counts))
    poisoned = torch.full_like(rows, torch.nan)
    for i in indices[indices >= 0].tolist():
        poisoned[i] = rows[i]
    got = _run((q, poisoned, indices, counts))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_invalid_index_next_to_row_zero():
    """[-1, 0]: only row 0 contributes; the last row, which -1 would address, is NaN."""
    q, rows, _, _ = _case()
    rows[1:] = torch.nan
    out, _ = _run(
        (q[:1], rows, torch.tensor([[-1, 0]], dtype=torch.int32), torch.tensor([1]).int())
    )
    torch.testing.assert_close(out[0], rows[0, :VALUE_DIM].expand(HEADS, -1))


def test_holes_do_not_read_row_zero():
    """No query selected row 0: it is not a stand-in for an invalid entry, forward or backward."""
    q, rows, _, _ = _case(dtype=torch.float64)
    indices = torch.tensor([[-1, 5, 2, -1], [7, -1, 3, 4]], dtype=torch.int32)
    case = (q[:2], rows, indices, torch.tensor([2, 3], dtype=torch.int32))
    expected, grads = _run(case), _gradients(case)
    rows[0] = torch.nan
    got = _run(case)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert all(torch.equal(a, b) for a, b in zip(_gradients(case), grads, strict=True))


def test_padding_row_does_not_read_row_zero():
    q, rows, _, _ = _case()
    rows[0] = torch.nan
    indices = torch.tensor([[-1, -1], [3, 4]], dtype=torch.int32)
    out, lse = _run((q[:2], rows, indices, torch.tensor([0, 2]).int()))
    assert not out[0].any() and (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_index_past_the_rows_raises():
    q, rows, indices, counts = _case([[0, ROWS]])
    with pytest.raises((IndexError, RuntimeError)):
        _run((q, rows, indices, counts))


def test_scale_is_applied_once_to_large_scores():
    """Scores of a few hundred: softmax must be shifted by its maximum."""
    q, rows, indices, counts = _case(dtype=torch.float64)
    case = (q * 300, rows, indices, counts)
    got, expected = _run(case), _run((q, rows * 1.0, indices, counts))
    assert got[0].isfinite().all() and got[1][0].isfinite().all()
    best = (SCALE * 300 * q[0] @ rows[indices[0, :4].long()].T).amax(-1)
    torch.testing.assert_close(got[1][0], best, rtol=0, atol=1.5)
    assert not torch.allclose(got[0], expected[0])


@pytest.mark.parametrize("tile_elements", [1, 60, 100, 200])
def test_tile_borders_change_nothing(monkeypatch, tile_elements):
    expected = _run(_case(dtype=torch.float64))
    grads = _gradients(_case(dtype=torch.float64))
    monkeypatch.setattr(MODULE, "TILE_ELEMENTS", tile_elements)
    got = _run(_case(dtype=torch.float64))
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        _gradients(_case(dtype=torch.float64)), grads, rtol=1e-13, atol=1e-13
    )


def _gradients(case, function=_run):
    q, rows = case[0].clone().requires_grad_(), case[1].clone().requires_grad_()
    out, lse = function((q, rows, *case[2:]))
    finite = lse.masked_fill(~lse.isfinite(), 0)
    (out.pow(2).sum() + (finite * torch.arange(1, HEADS + 1)).sum()).backward()
    return q.grad, rows.grad


def test_gradients_equal_those_of_dense_masked_attention():
    def dense(case):
        q, rows, indices, _ = case
        visible = torch.zeros(q.shape[0], ROWS, dtype=torch.bool)
        for t, row in enumerate(indices.tolist()):
            visible[t, [i for i in row if i >= 0]] = True
        scores = SCALE * torch.einsum("thx,nx->thn", q, rows)
        scores = scores.masked_fill(~visible[:, None], -1e300)
        lse = scores.logsumexp(-1)
        probs = scores.softmax(-1) * visible.any(-1)[:, None, None]
        lse = lse.masked_fill(~visible.any(-1)[:, None], -torch.inf)
        return torch.einsum("thn,nc->thc", probs, rows[:, :VALUE_DIM]), lse

    case = _case(dtype=torch.float64)
    got, expected = _gradients(case), _gradients(case, dense)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert not got[0][1].any()  # the row without keys


def test_gradients_with_poisoned_unselected_rows():
    q, rows, indices, counts = _case(dtype=torch.float64)
    expected = _gradients((q, rows, indices, counts))
    selected = indices[indices >= 0].unique().long()
    poisoned = torch.full_like(rows, torch.nan).index_copy(0, selected, rows[selected])
    got = _gradients((q, poisoned, indices, counts))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


def test_gradcheck():
    q, rows, indices, counts = _case([[0, 3, -1], [2, -1, 0]], dtype=torch.float64)
    q, rows = q[:, :2].clone().requires_grad_(), rows[:5].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda a, b: sparse_mla(a, b, indices, counts, value_dim=VALUE_DIM, scale=SCALE),
        (q, rows),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    q, rows, indices, counts = _case(dtype=dtype)
    # A row without keys has lse = -inf, whose difference to itself is NaN: leave it out.
    keep = counts > 0
    q, indices, counts = q[keep], indices[keep], counts[keep]
    args = (q.requires_grad_(), rows.requires_grad_(), indices, counts, VALUE_DIM, SCALE)
    torch.library.opcheck(OP, args)


NOTHING = {
    "no keys": (0, torch.full((3, 4), -1)),
    "nothing selected": (ROWS, torch.full((3, 4), -1)),
    "no slots": (ROWS, torch.zeros(3, 0)),
    "no queries": (ROWS, torch.zeros(0, 4)),
}


@pytest.mark.parametrize(("num_rows", "indices"), NOTHING.values(), ids=NOTHING.keys())
def test_backward_of_nothing(num_rows, indices):
    indices = indices.to(torch.int32)
    q = torch.randn(indices.shape[0], HEADS, VALUE_DIM + ROPE, requires_grad=True)
    rows = torch.full((num_rows, VALUE_DIM + ROPE), torch.nan, requires_grad=True)
    counts = torch.zeros(indices.shape[0], dtype=torch.int32)
    out, lse = _run((q, rows, indices, counts))
    (out.sum() + lse.masked_fill(~lse.isfinite(), 0).sum()).backward()
    assert q.grad.shape == q.shape and not q.grad.any()
    assert rows.grad.shape == rows.shape and not rows.grad.any()
    q, rows = q.detach(), rows.detach()
    args = (out.detach(), torch.zeros_like(lse), q, rows, indices, out.detach(), lse.detach())
    torch.library.opcheck(torch.ops.glm53.sparse_mla_backward.default, (*args, VALUE_DIM, SCALE))


def test_autocast_changes_nothing():
    """Softmax and sums are fp32, forward and backward, also inside an autocast region."""
    case = _case()
    expected, gradients = _run(case), _gradients(case)
    with torch.autocast("cpu", torch.bfloat16):
        got = _run(case)
        got_gradients = _gradients(case)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got_gradients, gradients, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_backward(dtype):
    q, rows, indices, _ = case = _case(dtype=dtype)
    out, lse = _run(case)
    grads = (torch.randn_like(out), torch.randn_like(lse))
    args = (*grads, q, rows, indices, out, lse, VALUE_DIM, SCALE)
    torch.library.opcheck(torch.ops.glm53.sparse_mla_backward.default, args)


def _alike(rows, kept, spread, seed=0):
    """Each query selects `kept` of the same `spread` slots, queries of a prompt as they are."""
    g = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(spread, generator=g)[:kept].sort().values for _ in range(rows)]
    return torch.stack(drawn).to(torch.int32)


# All in one block; several blocks, a last one that is smaller; too many slots; too few queries.
@pytest.mark.parametrize(
    ("rows", "spread", "sharing"),
    [(64, 40, 64), (150, 40, 150), (37, 60, 37), (64, 300, 0), (15, 21, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_select_alike(rows, spread, sharing, dtype, monkeypatch):
    indices = _alike(rows, 20, spread)
    indices[3, 5:], indices[7, :] = -1, -1
    counts = (indices >= 0).sum(-1, dtype=torch.int32)
    q, cache = torch.randn(rows, 3, 22).to(dtype), torch.randn(400, 22).to(dtype)
    cache[spread:] = torch.nan
    shared, real = [], MODULE._attend_shared
    monkeypatch.setattr(MODULE, "_attend_shared", lambda *a: shared.append(len(a[0])) or real(*a))
    out, lse = sparse_mla(q, cache, indices, counts, value_dim=17, scale=0.3)
    assert sum(shared) == sharing
    exact, exact_lse = sparse_mla_ref(q.double(), cache.double(), indices, counts, 17, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-4)


def test_nan_in_a_shared_block_reaches_its_own_queries_only():
    """A broken request's keys among those of a block."""
    indices = _alike(32, 20, 30)
    indices[:, -1] = 30  # a slot that everybody shares but queries 4 and 9
    indices[[4, 9], -1] = torch.tensor([31, 32], dtype=torch.int32)
    counts = torch.full((32,), 20, dtype=torch.int32)
    q, cache = torch.randn(32, 3, 22), torch.randn(40, 22)
    expected, _ = sparse_mla(q, cache, indices, counts, value_dim=17, scale=0.3)
    cache[31] = torch.nan
    out, _ = sparse_mla(q, cache, indices, counts, value_dim=17, scale=0.3)
    assert out[4].isnan().all()
    others = torch.arange(32) != 4
    torch.testing.assert_close(out[others], expected[others], rtol=1e-5, atol=1e-5)
