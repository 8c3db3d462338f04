"""Host-backed cache: which latent rows have a copy on the device, and which ones to fetch.

Latents live in host memory, in the pages of the cache. Every layer has `num_rows` hot rows on the
device. Which slot of the cache each of them holds is decided once per index group, since its layers
read the same selection: the full layer resolves a selection into a `FetchPlan`, and every layer of
the group carries it out on rows of its own.

The hot rows are one pool for all requests: rows of a shared prefix have one copy, and one request
alone may use all of it. A row is the unit, as it is of a selection. Least recently used goes first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from glm53.ops import tiered_sparse_mla


@dataclass(frozen=True)
class FetchPlan:
    """How the rows of a selection become resident, tile by tile; see `tiered_sparse_mla`.

    slots, indices [T, index_topk] int32: the selection in slots of the cache, and in hot rows; -1
    where nothing is selected. tile_ends, fetch_ends:
    where each tile ends, in rows and in the two lists of copies, sources [F] int64 (slots of the
    cache, on the CPU) and destinations [F] int64 (hot rows).
    """

    slots: Tensor
    indices: Tensor
    tile_ends: list[int]
    sources: Tensor
    destinations: Tensor
    fetch_ends: list[int]
    serial: int  # which plan of its residency this is


class Residency:
    """Where the hot copies of one index group's rows are. The map lives on the device.

    hits, misses: distinct slots of each tile of selections that were, were not resident.
    fetched_bytes: copied to the device, over all layers of the group.
    """

    def __init__(self, num_slots: int, num_rows: int, device: torch.device | str) -> None:
        """num_slots: of the cache; num_rows: hot rows, at least as many as a query selects."""
        # One more: slot -1 (no slot) finds a hot row of -1 there.
        self._row_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        # What a hot row was filled with; it still is that slot's copy if the slot points back.
        self._slot_of_row = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._order = torch.arange(num_rows, device=device)  # hot rows, least recently used first
        self._serial = 0
        self._pending = 0  # layers that have not carried out the last plan
        self.num_layers = 0
        self.hits = self.misses = self.fetched_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._row_of_slot.nbytes + self._slot_of_row.nbytes + self._order.nbytes

    def invalidate(self, slots_T: Tensor) -> None:
        """Copies of these slots (negative: none) are stale: the slots are about to be written."""
        self._row_of_slot[slots_T.clamp(min=-1)] = -1

    def resolve(self, slots_TL: Tensor) -> FetchPlan:
        """Plan for a selection: slots int32 [T, index_topk], distinct within a row, -1: nothing.

        Every layer of the group carries it out, and says so (`done`), before the next one is made.
        """
        # An error kept a layer from its part of the last plan: it lacks rows that the map has.
        if self._pending:
            self._row_of_slot.fill_(-1)
        self._pending = self.num_layers
        self._serial += 1
        # Rows whose slot was written since are the first to be used again.
        current = self._row_of_slot[self._slot_of_row[self._order]] == self._order
        self._order = torch.cat((self._order[~current], self._order[current]))
        indices_TL = torch.full_like(slots_TL, -1)
        tile_ends: list[int] = []
        fetch_ends: list[int] = []
        sources = [self._slot_of_row.new_empty(0)]
        destinations = [self._slot_of_row.new_empty(0)]
        num_fetched = 0
        earlier_TL = _earlier_rows(slots_TL)
        for tile in _tiles(earlier_TL, self._order.numel()):
            distinct = slots_TL[tile][earlier_TL[tile] < tile.start].long()
            missing, rows = self._admit(distinct)
            indices_TL[tile] = self._row_of_slot[slots_TL[tile]]
            sources.append(missing)
            destinations.append(rows)
            num_fetched += missing.numel()
            tile_ends.append(tile.stop)
            fetch_ends.append(num_fetched)
            self.hits += distinct.numel() - missing.numel()
            self.misses += missing.numel()
        return FetchPlan(
            slots_TL,
            indices_TL,
            tile_ends,
            torch.cat(sources).cpu(),
            torch.cat(destinations),
            fetch_ends,
            self._serial,
        )

    def _admit(self, distinct: Tensor) -> tuple[Tensor, Tensor]:
        """Make distinct slots resident: those that were not, and the hot rows they get."""
        held = self._row_of_slot[distinct]
        missing = distinct[held < 0]
        needed = torch.zeros_like(self._order, dtype=torch.bool)
        needed[held[held >= 0]] = True
        spare = self._order[~needed[self._order]]
        rows, rest = spare[: missing.numel()], spare[missing.numel() :]
        left = self._slot_of_row[rows]
        self._row_of_slot[left[self._row_of_slot[left] == rows]] = -1
        self._slot_of_row[rows] = missing
        self._row_of_slot[missing] = rows.to(torch.int32)
        self._order = torch.cat((rest, self._row_of_slot[distinct].long()))
        return missing, rows

    def done(self, plan: FetchPlan, nbytes: int) -> None:
        """One layer of the group has carried out the last plan, copying so many bytes."""
        assert plan.serial == self._serial and self._pending > 0
        self._pending -= 1
        self.fetched_bytes += nbytes


class HotRows(NamedTuple):
    """The hot rows [num_rows, kv_lora_rank + qk_rope_head_dim] of one layer."""

    rows: Tensor
    residency: Residency

    def sparse_mla(
        self,
        q_THX: Tensor,
        host_MX: Tensor,
        plan: FetchPlan,
        counts_T: Tensor,
        *,
        value_dim: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """`ops.sparse_mla` over host_MX, through the hot rows: carries out a plan."""
        outcome = tiered_sparse_mla(
            q_THX,
            host_MX,
            self.rows,
            plan.slots,
            plan.indices,
            counts_T,
            tile_ends=plan.tile_ends,
            sources=plan.sources,
            destinations=plan.destinations,
            fetch_ends=plan.fetch_ends,
            value_dim=value_dim,
            scale=scale,
        )
        self.residency.done(plan, plan.sources.numel() * self.rows.shape[1] * self.rows.itemsize)
        return outcome


def _earlier_rows(slots_TL: Tensor) -> Tensor:
    """[T, L]: the last row before that selects the same slot, -1 if none; T where nothing is."""
    num_rows, width = slots_TL.shape
    slots, order = slots_TL.flatten().sort(stable=True)
    rows = order // width
    earlier = torch.full_like(order, -1)
    earlier[order[1:]] = torch.where(slots[1:] == slots[:-1], rows[:-1], -1)
    return earlier.view(num_rows, width).masked_fill_(slots_TL < 0, num_rows)


def _tiles(earlier_TL: Tensor, limit: int) -> Iterator[slice]:
    """Runs of rows, as long as their union has at most `limit` slots. One host sync for each."""
    num_rows = earlier_TL.shape[0]
    start, window = 0, num_rows
    while start < num_rows:
        ahead_TL = earlier_TL[start : start + window]
        union_T = (ahead_TL < start).sum(-1).cumsum(0)
        fitting = int((union_T <= limit).sum())
        if fitting == window and start + window < num_rows:
            window *= 2
            continue
        assert fitting > 0, "a row selects more slots than there are hot rows"
        yield slice(start, start + fitting)
        # Unions of neighbours differ little, so that all tiles together look at few rows twice.
        start, window = start + fitting, 2 * fitting
