"""Batch invariance: a row's logits are the same bits whatever else the step computes.

The network and its head only ever see tiles of TILE_ROWS rows. A token at position p is row
p % TILE_ROWS of its tile, in any batch and any chunking; rows that nobody needs are padding. So
every product has one shape, and a token has one place in it: its result is a function of the token
and of the keys before it. Nothing is assumed of a library's kernels but that a row of a product of
a given shape does not depend on the other rows.

Tiles run one after the other, the earlier positions of a request first, for later ones read their
keys from the cache.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from glm53.batch import Batch, Trace
from glm53.cache import KVCache
from glm53.model import Transformer
from glm53.ops import fixed_shapes

TILE_ROWS = 16


def conditions(device: torch.device) -> dict[str, str | int]:
    """What the bits of a row depend on besides weights, dtypes and tokens."""
    kind = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} ({torch.backends.cpu.get_cpu_capability()})"
    )
    return {
        "device": kind,
        "number of threads": torch.get_num_threads(),
        "version of torch": str(torch.__version__),
    }


def pack(requests: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
    """Tiles of TILE_ROWS row numbers, -1 for padding.

    Rows of a request that share positions // TILE_ROWS lie in one tile, and in an earlier one than
    those after them.
    """
    tiles: list[list[int]] = []
    next_tile: dict[int, int] = {}  # by request: where its next block may lie
    start = 0
    while start < len(positions):
        request, block = requests[start], positions[start] // TILE_ROWS
        stop = start + 1
        while (
            stop < len(positions)
            and requests[stop] == request
            and positions[stop] // TILE_ROWS == block
        ):
            stop += 1
        places = [position % TILE_ROWS for position in positions[start:stop]]
        index = next_tile.get(request, 0)
        while index < len(tiles) and any(tiles[index][place] >= 0 for place in places):
            index += 1
        if index == len(tiles):
            tiles.append([-1] * TILE_ROWS)
        for row, place in enumerate(places, start):
            tiles[index][place] = row
        next_tile[request] = index + 1
        start = stop
    return tiles


def hidden_states(
    network: Transformer,
    cache: KVCache,
    batch: Batch,
    record: Trace | None = None,
    replay: Trace | None = None,
) -> Tensor:
    """`network.model` of a paged batch, tile by tile: [T, D]."""
    hidden_TD = torch.empty(
        *batch.input_ids.shape,
        network.config.hidden_size,
        dtype=network.dtype,
        device=network.device,
    )
    recorded: list[Trace] = []
    order: list[Tensor] = []
    for tile in pack(batch.request.tolist(), batch.positions.tolist()):
        rows = torch.tensor(tile, device=network.device)
        wanted = rows >= 0
        of_tile = None if record is None else Trace()
        with fixed_shapes():
            tile_RD = network.model(
                _padded(batch, rows),
                cache,
                of_tile,
                None if replay is None else replay.select(rows),
            )
        hidden_TD[rows[wanted]] = tile_RD[wanted]
        if of_tile is not None:
            recorded.append(of_tile.select(wanted.nonzero()[:, 0]))
            order.append(rows[wanted])
    if record is not None:
        merged = Trace.cat(recorded).select(torch.cat(order).argsort())
        record.selections.update(merged.selections)
        record.experts.update(merged.experts)
    return hidden_TD


def logits(network: Transformer, hidden_TD: Tensor, positions: Sequence[int]) -> Tensor:
    """`network.lm_head` of rows at these positions, tile by tile: [T, W]."""
    logits_TW = hidden_TD.new_empty(len(positions), network.config.vocab_size)
    for tile in pack(range(len(positions)), positions):
        rows = torch.tensor(tile, device=hidden_TD.device)
        wanted = rows >= 0
        tile_RD = hidden_TD[rows.clamp(min=0)]
        logits_TW[rows[wanted]] = network.lm_head(tile_RD)[wanted]
    return logits_TW


def _padded(batch: Batch, rows: Tensor) -> Batch:
    """Rows [R] of a batch; -1 is a padding row, which sees nothing and writes nothing."""
    real = rows >= 0
    tile = batch.select(rows.clamp(min=0))
    return replace(
        tile,
        positions=torch.where(real, tile.positions, 0),
        lengths=torch.where(real, tile.lengths, 0),
        slots=torch.where(real, tile.slots, -1),
    )
