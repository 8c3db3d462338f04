"""Absorbed attention over rows in host memory, of which a hot set is on the device.

    for every tile of queries, in order:
        hot[destinations] = host[sources]                    (those that belong to the tile)
        out[tile], lse[tile] = sparse_mla(q[tile], hot, indices[tile])

host_MX [M, X] is the whole cache; hot_ZX [Z, X], its copies on the device, is mutated. q_THX,
counts_T, value_dim, scale and the results are those of `sparse_mla`. slots_TL [T, L] int32 are its
indices, rows of host_MX; indices_TL int32 are the same rows in the hot set. A tile is rows
[previous end, end) of `tile_ends`, its copies are entries [previous end, end) of `fetch_ends`, in
sources [F] int64 (rows of host_MX; on the CPU) and destinations [F] int64 (rows of hot_ZX; on the
device). A copy may take the place of a row that earlier tiles read: that is why the tiles are the
operator's business and not its caller's.

Bits are those of `sparse_mla` over host_MX: the last one depends on how queries are tiled, so that
the tiles here only gather, and the attention of both runs in the same tiles.

On a GPU each tile is a copy and a kernel, in the order of one stream. A kernel that reads pinned
memory itself, or a second stream that fetches for tile i + 1 what tile i does not read, would
overlap the two; and a shared layer could fetch all but the rows of the forward under way as soon as
its index group's plan is known.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm53.ops.precision import compute_dtype
from glm53.ops.sparse_mla import attend, sparse_mla_ref


def tiered_sparse_mla_ref(
    q_THX: Tensor,
    host_MX: Tensor,
    hot_ZX: Tensor,
    slots_TL: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    tile_ends: Sequence[int],
    sources: Tensor,
    destinations: Tensor,
    fetch_ends: Sequence[int],
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The semantics, one tile and one copy at a time."""
    out_THC = q_THX.new_empty(*q_THX.shape[:2], value_dim)
    lse_TH = q_THX.new_empty(q_THX.shape[:2], dtype=compute_dtype(q_THX.dtype))
    start, first = 0, 0
    for end, last in zip(tile_ends, fetch_ends, strict=True):
        for source, destination in zip(
            sources[first:last].tolist(), destinations[first:last].tolist(), strict=True
        ):
            hot_ZX[destination] = host_MX[source]
        tile = slice(start, end)
        out_THC[tile], lse_TH[tile] = sparse_mla_ref(
            q_THX[tile], hot_ZX, indices_TL[tile], counts_T[tile], value_dim, scale
        )
        start, first = end, last
    return out_THC, lse_TH


def _fetch(host_MX: Tensor, sources: Tensor, destinations: Tensor, hot_ZX: Tensor) -> None:
    # A staging buffer per call: the allocator keeps a pinned one until its copy is done.
    shape = (sources.numel(), host_MX.shape[1])
    staged = torch.empty(shape, dtype=host_MX.dtype, pin_memory=host_MX.is_pinned())
    torch.index_select(host_MX, 0, sources, out=staged)
    hot_ZX.index_copy_(0, destinations, staged.to(hot_ZX.device, non_blocking=True))


@torch.library.custom_op("glm53::tiered_sparse_mla", mutates_args=("hot_ZX",))
def _tiered_sparse_mla(
    q_THX: Tensor,
    host_MX: Tensor,
    hot_ZX: Tensor,
    slots_TL: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    tile_ends: Sequence[int],
    sources: Tensor,
    destinations: Tensor,
    fetch_ends: Sequence[int],
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    starts, firsts = [0, *tile_ends], [0, *fetch_ends]
    current = -1  # the tile whose rows are resident

    def gather(tile: slice, slots_N: Tensor, places_TL: Tensor) -> Tensor:
        nonlocal current
        keys_NX = hot_ZX.new_zeros(len(slots_N), hot_ZX.shape[1])
        row = tile.start
        while row < tile.stop:
            if current < 0 or row == tile_ends[current]:
                current += 1
                part = slice(firsts[current], firsts[current + 1])
                if part.start < part.stop:
                    _fetch(host_MX, sources[part], destinations[part], hot_ZX)
            assert starts[current] <= row < tile_ends[current]
            end = min(tile.stop, tile_ends[current])
            hot_TL = indices_TL[row:end, : places_TL.shape[1]]
            valid_TL = hot_TL >= 0
            places = places_TL[row - tile.start : end - tile.start][valid_TL]
            keys_NX[places] = hot_ZX[hot_TL[valid_TL].long()]
            row = end
        return keys_NX

    return attend(q_THX, slots_TL, counts_T, value_dim, scale, gather)


@_tiered_sparse_mla.register_fake
def _(
    q_THX: Tensor,
    host_MX: Tensor,
    hot_ZX: Tensor,
    slots_TL: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    tile_ends: Sequence[int],
    sources: Tensor,
    destinations: Tensor,
    fetch_ends: Sequence[int],
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return (
        q_THX.new_empty(*q_THX.shape[:2], value_dim),
        q_THX.new_empty(q_THX.shape[:2], dtype=compute_dtype(q_THX.dtype)),
    )


def tiered_sparse_mla(
    q_THX: Tensor,
    host_MX: Tensor,
    hot_ZX: Tensor,
    slots_TL: Tensor,
    indices_TL: Tensor,
    counts_T: Tensor,
    *,
    tile_ends: Sequence[int],
    sources: Tensor,
    destinations: Tensor,
    fetch_ends: Sequence[int],
    value_dim: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`sparse_mla` of queries whose rows are fetched tile by tile; see the module docstring.

    Not differentiable. The last tile ends with the last query, every tile has a query, and every
    row that a tile's indices name was fetched by it or by an earlier tile, or was in hot_ZX before.
    """
    return _tiered_sparse_mla(
        q_THX,
        host_MX,
        hot_ZX,
        slots_TL,
        indices_TL,
        counts_T,
        tile_ends,
        sources,
        destinations,
        fetch_ends,
        value_dim,
        scale,
    )
