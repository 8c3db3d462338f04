"""Batch: the tensors that one forward needs. Rows (tokens) of all requests are flattened to [T].

A batch is either *paged* (keys live in a cache, addressed through block tables) or *uncached*
(keys are the rows of this very forward). Both say where position p of request r is found in the
same way, see `glm53.ops.index_select`: block_table[r, p // page_size] * block_stride
+ p % page_size. Rows of one request are adjacent and in ascending position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
        width = max(len(pages) for _, _, pages in requests)
        table = [list(pages) + [-1] * (width - len(pages)) for _, _, pages in requests]
        return cls(
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            request=torch.tensor(request, dtype=torch.int32, device=device),
            lengths=torch.tensor(positions, dtype=torch.int32, device=device) + 1,
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            page_size=page_size,
            block_stride=page_size,
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


@dataclass
class Trace:
    """Discrete decisions of a forward, by layer: recorded on request, and replayable.

    selections: full layer -> logical [T, index_topk] int32; experts: MoE layer -> expert ids
    [T, num_experts_per_tok] int64. A replayed forward takes every decision the trace holds and
    makes the others itself.
    """

    selections: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
