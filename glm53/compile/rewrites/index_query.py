"""Ropes of the queries of attention and indexer, and what is done beside them, in one launch."""

import torch
from torch import Tensor, fx

from glm53.compile.rewrites.pattern import (
    Match,
    Pattern,
    call,
    erase,
    example,
    first_match,
    is_rope_table,
    item,
    partial_rope,
    same_dtype,
)
from glm53.model import rope

OPERATOR = torch.ops.glm53.index_query.default
_SPARSE_MLA = (torch.ops.glm53.sparse_mla, torch.ops.glm53.sparse_mla.default)
_INDEX_SELECT = (torch.ops.glm53.index_select, torch.ops.glm53.index_select.default)


def _query(q_latent: Tensor, q_pe: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    return torch.cat((q_latent, rope(q_pe, cos[:, None], sin[:, None], interleave)), dim=-1)


def _index_query(
    index_q: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleave: bool
) -> Tensor:
    return partial_rope(index_q, cos[:, None], sin[:, None], rotary_dim, interleave)


def _weights(head_weights: Tensor, scale: float) -> Tensor:
    return head_weights * scale


_QUERIES = [Pattern(_query, interleave=interleave) for interleave in (True, False)]
_INDEX_QUERIES = [Pattern(_index_query, interleave=interleave) for interleave in (True, False)]
_WEIGHTS = [Pattern(_weights)]


def rewrite(graph: fx.Graph) -> int:
    """Replaces the chain before every `sparse_mla`, and with it that before the `index_select` of
    the same layer; how many."""
    count, select = 0, None
    for node in list(graph.nodes):
        if node.target in _INDEX_SELECT:
            select = node
        elif node.target in _SPARSE_MLA:
            query = first_match(_QUERIES, node.args[0])
            if query is not None and _fits(query):
                _replace(graph, query, select)
                count += 1
            select = None
    return count


def _replace(graph: fx.Graph, query: Match, select: fx.Node | None) -> None:
    index = None if select is None else _index(query, select)
    if index is None or select is None:
        place, arguments, constants = query.output, (None, None), (1.0, query["interleave"], False)
        outputs = [query]
    else:
        index_query, weights = index
        place, arguments = select, (index_query["index_q"], weights["head_weights"])
        constants = weights["scale"], query["interleave"], index_query["interleave"]
        outputs = [query, index_query, weights]
    with graph.inserting_before(place):
        inputs = query.get("q_latent", "q_pe", "cos", "sin")
        fused = call(graph, OPERATOR, *inputs, *arguments, *constants)
    for i, match in enumerate(outputs):
        match.output.replace_all_uses_with(item(fused, i))
        erase(match.nodes)


def _index(query: Match, select: fx.Node) -> tuple[Match, Match] | None:
    """The chains before `select`, if what `query` needs is there as well."""
    index_query = first_match(_INDEX_QUERIES, select.args[0])
    weights = first_match(_WEIGHTS, select.args[1])
    if index_query is None or weights is None:
        return None
    outputs = query.output, index_query.output, weights.output
    fits = (
        query.get("cos", "sin") == index_query.get("cos", "sin")
        and index_query["rotary_dim"] == 2 * example(query["cos"]).shape[-1]
        and example(index_query["index_q"]).dim() == 3
        and example(weights["head_weights"]).dtype == torch.float32
        and all(node < select for node in query.get("q_latent", "q_pe"))
        and not any(user < select for output in outputs for user in output.users)
    )
    return (index_query, weights) if fits else None


def _fits(query: Match) -> bool:
    q_latent, q_pe = query.get("q_latent", "q_pe")
    return (
        example(q_pe).dim() == 3
        and same_dtype(q_latent, q_pe)
        and is_rope_table(*query.get("cos", "sin"))
    )
