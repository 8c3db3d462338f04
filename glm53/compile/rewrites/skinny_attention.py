"""Attention of few rows in plain operators.

`sparse_mla` decides on the host how much of a selection is empty and works through tiles, which
bounds memory for thousands of rows. For a handful of rows the compiler gathers and converts the
selected keys in one loop and fuses scale, mask and softmax between the two products. Scores,
softmax and sums are fp32.
"""

import torch
from torch import Tensor, fx

from glm53.compile.rewrites.retarget import retarget

MAX_ROWS = 16
_TILE_ROWS = 4  # whose keys stay in a cache between the two products


def gathered_mla(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`glm53.ops.sparse_mla`. An invalid entry repeats a row that was selected, so that no row is
    read that nobody selected: there NaN may lie."""
    tiles = zip(q_THX.split(_TILE_ROWS), indices_TL.split(_TILE_ROWS), strict=True)
    parts = [_attend(q_tile, rows_MX, indices, value_dim, scale) for q_tile, indices in tiles]
    out_THC, lse_TH = (torch.cat(results) for results in zip(*parts, strict=True))
    return torch.where((counts_T > 0)[:, None, None], out_THC, 0), lse_TH


def _attend(
    q_THX: Tensor, rows_MX: Tensor, indices_TL: Tensor, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    valid_T1L = (indices_TL >= 0).unsqueeze(1)
    indices_TL = torch.where(indices_TL >= 0, indices_TL, indices_TL.amax(-1, keepdim=True))
    keys_TLX = rows_MX[indices_TL.clamp(min=0)].float()
    scores_THL = torch.bmm(q_THX.float(), keys_TLX.mT) * scale
    scores_THL = torch.where(valid_T1L, scores_THL, -torch.inf)
    lse_TH = scores_THL.logsumexp(-1)
    return torch.bmm(scores_THL.softmax(-1), keys_TLX[..., :value_dim]).to(q_THX.dtype), lse_TH


def rewrite(graph: fx.Graph) -> int:
    """Replaces the operators whose number of rows is static and at most MAX_ROWS; how many."""
    return retarget(graph, torch.ops.glm53.sparse_mla, gathered_mla, MAX_ROWS)
