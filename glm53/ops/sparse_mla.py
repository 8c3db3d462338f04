"""Absorbed multi-head latent attention over selected cache rows.

    s[t, h, l] = scale * q[t, h] . rows[indices[t, l]]
    out[t, h]  = sum_l softmax_l(s)[t, h, l] * rows[indices[t, l], :value_dim]
    lse[t, h]  = log sum_l exp(s[t, h, l])

q = [q_nope @ W_UK | q_pe], a row = [latent (value_dim) | rope key]. Only selected rows are read:
causality lives in the indices, so there is no mask besides "index < 0 is not a key". A row of
queries without a valid index gives out = 0 and lse = -inf. Softmax and sums are fp32 (fp64 for
fp64 inputs).

q_THX [T, H, X], rows_MX [M, X], indices_TL [T, L] int32, counts_T [T] int32 (valid entries of each
row). Returns out_THC [T, H, value_dim] in q's dtype and lse_TH [T, H].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from glm53.ops.fixed_shapes import shapes_are_fixed
from glm53.ops.precision import compute_dtype, no_autocast

# Elements of one gathered tile [rows, selected, X]: bounds memory at any context length.
TILE_ELEMENTS = 1 << 22


def sparse_mla_ref(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The semantics, one token at a time."""
    dtype = compute_dtype(q_THX.dtype)
    out_THC = q_THX.new_zeros(*q_THX.shape[:2], value_dim)
    lse_TH = q_THX.new_full(q_THX.shape[:2], -torch.inf, dtype=dtype)
    for t in range(q_THX.shape[0]):
        selected = indices_TL[t][indices_TL[t] >= 0].long()
        if selected.numel() == 0:
            continue
        keys_LX = rows_MX[selected].to(dtype)
        scores_HL = scale * (q_THX[t].to(dtype) @ keys_LX.T)
        lse_TH[t] = scores_HL.logsumexp(-1)
        out_THC[t] = (scores_HL.softmax(-1) @ keys_LX[:, :value_dim]).to(q_THX.dtype)
    return out_THC, lse_TH


