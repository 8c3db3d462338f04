"""norm_rope_cache: equation, reference and kernel agree, and no other byte of a cache changes."""

import math
from unittest import mock

import pytest
import torch
from torch._inductor.graph import GraphLowering

from glm53.ops import norm_rope_cache
from glm53.ops.norm_rope_cache import norm_rope_cache_ref
from tests.fused_cases import GLM53, ODD, SLOTS, ULPS, error, norm_rope_cache_args

FP32, BF16 = torch.float32, torch.bfloat16
OP = torch.ops.glm53.norm_rope_cache.default
NUMBERS = dict(eps=1e-5, index_eps=1e-6, interleave=True, index_interleave=False)


def loop_rope(x, cos, sin, interleave):
    half = len(cos)
    out = list(x)
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if interleave else (j, j + half)
        out[a] = x[a] * cos[j] - x[b] * sin[j]
        out[b] = x[b] * cos[j] + x[a] * sin[j]
    return out


def loop_rms(x, weight, eps):
    scale = 1 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [w * v * scale for v, w in zip(x, weight, strict=True)]


def by_loops(args, eps, index_eps, interleave, index_interleave):
    """q, latent rows, index keys of every row: fp64, number by number."""
    values = [None if x is None else x.double().tolist() for x in args]
    q, q_norm, kv, kv_norm, cos, sin, _, _, key, weight, bias, _ = values
    queries, rows, keys = [], [], []
    for t in range(len(q)):
        queries.append(loop_rms(q[t], q_norm, eps))
        split = len(kv_norm)
        k_pe = loop_rope(kv[t][split:], cos[t], sin[t], interleave)
        rows.append(loop_rms(kv[t][:split], kv_norm, eps) + k_pe)
        mean = sum(key[t]) / len(key[t])
        variance = sum((v - mean) ** 2 for v in key[t]) / len(key[t])
        normed = [
            (v - mean) / math.sqrt(variance + index_eps) * w + b
            for v, w, b in zip(key[t], weight, bias, strict=True)
        ]
        keys.append(loop_rope(normed, cos[t], sin[t], index_interleave))
    return torch.tensor(queries), torch.tensor(rows), torch.tensor(keys)


