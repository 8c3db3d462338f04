"""Absorbed multi-head latent attention over selected cache rows.

    s[t, h, l] = scale * q[t, h] . rows[indices[t, l]]
    out[t, h]  = sum_l softmax_l(s)[t, h, l] * rows[indices[t, l], :value_dim]
    lse[t, h]  = log sum_l exp(s[t, h, l])

q = [q_nope @ W_UK | q_pe], a row = [latent (value_dim) | rope key]. Only selected rows are read:
causality lives in the indices, so there is no mask besides "index < 0 is not a key". A row of
queries without a valid index gives out = 0 and lse = -inf. Scores, softmax and sums are fp32 (fp64
for fp64 inputs); for inputs of half precision the softmax is rounded to their dtype before it is
multiplied by the values, as in FlashAttention (Dao, 2023).

q_THX [T, H, X], rows_MX [M, X], indices_TL [T, L] int32, counts_T [T] int32 (valid entries of each
row). Returns out_THC [T, H, value_dim] in q's dtype and lse_TH [T, H].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from glm53.ops.fixed_shapes import shapes_are_fixed
from glm53.ops.precision import compute_dtype, no_autocast

# Elements of one gathered tile [rows, selected, X], and of shared scores [rows, heads, keys]:
# bounds memory at any context.
TILE_ELEMENTS = 1 << 22
# Queries that may share a matrix of keys, and how many times the keys of one query it may hold. On
# a CPU a masked product of so many is faster than one product per query (512 queries of 16 heads
# over 512 keys each, fp32, 2 threads: 4.4 times at a union of 1 to 2 times, 1.3 times at 3).
SHARED_ROWS = 64
MIN_SHARED_ROWS = 16
SHARED_KEYS = 3


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


def _tiles(num_rows: int, step: int) -> list[slice]:
    return [slice(t, min(t + step, num_rows)) for t in range(0, num_rows, step)]


def fill(slots_TL: Tensor) -> Tensor:
    """Slots that can all be read, int64 [T, L].

    An invalid entry repeats a row that its query did select, so that whatever lies in unwritten
    memory (NaN times a zero weight is NaN) cannot reach the sum.
    """
    stand_in_T1 = slots_TL.amax(-1, keepdim=True).clamp(min=0)
    return torch.where(slots_TL >= 0, slots_TL, stand_in_T1).long()


def _union(filled_TL: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct slots [N], ascending, and the number of each entry's slot in them [T, L]."""
    lowest = filled_TL.amin()
    offsets_TL = filled_TL - lowest
    marked = torch.zeros(int(offsets_TL.amax()) + 1, dtype=torch.bool, device=filled_TL.device)
    marked[offsets_TL.flatten()] = True
    return marked.nonzero().squeeze(1) + lowest, (marked.cumsum(0) - 1)[offsets_TL]


