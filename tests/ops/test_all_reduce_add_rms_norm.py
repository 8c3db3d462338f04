"""all_reduce_add_rms_norm: equation, reference and kernel agree, on one rank and on two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm53.ops import all_reduce_add_rms_norm
from glm53.ops.all_reduce_add_rms_norm import all_reduce_add_rms_norm_ref
from tests.fused_cases import GLM53, ODD, ULPS, add_rms_norm_args, error
from tests.ops.test_norm_rope_cache import loop_rms

FP32, BF16 = torch.float32, torch.bfloat16
OP = torch.ops.glm53.all_reduce_add_rms_norm.default
ROOT = Path(__file__).parents[2]


def test_reference_is_the_equation():
    args = add_rms_norm_args(5, ODD, FP32)
    normed, stream = all_reduce_add_rms_norm_ref(*args, 1e-5, None)
    x, residual, weight = (tensor.double().tolist() for tensor in args)
    for t in range(5):
        total = [a + b for a, b in zip(x[t], residual[t], strict=True)]
        torch.testing.assert_close(stream[t], torch.tensor(total), rtol=1e-6, atol=1e-6)
        expected = torch.tensor(loop_rms(total, weight, 1e-5))
        torch.testing.assert_close(normed[t], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sizes, dtype", [(ODD, FP32), (GLM53, BF16)], ids=["fp32", "bf16"])
def test_kernel_equals_reference(sizes, dtype):
    for rows, sliced in [(5, True), (3, False), (1, True), (0, True)]:
        args = add_rms_norm_args(rows, sizes, dtype, sliced=sliced)
        before = [x.clone() for x in args]
        normed, stream = all_reduce_add_rms_norm(*args, eps=1e-5, group_name=None)
        expected = all_reduce_add_rms_norm_ref(*args, 1e-5, None)
        assert error(normed, expected[0], dtype) <= (ULPS if dtype == BF16 else 16)
        assert torch.equal(stream, expected[1])
        assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))


def test_opcheck():
    torch.library.opcheck(OP, (*add_rms_norm_args(5, ODD, FP32), 1e-5, None))


@torch.inference_mode()
def test_one_node_of_a_compiled_caller():
    def caller(*args):
        normed, stream = all_reduce_add_rms_norm(*args, eps=1e-5, group_name=None)
        return normed * 2 + stream

    compiled = torch.compile(caller, fullgraph=True, dynamic=True)
    for rows in (5, 3):
        args = add_rms_norm_args(rows, ODD, FP32)
        with torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(*args), caller(*args))


RANK = """
import sys, torch, torch.distributed as dist
from glm53.ops import all_reduce_add_rms_norm

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
name = dist.group.WORLD.group_name
torch.manual_seed(0)
parts, residual, weight = torch.randn(2, 5, 13), torch.randn(5, 13), torch.rand(13)

expected = all_reduce_add_rms_norm(
    parts.sum(0), residual, weight, eps=1e-5, group_name=None
)
mine = parts[rank].clone()
got = all_reduce_add_rms_norm(mine, residual, weight, eps=1e-5, group_name=name)
torch.testing.assert_close(got, expected)
assert torch.equal(mine, parts[rank])
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path):
    """The partial sums of two processes are added; x is left as it was."""
    store = tmp_path / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(store)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], errors
