"""Norms and rope, as the network computes them: what the fused operators are made of.

    RMSNorm:    weight * (x / sqrt(mean(x^2) + eps))
    LayerNorm:  (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
    rope:       y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin

for the pairs (x1, x2) of the last dim: dims (2j, 2j + 1) if interleave, else (j, j + R / 2). All in
fp32. Results are rounded to the input's dtype where the network rounds: RMSNorm before the weight
and after it, rope at the end, LayerNorm nowhere (its result goes through rope first).

`cos` and `sin` have half as many entries in the last dim as x, fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_rows(rows: Tensor) -> Tensor:
    """Rows without gaps inside; what lies between them does not matter."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_fp32 = x.float()
    normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """fp32."""
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    if interleave:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    else:
        x1, x2 = x.chunk(2, dim=-1)
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return rotated.to(x.dtype)


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    """Rotates the first R dims; the others pass."""
    rotary_dim = 2 * cos.shape[-1]
    rotated = rope(x[..., :rotary_dim], cos, sin, interleave)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
