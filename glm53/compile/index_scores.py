"""Index scores of few rows on a CPU, by a compiled loop over the pages.

`index_select` copies the keys it looks at to fp32, to multiply them by a GEMM. For one query that
moves three times the bytes that the keys have. Here every page is read where it lies, for eight
heads at a time:

    score(t, s) = sum_j weights[t, j] * relu(sum_g q[t, j, g] * k[s, g])

What runs between two pieces of a graph is then the operator's own kernel with another scorer.
"""

import torch
from torch import Tensor

from glm53.compile.isolate import compile_alone
from glm53.ops.index_select import scores, select_best

MAX_ROWS = 8
# Sums that one loop carries: more do not fit the registers of a CPU.
_HEADS = 8


def page_scores(q_JG: Tensor, weights_J: Tensor, keys_PZG: Tensor, pages_N: Tensor) -> Tensor:
    """fp32 [N, Z]: scores of the keys of some pages, of q and weights in fp32."""
    keys_NZG = keys_PZG[pages_N].float()
    parts = [(keys_NZG * q_G).sum(-1).relu() * w for q_G, w in zip(q_JG, weights_J, strict=True)]
    return sum(parts[1:], parts[0])


class IndexScores:
    """`index_select` for the break of a compiled network; keys in a paged cache on a CPU."""

    def __init__(self) -> None:
        self._page_scores = compile_alone(page_scores, "page_scores")

    def warm_up(self, keys_MG: Tensor, num_heads: int, page_size: int) -> None:
        """Compile for keys and heads like these. Reads a page, whatever is in it."""
        q_UJG = torch.zeros(1, num_heads, keys_MG.shape[1], device=keys_MG.device)
        weights_UJ = torch.zeros(1, num_heads, device=keys_MG.device)
        pages_P = torch.zeros(1, dtype=torch.int32, device=keys_MG.device)
        self.scores(q_UJG, weights_UJ, keys_MG, pages_P, page_size, page_size, page_size)

    def scores(
        self,
        q_UJG: Tensor,
        weights_UJ: Tensor,
        keys_MG: Tensor,
        block_row_P: Tensor,
        num_keys: int,
        page_size: int,
        block_stride: int,
    ) -> Tensor:
        """`glm53.ops.index_select.scores`."""
        if q_UJG.shape[0] > MAX_ROWS:  # a GEMM pays
            return scores(
                q_UJG, weights_UJ, keys_MG, block_row_P, num_keys, page_size, block_stride
            )
        assert block_stride == page_size, "keys of a paged cache"
        pages_N = block_row_P[: -(-num_keys // page_size)].long()
        if pages_N.numel() == 1:  # would be taken for a constant
            pages_N = pages_N.repeat(2)
        torch._dynamo.mark_dynamic(pages_N, 0)
        keys_PZG = keys_MG.unflatten(0, (-1, page_size))
        scores_US = q_UJG.new_empty(q_UJG.shape[0], num_keys, dtype=torch.float32)
        # Contiguous, as Dynamo distinguishes strides.
        rows = zip(scores_US, q_UJG.float().contiguous(), weights_UJ.contiguous(), strict=True)
        for scores_S, q_JG, weights_J in rows:
            parts = [
                self._page_scores(q, weights, keys_PZG, pages_N).flatten()[:num_keys]
                for q, weights in zip(q_JG.split(_HEADS), weights_J.split(_HEADS), strict=True)
            ]
            torch.sum(torch.stack(parts), 0, out=scores_S)
        return scores_US

    def index_select(self, *arguments) -> Tensor:
        """`glm53::index_select`."""
        return select_best(self.scores, *arguments)
