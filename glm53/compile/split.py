"""Splits a Dynamo graph at its breaks and compiles each distinct piece once.

Only `index_select` breaks a graph: it runs eagerly between two pieces, so a network whose full
layers are F gives F + 1 pieces. Weights, caches and batch tensors are inputs of a piece and no
layer number appears in one, so layers of the same kind give equal pieces: a network of any depth
compiles as many as it has kinds of index groups.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.fx.passes.split_module import split_module

BREAKS = (
    torch.ops.glm53.index_select,
    torch.ops.glm53.index_select.default,
)

Compile = Callable[[fx.GraphModule, list], Callable]


class Segments(Protocol):
    """Given every piece and break, in the order they run; gives what is called in their place."""

    def piece(self, function: Callable) -> Callable: ...

    def eager(self, function: Callable) -> Callable: ...


@dataclass
class Report:
    """What compiling one graph came to.

    pieces: for each piece, in the order they run, the number of the distinct piece that it is;
    graphs: the distinct pieces as given to the compiler; breaks: eager calls between pieces;
    seconds: spent in the compiler.
    """

    pieces: list[int] = field(default_factory=list)
    graphs: list[fx.GraphModule] = field(default_factory=list)
    breaks: int = 0
    seconds: float = 0.0

    def count(self, name: str) -> int:
        """Nodes of the whole network whose target is called `name`: those of each distinct piece
        times how often it runs."""
        times = Counter(self.pieces)
        return sum(
            times[number] * sum(target_name(node) == name for node in graph.graph.nodes)
            for number, graph in enumerate(self.graphs)
        )


class _Called(torch.nn.Module):
    """A callable in the place of a piece or a break."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def compile_pieces(
    graph: fx.GraphModule,
    compile_piece: Compile,
    at_break: Callable | None = None,
    segments: Segments | None = None,
) -> tuple[Callable, Report]:
    """A callable with the graph's inputs and outputs, of which every piece is compiled.

    at_break: called between pieces, with the arguments of `glm53::index_select`, in its place.
    segments: what wraps compiled pieces and breaks; None: nothing.
    """
    report = Report()
    part, parts, is_break = 0, {}, set()
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_function" and node.target in BREAKS:
            is_break.add(part + 1)
            parts[node] = part + 1
            part += 2
        else:
            parts[node] = part
    split = split_module(graph, graph, parts.__getitem__, keep_original_order=True)
    report.breaks = len(is_break)

    # First all inputs, then the compiler: it traces, which must not happen inside another trace.
    inputs: dict[str, list] = {}

    class Record(fx.Interpreter):
        def call_module(self, target, args, kwargs):
            name = str(target)
            if int(name.rsplit("_", 1)[1]) not in is_break:
                inputs[name] = list(args)
            return super().call_module(target, args, kwargs)

    examples = [
        node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"
    ]
    fake_mode = next(value.fake_mode for value in examples if hasattr(value, "fake_mode"))
    with fake_mode:
        Record(split).run(*examples)

    for name, part in split.named_children():
        if at_break is not None and name not in inputs:
            assert isinstance(part, fx.GraphModule)
            for node in part.graph.nodes:
                if node.target in BREAKS:
                    node.target = at_break
            part.recompile()

    known: dict[tuple, tuple[int, Callable]] = {}
    for name, piece in list(split.named_children()):
        assert isinstance(piece, fx.GraphModule)
        if name not in inputs:
            if segments is not None:
                setattr(split, name, _Called(segments.eager(piece)))
            continue
        args = inputs[name]
        key = signature(piece, args)
        if key not in known:
            start = time.perf_counter()
            report.graphs.append(piece)
            known[key] = len(known), compile_piece(piece, args)
            report.seconds += time.perf_counter() - start
        number, function = known[key]
        report.pieces.append(number)
        setattr(split, name, _Called(segments.piece(function) if segments else function))
    return split.forward, report


def signature(piece: fx.GraphModule, inputs: Sequence) -> tuple:
    """Equal for pieces that compute the same of inputs of the same form."""
    numbers: dict[fx.Node, int] = {}
    lines: list[tuple] = []
    forms = iter(inputs)
    for node in piece.graph.nodes:
        numbers[node] = len(numbers)
        if node.op == "placeholder":
            lines.append(_form(next(forms)))
        elif node.op == "get_attr":
            lines.append(("get_attr", id(getattr(piece, node.target))))
        else:
            arguments = map_arg((node.args, node.kwargs), lambda n: _Number(numbers[n]))
            lines.append((node.op, node.target, repr(arguments)))
    return tuple(lines)


def target_name(node: fx.Node) -> str:
    """`glm53.sparse_mla`, `torch.nn.functional.silu`, `float` (a method), ..."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


class _Number(int):
    """A node within its graph; not to be taken for an integer argument."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _form(value) -> tuple:
    if not isinstance(value, Tensor):
        return ("value", str(value))
    return (
        "tensor",
        str(tuple(value.shape)),
        str(value.stride()),
        str(value.dtype),
        str(value.device),
        value.requires_grad,
    )
