"""What keeps a piece from being captured as a CUDA graph: operators that need the host.

A capture records launches, so nothing in it may wait for the device or depend on values that only
the device has. ATen says so by tags. An operator of another library says nothing, and a tag that
somebody forgot would be silent, so these are known by name.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators outside ATen that, on CUDA, launch kernels and read nothing on the host.
CAPTURABLE = frozenset(
    {
        "glm53.all_reduce_add_rms_norm",
        "glm53.cache_write",
        "glm53.embed_eh_norm",
        "glm53.index_query",
        "glm53.logical_to_physical",
        "glm53.norm_rope_cache",
    }
)
_HOST_TAGS = frozenset(
    {torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


class _Operators(TorchDispatchMode):
    """Notes what is called, by name, and what of it needs the host."""

    def __init__(self, devices: set[torch.device]) -> None:
        super().__init__()
        self.devices = devices
        self.called: set[str] = set()
        self.host: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket)
        self.called.add(name)
        if name.split(".")[0] not in ("aten", "prim", "prims") and name not in CAPTURABLE:
            self.host.add(name)
        if _HOST_TAGS & set(func.tags) and not _indexes_by_number(func, args):
            self.host.add(name)
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        if any(isinstance(x, Tensor) and x.device not in self.devices for x in leaves):
            self.host.add(f"{name} on another device")
        return result


def _indexes_by_number(func, args: Sequence) -> bool:
    """`index` has a dynamic shape with masks only."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in masks for index in args[1]
    )


def operators(piece: fx.GraphModule, inputs: Sequence) -> tuple[set[str], set[str]]:
    """The operators that a piece calls on fake inputs, and those of them that need the host."""
    devices = {x.device for x in inputs if isinstance(x, Tensor)}
    fake_mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with torch.no_grad(), fake_mode, _Operators(devices) as mode:
        piece(*inputs)
    return mode.called, mode.host
