"""Block-scaled E4M3 weights: one scale per block of `weight_block_size` (rows, columns).

    weight[i, j] = values[i, j] * scale[i // rows, j // columns]

`weight_scale_inv`, the scale's name on disk, is a misnomer kept from DeepSeek-V3: it multiplies.
"""

import torch
from torch import Tensor


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a weight of `shape`; the last block of a side may be partial."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


@torch.no_grad()
def dequantise(values: Tensor, scale: Tensor, block: tuple[int, int], out: Tensor) -> None:
    """Write values [rows, columns] * scale into out [rows, columns]: fp32, rounded once.

    Takes one fp32 copy of `values`; scales are never expanded to the size of the weight.
    """
    assert tuple(scale.shape) == scale_shape(tuple(values.shape), block), scale.shape
    rows, columns = values.shape
    weight = values.float()
    scale = scale.float().repeat_interleave(block[1], dim=1)[:, :columns]
    full = rows // block[0]
    whole = weight[: full * block[0]].view(full, block[0], columns)
    whole.mul_(scale[:full, None])
    if full < len(scale):
        weight[full * block[0] :].mul_(scale[full])
    out.copy_(weight)
