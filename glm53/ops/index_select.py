"""Lightning indexer: score every visible key of a request and keep the index_topk best.

    score(t, s) = sum_j weights[t, j] * relu(q[t, j] . k[s])          for s < lengths[t]

The scales (index_head_dim ** -0.5, index_n_heads ** -0.5) are positive, so callers fold them into
`weights`; weights are signed and the relu sits inside the head sum (DeepSeek-V3.2 technical
report, section 2.1). Higher score first, lower position first among equal scores: a canonical
order, because scores that the relu cut to exactly 0 tie in whole groups. The output row lists the
selected positions in ascending order, then -1; every slot is written.

Where a key lives. Position p of request r is row

    block_table[r, p // page_size] * block_stride + p % page_size

of the key tensor. Pages of a pool have block_stride == page_size. A freshly computed, contiguous
key tensor is the same thing with one page per request as long as its longest request, and
block_stride == 1, block_table[r, 0] == the request's first row.

Rows of one request are adjacent. Nothing larger than a fixed tile (TILE_ELEMENTS) exists with a
head dimension, and keys at or beyond a row's length are never part of a result.

`logical_to_physical` turns positions into rows of that layout, once per index group.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from glm53.ops.fixed_shapes import shapes_are_fixed
from glm53.ops.precision import no_autocast

# fp32 elements of the largest [rows, heads, keys] and [rows, keys] temporaries: 8 MiB, which stays
# in a last-level cache; it bounds memory, not results.
TILE_ELEMENTS = 1 << 21
TILE_KEYS = 2048
BLOCK_KEYS = 256  # keys of one product where shapes are fixed


def rows_of_positions(
    positions: Tensor, block_row_P: Tensor, page_size: int, block_stride: int
) -> Tensor:
    """Rows of the key tensor that hold `positions` (any shape, >= 0) of one request."""
    pages = block_row_P[positions // page_size].long()
    return pages * block_stride + positions % page_size


def index_select_ref(
    q_TJG: Tensor,
    weights_TJ: Tensor,
    keys_MG: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    lengths_T: Tensor,
    index_topk: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    """The semantics, one row at a time with a stable sort."""
    logical_TL = torch.full((q_TJG.shape[0], index_topk), -1, dtype=torch.int32)
    for t, (request, length) in enumerate(zip(request_T.tolist(), lengths_T.tolist(), strict=True)):
        positions = torch.arange(length)
        block_row_P = block_table_BP[request].cpu()
        rows = rows_of_positions(positions, block_row_P, page_size, block_stride)
        keys_SG = keys_MG[rows.to(keys_MG.device)].float()
        dots_JS = torch.relu(q_TJG[t].float() @ keys_SG.T)
        scores_S = (weights_TJ[t].float()[:, None] * dots_JS).sum(0)
        best = torch.sort(scores_S, descending=True, stable=True).indices[:index_topk]
        logical_TL[t, : best.numel()] = best.sort().values.to("cpu", torch.int32)
    return logical_TL.to(q_TJG.device)


def scores(
    q_UJG: Tensor,
    weights_UJ: Tensor,
    keys_MG: Tensor,
    block_row_P: Tensor,
    num_keys: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    """fp32 scores [U, num_keys] of some rows of one request, in tiles over the keys."""
    num_rows, num_heads, head_dim = q_UJG.shape
    q_IG = q_UJG.float().reshape(num_rows * num_heads, head_dim)
    weights_U1J = weights_UJ.float().unsqueeze(1)
    scores_US = q_IG.new_empty(num_rows, num_keys)
    with no_autocast(q_UJG):
        for start in range(0, num_keys, TILE_KEYS):
            positions = torch.arange(start, min(start + TILE_KEYS, num_keys), device=keys_MG.device)
            rows = rows_of_positions(positions, block_row_P, page_size, block_stride)
            dots_IS = (q_IG @ keys_MG[rows].float().T).relu_()
            scores_US[:, start : start + positions.numel()] = torch.bmm(
                weights_U1J, dots_IS.view(num_rows, num_heads, -1)
            ).squeeze(1)
    return scores_US


def _scores_of_fixed_shape(
    q_UJG: Tensor,
    weights_UJ: Tensor,
    keys_MG: Tensor,
    block_row_P: Tensor,
    num_keys: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    """As `scores`, of one row and BLOCK_KEYS keys at a time."""
    # Copies, because a product may also depend on how its operands are aligned.
    rows = [
        (q_JG.to(torch.float32, copy=True), weights_J.to(torch.float32, copy=True)[None])
        for q_JG, weights_J in zip(q_UJG, weights_UJ, strict=True)
    ]
    scores_US = weights_UJ.new_empty(len(rows), num_keys, dtype=torch.float32)
    with no_autocast(q_UJG):
        for start in range(0, num_keys, BLOCK_KEYS):
            positions = torch.arange(start, start + BLOCK_KEYS, device=keys_MG.device)
            positions.clamp_(max=num_keys - 1)  # the last block is filled with its last key
            key_rows = rows_of_positions(positions, block_row_P, page_size, block_stride)
            keys_SG = keys_MG[key_rows].to(torch.float32)
            for scores_S, (q_JG, weights_1J) in zip(scores_US, rows, strict=True):
                block_S = (weights_1J @ (q_JG @ keys_SG.T).relu_())[0]
                scores_S[start : start + BLOCK_KEYS] = block_S[: num_keys - start]
    return scores_US


def _select(scores_US: Tensor, lengths_U: Tensor, index_topk: int) -> Tensor:
    """Canonical top-k of rows that all have more than index_topk visible keys."""
    hidden = torch.arange(scores_US.shape[1], device=scores_US.device) >= lengths_U[:, None]
    # A NaN score (a broken request) must not leave slots unwritten: it ranks last.
    scores_US = scores_US.nan_to_num(nan=-torch.inf).masked_fill_(hidden, -torch.inf)
    threshold_U1 = scores_US.topk(index_topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_US = scores_US > threshold_U1
    tied_US = scores_US == threshold_U1
    wanted_U1 = index_topk - above_US.sum(-1, keepdim=True)
    kept_US = above_US | (tied_US & (tied_US.cumsum(-1) <= wanted_U1))
    return kept_US.nonzero()[:, 1].view(-1, index_topk).to(torch.int32)


def _runs(request_T: list[int]) -> list[tuple[int, int]]:
    """(first, last + 1) of each run of rows that belong to the same request."""
    starts = [t for t, r in enumerate(request_T) if t == 0 or r != request_T[t - 1]]
    return list(pairwise([*starts, len(request_T)]))


Score = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, int], Tensor]


def select_best(
    score: Score,
    q_TJG: Tensor,
    weights_TJ: Tensor,
    keys_MG: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    lengths_T: Tensor,
    index_topk: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    """The kernel. score: fp32 scores [U, num_keys] of some rows of one request, as `scores`."""
    num_heads = q_TJG.shape[1]
    ramp_L = torch.arange(index_topk, dtype=torch.int32, device=q_TJG.device)
    # Rows with at most index_topk visible keys keep them all and need no scores.
    logical_TL = torch.where(ramp_L < lengths_T[:, None], ramp_L, -1)
    requests, lengths = request_T.tolist(), lengths_T.tolist()
    for first, last in _runs(requests):
        scored = [t for t in range(first, last) if lengths[t] > index_topk]
        while scored:
            num_keys = max(lengths[t] for t in scored)
            per_row = max(num_keys, num_heads * min(num_keys, TILE_KEYS))
            step = max(1, TILE_ELEMENTS // per_row)
            rows, scored = scored[:step], scored[step:]
            row_ids = torch.tensor(rows, device=q_TJG.device)
            scores_US = score(
                q_TJG[row_ids],
                weights_TJ[row_ids],
                keys_MG,
                block_table_BP[requests[first]],
                max(lengths[t] for t in rows),
                page_size,
                block_stride,
            )
            logical_TL[row_ids] = _select(scores_US, lengths_T[row_ids], index_topk)
    return logical_TL


@torch.library.custom_op("glm53::index_select", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _index_select(
    q_TJG: Tensor,
    weights_TJ: Tensor,
    keys_MG: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    lengths_T: Tensor,
    index_topk: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    return select_best(
        _scores_of_fixed_shape if shapes_are_fixed() else scores,
        q_TJG,
        weights_TJ,
        keys_MG,
        block_table_BP,
        request_T,
        lengths_T,
        index_topk,
        page_size,
        block_stride,
    )


@_index_select.register_fake
def _(
    q_TJG: Tensor,
    weights_TJ: Tensor,
    keys_MG: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    lengths_T: Tensor,
    index_topk: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    return q_TJG.new_empty((q_TJG.shape[0], index_topk), dtype=torch.int32)


def index_select(
    q_TJG: Tensor,
    weights_TJ: Tensor,
    keys_MG: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    lengths_T: Tensor,
    *,
    index_topk: int,
    page_size: int,
    block_stride: int,
) -> Tensor:
    """Positions that each row attends to, int32 [T, index_topk], ascending, padded with -1.

    q_TJG: index queries after rope; weights_TJ: fp32 head weights with both scales folded in;
    keys_MG: index keys; block_table_BP int32; request_T int32 (row of the block table; rows of
    one request adjacent); lengths_T int32 (visible keys, 0 for padding rows).
    """
    if index_topk < 1:
        raise ValueError(f"index_topk must be at least 1, got {index_topk}")
    return _index_select(
        q_TJG,
        weights_TJ,
        keys_MG,
        block_table_BP,
        request_T,
        lengths_T,
        index_topk,
        page_size,
        block_stride,
    )


def logical_to_physical_ref(
    logical_TL: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    page_size: int,
    block_stride: int,
) -> tuple[Tensor, Tensor]:
    """The semantics, one entry at a time."""
    physical_TL = torch.full_like(logical_TL, -1)
    table = block_table_BP.tolist()
    for t, request in enumerate(request_T.tolist()):
        for i, position in enumerate(logical_TL[t].tolist()):
            page = position // page_size
            if position >= 0 and page < len(table[request]) and table[request][page] >= 0:
                physical_TL[t, i] = table[request][page] * block_stride + position % page_size
    return physical_TL, (physical_TL >= 0).sum(-1, dtype=torch.int32)


def convert(
    logical_TL: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    page_size: int,
    block_stride: int,
) -> tuple[Tensor, Tensor]:
    """The kernel of `logical_to_physical`: plain operators, which a compiler may fuse."""
    page_TL = logical_TL // page_size
    inside_TL = (logical_TL >= 0) & (page_TL < block_table_BP.shape[1])
    # The table of a million positions is long: its entries are looked up, no row is copied.
    block_TL = block_table_BP[request_T[:, None].long(), torch.where(inside_TL, page_TL, 0).long()]
    valid_TL = inside_TL & (block_TL >= 0)
    physical_TL = torch.where(valid_TL, block_TL * block_stride + logical_TL % page_size, -1)
    return physical_TL.to(torch.int32), valid_TL.sum(-1, dtype=torch.int32)


@torch.library.custom_op("glm53::logical_to_physical", mutates_args=())
def _logical_to_physical(
    logical_TL: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    page_size: int,
    block_stride: int,
) -> tuple[Tensor, Tensor]:
    return convert(logical_TL, block_table_BP, request_T, page_size, block_stride)


@_logical_to_physical.register_fake
def _(
    logical_TL: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    page_size: int,
    block_stride: int,
) -> tuple[Tensor, Tensor]:
    return (
        logical_TL.new_empty(logical_TL.shape),
        logical_TL.new_empty((logical_TL.shape[0],), dtype=torch.int32),
    )


def logical_to_physical(
    logical_TL: Tensor,
    block_table_BP: Tensor,
    request_T: Tensor,
    *,
    page_size: int,
    block_stride: int,
) -> tuple[Tensor, Tensor]:
    """Rows [T, L] int32 that hold the positions `logical_TL`, and how many are valid [T] int32.

    An entry is -1 where the position is negative, beyond the block table, or on a page that the
    table marks as absent (negative).
    """
    return _logical_to_physical(logical_TL, block_table_BP, request_T, page_size, block_stride)
