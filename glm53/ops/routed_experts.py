"""Routed experts of a mixture-of-experts layer.

    out[t] = sum_k weights[t, k] * down[e] @ (silu(gate[e] @ x[t]) * (up[e] @ x[t])),  e = ids[t, k]

x_TD [T, D], gate_up_EFD [E, 2F, D] (gate rows first, then up), down_EDF [E, D, F],
ids_TK [T, K] int64, weights_TK [T, K] fp32. An id outside [0, E) contributes nothing: that is
how a rank skips the experts of other ranks. Experts without tokens are never read. The weighted
sum is fp32 (fp64 for fp64 inputs), the result is in x's dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53.ops.fixed_shapes import shapes_are_fixed
from glm53.ops.precision import compute_dtype, no_autocast


def routed_experts_ref(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """The semantics, one (token, expert) pair at a time."""
    dtype = compute_dtype(x_TD.dtype)
    out_TD = torch.zeros(x_TD.shape, dtype=dtype, device=x_TD.device)
    for t, experts in enumerate(ids_TK.tolist()):
        for k, e in enumerate(experts):
            if 0 <= e < gate_up_EFD.shape[0]:
                gate_F, up_F = (gate_up_EFD[e].to(dtype) @ x_TD[t].to(dtype)).chunk(2)
                out_TD[t] += weights_TK[t, k] * (down_EDF[e].to(dtype) @ (F.silu(gate_F) * up_F))
    return out_TD.to(x_TD.dtype)


def _groups(ids_TK: Tensor, num_experts: int) -> list[tuple[int, Tensor]]:
    """(expert, flat indices into ids_TK of its assignments) for every expert that has some."""
    flat = ids_TK.flatten()
    order = flat.argsort(stable=True)
    experts, counts = flat[order].unique_consecutive(return_counts=True)
    parts = order.split(counts.tolist())
    groups = zip(experts.tolist(), parts, strict=True)
    return [(e, part) for e, part in groups if 0 <= e < num_experts]


# It reads on the host how much work there is.
@torch.library.custom_op(
    "glm53::routed_experts", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _routed_experts(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    out_TD = torch.zeros(x_TD.shape, dtype=compute_dtype(x_TD.dtype), device=x_TD.device)
    weights = weights_TK.flatten()
    for e, assignments in _groups(ids_TK, gate_up_EFD.shape[0]):
        tokens = assignments // ids_TK.shape[1]
        # With fixed shapes an expert computes every row, and those sent elsewhere are dropped.
        computed, kept = (slice(None), tokens) if shapes_are_fixed() else (tokens, slice(None))
        gate, up = F.linear(x_TD[computed], gate_up_EFD[e]).chunk(2, dim=-1)
        expert_out = F.linear(F.silu(gate) * up, down_EDF[e])[kept].to(out_TD.dtype)
        out_TD.index_add_(0, tokens, expert_out * weights[assignments, None])
    return out_TD.to(x_TD.dtype)


@_routed_experts.register_fake
def _(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    return x_TD.new_empty(x_TD.shape)


@torch.library.custom_op("glm53::routed_experts_backward", mutates_args=())
def _routed_experts_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    needs_expert_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x_TD.dtype)
    grad_x_TD = torch.zeros(x_TD.shape, dtype=dtype, device=x_TD.device)
    # Frozen experts are by far the largest tensors of the model: no gradients unless asked for.
    grad_gate_up = gate_up_EFD.new_zeros(gate_up_EFD.shape if needs_expert_grads else (0,))
    grad_down = down_EDF.new_zeros(down_EDF.shape if needs_expert_grads else (0,))
    grad_weights = torch.zeros_like(weights_TK, memory_format=torch.contiguous_format).flatten()
    weights = weights_TK.flatten()
    with no_autocast(x_TD):
        for e, assignments in _groups(ids_TK, gate_up_EFD.shape[0]):
            tokens = assignments // ids_TK.shape[1]
            x, grad_out = x_TD[tokens].to(dtype), grad_TD[tokens].to(dtype)
            gate_up, down = gate_up_EFD[e].to(dtype), down_EDF[e].to(dtype)
            gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
            sigmoid = gate.sigmoid()
            activated = gate * sigmoid
            hidden = activated * up
            grad_weights[assignments] = (
                (F.linear(hidden, down) * grad_out).sum(-1).to(weights.dtype)
            )
            grad_expert = grad_out * weights[assignments, None]
            grad_hidden = grad_expert @ down
            grad_gate = grad_hidden * up * (sigmoid + activated * (1 - sigmoid))
            grad_both = torch.cat([grad_gate, grad_hidden * activated], dim=-1)
            grad_x_TD.index_add_(0, tokens, grad_both @ gate_up)
            if needs_expert_grads:
                grad_gate_up[e] = (grad_both.T @ x).to(grad_gate_up.dtype)
                grad_down[e] = (grad_expert.T @ hidden).to(grad_down.dtype)
    return grad_x_TD.to(x_TD.dtype), grad_gate_up, grad_down, grad_weights.view_as(weights_TK)


@_routed_experts_backward.register_fake
def _(
    grad_TD: Tensor,
    x_TD: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    needs_expert_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x_TD.new_empty(x_TD.shape),
        gate_up_EFD.new_empty(gate_up_EFD.shape if needs_expert_grads else (0,)),
        down_EDF.new_empty(down_EDF.shape if needs_expert_grads else (0,)),
        weights_TK.new_empty(weights_TK.shape),
    )


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_TD: Tensor):
    needs_expert_grads = any(ctx.needs_input_grad[1:3])
    grad_x_TD, grad_gate_up, grad_down, grad_weights_TK = _routed_experts_backward(
        grad_TD, *ctx.saved_tensors, needs_expert_grads
    )
    if not needs_expert_grads:
        return grad_x_TD, None, None, None, grad_weights_TK
    return grad_x_TD, grad_gate_up, grad_down, None, grad_weights_TK


_routed_experts.register_autograd(_backward, setup_context=_setup_context)


def routed_experts(
    x_TD: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """Weighted sum of each token's experts [T, D]; see the module docstring.

    Differentiable in x_TD, gate_up_EFD, down_EDF and weights_TK.
    """
    return _routed_experts(x_TD, gate_up_EFD, down_EDF, ids_TK, weights_TK)
