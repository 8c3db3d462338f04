"""Triton kernel of `norm_rope_cache`: a grid of rows and branches."""

import triton
import triton.language as tl
from torch import Tensor

from glm53.ops.kernels.rows import rms_norm_row, rope_partner, rotate
from glm53.ops.norm_rope import dense_rows


@triton.jit
def _kernel(
    q_ptr,
    q_norm_ptr,
    q_out_ptr,
    kv_ptr,
    kv_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    latent_cache_ptr,
    key_ptr,
    key_weight_ptr,
    key_bias_ptr,
    key_cache_ptr,
    q_stride,
    kv_stride,
    cos_stride,
    sin_stride,
    latent_cache_stride,
    key_stride,
    key_cache_stride,
    eps,
    index_eps,
    Q: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    G: tl.constexpr,
    interleave: tl.constexpr,
    index_interleave: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Grid (T, 2 or 3): a row's query latent, its cache row, its index key."""
    t = tl.program_id(0).to(tl.int64)
    branch = tl.program_id(1)
    if branch == 0:
        i = tl.arange(0, BLOCK_Q)
        x = tl.load(q_ptr + t * q_stride + i, mask=i < Q, other=0.0).to(tl.float32)
        y = rms_norm_row(x, q_norm_ptr, i, i < Q, eps, Q, q_ptr.dtype.element_ty)
        tl.store(q_out_ptr + t * Q + i, y.to(q_out_ptr.dtype.element_ty), mask=i < Q)
        return
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:
        return
    cos_row = cos_ptr + t * cos_stride
    sin_row = sin_ptr + t * sin_stride
    if branch == 1:
        row = kv_ptr + t * kv_stride
        out = latent_cache_ptr + slot * latent_cache_stride
        i = tl.arange(0, BLOCK_C)
        x = tl.load(row + i, mask=i < C, other=0.0).to(tl.float32)
        y = rms_norm_row(x, kv_norm_ptr, i, i < C, eps, C, kv_ptr.dtype.element_ty)
        tl.store(out + i, y.to(latent_cache_ptr.dtype.element_ty), mask=i < C)
        r = tl.arange(0, BLOCK_R)
        partner, entry, is_first = rope_partner(r, R, interleave)
        x = tl.load(row + C + r, mask=r < R, other=0.0).to(tl.float32)
        x2 = tl.load(row + C + partner, mask=r < R, other=0.0).to(tl.float32)
        y = rotate(x, x2, cos_row, sin_row, entry, is_first, r < R)
        y = y.to(kv_ptr.dtype.element_ty).to(latent_cache_ptr.dtype.element_ty)
        tl.store(out + C + r, y, mask=r < R)
    else:
        row = key_ptr + t * key_stride
        g = tl.arange(0, BLOCK_G)
        inside = g < G
        rotates = g < R
        partner, entry, is_first = rope_partner(g, R, index_interleave)
        x = tl.load(row + g, mask=inside, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / G
        centred = tl.where(inside, x - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / G + index_eps)
        weight = tl.load(key_weight_ptr + g, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(key_bias_ptr + g, mask=inside, other=0.0).to(tl.float32)
        y = centred * rstd * weight + bias
        x2 = tl.load(row + partner, mask=rotates, other=0.0).to(tl.float32)
        weight2 = tl.load(key_weight_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
        bias2 = tl.load(key_bias_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
        y2 = (x2 - mean) * rstd * weight2 + bias2
        y = rotate(y, y2, cos_row, sin_row, entry, is_first, rotates)
        y = y.to(key_ptr.dtype.element_ty).to(key_cache_ptr.dtype.element_ty)
        tl.store(key_cache_ptr + slot * key_cache_stride + g, y, mask=inside)


def launch(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None,
    index_norm_weight_G: Tensor | None,
    index_norm_bias_G: Tensor | None,
    index_key_cache_MG: Tensor | None,
    eps: float,
    index_eps: float,
    interleave: bool,
    index_interleave: bool,
) -> Tensor:
    """One launch. A slot past the end of a cache is not noticed."""
    num_rows, q_dim = q_latent_TQ.shape
    q_out_TQ = q_latent_TQ.new_empty(q_latent_TQ.shape)
    if num_rows == 0:
        return q_out_TQ
    q_latent_TQ, kv_a_TX = dense_rows(q_latent_TQ), dense_rows(kv_a_TX)
    cos_TR, sin_TR, slots_T = dense_rows(cos_TR), dense_rows(sin_TR), dense_rows(slots_T)
    latent_dim, rotary_dim = kv_norm_C.shape[0], 2 * cos_TR.shape[1]
    if index_key_TG is None:
        # Pointers of a branch that the grid does not have.
        key_TG, key_weight_G, key_bias_G, key_cache_MG = kv_a_TX, kv_norm_C, kv_norm_C, kv_a_TX
        key_dim = 2
    else:
        assert index_norm_weight_G is not None and index_norm_bias_G is not None
        assert index_key_cache_MG is not None
        key_TG, key_cache_MG = dense_rows(index_key_TG), index_key_cache_MG
        key_weight_G, key_bias_G = index_norm_weight_G, index_norm_bias_G
        key_dim = key_TG.shape[1]
    _kernel[(num_rows, 2 if index_key_TG is None else 3)](
        q_latent_TQ,
        q_norm_Q,
        q_out_TQ,
        kv_a_TX,
        kv_norm_C,
        cos_TR,
        sin_TR,
        slots_T,
        latent_cache_MX,
        key_TG,
        key_weight_G,
        key_bias_G,
        key_cache_MG,
        q_latent_TQ.stride(0),
        kv_a_TX.stride(0),
        cos_TR.stride(0),
        sin_TR.stride(0),
        latent_cache_MX.stride(0),
        key_TG.stride(0),
        key_cache_MG.stride(0),
        eps,
        index_eps,
        Q=q_dim,
        C=latent_dim,
        R=rotary_dim,
        G=key_dim,
        interleave=interleave,
        index_interleave=index_interleave,
        BLOCK_Q=triton.next_power_of_2(q_dim),
        BLOCK_C=triton.next_power_of_2(latent_dim),
        BLOCK_R=triton.next_power_of_2(rotary_dim),
        BLOCK_G=triton.next_power_of_2(key_dim),
    )
    return q_out_TQ
