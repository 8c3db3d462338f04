"""Precision of scores and sums: fp32 (fp64 for fp64 inputs), whatever the caller asked for.

Autocast turns every matrix product inside a `torch.autocast` region into the low-precision dtype,
also products of operands that were made fp32 on purpose.
"""

import contextlib

import torch
from torch import Tensor


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Context without autocast on the device of x; nothing on meta, which has none."""
    # By name: Dynamo of torch 2.11 cannot trace torch.amp.is_autocast_available.
    if x.device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What inputs of `dtype` are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
