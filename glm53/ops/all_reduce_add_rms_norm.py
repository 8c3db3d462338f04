"""What a block owes, summed over ranks, added to the residual stream and normed.

    stream = residual + sum over ranks(x)
    normed = RMSNorm(stream)

x_TD [T, D] (this rank's partial sum), residual_TD [T, D] (the same on every rank), weight_D.
Returns (normed, stream), both in x's dtype; the stream is rounded before it is normed, as the
network does. Norm and its roundings: `norm_rope.py`.

The sum is a functional all-reduce of the process group named `group_name`; None means one rank and
no collective. The addition and the norm are one kernel after it. A kernel that also reduces (over
peer memory, for rows that fit its workspace) is not here: every size takes the path above.
"""

import torch
from torch import Tensor

from glm53.ops.cpu_kernel import CPUKernel
from glm53.ops.norm_rope import dense_rows, rms_norm


def _all_reduce(x_TD: Tensor, group_name: str | None) -> Tensor:
    if group_name is None:
        return x_TD
    reduced = torch.ops._c10d_functional.all_reduce(x_TD, "sum", group_name)
    return torch.ops._c10d_functional.wait_tensor(reduced)


def _add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    stream_TD = residual_TD + x_TD
    return rms_norm(stream_TD, weight_D, eps), stream_TD


def all_reduce_add_rms_norm_ref(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, group_name: str | None
) -> tuple[Tensor, Tensor]:
    """The semantics."""
    return _add_rms_norm(_all_reduce(x_TD, group_name), residual_TD, weight_D, eps)


_cpu_kernel = CPUKernel(_add_rms_norm, rows="TT.")


@torch.library.custom_op("glm53::all_reduce_add_rms_norm", mutates_args=(), device_types="cpu")
def _all_reduce_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, group_name: str | None
) -> tuple[Tensor, Tensor]:
    x_TD = dense_rows(_all_reduce(x_TD, group_name))
    normed_TD, stream_TD = _cpu_kernel(x_TD, dense_rows(residual_TD), weight_D, eps=eps)
    return normed_TD, stream_TD


@_all_reduce_add_rms_norm.register_kernel("cuda")
def _(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, group_name: str | None
) -> tuple[Tensor, Tensor]:
    from glm53.ops.kernels.all_reduce_add_rms_norm import launch

    return launch(_all_reduce(x_TD, group_name), residual_TD, weight_D, eps)


@_all_reduce_add_rms_norm.register_fake
def _(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, group_name: str | None
) -> tuple[Tensor, Tensor]:
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape)


def all_reduce_add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, *, eps: float, group_name: str | None
) -> tuple[Tensor, Tensor]:
    """(normed, stream), [T, D] each; see the module docstring.

    Every rank of the group calls it with the same T.
    """
    return _all_reduce_add_rms_norm(x_TD, residual_TD, weight_D, eps, group_name)
