"""Chains of operators found in a graph by the code that computes them.

A pattern is what tracing a function leaves. Its parameters stand for any node or constant; all else
has to be there as it is written, operators, the order of operands, constants. Patterns call the
model's own functions, so that they follow its source.
"""

import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from glm53.model import Indexer, RMSNorm


@dataclass(frozen=True)
class Match:
    """A chain: its last node, all its nodes, and what the parameters of the pattern are there."""

    output: fx.Node
    nodes: frozenset[fx.Node]
    inputs: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name]

    def get(self, *names: str) -> tuple:
        return tuple(self.inputs[name] for name in names)


class Pattern:
    """`function` with some of its parameters given as constants.

    A parameter annotated as Tensor stands for a node, any other for a constant of its type.
    """

    def __init__(self, function: Callable[..., Tensor], **constants) -> None:
        self._constants = constants
        graph = fx.Graph()
        tracer = GraphAppendingTracer(graph)
        self._parameters: dict[fx.Node, tuple[str, type]] = {}
        proxies: Any = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in constants:
                node = graph.placeholder(name)
                self._parameters[node] = name, parameter.annotation
                proxies[name] = fx.Proxy(node, tracer)
        output: Any = function(**proxies, **constants)
        self._output: fx.Node = output.node

    def match(self, node: fx.Node) -> Match | None:
        """The chain that ends in `node`, if nothing else uses a value from inside it."""
        bound: dict[fx.Node, Any] = {}
        attributes: list[tuple[fx.Node, Any]] = []

        def same(pattern: Any, value: Any) -> bool:
            if not isinstance(pattern, fx.Node):
                return _same_constant(pattern, value, same)
            if pattern in bound:
                found = bound[pattern]
                return found is value or (not isinstance(found, fx.Node) and found == value)
            if pattern in self._parameters:
                bound[pattern] = value
                return isinstance(example(value), self._parameters[pattern][1])
            if pattern.target is getattr:  # x.dtype, a constant in a graph; x may be found later
                attributes.append((pattern, value))
                return True
            if not isinstance(value, fx.Node) or _target(pattern) != _target(value):
                return False
            bound[pattern] = value
            return same(_arguments(pattern), _arguments(value))

        if not same(self._output, node):
            return None
        for pattern, value in attributes:
            owner, name = pattern.args
            assert isinstance(owner, fx.Node) and isinstance(name, str)
            if getattr(example(bound[owner]), name) != value:
                return None
        inputs = {name: bound[p] for p, (name, _) in self._parameters.items()}
        nodes = frozenset(value for p, value in bound.items() if p not in self._parameters)
        if any(not nodes.issuperset(n.users) for n in nodes if n is not node):
            return None
        return Match(node, nodes, inputs | self._constants)


def example(value: Any) -> Any:
    """What a node had as value when the graph was traced; a constant itself."""
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def same_dtype(*nodes: fx.Node) -> bool:
    return len({example(node).dtype for node in nodes}) == 1


def is_rope_table(cos: fx.Node, sin: fx.Node) -> bool:
    """fp32 [T, R / 2], not yet broadcast over heads."""
    return all(
        example(node).dim() == 2 and example(node).dtype == torch.float32 for node in (cos, sin)
    )


def first_match(patterns: Iterable[Pattern], node: Any) -> Match | None:
    """Of the first pattern that fits."""
    if not isinstance(node, fx.Node):
        return None
    return next((found for p in patterns if (found := p.match(node)) is not None), None)


def call(graph: fx.Graph, target: Callable, *args) -> fx.Node:
    """A new call, with the example value that later rewrites look at."""
    examples = map_arg(args, example)
    fake_mode = next(x.fake_mode for x in examples if hasattr(x, "fake_mode"))
    node = graph.call_function(target, args)
    with fake_mode:
        node.meta["example_value"] = target(*examples)
    return node


def item(results: fx.Node, index: int) -> fx.Node:
    """One result of a call that returns several, right after it."""
    with results.graph.inserting_after(results):
        node = results.graph.call_function(operator.getitem, (results, index))
    node.meta["example_value"] = example(results)[index]
    return node


def erase(nodes: Iterable[fx.Node]) -> None:
    """Nodes that only use each other."""
    for node in sorted(nodes, reverse=True):
        node.graph.erase_node(node)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm: Any = SimpleNamespace(weight=weight, eps=eps)
    return RMSNorm.forward(norm, x)


def partial_rope(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleave: bool) -> Tensor:
    config = SimpleNamespace(qk_rope_head_dim=rotary_dim, indexer_rope_interleave=interleave)
    indexer: Any = SimpleNamespace(config=config)
    return Indexer._rope(indexer, x, cos, sin)


def _same_constant(pattern: Any, value: Any, same: Callable[[Any, Any], bool]) -> bool:
    if isinstance(pattern, slice):
        return isinstance(value, slice) and all(
            same(getattr(pattern, name), getattr(value, name)) for name in ("start", "stop", "step")
        )
    if isinstance(pattern, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(pattern) == len(value)
            and all(map(same, pattern, value))
        )
    if isinstance(pattern, dict):
        return (
            isinstance(value, dict)
            and pattern.keys() == value.keys()
            and all(same(pattern[key], value[key]) for key in pattern)
        )
    return type(pattern) is type(value) and pattern == value


def _target(node: fx.Node) -> tuple:
    """torch 2.11 traces `==` as a method."""
    if node.target == "__eq__":
        return "call_function", operator.eq
    return node.op, node.target


def _arguments(node: fx.Node) -> tuple | dict:
    """By name where the target is a Python function, which may be called in several ways."""
    if inspect.isfunction(node.target):
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)
    return node.args, node.kwargs
