"""embed_eh_norm: equation, reference and kernel agree."""

import pytest
import torch

from glm53.ops import embed_eh_norm
from glm53.ops.embed_eh_norm import embed_eh_norm_ref
from tests.fused_cases import GLM53, ODD, ULPS, embed_eh_norm_args, error
from tests.ops.test_norm_rope_cache import loop_rms

FP32, BF16 = torch.float32, torch.bfloat16
OP = torch.ops.glm53.embed_eh_norm.default


def test_reference_is_the_equation():
    args = embed_eh_norm_args(5, ODD, FP32)
    ids, positions, table, hidden, enorm, hnorm = (x.double().tolist() for x in args)
    expected = []
    for i, position, h in zip(ids, positions, hidden, strict=True):
        embedding = [0.0] * len(h) if position == 0 else table[int(i)]
        expected.append(loop_rms(embedding, enorm, 1e-5) + loop_rms(h, hnorm, 1e-5))
    got = embed_eh_norm_ref(*args, 1e-5)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("sizes, dtype", [(ODD, FP32), (GLM53, BF16)], ids=["fp32", "bf16"])
def test_kernel_equals_reference(sizes, dtype):
    """The first row's embedding is NaN in the table: at position 0 it is not looked at."""
    for rows, sliced in [(5, True), (3, False), (1, True), (0, True)]:
        args = embed_eh_norm_args(rows, sizes, dtype, sliced=sliced)
        got = embed_eh_norm(*args, eps=1e-5)
        assert error(got, embed_eh_norm_ref(*args, 1e-5), dtype) <= (ULPS if dtype == BF16 else 16)
        assert not got[:1, : sizes["D"]].any() and not got.isnan().any()


def test_gathered_embeddings():
    """Rows of a table that other ranks hold: the gathered rows are the table."""
    args = embed_eh_norm_args(5, ODD, FP32)
    gathered = [torch.arange(5), args[1], args[2][args[0]], *args[3:]]
    assert torch.equal(embed_eh_norm(*args, eps=1e-5), embed_eh_norm(*gathered, eps=1e-5))


@pytest.mark.parametrize("unknown", [-1, 17])
def test_unknown_id_raises(unknown):
    args = embed_eh_norm_args(5, ODD, FP32)
    args[0][2] = unknown
    with pytest.raises(IndexError, match=str(unknown)):
        embed_eh_norm(*args, eps=1e-5)


def test_opcheck():
    args = embed_eh_norm_args(5, ODD, FP32)
    args[2] = args[2].nan_to_num()
    torch.library.opcheck(OP, (*args, 1e-5))


@torch.inference_mode()
def test_one_node_of_a_compiled_caller():
    def caller(*args):
        return embed_eh_norm(*args, eps=1e-5) * 2

    compiled = torch.compile(caller, fullgraph=True, dynamic=True)
    for rows in (5, 3):
        args = embed_eh_norm_args(rows, ODD, FP32)
        with torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            torch.testing.assert_close(compiled(*args), caller(*args))
