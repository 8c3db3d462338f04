"""Triton kernel of `all_reduce_add_rms_norm`: the addition and the norm after the collective."""

import triton
import triton.language as tl
from torch import Tensor

from glm53.ops.kernels.rows import rms_norm_row
from glm53.ops.norm_rope import dense_rows


@triton.jit
def _kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    stream_ptr,
    x_stride,
    residual_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (T,): one row."""
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_D)
    inside = i < D
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + t * x_stride + i, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + t * residual_stride + i, mask=inside, other=0.0)
    stream = (residual.to(tl.float32) + x).to(dtype)
    tl.store(stream_ptr + t * D + i, stream, mask=inside)
    y = rms_norm_row(stream.to(tl.float32), weight_ptr, i, inside, eps, D, dtype)
    tl.store(normed_ptr + t * D + i, y.to(dtype), mask=inside)


def launch(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """One launch."""
    num_rows, dim = x_TD.shape
    normed_TD, stream_TD = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)
    if num_rows == 0:
        return normed_TD, stream_TD
    x_TD = dense_rows(x_TD)
    residual_TD = dense_rows(residual_TD)
    _kernel[(num_rows,)](
        x_TD,
        residual_TD,
        weight_D,
        normed_TD,
        stream_TD,
        x_TD.stride(0),
        residual_TD.stride(0),
        eps,
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=8,
    )
    return normed_TD, stream_TD
