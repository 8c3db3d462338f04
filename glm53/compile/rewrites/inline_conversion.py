"""Positions to cache rows in plain operators, which the compiler makes one loop of."""

import torch
from torch import fx

from glm53.compile.rewrites.retarget import retarget
from glm53.ops.index_select import convert


def rewrite(graph: fx.Graph) -> int:
    """Replaces every `logical_to_physical`; how many."""
    return retarget(graph, torch.ops.glm53.logical_to_physical, convert)
