"""Positions to cache rows in plain operators, which the compiler makes one loop of."""

import torch
from torch import fx

from glm53.ops.index_select import convert

_TARGETS = (torch.ops.glm53.logical_to_physical, torch.ops.glm53.logical_to_physical.default)


def rewrite(graph: fx.Graph) -> int:
    """Replaces every `logical_to_physical`; how many."""
    found = [n for n in graph.nodes if n.op == "call_function" and n.target in _TARGETS]
    for node in found:
        node.target = convert
    return len(found)
