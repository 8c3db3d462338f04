"""The Dynamo backend: rewrites, split, one Inductor compilation per distinct piece."""

from collections.abc import Callable

from torch import fx

from glm53.compile.rewrites import rewrite
from glm53.compile.split import Report, compile_pieces


def _compile(piece: fx.GraphModule, inputs: list) -> Callable:
    from torch._inductor.compile_fx import compile_fx  # imports triton, if it is installed

    compiled = compile_fx(piece, inputs)
    assert callable(compiled)
    return compiled


class Backend:
    """Given to `torch.compile`; keeps a report of every graph it compiled."""

    def __init__(self, rewrites: tuple[str, ...], at_break: Callable | None = None) -> None:
        """at_break: see `compile_pieces`."""
        self.rewrites = rewrites
        self.at_break = at_break
        self.reports: list[Report] = []

    def __call__(self, graph: fx.GraphModule, example_inputs: list) -> Callable:
        rewrite(graph, self.rewrites)
        function, report = compile_pieces(graph, _compile, self.at_break)
        self.reports.append(report)
        return function
