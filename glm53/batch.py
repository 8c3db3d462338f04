"""Batch: the tensors that one forward needs. Rows (tokens) of all requests are flattened to [T].

A batch is either *paged* (keys live in a cache, addressed through block tables) or *uncached*
(keys are the rows of this very forward). Both say where position p of request r is found in the
same way, see `glm53.ops.index_select`: block_table[r, p // page_size] * block_stride
+ p % page_size. Rows of one request are adjacent and in ascending position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from glm53.config import GLM53Config


def block_table(pages: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """int32 [B, P]: the pages of each request, -1 after its last."""
    width = max(map(len, pages))
    rows = [[*row, *[-1] * (width - len(row))] for row in pages]
    return torch.tensor(rows, dtype=torch.int32, device=device)


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
    the rows that hold them; counts [T] int32: valid entries.
    """

    logical: Tensor
    physical: Tensor
    counts: Tensor

    def select(self, rows: Tensor | slice) -> "Selection":
        """That of some rows."""
        return Selection(self.logical[rows], self.physical[rows], self.counts[rows])


@dataclass
class Trace:
    """Discrete decisions of a forward, by layer: recorded on request, and replayable.

    selections: full layer -> logical [T, index_topk] int32; experts: MoE layer -> expert ids
    [T, num_experts_per_tok] int64. A replayed forward takes every decision the trace holds and
    makes the others itself.
    """

    selections: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)

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
            if not known_TK.all():
                t = int((~known_TK).any(1).nonzero()[0])
                raise ValueError(
                    f"{name}: expert ids must be in [0, {config.n_routed_experts}), row {t} is "
                    f"{ids_TK[t].tolist()}"
                )


def _check_decisions(
    name: str, decisions: Tensor, batch: Batch, width: int, dtype: torch.dtype
) -> None:
    expected = (batch.input_ids.shape[0], width)
    if decisions.shape != expected:
        raise ValueError(f"{name}: shape must be {expected}, got {tuple(decisions.shape)}")
    if decisions.dtype != dtype:
        raise ValueError(f"{name}: dtype must be {dtype}, got {decisions.dtype}")
    if decisions.device != batch.input_ids.device:
        raise ValueError(f"{name}: device must be {batch.input_ids.device}, got {decisions.device}")
