"""Operators that read on the host, as plain operators that do not: what a CUDA graph can hold.

`sparse_mla` and `routed_experts` decide on the host how much work there is. That saves work for
many rows; with the few of a static bucket there is little to save, and a piece that reads nothing
on the host can be captured. Sums are fp32.
"""

import torch
from torch import fx

from glm53.compile.rewrites.retarget import retarget
from glm53.compile.rewrites.skinny_attention import gathered_mla
from glm53.compile.rewrites.skinny_experts import experts_by_pairs


def rewrite(graph: fx.Graph) -> int:
    """Replaces what the other rewrites left of the two, of graphs whose shapes are static; how
    many."""
    count = retarget(graph, torch.ops.glm53.sparse_mla, gathered_mla)
    return count + retarget(graph, torch.ops.glm53.routed_experts, experts_by_pairs)
