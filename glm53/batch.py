"""Batch: the tensors that one forward needs. Rows (tokens) of all requests are flattened to [T].

A batch is either *paged* (keys live in a cache, addressed through block tables) or *uncached*
(keys are the rows of this very forward). Both say where position p of request r is found in the
same way, see `glm53.ops.index_select`: block_table[r, p // page_size] * block_stride
+ p % page_size. Rows of one request are adjacent and in ascending position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53.config import GLM53Config
from glm53.residency import FetchPlan


def block_table(pages: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """int32 [B, P]: the pages of each request, -1 after its last."""
    width = max(map(len, pages), default=0)
    rows = [[*row, *[-1] * (width - len(row))] for row in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device).view(len(rows), width)


TENSORS = ("input_ids", "positions", "request", "lengths", "slots", "block_table")  # of a Batch


@dataclass(frozen=True)
class Batch:
    """Rows of one forward.

    input_ids [T] int64; positions [T] int64 (absolute); request [T] int32 (row of block_table);
    lengths [T] int32 (keys visible to the row, its own included; 0 for a padding row);
    slots [T] int64 (where the row's latent and index key are stored, -1: nowhere);
    block_table [B, P] int32 (-1: no page).
    """

    input_ids: Tensor
    positions: Tensor
    request: Tensor
    lengths: Tensor
    slots: Tensor
    block_table: Tensor
    page_size: int
    block_stride: int

    @classmethod
    def uncached(cls, input_ids_BS: Tensor, attention_mask_BS: Tensor | None) -> "Batch":
        """Rows of a dense batch; masked-out positions (0) are left out, wherever they are.

        A token's position counts the unmasked tokens before it (`cumsum(mask) - 1`), so left and
        right padding give the same rows.
        """
        device = input_ids_BS.device
        num_requests, width = input_ids_BS.shape
        if attention_mask_BS is None:
            mask_BS = torch.ones_like(input_ids_BS, dtype=torch.bool)
        else:
            mask_BS = attention_mask_BS.to(device).bool()
        positions = (mask_BS.cumsum(-1) - 1)[mask_BS]
        counts_B = mask_BS.sum(-1)
        requests = torch.arange(num_requests, dtype=torch.int32, device=device)
        return cls(
            input_ids=input_ids_BS[mask_BS],
            positions=positions,
            request=requests.repeat_interleave(counts_B),
            lengths=(positions + 1).to(torch.int32),
            slots=torch.full_like(positions, -1),
            block_table=(counts_B.cumsum(0) - counts_B).to(torch.int32)[:, None],
            page_size=max(width, 1),
            block_stride=1,
        )

    @classmethod
    def paged(
        cls,
        requests: Sequence[tuple[Sequence[int], int, Sequence[int]]],
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> "Batch":
        """Rows of several requests, each given as (token ids, position of the first, pages)."""
        ids = [i for tokens, _, _ in requests for i in tokens]
        positions = [start + i for tokens, start, _ in requests for i in range(len(tokens))]
        request = [r for r, (tokens, _, _) in enumerate(requests) for _ in tokens]
        slots = [
            pages[p // page_size] * page_size + p % page_size
            for tokens, start, pages in requests
            for p in range(start, start + len(tokens))
        ]
        return cls(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            request=torch.tensor(request, dtype=torch.int32, device=device),
            lengths=torch.tensor(positions, dtype=torch.int32, device=device) + 1,
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            block_table=block_table([pages for _, _, pages in requests], device),
            page_size=page_size,
            block_stride=page_size,
        )

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    def pad(self, rows: int, requests: int, pages: int) -> "Batch":
        """At least so many rows, requests and pages per request.

        A padding row is of request 0 and position 0, has no slot and sees nothing.
        """

        def padded(tensor: Tensor, value: int) -> Tensor:
            return F.pad(tensor, (0, max(0, rows - self.num_rows)), value=value)

        missing_requests = max(0, requests - self.block_table.shape[0])
        missing_pages = max(0, pages - self.block_table.shape[1])
        return replace(
            self,
            input_ids=padded(self.input_ids, 0),
            positions=padded(self.positions, 0),
            request=padded(self.request, 0),
            lengths=padded(self.lengths, 0),
            slots=padded(self.slots, -1),
            block_table=F.pad(self.block_table, (0, missing_pages, 0, missing_requests), value=-1),
        )

    def compact(self, requests: int) -> "Batch":
        """With at most so many rows in the block table: those of requests that have rows here,
        which may not be more. Nothing is read on the host."""
        if self.block_table.shape[0] <= requests:
            return self
        starts_T = F.pad(self.request[1:] != self.request[:-1], (1, 0))
        request_T = starts_T.cumsum(0).to(torch.int32)
        table_BP = self.block_table.new_full((requests, self.block_table.shape[1]), -1)
        table_BP[request_T.long()] = self.block_table[self.request.long()]
        return replace(self, request=request_T, block_table=table_BP)

    def select(self, rows: Tensor | slice) -> "Batch":
        """Some rows, by index [R] or slice; those of one request must stay adjacent."""
        return replace(
            self,
            input_ids=self.input_ids[rows],
            positions=self.positions[rows],
            request=self.request[rows],
            lengths=self.lengths[rows],
            slots=self.slots[rows],
        )

    def advance(self, steps: int) -> "Batch":
        """The rows `steps` positions later in their requests; their pages must exist."""
        positions = self.positions + steps
        pages = self.block_table[self.request.long(), positions // self.page_size].long()
        return replace(
            self,
            positions=positions,
            lengths=self.lengths + steps,
            slots=pages * self.block_stride + positions % self.page_size,
        )


@dataclass(frozen=True)
class Selection:
    """What an index group attends to: made by its full layer, received by its shared layers.

    logical [T, index_topk] int32: positions, ascending, -1 suffix; physical [T, index_topk] int32:
    the rows that hold them; counts [T] int32: valid entries. fetch: with a host-backed cache, how
    these rows get to the device, made by the full layer as well.
    """

    logical: Tensor
    physical: Tensor
    counts: Tensor
    fetch: FetchPlan | None = None

    def select(self, rows: Tensor | slice) -> "Selection":
        """That of some rows; a full layer that takes it makes a new plan."""
        return Selection(self.logical[rows], self.physical[rows], self.counts[rows])


@dataclass
class Trace:
    """Discrete decisions of a forward, by layer: recorded on request, and replayable.

    selections: full layer -> logical [T, index_topk] int32; experts: MoE layer -> expert ids
    [T, num_experts_per_tok] int64. A replayed forward takes every decision the trace holds and
    makes the others itself: those of layers that are missing, and of rows that are all -1.
    """

    selections: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """T; 0 for a trace without a layer. ValueError, naming a layer, if they differ."""
        num_rows: int | None = None
        for kind in ("selections", "experts"):
            for layer, rows in getattr(self, kind).items():
                name = f"{kind}[{layer}]"
                if not isinstance(rows, Tensor) or rows.dim() != 2:
                    raise ValueError(f"{name}: must be a tensor with a row for each token")
                if num_rows is not None and len(rows) != num_rows:
                    raise ValueError(
                        f"{name} has {len(rows)} rows, layers before it have {num_rows}"
                    )
                num_rows = len(rows)
        return num_rows or 0

    def select(self, rows: Tensor | slice) -> "Trace":
        """That of some rows, by slice or index [R]; for an index of -1 a row of -1."""

        def chosen(decisions: Tensor) -> Tensor:
            if isinstance(rows, slice):
                return decisions[rows]
            at = rows.to(decisions.device)
            return decisions[at.clamp(min=0)].masked_fill_((at < 0)[:, None], -1)

        return self._map(chosen)

    def to(self, device: torch.device | str) -> "Trace":
        """On another device."""
        return self._map(lambda decisions: decisions.to(device))

    @staticmethod
    def cat(traces: "Sequence[Trace]", lengths: Sequence[int] | None = None) -> "Trace":
        """One trace of the rows of several, in order: of a batch, from those of its sequences.

        lengths: rows that each gets, those it holds and then rows of -1; by default those it holds.
        The trace of a completion lacks the row of the last token, so for `model(input_ids)` give
        the lengths of the sequences (their unmasked tokens). A layer that only some hold is free in
        the others. ValueError: a trace with more rows than its length, or whose layers differ.
        """
        if lengths is None:
            lengths = [trace.num_rows for trace in traces]
        for i, (trace, length) in enumerate(zip(traces, lengths, strict=True)):
            if trace.num_rows > length:
                raise ValueError(f"traces[{i}] has {trace.num_rows} rows, lengths[{i}]={length}")

        def joined(kind: str) -> dict[int, Tensor]:
            parts = [getattr(trace, kind) for trace in traces]
            like = {layer: rows for part in parts for layer, rows in part.items()}
            return {
                layer: torch.cat(
                    [
                        F.pad(rows, (0, 0, 0, length - len(rows)), value=-1)
                        for part, length in zip(parts, lengths, strict=True)
                        for rows in [part.get(layer, like[layer][:0])]
                    ]
                )
                for layer in sorted(like)
            }

        return Trace(joined("selections"), joined("experts"))

    def _map(self, fn: Callable[[Tensor], Tensor]) -> "Trace":
        return Trace(
            {layer: fn(rows) for layer, rows in self.selections.items()},
            {layer: fn(rows) for layer, rows in self.experts.items()},
        )

    def check(self, batch: Batch, config: GLM53Config) -> None:
        """ValueError, naming the layer, unless a forward of `batch` could have recorded this.

        Reads values on the host. Nothing below checks: a position that the row cannot see would
        leak the future, an expert id out of range would silently contribute nothing.
        """
        for layer, logical_TL in self.selections.items():
            name = f"selections[{layer}]"
            if layer not in config.full_layers:
                raise ValueError(f"{name}: full layers are {list(config.full_layers)}")
            _check_decisions(name, logical_TL, batch, config.index_topk, torch.int32)
            visible_TL = (logical_TL >= -1) & (logical_TL < batch.lengths[:, None])
            if not visible_TL.all():
                t = int((~visible_TL).any(1).nonzero()[0])
                raise ValueError(
                    f"{name}: row {t} sees {int(batch.lengths[t])} positions and selects "
                    f"{logical_TL[t].tolist()}"
                )
            now_TL, then_TL = logical_TL[:, :-1], logical_TL[:, 1:]
            ordered_TL = (then_TL == -1) | ((now_TL >= 0) & (then_TL > now_TL))
            if not ordered_TL.all():
                t = int((~ordered_TL).any(1).nonzero()[0])
                raise ValueError(
                    f"{name}: positions must ascend, with -1 after the last; row {t} is "
                    f"{logical_TL[t].tolist()}"
                )
        moe_layers = [i for i in range(config.num_hidden_layers) if config.is_sparse(i)]
        for layer, ids_TK in self.experts.items():
            name = f"experts[{layer}]"
            if layer not in moe_layers:
                raise ValueError(f"{name}: MoE layers are {moe_layers}")
            _check_decisions(name, ids_TK, batch, config.num_experts_per_tok, torch.int64)
            known_TK = (ids_TK >= 0) & (ids_TK < config.n_routed_experts)
            known_TK |= (ids_TK == -1).all(1, keepdim=True)
            if not known_TK.all():
                t = int((~known_TK).any(1).nonzero()[0])
                raise ValueError(
                    f"{name}: expert ids must be in [0, {config.n_routed_experts}), or -1 in all "
                    f"of a row; row {t} is {ids_TK[t].tolist()}"
                )
            ranked_TK = ids_TK.sort(1).values
            twice_T = ((ranked_TK[:, 1:] == ranked_TK[:, :-1]) & (ranked_TK[:, 1:] >= 0)).any(1)
            if twice_T.any():
                t = int(twice_T.nonzero()[0])
                raise ValueError(
                    f"{name}: experts of a row must be distinct; row {t} is {ids_TK[t].tolist()}"
                )


class Recording:
    """The trace of one completion, appended to as its rows are computed; on the CPU."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._layers: tuple[list[int], list[int]] = ([], [])
        # Of each part [layers, rows, index_topk] and [layers, rows, num_experts_per_tok].
        self._parts: list[tuple[Tensor, Tensor]] = []

    def append(self, trace: Trace, rows: slice) -> None:
        """Some rows of a step: two copies, however many layers."""
        kinds = trace.selections, trace.experts
        self._layers = list(kinds[0]), list(kinds[1])
        first, second = (torch.stack([d[rows] for d in kind.values()]).cpu() for kind in kinds)
        self._parts.append((first, second))
        self.num_rows += first.shape[1]

    def trace(self, num_rows: int) -> Trace:
        """The first `num_rows` rows, or those there are."""
        if not self._parts:
            return Trace()
        selections, experts = (
            dict(zip(layers, torch.cat(parts, dim=1)[:, :num_rows], strict=True))
            for layers, parts in zip(self._layers, zip(*self._parts, strict=True), strict=True)
        )
        return Trace(selections, experts)


def _check_decisions(
    name: str, decisions: Tensor, batch: Batch, width: int, dtype: torch.dtype
) -> None:
    if not isinstance(decisions, Tensor):
        raise ValueError(f"{name}: must be a tensor, got {type(decisions).__name__}")
    expected = (batch.input_ids.shape[0], width)
    if decisions.shape != expected:
        raise ValueError(f"{name}: shape must be {expected}, got {tuple(decisions.shape)}")
    if decisions.dtype != dtype:
        raise ValueError(f"{name}: dtype must be {dtype}, got {decisions.dtype}")
    if decisions.device != batch.input_ids.device:
        raise ValueError(f"{name}: device must be {batch.input_ids.device}, got {decisions.device}")