def _tiles(num_rows: int, row_elements: int) -> list[slice]:
    step = max(1, TILE_ELEMENTS // max(1, row_elements))
    return [slice(t, min(t + step, num_rows)) for t in range(0, num_rows, step)]


def _fill(indices_TL: Tensor) -> tuple[Tensor, Tensor]:
    """Indices that can all be read, and which of them were valid; both [T, L].

    An invalid entry repeats a row that its query did select, so that whatever lies in unwritten
    memory (NaN times a zero weight is NaN) cannot reach the sum.
    """
    valid_TL = indices_TL >= 0
    stand_in_T1 = indices_TL.amax(-1, keepdim=True).clamp(min=0)
    return torch.where(valid_TL, indices_TL, stand_in_T1).long(), valid_TL


def attend(
    q_THX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
    gather: Callable[[slice, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The kernel. gather(tile, filled_TL): the rows [T, L, X] of a tile of queries, tiles in order.

    What a query gets depends, in the last bit, on the shapes of its tile and on nothing that
    `gather` does.
    """
    dtype = compute_dtype(q_THX.dtype)
    out_THC = q_THX.new_empty(*q_THX.shape[:2], value_dim)
    lse_TH = q_THX.new_empty(q_THX.shape[:2], dtype=dtype)
    if not bool(counts_T.any()):
        return out_THC.zero_(), lse_TH.fill_(-torch.inf)
    width = indices_TL.shape[1]
    if not shapes_are_fixed():
        # Valid entries need not be a prefix, so only a suffix that is invalid in every row is cut.
        width = int((indices_TL >= 0).any(0).nonzero().amax()) + 1
    with no_autocast(q_THX):
        for tile in _tiles(q_THX.shape[0], width * q_THX.shape[2]):
            filled_TL, valid_TL = _fill(indices_TL[tile, :width])
            keys_TLX = gather(tile, filled_TL).to(dtype)
            scores_THL = torch.bmm(q_THX[tile].to(dtype), keys_TLX.mT).mul_(scale)
            scores_THL.masked_fill_(~valid_TL[:, None], -torch.inf)
            lse_TH[tile] = scores_THL.logsumexp(-1)
            out_tile = torch.bmm(scores_THL.softmax(-1), keys_TLX[..., :value_dim])
            empty_T = ~valid_TL.any(-1)
            out_THC[tile] = out_tile.masked_fill_(empty_T[:, None, None], 0).to(q_THX.dtype)
            lse_TH[tile].masked_fill_(empty_T[:, None], -torch.inf)
    return out_THC, lse_TH


@torch.library.custom_op("glm53::sparse_mla", mutates_args=())
def _sparse_mla(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    def gather(tile: slice, filled_TL: Tensor) -> Tensor:
        return rows_MX[filled_TL]

    return attend(q_THX, indices_TL, counts_T, value_dim, scale, gather)


@_sparse_mla.register_fake
def _(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return (
        q_THX.new_empty(*q_THX.shape[:2], value_dim),
        q_THX.new_empty(q_THX.shape[:2], dtype=compute_dtype(q_THX.dtype)),
    )


@torch.library.custom_op("glm53::sparse_mla_backward", mutates_args=())
def _sparse_mla_backward(
    grad_out_THC: Tensor,
    grad_lse_TH: Tensor,
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    out_THC: Tensor,
    lse_TH: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    dtype = lse_TH.dtype
    grad_q_THX = torch.empty_like(q_THX, memory_format=torch.contiguous_format)
    grad_rows_MX = torch.zeros(rows_MX.shape, dtype=dtype, device=rows_MX.device)
    if not bool((indices_TL >= 0).any()):
        return grad_q_THX.zero_(), grad_rows_MX.to(rows_MX.dtype)
    with no_autocast(q_THX):
        for tile in _tiles(q_THX.shape[0], indices_TL.shape[1] * q_THX.shape[2]):
            filled_TL, valid_TL = _fill(indices_TL[tile])
            keys_TLX, q_tile = rows_MX[filled_TL].to(dtype), q_THX[tile].to(dtype)
            grad_tile = grad_out_THC[tile].to(dtype)
            scores_THL = torch.bmm(q_tile, keys_TLX.mT).mul_(scale)
            visible_T1L = valid_TL[:, None]
            probs_THL = (scores_THL - lse_TH[tile][..., None]).exp_().masked_fill_(~visible_T1L, 0)
            delta_TH = (grad_tile * out_THC[tile].to(dtype)).sum(-1)
            grad_scores_THL = torch.bmm(grad_tile, keys_TLX[..., :value_dim].mT)
            grad_scores_THL -= (delta_TH - grad_lse_TH[tile])[..., None]
            grad_scores_THL = (grad_scores_THL * probs_THL).masked_fill_(~visible_T1L, 0)
            grad_scores_THL *= scale
            grad_q = torch.bmm(grad_scores_THL, keys_TLX)
            empty_T = ~valid_TL.any(-1)
            grad_q_THX[tile] = grad_q.masked_fill_(empty_T[:, None, None], 0).to(q_THX.dtype)
            grad_keys_TLX = torch.bmm(grad_scores_THL.mT, q_tile)
            grad_keys_TLX[..., :value_dim] += torch.bmm(probs_THL.mT, grad_tile)
            selected = indices_TL[tile][valid_TL].long()
            grad_rows_MX.index_add_(0, selected, grad_keys_TLX[valid_TL])
    return grad_q_THX, grad_rows_MX.to(rows_MX.dtype)


@_sparse_mla_backward.register_fake
def _(
    grad_out_THC: Tensor,
    grad_lse_TH: Tensor,
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    out_THC: Tensor,
    lse_TH: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return q_THX.new_empty(q_THX.shape), rows_MX.new_empty(rows_MX.shape)


def _setup_context(ctx, inputs, output) -> None:
    q_THX, rows_MX, indices_TL, _, ctx.value_dim, ctx.scale = inputs
    ctx.save_for_backward(q_THX, rows_MX, indices_TL, *output)


def _backward(ctx, grad_out_THC: Tensor, grad_lse_TH: Tensor):
    grad_q_THX, grad_rows_MX = _sparse_mla_backward(
        grad_out_THC, grad_lse_TH, *ctx.saved_tensors, ctx.value_dim, ctx.scale
    )
    return grad_q_THX, grad_rows_MX, None, None, None, None


_sparse_mla.register_autograd(_backward, setup_context=_setup_context)


def sparse_mla(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    *,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over the rows it selected; see the module docstring.

    Differentiable in q_THX and rows_MX. Indices >= M raise IndexError.
    """
    return _sparse_mla(q_THX, rows_MX, indices_TL, counts_T, value_dim, scale)
