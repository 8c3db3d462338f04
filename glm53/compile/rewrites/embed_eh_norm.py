"""Embedding, the two norms of the MTP layer's input and their concatenation, in one launch.

Embeddings that come from elsewhere (a table distributed over ranks, whose rows are gathered first)
are the operator's table, and the numbers of the rows its ids.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from glm53.compile.rewrites.pattern import (
    Pattern,
    call,
    erase,
    first_match,
    rms_norm,
    same_dtype,
)

OPERATOR = torch.ops.glm53.embed_eh_norm.default


def _gathered(
    embeddings: Tensor, positions: Tensor, hidden: Tensor, enorm: Tensor, hnorm: Tensor, eps: float
) -> Tensor:
    embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
    return torch.cat((rms_norm(embeddings, enorm, eps), rms_norm(hidden, hnorm, eps)), dim=-1)


def _looked_up(
    ids: Tensor,
    table: Tensor,
    positions: Tensor,
    hidden: Tensor,
    enorm: Tensor,
    hnorm: Tensor,
    eps: float,
) -> Tensor:
    return _gathered(F.embedding(ids, table), positions, hidden, enorm, hnorm, eps)


_GATHERED = Pattern(_gathered)
_LOOKED_UP = Pattern(_looked_up)


def gathered_eh_norm(
    embeddings_TD: Tensor,
    positions_T: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> Tensor:
    """`glm53::embed_eh_norm` of embeddings [T, D] that are there already."""
    rows_T = torch.arange(embeddings_TD.shape[0], device=embeddings_TD.device)
    return OPERATOR(rows_T, positions_T, embeddings_TD, hidden_TD, enorm_D, hnorm_D, eps)


def rewrite(graph: fx.Graph) -> int:
    """Replaces every such chain; how many."""
    count = 0
    for node in list(graph.nodes):
        match = first_match((_LOOKED_UP, _GATHERED), node) if node.target is torch.cat else None
        if match is None:
            continue
        looked_up = "table" in match.inputs
        source = "table" if looked_up else "embeddings"
        if not same_dtype(*match.get(source, "hidden", "enorm", "hnorm")):
            continue
        if looked_up:
            target, names = OPERATOR, ("ids", "positions", "table")
        else:
            target, names = gathered_eh_norm, ("embeddings", "positions")
        with graph.inserting_before(node):
            inputs = match.get(*names, "hidden", "enorm", "hnorm", "eps")
            fused = call(graph, target, *inputs)
        node.replace_all_uses_with(fused)
        erase(match.nodes)
        count += 1
    return count
