"""Triton kernel of `index_query`: a grid of rows and heads."""

import triton
import triton.language as tl
from torch import Tensor

from glm53.ops.kernels.rows import rope_partner, rotate
from glm53.ops.norm_rope import dense_rows


@triton.jit
def _write_query(
    latent_ptr,
    pe_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    C: tl.constexpr,
    R: tl.constexpr,
    interleave: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    i = tl.arange(0, BLOCK_C)
    tl.store(out_ptr + i, tl.load(latent_ptr + i, mask=i < C, other=0.0), mask=i < C)
    r = tl.arange(0, BLOCK_R)
    partner, entry, is_first = rope_partner(r, R, interleave)
    x = tl.load(pe_ptr + r, mask=r < R, other=0.0).to(tl.float32)
    x2 = tl.load(pe_ptr + partner, mask=r < R, other=0.0).to(tl.float32)
    rotated = rotate(x, x2, cos_ptr, sin_ptr, entry, is_first, r < R)
    tl.store(out_ptr + C + r, rotated.to(out_ptr.dtype.element_ty), mask=r < R)


@triton.jit
def _write_index_query(
    index_q_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    R: tl.constexpr,
    G: tl.constexpr,
    interleave: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    g = tl.arange(0, BLOCK_G)
    partner, entry, is_first = rope_partner(g, R, interleave)
    x = tl.load(index_q_ptr + g, mask=g < G, other=0.0).to(tl.float32)
    x2 = tl.load(index_q_ptr + partner, mask=g < R, other=0.0).to(tl.float32)
    rotated = rotate(x, x2, cos_ptr, sin_ptr, entry, is_first, g < R)
    tl.store(out_ptr + g, rotated.to(out_ptr.dtype.element_ty), mask=g < G)


@triton.jit
def _kernel(
    latent_ptr,
    pe_ptr,
    query_ptr,
    cos_ptr,
    sin_ptr,
    index_q_ptr,
    index_query_ptr,
    head_weights_ptr,
    weights_ptr,
    latent_stride,
    latent_head_stride,
    pe_stride,
    pe_head_stride,
    cos_stride,
    sin_stride,
    index_q_stride,
    index_q_head_stride,
    head_weights_stride,
    weight_scale,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    J: tl.constexpr,
    G: tl.constexpr,
    interleave: tl.constexpr,
    index_interleave: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (T, H + J): a head of the query, or a head of the index query and its weight."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cos_row = cos_ptr + t * cos_stride
    sin_row = sin_ptr + t * sin_stride
    if head < H:
        _write_query(
            latent_ptr + t * latent_stride + head * latent_head_stride,
            pe_ptr + t * pe_stride + head * pe_head_stride,
            cos_row,
            sin_row,
            query_ptr + (t * H + head) * (C + R),
            C,
            R,
            interleave,
            BLOCK_C,
            BLOCK_R,
        )
    else:
        j = head - H
        _write_index_query(
            index_q_ptr + t * index_q_stride + j * index_q_head_stride,
            cos_row,
            sin_row,
            index_query_ptr + (t * J + j) * G,
            R,
            G,
            index_interleave,
            BLOCK_G,
        )
        weight = tl.load(head_weights_ptr + t * head_weights_stride + j)
        tl.store(weights_ptr + t * J + j, weight * weight_scale)


def launch(
    q_latent_THC: Tensor,
    q_pe_THR: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    index_q_TJG: Tensor | None,
    head_weights_TJ: Tensor | None,
    weight_scale: float,
    interleave: bool,
    index_interleave: bool,
) -> list[Tensor]:
    """One launch."""
    num_rows, num_heads, latent_dim = q_latent_THC.shape
    rotary_dim = q_pe_THR.shape[2]
    outputs = [q_latent_THC.new_empty(num_rows, num_heads, latent_dim + rotary_dim)]
    if index_q_TJG is None or head_weights_TJ is None:
        # Pointers of heads that the grid does not have.
        index_q_TJG, head_weights_TJ = q_pe_THR, cos_TR
        index_query_TJG, weights_TJ = outputs[0], cos_TR
        index_heads, index_dim = 0, rotary_dim
    else:
        index_query_TJG = index_q_TJG.new_empty(index_q_TJG.shape)
        weights_TJ = head_weights_TJ.new_empty(head_weights_TJ.shape)
        outputs += [index_query_TJG, weights_TJ]
        index_heads, index_dim = index_q_TJG.shape[1:]
    if num_rows == 0:
        return outputs
    q_latent_THC, q_pe_THR = dense_rows(q_latent_THC), dense_rows(q_pe_THR)
    cos_TR, sin_TR = dense_rows(cos_TR), dense_rows(sin_TR)
    index_q_TJG, head_weights_TJ = dense_rows(index_q_TJG), dense_rows(head_weights_TJ)
    _kernel[(num_rows, num_heads + index_heads)](
        q_latent_THC,
        q_pe_THR,
        outputs[0],
        cos_TR,
        sin_TR,
        index_q_TJG,
        index_query_TJG,
        head_weights_TJ,
        weights_TJ,
        q_latent_THC.stride(0),
        q_latent_THC.stride(1),
        q_pe_THR.stride(0),
        q_pe_THR.stride(1),
        cos_TR.stride(0),
        sin_TR.stride(0),
        index_q_TJG.stride(0),
        index_q_TJG.stride(1),
        head_weights_TJ.stride(0),
        weight_scale,
        H=num_heads,
        C=latent_dim,
        R=rotary_dim,
        J=index_heads,
        G=index_dim,
        interleave=interleave,
        index_interleave=index_interleave,
        BLOCK_C=triton.next_power_of_2(latent_dim),
        BLOCK_R=triton.next_power_of_2(rotary_dim),
        BLOCK_G=triton.next_power_of_2(index_dim),
        num_warps=1,
    )
    return outputs
