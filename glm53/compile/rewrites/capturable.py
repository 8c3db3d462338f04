"""Operators that read on the host, as plain operators that do not: what a CUDA graph can hold.

`sparse_mla` and `routed_experts` decide on the host how much work there is. That saves work for
many rows; with the few of a static bucket there is little to save, and a piece that reads nothing
on the host can be captured. Sums are fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from glm53.compile.rewrites.retarget import retarget
from glm53.compile.rewrites.skinny_attention import gathered_mla


def experts_of_pairs(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """`glm53.ops.routed_experts`, every (token, expert) pair a row of its own.

    The compiler fuses each gather of weights with the sum over them, so that a pair reads its
    expert where it lies. Two tokens of one expert read it twice: of 256 experts, top 8 of 32 tokens
    are 256 pairs and in the mean 162 experts. An id outside [0, E) contributes nothing.
    """
    num_tokens, per_token = ids_TK.shape
    known_P = ((ids_TK >= 0) & (ids_TK < gate_up_EFD.shape[0])).flatten()
    ids_P = torch.where(known_P, ids_TK.flatten(), 0)
    x_PD = x_TD.float().repeat_interleave(per_token, 0)
    both_PF = (gate_up_EFD[ids_P].float() * x_PD.unsqueeze(1)).sum(-1)
    gate_PF, up_PF = both_PF.chunk(2, dim=-1)
    hidden_PF = F.silu(gate_PF) * up_PF
    out_PD = (down_EDF[ids_P].float() * hidden_PF.unsqueeze(1)).sum(-1)
    weighted_PD = torch.where(known_P, weights_TK.flatten(), 0).unsqueeze(-1) * out_PD
    return weighted_PD.unflatten(0, (num_tokens, per_token)).sum(1).to(x_TD.dtype)


def rewrite(graph: fx.Graph) -> int:
    """Replaces what the other rewrites left of the two, of graphs whose shapes are static; how
    many."""
    count = retarget(graph, torch.ops.glm53.sparse_mla, gathered_mla)
    return count + retarget(graph, torch.ops.glm53.routed_experts, experts_of_pairs)