def attend_own(
    q_THX: Tensor, keys_TLX: Tensor, valid_TL: Tensor, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Every query over keys [T, L, X] of its own. A query without a valid key gets anything."""
    dtype = compute_dtype(q_THX.dtype)
    # Rows of another dtype (a cache in fp32, autocast) would have to be rounded first.
    if q_THX.device.type == "cpu" and dtype != q_THX.dtype == keys_TLX.dtype:
        # Heads as the rows of one product per query, keys and values in one matrix: twice as fast
        # as two products in fp32 (16 heads, 512 keys, 2 threads), although the rope part of the
        # values is computed for nothing.
        mask_TL = torch.zeros_like(valid_TL, dtype=q_THX.dtype).masked_fill_(~valid_TL, -torch.inf)
        out_T1HX, lse_T1H = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_THX[:, None],
            keys_TLX[:, None],
            keys_TLX[:, None],
            attn_mask=mask_TL[:, None, None],
            scale=scale,
        )
        return out_T1HX[:, 0, :, :value_dim], lse_T1H[:, 0]
    keys_TLX = keys_TLX.to(dtype)
    scores_THL = torch.bmm(q_THX.to(dtype), keys_TLX.mT).mul_(scale)
    scores_THL.masked_fill_(~valid_TL[:, None], -torch.inf)
    lse_TH = scores_THL.logsumexp(-1)
    return torch.bmm(scores_THL.softmax(-1), keys_TLX[..., :value_dim]), lse_TH


def _attend_shared(
    q_THX: Tensor, keys_NX: Tensor, mask_TN: Tensor, value_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """All queries over the same keys, of which each sees those in its row of the mask."""
    dtype = compute_dtype(q_THX.dtype)
    scores_THN = (q_THX.to(dtype).flatten(0, 1) @ keys_NX.to(dtype).T).mul_(scale)
    scores_THN = scores_THN.view(*q_THX.shape[:2], -1)
    scores_THN.masked_fill_(~mask_TN[:, None], -torch.inf)
    probs_THN = scores_THN.softmax(-1)
    # The largest weight is exp(largest score - lse); logsumexp would pass five times over scores.
    lse_TH = scores_THN.amax(-1) - probs_THN.amax(-1).log()
    probs_IN = probs_THN.flatten(0, 1).to(keys_NX.dtype)
    return (probs_IN @ keys_NX[:, :value_dim]).view(*q_THX.shape[:2], -1), lse_TH


def attend(
    q_THX: Tensor,
    slots_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
    gather: Callable[[slice, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """The kernel. slots_TL: which row an entry is; equal slots are equal rows.

    gather(tile, slots_N, places_TL): rows [N, X], of which number places_TL[t, l] is that of entry
    (t, l) of a tile of queries, for all its valid entries; rows that no valid entry has may be
    anything finite. It is called once for every tile, in order. What a query gets depends, in the
    last bit, on the shapes of its tile and on nothing that `gather` does.

    Queries that follow each other in a prompt select nearly the same rows. Where those of a block
    of queries are not many more than those of one, they are multiplied as one matrix, with a mask.
    """
    dtype = compute_dtype(q_THX.dtype)
    num_rows, num_heads, row_dim = q_THX.shape
    out_THC = q_THX.new_empty(num_rows, num_heads, value_dim)
    lse_TH = q_THX.new_empty(num_rows, num_heads, dtype=dtype)
    if not bool(counts_T.any()):
        return out_THC.zero_(), lse_TH.fill_(-torch.inf)
    width, shared_rows = slots_TL.shape[1], 0
    if not shapes_are_fixed():
        # Valid entries need not be a prefix, so only a suffix that is invalid in every row is cut.
        width = int((slots_TL >= 0).any(0).nonzero().amax()) + 1
        most_keys = SHARED_KEYS * width
        shared_rows = min(SHARED_ROWS, num_rows, TILE_ELEMENTS // (num_heads * most_keys))
    own_rows = max(1, TILE_ELEMENTS // (width * row_dim))
    share = shared_rows >= MIN_SHARED_ROWS

    with no_autocast(q_THX):
        for tile in _tiles(num_rows, shared_rows if share else own_rows):
            q_tile, slots_tile = q_THX[tile], slots_TL[tile, :width]
            valid_TL, filled_TL = slots_tile >= 0, fill(slots_tile)
            if share:
                slots_N, places_TL = _union(filled_TL)
            else:
                slots_N = filled_TL.flatten()
                places_TL = torch.arange(len(slots_N), device=slots_N.device).view_as(filled_TL)
            keys_NX = gather(tile, slots_N, places_TL)
            # A mask is no wall against NaN: keys that have some are seen by their owners only.
            if share and len(slots_N) <= SHARED_KEYS * width and keys_NX.isfinite().all():
                mask_TN = torch.zeros(
                    len(q_tile), len(slots_N), dtype=torch.bool, device=q_THX.device
                )
                mask_TN.scatter_(1, places_TL, True)
                parts = [_attend_shared(q_tile, keys_NX, mask_TN, value_dim, scale)]
            else:
                parts = []
                for part in _tiles(len(q_tile), own_rows):
                    if share:
                        places_PL = places_TL[part]
                        keys_PX = keys_NX.index_select(0, places_PL.flatten())
                        keys_TLX = keys_PX.view(*places_PL.shape, row_dim)
                    else:  # one part, and every entry has a row of its own
                        keys_TLX = keys_NX.unflatten(0, (-1, width))
                    parts.append(
                        attend_own(q_tile[part], keys_TLX, valid_TL[part], value_dim, scale)
                    )
            empty_T = ~valid_TL.any(-1)
            outs, lses = (torch.cat(results) for results in zip(*parts, strict=True))
            out_THC[tile] = outs.masked_fill_(empty_T[:, None, None], 0).to(q_THX.dtype)
            lse_TH[tile] = lses.masked_fill_(empty_T[:, None], -torch.inf)
    return out_THC, lse_TH


# It reads on the host how much work there is.
@torch.library.custom_op("glm53::sparse_mla", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _sparse_mla(
    q_THX: Tensor,
    rows_MX: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    def gather(tile: slice, slots_N: Tensor, places_TL: Tensor) -> Tensor:
        return rows_MX.index_select(0, slots_N)

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
        own_rows = max(1, TILE_ELEMENTS // (indices_TL.shape[1] * q_THX.shape[2]))
        for tile in _tiles(q_THX.shape[0], own_rows):
            filled_TL, valid_TL = fill(indices_TL[tile]), indices_TL[tile] >= 0
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
