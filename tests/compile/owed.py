"""Networks whose blocks owe a reduction over the ranks of a process group."""

from collections.abc import Callable

import torch
from torch import Tensor

from glm53.model import ResidualRMSNorm, Transformer

_OPS = torch.ops._c10d_functional


def owe(network: Transformer, group_name: str, operation: str = "sum") -> None:
    """Makes every norm reduce what it is owed."""

    def reduce(x: Tensor) -> Tensor:
        return _OPS.wait_tensor(_OPS.all_reduce(x, operation, group_name))

    for module in network.modules():
        if isinstance(module, ResidualRMSNorm):
            module.reduce = reduce


@torch.no_grad()
def take_part(network: Transformer, part: float) -> None:
    """Scales the last product of every block, so that it computes this part of what it would."""
    names = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
    for name, tensor in network.named_parameters():
        if name.endswith(names):
            tensor.mul_(part)


def calls(run: Callable) -> list[int]:
    """How often a function calls the fused operator, and how often all-reduce."""
    with torch.profiler.profile() as profile:
        run()
    found = {event.key: event.count for event in profile.key_averages()}
    operators = ("glm53::all_reduce_add_rms_norm", "_c10d_functional::all_reduce")
    return [found.get(name, 0) for name in operators]
