"""Norms, ropes and cache writes of a layer's attention inputs, in one launch.

The model writes a full layer's index keys some way after its latents, for the indexer projects them
itself. They depend on the layer's input alone, so their projection moves up to the latents' write,
and their write with it: nothing in between may write anything or have read those keys.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from glm53.compile.rewrites.pattern import (
    Match,
    Pattern,
    call,
    erase,
    example,
    first_match,
    is_rope_table,
    partial_rope,
    rms_norm,
    same_dtype,
)
from glm53.model import rope

OPERATOR = torch.ops.glm53.norm_rope_cache.default
_CACHE_WRITE = (torch.ops.glm53.cache_write, torch.ops.glm53.cache_write.default)


def _latents(
    kv_a: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    latent_dim: int,
    rotary_dim: int,
    interleave: bool,
) -> Tensor:
    latent, k_pe = kv_a.split([latent_dim, rotary_dim], dim=-1)
    k_pe = rope(k_pe, cos, sin, interleave)
    return torch.cat((rms_norm(latent, weight, eps), k_pe), dim=-1)


def _index_keys(
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    key_dim: int,
    rotary_dim: int,
    interleave: bool,
) -> Tensor:
    keys = F.layer_norm(key.float(), (key_dim,), weight.float(), bias.float(), eps)
    return partial_rope(keys, cos, sin, rotary_dim, interleave).to(key.dtype)


_QUERY = Pattern(rms_norm)
_LATENTS = [Pattern(_latents, interleave=interleave) for interleave in (True, False)]
_INDEX_KEYS = [Pattern(_index_keys, interleave=interleave) for interleave in (True, False)]


def rewrite(graph: fx.Graph) -> int:
    """Replaces the chains before every write of latents, together with those before the write of
    the same layer's index keys; how many."""
    writes = [node for node in graph.nodes if node.target in _CACHE_WRITE]
    norms = [match for node in graph.nodes if (match := _QUERY.match(node)) is not None]
    count = 0
    for write, next_write in itertools.zip_longest(writes, writes[1:]):
        latents = first_match(_LATENTS, write.args[0])
        if latents is None or not _latents_fit(latents, write):
            continue
        queries = [norm for norm in norms if _query_fits(norm, latents, write)]
        if len(queries) == 1:
            _replace(graph, queries[0], latents, write, _keys_of(latents, write, next_write))
            count += 1
    return count


def _latents_fit(latents: Match, write: fx.Node) -> bool:
    kv_a, weight, cos, sin = latents.get("kv_a", "weight", "cos", "sin")
    return (
        set(latents.output.users) == {write}
        and example(kv_a).dim() == 2
        and example(weight).shape == (latents["latent_dim"],)
        and same_dtype(kv_a, weight)
        and is_rope_table(cos, sin)
        and latents["rotary_dim"] == 2 * example(cos).shape[-1]
    )


def _query_fits(query: Match, latents: Match, write: fx.Node) -> bool:
    return (
        _projected_from(query["x"]) is _projected_from(latents["kv_a"]) is not None
        and query["eps"] == latents["eps"]
        and example(query["x"]).dim() == 2
        and same_dtype(*query.get("x", "weight"), latents["kv_a"])
        and query.output < write
        and all(user > write for user in query.output.users)
    )


def _keys_of(latents: Match, write: fx.Node, next_write: fx.Node | None) -> Match | None:
    """The chain before `next_write`, if that is the same layer's and may take place at `write`."""
    keys = None if next_write is None else first_match(_INDEX_KEYS, next_write.args[0])
    if next_write is None or keys is None:
        return None
    _, slots, cache = next_write.args
    fits = (
        set(keys.output.users) == {next_write}
        and _projected_from(keys["key"]) is _projected_from(latents["kv_a"])
        and example(keys["key"]).dim() == 2
        and same_dtype(keys["key"], latents["kv_a"])
        and keys.get("cos", "sin") == latents.get("cos", "sin")
        and keys["rotary_dim"] == latents["rotary_dim"]
        and slots is write.args[1]
        # Nobody has seen this cache yet, and nothing else is written in between.
        and isinstance(cache, fx.Node)
        and cache.op == "placeholder"
        and min(cache.users) is next_write
        and not any(_has_effect(node) for node in _between(write, next_write))
    )
    return keys if fits else None


def _projected_from(node: fx.Node) -> Any:
    """What a projection, or a part of one, was computed from."""
    return node.args[0] if node.args else None


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _has_effect(node: fx.Node) -> bool:
    return node.is_impure() or (node.op == "call_method" and str(node.target).endswith("_"))


def _later(nodes: Iterable[fx.Node], place: fx.Node) -> set[fx.Node]:
    """Of the nodes and all that they are computed from, those after `place`."""
    later: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node > place and node not in later:
            later.add(node)
            pending += node.all_input_nodes
    return later


def _replace(
    graph: fx.Graph, query: Match, latents: Match, write: fx.Node, keys: Match | None
) -> None:
    _, slots, cache = write.args
    index_arguments: tuple = (None,) * 4
    index_numbers = 0.0, False
    if keys is not None:
        (keys_write,) = keys.output.users
        index_arguments = *keys.get("key", "weight", "bias"), keys_write.args[2]
        index_numbers = keys.get("eps", "interleave")
        for node in sorted(_later(index_arguments, write)):
            write.prepend(node)
        erase({keys_write, *keys.nodes})
    with graph.inserting_before(write):
        fused = call(
            graph,
            OPERATOR,
            *query.get("x", "weight"),
            *latents.get("kv_a", "weight", "cos", "sin"),
            slots,
            cache,
            *index_arguments,
            latents["eps"],
            index_numbers[0],
            latents["interleave"],
            index_numbers[1],
        )
    query.output.replace_all_uses_with(fused)
    erase({write, *latents.nodes})
    erase(query.nodes)
