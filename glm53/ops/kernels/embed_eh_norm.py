"""Triton kernel of `embed_eh_norm`: a grid of rows and halves."""

import triton
import triton.language as tl
from torch import Tensor

from glm53.ops.kernels.rows import rms_norm_row
from glm53.ops.norm_rope import dense_rows


@triton.jit
def _kernel(
    ids_ptr,
    positions_ptr,
    table_ptr,
    hidden_ptr,
    enorm_ptr,
    hnorm_ptr,
    out_ptr,
    table_stride,
    hidden_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (T, 2): the two halves of a row."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_D)
    inside = i < D
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if tl.program_id(1) == 0:
        row = table_ptr + tl.load(ids_ptr + t).to(tl.int64) * table_stride
        embedded = inside & (tl.load(positions_ptr + t) != 0)
        x = tl.load(row + i, mask=embedded, other=0.0).to(tl.float32)
        y = rms_norm_row(x, enorm_ptr, i, inside, eps, D, dtype)
        tl.store(out_ptr + 2 * t * D + i, y.to(dtype), mask=inside)
    else:
        x = tl.load(hidden_ptr + t * hidden_stride + i, mask=inside, other=0.0).to(tl.float32)
        y = rms_norm_row(x, hnorm_ptr, i, inside, eps, D, dtype)
        tl.store(out_ptr + (2 * t + 1) * D + i, y.to(dtype), mask=inside)


def launch(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> Tensor:
    """One launch. An id outside the table is not noticed."""
    num_rows, dim = hidden_TD.shape
    out = hidden_TD.new_empty(num_rows, 2 * dim)
    if num_rows == 0:
        return out
    hidden_TD = dense_rows(hidden_TD)
    _kernel[(num_rows, 2)](
        dense_rows(ids_T),
        dense_rows(positions_T),
        table_WD,
        hidden_TD,
        enorm_D,
        hnorm_D,
        out,
        table_WD.stride(0),
        hidden_TD.stride(0),
        eps,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=8,
    )
    return out
