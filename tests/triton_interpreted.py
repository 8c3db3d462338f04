"""Runs the Triton kernels of the fused operators on CPU tensors; prints errors as JSON.

A program of its own: the interpreter is chosen by TRITON_INTERPRET=1 before triton is imported, and
nothing else in a test process may be interpreted.
"""

import importlib
import json
import os

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from tests import fused_cases
from tests.fused_cases import ODD, error

FP32, BF16 = torch.float32, torch.bfloat16
WIDE = dict(D=1536, Q=128, C=64, R=16, G=32, H=2, J=2, N=8)  # powers of two and a multiple


def round_to_nearest_even() -> None:
    """The interpreter's cast from fp32 to bf16 cuts; the hardware's rounds."""
    convert = interpreter._convert_float

    def rounded(values, source, target, mode):
        if source == tl.float32 and target == tl.bfloat16:
            fp32 = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            return fp32.to(BF16).view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
        return convert(values, source, target, mode)

    interpreter._convert_float = rounded


def difference(name: str, args: list, numbers: tuple, launch_numbers: tuple, dtype) -> float:
    """Error of outputs and of everything the operator wrote into its arguments."""
    reference = getattr(importlib.import_module(f"glm53.ops.{name}"), f"{name}_ref")
    launch = importlib.import_module(f"glm53.ops.kernels.{name}").launch
    twin = [None if x is None else x.clone() for x in args]
    expected, got = reference(*twin, *numbers), launch(*args, *launch_numbers)
    if isinstance(expected, torch.Tensor):
        expected, got = [expected], [got]
    pairs = [*zip(got, expected, strict=True)]
    pairs += [(x, y) for x, y in zip(args, twin, strict=True) if x is not None]
    return max(error(x, y, dtype if x.is_floating_point() else None) for x, y in pairs)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1"
    round_to_nearest_even()
    torch.manual_seed(0)
    errors = {}
    for sizes_name, sizes in (("odd", ODD), ("wide", WIDE)):
        for dtype, cache_dtype in ((FP32, FP32), (BF16, BF16), (FP32, BF16), (BF16, FP32)):
            low = BF16 if BF16 in (dtype, cache_dtype) else FP32
            for interleave, index_interleave, index in (
                (True, False, True),
                (False, True, True),
                (True, True, False),
            ):
                case = f"{sizes_name}-{dtype}-{cache_dtype}-{interleave}-{index_interleave}-{index}"
                args = fused_cases.norm_rope_cache_args(
                    5, sizes, dtype, cache_dtype, index=index, padding=2
                )
                numbers = (1e-5, 1e-6, interleave, index_interleave)
                errors[f"norm_rope_cache-{case}"] = difference(
                    "norm_rope_cache", args, numbers, numbers, low
                )
                if dtype == cache_dtype:
                    args = fused_cases.index_query_args(3, sizes, dtype, index=index)
                    numbers = (0.37, interleave, index_interleave)
                    errors[f"index_query-{case}"] = difference(
                        "index_query", args, numbers, numbers, dtype
                    )
            if dtype == cache_dtype:
                case = f"{sizes_name}-{dtype}"
                args = fused_cases.embed_eh_norm_args(3, sizes, dtype)
                errors[f"embed_eh_norm-{case}"] = difference(
                    "embed_eh_norm", args, (1e-5,), (1e-5,), dtype
                )
                args = fused_cases.add_rms_norm_args(3, sizes, dtype)
                errors[f"all_reduce_add_rms_norm-{case}"] = difference(
                    "all_reduce_add_rms_norm", args, (1e-5, None), (1e-5,), dtype
                )
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
