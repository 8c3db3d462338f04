"""What rewrites of one operator have in common."""

from collections.abc import Callable

from torch import fx


def retarget(graph: fx.Graph, operator, function: Callable, max_rows: int | None = None) -> int:
    """Replaces calls of an operator of ours by calls of `function`, with the same arguments; how
    many. max_rows: only where the first argument has a static number of rows, at most so many."""
    count = 0
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (operator, operator.default):
            continue
        rows = node.args[0].meta["example_value"].shape[0]
        if max_rows is None or (isinstance(rows, int) and rows <= max_rows):
            node.target = function
            count += 1
    return count
