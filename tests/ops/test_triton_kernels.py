"""Triton kernels without a GPU: interpreted on CPU tensors, and compiled for two of them."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import fused_cases
from tests.fused_cases import GLM53

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (extra gpu)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16
NAMES = ("norm_rope_cache", "index_query", "embed_eh_norm", "all_reduce_add_rms_norm")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-m", "tests.triton_interpreted"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernel_equals_reference(interpreted, name):
    """fp32 within 16 ulp (sums in another order), bf16 within one; NaN exactly where it belongs."""
    errors = {case: e for case, e in interpreted.items() if case.startswith(f"{name}-")}
    assert len(errors) == {"norm_rope_cache": 24, "index_query": 12}.get(name, 4)
    wrong = {case: e for case, e in errors.items() if not e <= (1 if "bfloat16" in case else 16)}
    assert not wrong
    if name == "index_query":  # no sum in it
        assert set(errors.values()) == {0}


def arguments(name: str) -> tuple[list, tuple]:
    """What `launch` gets for one layer of GLM-5.3 in bf16."""
    if name == "norm_rope_cache":
        args = fused_cases.norm_rope_cache_args(2, GLM53, BF16, BF16)
        return args, (1e-5, 1e-6, True, True)
    if name == "index_query":
        return fused_cases.index_query_args(2, GLM53, BF16), (1 / 64, True, True)
    if name == "embed_eh_norm":
        return fused_cases.embed_eh_norm_args(2, GLM53, BF16), (1e-5,)
    return fused_cases.add_rms_norm_args(2, GLM53, BF16), (1e-5,)


class Launches:
    """Stands in for a kernel and keeps what it is launched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple, dict]] = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


def compile_for(kernel, args: tuple, kwargs: dict, capability: int) -> dict[str, int]:
    """Registers, spilled bytes and shared memory of the specialisation that the JIT would make."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {"num_warps": kwargs.pop("num_warps", 4)}
    types = {BF16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
    signature, constants, attributes = {}, dict(kwargs), {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = types[value.dtype]
            aligned = value.storage_offset() * value.element_size() % 16 == 0
        elif isinstance(value, int):
            signature[name] = "i32"
            aligned = value % 16 == 0
        else:
            signature[name], aligned = "fp32", False
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    for name in constants:
        signature[name] = "constexpr"
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    ptx = compiled.asm["ptx"]
    binaries = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = binaries / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    architecture = re.search(r"\.target\s+(\w+)", ptx)[1]
    report = subprocess.run(
        [assembler, "-v", f"--gpu-name={architecture}", "-", "-o", os.devnull],
        input=ptx,
        capture_output=True,
        text=True,
    )
    assert report.returncode == 0, report.stderr
    return {
        "architecture": architecture,
        "registers": int(re.search(r"Used (\d+) registers", report.stderr)[1]),
        "spilled": int(re.search(r"(\d+) bytes spill stores", report.stderr)[1]),
        "shared": compiled.metadata.shared,
    }


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiles, not interprets")
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_spills(monkeypatch, record_property, name, capability):
    """One launch per call; for sm_90a and sm_100a: no spill, two blocks fit a multiprocessor."""
    module = importlib.import_module(f"glm53.ops.kernels.{name}")
    kernel, launches = module._kernel, Launches()
    monkeypatch.setattr(module, "_kernel", launches)
    args, numbers = arguments(name)
    module.launch(*args, *numbers)
    ((args, kwargs),) = launches.calls
    used = compile_for(kernel, args, kwargs, capability)
    for key, value in used.items():
        record_property(key, value)
    print(name, used)
    assert used["architecture"] == f"sm_{capability}a"
    assert used["spilled"] == 0
    threads = 32 * kwargs.get("num_warps", 4)
    assert 2 * threads * used["registers"] <= 65536
    assert used["shared"] <= 16 * 1024


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_no_launch(monkeypatch, name):
    module = importlib.import_module(f"glm53.ops.kernels.{name}")
    launches = Launches()
    monkeypatch.setattr(module, "_kernel", launches)
    args, numbers = arguments(name)
    slots = args[6] if name == "norm_rope_cache" else None
    args = [x if x is None or (x.dim() == 1 and x.dtype == BF16) else x[:0] for x in args]
    if slots is not None:
        args[6] = slots[:0]
    out = module.launch(*args, *numbers)
    assert not launches.calls
    assert all(x.shape[0] == 0 for x in ([out] if isinstance(out, torch.Tensor) else out))
