"""CPU kernels of the fused operators: one C++ function each, for any number of rows."""

import importlib
import re
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch._inductor.graph import GraphLowering

from glm53.ops.cpu_kernel import SERIAL_ROWS, CPUKernel
from tests import fused_cases
from tests.fused_cases import ODD

FP32 = torch.float32
INDEX_NUMBERS = dict(interleave=True, index_interleave=False)
CALLS = {
    "norm_rope_cache": lambda rows: (
        fused_cases.norm_rope_cache_args(rows, ODD, FP32, FP32),
        dict(eps=1e-5, index_eps=1e-6, **INDEX_NUMBERS),
    ),
    "index_query": lambda rows: (
        fused_cases.index_query_args(rows, ODD, FP32),
        dict(weight_scale=0.37, **INDEX_NUMBERS),
    ),
    "embed_eh_norm": lambda rows: (
        fused_cases.embed_eh_norm_args(rows, ODD, FP32),
        dict(eps=1e-5),
    ),
    "all_reduce_add_rms_norm": lambda rows: (
        fused_cases.add_rms_norm_args(rows, ODD, FP32),
        dict(eps=1e-5, group_name=None),
    ),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", CALLS)
def test_one_function_for_any_number_of_rows(monkeypatch, name):
    """The generated module calls its one C++ function and nothing else that computes."""
    module = importlib.import_module(f"glm53.ops.{name}")
    shared = module._cpu_kernel
    monkeypatch.setattr(module, "_cpu_kernel", CPUKernel(shared.function, shared.rows))
    sources = []
    with mock.patch.object(GraphLowering, "save_output_code", sources.append):
        for rows in (6, 3, 1, 9):
            args, numbers = CALLS[name](rows)
            getattr(module, name)(*args, **numbers)
    (source,) = sources
    assert source.count("async_compile.cpp_pybinding(") == 1
    called = re.findall(
        r"^\s+(?:\w+ = )?((?:cpp_fused|extern_kernels|torch\.ops)[\w.]*)\(", source, re.M
    )
    assert len(called) == 1 and called[0].startswith("cpp_fused")


def test_other_dtypes_widths_and_constants_are_other_functions():
    kernel = CPUKernel(lambda x, *, factor: (x * factor,), rows="T")
    narrow, wide = torch.ones(3, 2), torch.ones(3, 5)
    for x, factor in ((narrow, 2.0), (narrow, 3.0), (wide, 2.0), (narrow.double(), 2.0)):
        assert torch.equal(kernel(x, factor=factor)[0], x * factor)
        assert torch.equal(kernel(x[:2], factor=factor)[0], x[:2] * factor)
    assert len(kernel._compiled) == 4


def test_few_rows_are_not_shared_among_threads():
    kernel = CPUKernel(lambda x, *, factor: (x * factor,), rows="T")
    sources = []
    with (
        torch._inductor.config.patch({"cpp.threads": 2, "force_disable_caches": True}),
        mock.patch.object(GraphLowering, "save_output_code", sources.append),
    ):
        for rows in (SERIAL_ROWS, SERIAL_ROWS + 1, 3, 2000):
            x = torch.randn(rows, 4096)
            assert torch.equal(kernel(x, factor=2.5)[0], x * 2.5)
    assert len(kernel._compiled) == 2
    assert ["omp parallel" in source for source in sources] == [False, True]


def test_first_call_inside_autocast_and_inference_mode():
    """What surrounds the first call does not become part of the kernel."""
    kernel = CPUKernel(lambda x, w: (x @ w,), rows="T.")
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    with torch.inference_mode(), torch.autocast("cpu"):
        (got,) = kernel(x, w)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x @ w)


def test_first_calls_of_two_threads():
    kernels = [CPUKernel(lambda x, *, factor: (x * factor,), rows="T") for _ in range(2)]
    x = torch.randn(3, 4)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(kernel, x, factor=1.5) for kernel in kernels for _ in range(2)]
    for call in calls:
        assert torch.equal(call.result()[0], x * 1.5)


@torch.inference_mode()
def test_constants_of_different_types_are_different():
    """1, 1.0 and True are equal as keys, and do not compute the same."""
    kernel = CPUKernel(lambda x, factor: (x * factor,), rows="T")
    x = torch.arange(6).view(3, 2)
    for factor, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
        (result,) = kernel(x, factor=factor)
        assert result.dtype == dtype
