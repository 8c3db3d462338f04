"""Routed experts of few tokens, pair by pair, as reductions.

`routed_experts` sorts (token, expert) pairs by expert, on the host. For a handful of pairs that
costs more than it saves: here each pair reads its expert where it lies, through its index, and the
compiler fuses activation, weights and the sum over experts. Sums are fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from glm53.compile.rewrites.retarget import retarget
from glm53.compile.rewrites.skinny_linear import in_memory

MAX_ROWS = 2


def experts_by_pairs(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """`glm53.ops.routed_experts`; an id outside [0, E) contributes nothing there as here."""
    parts = []
    rows = zip(in_memory(x_TD).unbind(0), ids_TK.unbind(0), weights_TK.unbind(0), strict=True)
    for x_D, ids_K, weights_K in rows:
        known_K = (ids_K >= 0) & (ids_K < gate_up_EFD.shape[0])
        ids_K = torch.where(known_K, ids_K, 0)
        both_KF = (gate_up_EFD[ids_K].float() * x_D.float()).sum(-1)
        gate_KF, up_KF = both_KF.chunk(2, dim=-1)
        hidden_K1F = (F.silu(gate_KF) * up_KF).unsqueeze(1)
        out_KD = (down_EDF[ids_K].float() * hidden_K1F).sum(-1)
        parts.append(torch.where(known_K, weights_K, 0).unsqueeze(-1) * out_KD)
    return torch.stack([part_KD.sum(0) for part_KD in parts]).to(x_TD.dtype)


def rewrite(graph: fx.Graph) -> int:
    """Replaces the operators whose number of rows is static and at most MAX_ROWS; how many."""
    return retarget(graph, torch.ops.glm53.routed_experts, experts_by_pairs, MAX_ROWS)