def written(args):
    """The caches after the call that `args` were given to."""
    return args[7], args[11]


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("index_interleave", [True, False])
def test_reference_is_the_equation(interleave, index_interleave):
    args = norm_rope_cache_args(6, ODD, FP32, FP32, padding=2)
    numbers = NUMBERS | dict(interleave=interleave, index_interleave=index_interleave)
    queries, rows, keys = by_loops(args, **numbers)
    got = norm_rope_cache_ref(*args, **numbers)
    torch.testing.assert_close(got, queries.float(), rtol=2e-6, atol=2e-6)
    for t, slot in enumerate(args[6].tolist()):
        if slot >= 0:
            torch.testing.assert_close(args[7][slot], rows[t].float(), rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(args[11][slot], keys[t].float(), rtol=4e-6, atol=4e-6)


CASES = {
    "fp32": (ODD, FP32, FP32, True, NUMBERS),
    "bf16": (GLM53, BF16, BF16, True, NUMBERS | dict(index_interleave=True)),
    "fp32 into bf16": (ODD, FP32, BF16, True, NUMBERS | dict(interleave=False)),
    "bf16 into fp32, shared layer": (GLM53, BF16, FP32, False, NUMBERS),
}


@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_reference(case):
    """Any number of rows, sliced or not, padding anywhere; unwritten slots keep their NaN."""
    sizes, dtype, cache_dtype, index, numbers = CASES[case]
    for rows, padding, sliced in [(6, 2, True), (6, 0, False), (1, 0, True), (1, 0, False)]:
        args = norm_rope_cache_args(
            rows, sizes, dtype, cache_dtype, index=index, padding=padding, sliced=sliced
        )
        twin = [None if x is None else x.clone() for x in args]
        expected, got = norm_rope_cache_ref(*twin, **numbers), norm_rope_cache(*args, **numbers)
        limit = ULPS if dtype == BF16 else 16
        assert error(got, expected, dtype) <= limit
        for ours, theirs in zip(written(args), written(twin), strict=True):
            if ours is not None:
                low = BF16 if BF16 in (dtype, cache_dtype) else FP32
                assert error(ours, theirs, low) <= (ULPS if low == BF16 else 16)
                unwritten = torch.ones(SLOTS, dtype=torch.bool)
                unwritten[args[6][args[6] >= 0]] = False
                assert ours[unwritten].isnan().all() and not ours[~unwritten].isnan().any()


def test_padding_rows_write_no_byte_but_have_a_query():
    args = norm_rope_cache_args(6, ODD, FP32, FP32, padding=6)
    before = [cache.view(torch.int32).clone() for cache in written(args)]
    got = norm_rope_cache(*args, **NUMBERS)
    assert error(got, norm_rope_cache_ref(*args, **NUMBERS)) <= 16
    for cache, bytes_before in zip(written(args), before, strict=True):
        assert torch.equal(cache.view(torch.int32), bytes_before)


def test_garbage_in_a_padding_row_stays_there():
    args = norm_rope_cache_args(6, ODD, FP32, FP32, padding=2)
    for x in (args[0], args[2], args[4], args[8]):
        x[args[6] < 0] = math.nan
    got = norm_rope_cache(*args, **NUMBERS)
    assert torch.equal(got.isnan().any(-1), args[6] < 0)
    for cache in written(args):
        assert int((~cache.isnan().any(-1)).sum()) == 4


def test_no_rows():
    args = norm_rope_cache_args(0, ODD, FP32, FP32, padding=0)
    assert norm_rope_cache(*args, **NUMBERS).shape == (0, ODD["Q"])
    assert all(cache.isnan().all() for cache in written(args))


def test_caches_may_be_strided():
    """A cache whose rows lie in the rows of something larger."""
    args = norm_rope_cache_args(6, ODD, FP32, FP32)
    twin = [x.clone() for x in args]
    norm_rope_cache_ref(*twin, **NUMBERS)
    pools = [torch.full((SLOTS, 2, cache.shape[1]), math.nan) for cache in written(args)]
    args[7], args[11] = (pool[:, 1] for pool in pools)
    norm_rope_cache(*args, **NUMBERS)
    for pool, expected in zip(pools, written(twin), strict=True):
        assert error(pool[:, 1], expected) <= 16
        assert pool[:, 0].isnan().all()


def test_slot_past_the_end_raises_and_writes_nothing():
    args = norm_rope_cache_args(6, ODD, FP32, FP32)
    args[6][3] = SLOTS
    with pytest.raises(IndexError, match=f"slot {SLOTS}"):
        norm_rope_cache(*args, **NUMBERS)
    assert all(cache.isnan().all() for cache in written(args))


@pytest.mark.parametrize("case", ["fp32", "bf16 into fp32, shared layer"])
def test_opcheck(case):
    sizes, dtype, cache_dtype, index, numbers = CASES[case]
    args = norm_rope_cache_args(6, sizes, dtype, cache_dtype, index=index)
    torch.library.opcheck(OP, (*args, *numbers.values()))


@torch.inference_mode()
def test_one_node_of_a_compiled_caller():
    """The caches are read after the call and not copied; a second size recompiles nothing."""

    def caller(*args):
        q = norm_rope_cache(*args, **NUMBERS)
        return q * 2, args[7].nan_to_num().sum(0), args[11].nan_to_num().sum(0)

    compiled = torch.compile(caller, fullgraph=True, dynamic=True)
    sources = []
    for rows in (6, 4):
        args = norm_rope_cache_args(rows, ODD, FP32, FP32)
        twin = [x.clone() for x in args]
        with (
            torch.compiler.set_stance("default" if rows == 6 else "fail_on_recompile"),
            mock.patch.object(GraphLowering, "save_output_code", sources.append),
        ):
            got = compiled(*args)
        torch.testing.assert_close(got, caller(*twin))
        for ours, theirs in zip(written(args), written(twin), strict=True):
            assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    (source,) = [s for s in sources if "torch.ops.glm53.norm_rope_cache" in s]
    assert "copy_(" not in source and "clone(" not in source and f"cpu(({SLOTS}," not in source
