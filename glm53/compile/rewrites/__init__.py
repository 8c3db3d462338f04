"""Rewrites of the graph that Dynamo traced; one file each. The model's source stays as it is."""

from torch import fx

from glm53.compile.rewrites import (
    embed_eh_norm,
    index_query,
    inline_conversion,
    norm_rope_cache,
    skinny_attention,
    skinny_experts,
    skinny_linear,
)

# In the order in which they are applied: chains are found before their parts are replaced.
_REWRITES = {
    "norm_rope_cache": norm_rope_cache.rewrite,
    "index_query": index_query.rewrite,
    "embed_eh_norm": embed_eh_norm.rewrite,
    "skinny_linear": skinny_linear.rewrite,
    "skinny_experts": skinny_experts.rewrite,
    "skinny_attention": skinny_attention.rewrite,
    "inline_conversion": inline_conversion.rewrite,
}
REWRITES = tuple(_REWRITES)


def rewrite(graph: fx.GraphModule, names: tuple[str, ...]) -> dict[str, int]:
    """Applies the named rewrites; how many nodes or chains each replaced."""
    counts = {name: apply(graph.graph) for name, apply in _REWRITES.items() if name in names}
    graph.recompile()
    return counts
