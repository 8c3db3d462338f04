"""Rewrites of the graph that Dynamo traced; one file each. The model's source stays as it is."""

from torch import fx

from glm53.compile.rewrites import (
    inline_conversion,
    skinny_attention,
    skinny_experts,
    skinny_linear,
)

_REWRITES = {
    "skinny_linear": skinny_linear.rewrite,
    "skinny_experts": skinny_experts.rewrite,
    "skinny_attention": skinny_attention.rewrite,
    "inline_conversion": inline_conversion.rewrite,
}
REWRITES = tuple(_REWRITES)


def rewrite(graph: fx.GraphModule, names: tuple[str, ...]) -> dict[str, int]:
    """Applies the named rewrites in their order; how many nodes each replaced."""
    counts = {name: _REWRITES[name](graph.graph) for name in names}
    graph.recompile()
    return counts
