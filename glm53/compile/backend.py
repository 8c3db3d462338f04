"""The Dynamo backend: rewrites, split, one Inductor compilation per distinct piece."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from glm53.compile.cacheable import cache_options
from glm53.compile.capture import Recording
from glm53.compile.passes import PASSES, inductor_options
from glm53.compile.rewrites import capturable, rewrite
from glm53.compile.split import Report, compile_pieces


def _compile(piece: fx.GraphModule, inputs: list, options: dict[str, Any]) -> Callable:
    from torch._inductor.compile_fx import compile_fx  # imports triton, if it is installed

    compiled = compile_fx(piece, inputs, config_patches=options | cache_options(piece))
    assert callable(compiled)
    return compiled


class Backend:
    """Given to `torch.compile`; keeps a report of every graph it compiled."""

    def __init__(
        self,
        rewrites: tuple[str, ...],
        at_break: Callable | None = None,
        *,
        break_on_device: bool = False,
    ) -> None:
        """rewrites: of REWRITES and PASSES; at_break: see `compile_pieces`. break_on_device: what
        runs at a break reads nothing on the host, so that a graph can be captured whole."""
        self.rewrites = tuple(name for name in rewrites if name not in PASSES)
        self.options = inductor_options(tuple(name for name in rewrites if name in PASSES))
        self.at_break = at_break
        self.break_on_device = break_on_device
        self.reports: list[Report] = []

    def __call__(
        self, graph: fx.GraphModule, example_inputs: list, recording: Recording | None = None
    ) -> Callable:
        """recording: captures the graph."""
        rewrite(graph, self.rewrites)
        if recording is None:
            compile_piece = partial(_compile, options=self.options)
            function, report = compile_pieces(graph, compile_piece, self.at_break)
        else:
            function, report = self._captured(graph, recording)
        self.reports.append(report)
        return function

    def _captured(self, graph: fx.GraphModule, recording: Recording) -> tuple[Callable, Report]:
        def compile_piece(piece: fx.GraphModule, inputs: list) -> Callable:
            recording.inspect(piece, inputs)
            return _compile(piece, inputs, self.options)

        capturable.rewrite(graph.graph)
        graph.recompile()
        if not self.break_on_device:
            return compile_pieces(graph, compile_piece, self.at_break, recording)
        function, report = compile_pieces(graph, compile_piece, self.at_break)
        return recording.piece(function), report
