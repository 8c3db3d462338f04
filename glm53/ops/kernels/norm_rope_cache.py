"""Triton kernel of `norm_rope_cache`: a grid of rows and branches."""

import triton
import triton.language as tl
from torch import Tensor

from glm53.ops.kernels.rows import rms_norm_row, rope_partner, rotate
from glm53.ops.norm_rope import dense_rows


@triton.jit
def _write_query(row_ptr, norm_ptr, out_ptr, eps, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK_Q)
    x = tl.load(row_ptr + i, mask=i < Q, other=0.0).to(tl.float32)
    y = rms_norm_row(x, norm_ptr, i, i < Q, eps, Q, dtype)
    tl.store(out_ptr + i, y.to(dtype), mask=i < Q)


@triton.jit
def _write_latent(
    row_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    interleave: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    cache_dtype: tl.constexpr = out_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK_C)
    latent = tl.load(row_ptr + i, mask=i < C, other=0.0).to(tl.float32)
    normed = rms_norm_row(latent, norm_ptr, i, i < C, eps, C, dtype)
    tl.store(out_ptr + i, normed.to(cache_dtype), mask=i < C)
    r = tl.arange(0, BLOCK_R)
    partner, entry, is_first = rope_partner(r, R, interleave)
    x = tl.load(row_ptr + C + r, mask=r < R, other=0.0).to(tl.float32)
    x2 = tl.load(row_ptr + C + partner, mask=r < R, other=0.0).to(tl.float32)
    rotated = rotate(x, x2, cos_ptr, sin_ptr, entry, is_first, r < R)
    tl.store(out_ptr + C + r, rotated.to(dtype).to(cache_dtype), mask=r < R)


@triton.jit
def _write_index_key(
    row_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    R: tl.constexpr,
    G: tl.constexpr,
    interleave: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    g = tl.arange(0, BLOCK_G)
    inside = g < G
    rotates = g < R
    partner, entry, is_first = rope_partner(g, R, interleave)
    x = tl.load(row_ptr + g, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / G
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / G + eps)
    weight = tl.load(weight_ptr + g, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + g, mask=inside, other=0.0).to(tl.float32)
    normed = centred * rstd * weight + bias
    # The other half of a pair is normed a second time: a value of another lane is not at hand.
    x2 = tl.load(row_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
    weight2 = tl.load(weight_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
    bias2 = tl.load(bias_ptr + partner, mask=rotates, other=0.0).to(tl.float32)
    normed2 = (x2 - mean) * rstd * weight2 + bias2
    key = rotate(normed, normed2, cos_ptr, sin_ptr, entry, is_first, rotates)
    key = key.to(row_ptr.dtype.element_ty).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g, key, mask=inside)


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
        _write_query(q_ptr + t * q_stride, q_norm_ptr, q_out_ptr + t * Q, eps, Q, BLOCK_Q)
    else:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        if slot >= 0:
            if branch == 1:
                _write_latent(
                    kv_ptr + t * kv_stride,
                    kv_norm_ptr,
                    cos_ptr + t * cos_stride,
                    sin_ptr + t * sin_stride,
                    latent_cache_ptr + slot * latent_cache_stride,
                    eps,
                    C,
                    R,
                    interleave,
                    BLOCK_C,
                    BLOCK_R,
                )
            else:
                _write_index_key(
                    key_ptr + t * key_stride,
                    key_weight_ptr,
                    key_bias_ptr,
                    cos_ptr + t * cos_stride,
                    sin_ptr + t * sin_stride,
                    key_cache_ptr + slot * key_cache_stride,
                    index_eps,
                    R,
                    G,
                    index_interleave,
                    BLOCK_G,
                )


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
