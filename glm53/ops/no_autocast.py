"""Where autocast must not reach: scores and sums that are fp32 whatever the caller asked for.

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
