"""index_query: equation, reference and kernel agree."""

import pytest
import torch

from glm53.ops import index_query
from glm53.ops.index_query import index_query_ref
from tests.fused_cases import GLM53, ODD, error, index_query_args
from tests.ops.test_norm_rope_cache import loop_rope

FP32, BF16 = torch.float32, torch.bfloat16
OP = torch.ops.glm53.index_query.default
NUMBERS = dict(weight_scale=0.37, interleave=True, index_interleave=False)


def by_loops(args, weight_scale, interleave, index_interleave):
    latent, pe, cos, sin, index_q, weights = (x.double().tolist() for x in args)
    query = [
        [head + loop_rope(pe[t][h], cos[t], sin[t], interleave) for h, head in enumerate(heads)]
        for t, heads in enumerate(latent)
    ]
    index = [
        [loop_rope(head, cos[t], sin[t], index_interleave) for head in heads]
        for t, heads in enumerate(index_q)
    ]
    scaled = [[w * weight_scale for w in row] for row in weights]
    return [torch.tensor(x).float() for x in (query, index, scaled)]


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("index_interleave", [True, False])
def test_reference_is_the_equation(interleave, index_interleave):
    args = index_query_args(5, ODD, FP32)
    numbers = NUMBERS | dict(interleave=interleave, index_interleave=index_interleave)
    torch.testing.assert_close(
        list(index_query_ref(*args, **numbers)), by_loops(args, **numbers), rtol=1e-6, atol=1e-6
    )


CASES = {
    "fp32": (ODD, FP32, True, NUMBERS),
    "bf16": (GLM53, BF16, True, NUMBERS | dict(index_interleave=True)),
    "bf16, shared layer": (ODD, BF16, False, NUMBERS | dict(interleave=False)),
}


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference_bit_for_bit(case):
    sizes, dtype, index, numbers = CASES[case]
    for rows, sliced in [(5, True), (3, False), (1, True), (0, True)]:
        args = index_query_args(rows, sizes, dtype, index=index, sliced=sliced)
        got, expected = index_query(*args, **numbers), index_query_ref(*args, **numbers)
        assert len(got) == len(expected) == (3 if index else 1)
        for ours, theirs in zip(got, expected, strict=True):
            assert error(ours, theirs) == 0
    assert all(x.is_contiguous() for x in got)


def test_weights_stay_fp32():
    """Head weights that bf16 cannot tell apart are still different afterwards."""
    args = index_query_args(1, GLM53, BF16)
    args[5] = 1 + torch.arange(32)[None] * 1e-4
    _, _, weights = index_query(*args, **NUMBERS | dict(index_interleave=True))
    assert weights.dtype == FP32 and weights.unique().numel() == 32


@pytest.mark.parametrize("case", ["fp32", "bf16, shared layer"])
def test_opcheck(case):
    sizes, dtype, index, numbers = CASES[case]
    args = index_query_args(5, sizes, dtype, index=index)
    torch.library.opcheck(OP, (*args, *numbers.values()))


@torch.inference_mode()
def test_one_node_of_a_compiled_caller():
    def caller(*args):
        query, index, weights = index_query(*args, **NUMBERS)
        return query * 2, index.sum(-1) * weights

    compiled = torch.compile(caller, fullgraph=True, dynamic=True)
    for rows in (7, 4):
        args = index_query_args(rows, ODD, FP32)
        with torch.compiler.set_stance("default" if rows == 7 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(*args), caller(*args))
