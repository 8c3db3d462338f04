"""Attention of few rows in plain operators.

`sparse_mla` decides on the host how much of a selection is empty and works through tiles, which
bounds memory for thousands of rows. For a handful of rows the compiler gathers the selected keys in
one loop, and fuses scale, mask and softmax between the two products. It gathers them in fp32 for
very few: scores, softmax and sums are fp32 then. For more, the copy in fp32 costs more than it
saves, see `attend_own`.
"""

import torch
from torch import Tensor, fx

from glm53.compile.rewrites.retarget import retarget
from glm53.ops.sparse_mla import attend_own, fill

MAX_ROWS = 16
_ROWS_IN_FP32 = 4


def gathered_mla(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`glm53.ops.sparse_mla`."""
    queries_THX, keys_TLX = q_THX, rows_MX[fill(indices_TL)]
    if q_THX.shape[0] <= _ROWS_IN_FP32:
        queries_THX, keys_TLX = q_THX.float(), keys_TLX.float()
    out_THC, lse_TH = attend_own(queries_THX, keys_TLX, indices_TL >= 0, value_dim, scale)
    seen_T1 = (counts_T > 0)[:, None]
    out_THC = torch.where(seen_T1[..., None], out_THC.to(q_THX.dtype), 0)
    return out_THC, torch.where(seen_T1, lse_TH, -torch.inf)


def rewrite(graph: fx.Graph) -> int:
    """Replaces the operators whose number of rows is static and at most MAX_ROWS; how many."""
    return retarget(graph, torch.ops.glm53.sparse_mla, gathered_mla, MAX_ROWS)
