"""Norms and rope of one row in Triton; equations and roundings as in `norm_rope.py`."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_row(x, weight_ptr, offsets, inside, eps, dim: tl.constexpr, dtype: tl.constexpr):
    """x: fp32, 0 where not inside. Returns fp32 values that `dtype` can hold."""
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + eps)
    return (weight * (x * rstd).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def rope_partner(offsets, rotary_dim: tl.constexpr, interleave: tl.constexpr):
    """For each dim: the other one of its pair, its entry of cos and sin, is it the pair's first."""
    if interleave:
        partner = offsets ^ 1
        entry = offsets // 2
        is_first = offsets % 2 == 0
    else:
        half: tl.constexpr = rotary_dim // 2
        is_first = offsets < half
        partner = tl.where(is_first, offsets + half, offsets - half)
        entry = tl.where(is_first, offsets, offsets - half)
    return partner, entry, is_first


@triton.jit
def rotate(x, partner_x, cos_ptr, sin_ptr, entry, is_first, rotates):
    """x and its pair's other half, fp32, rotated; unchanged where not `rotates`."""
    cos = tl.load(cos_ptr + entry, mask=rotates, other=1.0)
    sin = tl.load(sin_ptr + entry, mask=rotates, other=0.0)
    turned = x * cos + tl.where(is_first, -partner_x, partner_x) * sin
    return tl.where(rotates, turned, x)
