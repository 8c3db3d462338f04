"""The code that Inductor generates for the pieces of a network, which is neither built nor run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from torch._functorch import config as functorch_config
from torch._inductor import compile_fx, config
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering


class _Kept(Exception):
    pass


class _NotBuilt(Exception):
    pass


def generated_code(
    function: Callable, *arguments, context: Callable[[], AbstractContextManager] = nullcontext
) -> list[str]:
    """The code of each distinct piece, in their order, of a compiled function called once.

    Its backend must be `glm53.compile.backend.Backend`. context: entered around Inductor.
    """
    codes: list[str] = []
    inductor = compile_fx.compile_fx

    def keep(code: str) -> None:
        codes.append(code)
        raise _Kept

    def compile_piece(piece, inputs, **options):
        with (
            context(),
            mock.patch.object(compile_fx, "compile_fx", inductor),  # which calls itself
            mock.patch.object(GraphLowering, "save_output_code", keep),
            # Where a cache hits, nothing is generated.
            config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            try:
                inductor(piece, inputs, **options)
            except InductorError as error:
                if not isinstance(error.inner_exception, _Kept):
                    raise
        return not_built

    def not_built(*inputs):
        raise _NotBuilt

    with mock.patch.object(compile_fx, "compile_fx", compile_piece):
        try:
            function(*arguments)
        except _NotBuilt:
            return codes
    raise AssertionError("ran without a piece")
