"""Owed reduction, residual addition and RMSNorm as one operator.

    residual + wait_tensor(all_reduce(x, "sum", group))  ->  RMSNorm

becomes `glm53::all_reduce_add_rms_norm`, which returns norm and sum. The pattern is traced from the
norm that the operator itself is defined by, once for each group and dtype that a graph reduces, and
for both orders of the addition, which the matcher tells apart.
"""

import functools

import torch
from torch import Tensor, fx
from torch._guards import tracing
from torch._inductor.pattern_matcher import (
    Match,
    PatternMatcherPass,
    fwd_only,
    register_replacement,
)
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from glm53.ops.norm_rope import rms_norm

_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
# Stands for any eps: a number that occurs nowhere else in the pattern.
_EPS = 0.123456789


def fuse(graph: fx.Graph) -> None:
    """Replaces what matches, in place."""
    reductions = {
        (node.args[2], node.meta["val"].dtype)
        for node in graph.find_nodes(op="call_function", target=_ALL_REDUCE)
    }
    for group_name, dtype in sorted(reductions, key=str):
        _patterns(group_name, dtype).apply(graph)


@functools.cache
def _patterns(group_name: str, dtype: torch.dtype) -> PatternMatcherPass:
    def owed(x: Tensor) -> Tensor:
        reduced = torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    def residual_first(x, residual, weight, eps):
        stream = residual + owed(x)
        return rms_norm(stream, weight, eps), stream

    def residual_last(x, residual, weight, eps):
        stream = owed(x) + residual
        return rms_norm(stream, weight, eps), stream

    def fused(x, residual, weight, eps):
        return torch.ops.glm53.all_reduce_add_rms_norm(x, residual, weight, eps, group_name)

    passes = PatternMatcherPass(pass_name="glm53.all_reduce_add_rms_norm")
    # A pass runs within a trace of its own graph.
    with tracing(None), unset_fake_temporarily(), FakeTensorMode():
        sizes = ((5, 16), (5, 16), (16,))
        examples = [torch.empty(size, dtype=dtype) for size in sizes]
        for pattern in (residual_first, residual_last):
            register_replacement(
                pattern,
                fused,
                examples,
                fwd_only,
                [passes],  # pyright: ignore[reportArgumentType]
                extra_check=_fits,
                scalar_workaround={"eps": _EPS},
            )
    return passes


def _fits(match: Match) -> bool:
    """No broadcast and no promotion: rows [T, D] and a weight [D] of one dtype."""
    x, residual, weight = (match.kwargs[name].meta["val"] for name in ("x", "residual", "weight"))
    return (
        x.dim() == 2
        and residual.shape == x.shape
        and weight.shape == x.shape[1:]
        and x.dtype == residual.dtype == weight.dtype
    )
