"""Compiled functions that do not share Dynamo's cache."""

import types
from collections.abc import Callable

import torch


def compile_alone(function: Callable, name: str, backend: str | Callable = "inductor") -> Callable:
    """`torch.compile` with static shapes (but for dims marked dynamic), of a copy of the function.

    Dynamo keeps what it compiled by code object, tries one graph after the other, and gives up
    after eight. A copy waits for no guards but its own, and cannot be recompiled, or refused, for
    the sake of another.
    """
    copy = types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    return torch.compile(copy, backend=backend, fullgraph=True, dynamic=False)
