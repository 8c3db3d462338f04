"""Fixed shapes: what a kernel computes for a row does not depend on the rows beside it.

A matrix product of another shape adds up in another order, and its results differ in their last
bits. The shapes of most products are those of the tensors that the caller passes. Inside
`with fixed_shapes():` the opaque kernels also give up those that they derive from values: tokens
per expert, keys in sight, the widest selection. A row's result is then a function of its inputs,
its row number and the number of rows; `glm53.tiles` fixes these two.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_fixed: ContextVar[bool] = ContextVar("glm53_fixed_shapes", default=False)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Kernels called inside derive no shape from values. Forward only; costs time."""
    token = _fixed.set(True)
    try:
        yield
    finally:
        _fixed.reset(token)


def shapes_are_fixed() -> bool:
    """Asked by kernels, at run time."""
    return _fixed.get()
