"""A PyTorch function as one C++ function that Inductor generates: CPU kernels of fused operators.

`torch.compile` inside an operator would work, but its guards cost more than the kernels here run
(50 of 70 us), and its recompile limit is one for all models of a process. So the function is traced
and lowered directly, once for each set of dtypes, widths and constants, for few rows and for many;
the numbers of rows and the row strides stay dynamic. Nothing of this runs inside the compilation of
a caller, for which the operator is opaque and known by its fake.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from glm53.ops.precision import no_autocast

# Sizes and strides to trace with: distinct, so that each letter and each stride is a symbol of its
# own, and none of them 0 or 1, which would be taken for constants.
TRACED_ROWS = {"T": 7, "M": 11, "W": 13}
TRACED_STRIDE = 1 << 14
# Up to so many rows one thread does it: to share 16 among two took three times as long.
SERIAL_ROWS = 32


class CPUKernel:
    """`function(*tensors, **constants)`, compiled at first use.

    rows: one character per tensor. Tensors with the same letter of TRACED_ROWS have the same,
    dynamic first dimension; "." means a parameter of fixed size. An absent tensor is None; the
    first is there and has T rows.
    The function returns a tuple of new tensors and may write into its arguments. The last dimension
    of every tensor must have stride 1.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], rows: str) -> None:
        self.function = function
        self.rows = rows
        self._compiled: dict[Any, Callable[[list[Tensor]], tuple[Tensor, ...]]] = {}

    def __call__(self, *tensors: Tensor | None, **constants: float) -> tuple[Tensor, ...]:
        present = [x for x in tensors if x is not None]
        serial = present[0].shape[0] <= SERIAL_ROWS
        key = (
            serial,
            *[(type(value), value) for value in constants.values()],  # 1, 1.0 and True are equal
            *[None if x is None else (x.dtype, x.shape[1:]) for x in tensors],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            # Dynamo's lock: Inductor keeps state of the process while it compiles.
            from torch._dynamo.convert_frame import compile_lock

            with compile_lock:
                compiled = self._compiled.get(key) or self._compile(tensors, constants, serial)
                self._compiled[key] = compiled
        return compiled(present)

    def _compile(
        self, tensors: tuple[Tensor | None, ...], constants: dict[str, float], serial: bool
    ) -> Callable[[list[Tensor]], tuple[Tensor, ...]]:
        # Imported here: they take a second, and only who runs a fused operator needs them.
        from torch._dynamo.source import ConstantSource
        from torch._guards import TracingContext, tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import (
            DimDynamic,
            ShapeEnv,
            StatelessSymbolicContext,
        )

        fake_mode = FakeTensorMode(shape_env=ShapeEnv())

        def fake(i: int, x: Tensor) -> Tensor:
            source = ConstantSource(f"tensor_{i}")
            if self.rows[i] == ".":
                return fake_mode.from_tensor(x.detach(), source=source, static_shapes=True)
            strides = [TRACED_STRIDE + 64 * i + 2 * dim + 1 for dim in range(x.dim() - 1)]
            sample = torch.empty_strided(
                (TRACED_ROWS[self.rows[i]], *x.shape[1:]), (*strides, 1), dtype=x.dtype
            )
            context = StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DUCK] + [DimDynamic.STATIC] * (x.dim() - 1)
            )
            return fake_mode.from_tensor(sample, source=source, symbolic_context=context)

        def traced(*present: Tensor) -> tuple[Tensor, ...]:
            rest = iter(present)
            return self.function(*[None if x is None else next(rest) for x in tensors], **constants)

        # Roundings between two steps are part of the semantics (torch 2.11 ignores the option).
        options = {"emulate_precision_casts": True} | ({"cpp.threads": 1} if serial else {})
        with torch.inference_mode(False), torch.no_grad(), config.patch(options):
            fakes = [fake(i, x) for i, x in enumerate(tensors) if x is not None]
            with fake_mode, no_autocast(fakes[0]):
                graph = make_fx(traced, decomposition_table=select_decomp_table())(*fakes)
                with tracing(TracingContext(fake_mode)):
                    return compile_fx_inner(graph, fakes)
