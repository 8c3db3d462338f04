"""Inputs of the fused operators, by size and dtype, as the network would pass them."""

import math

import torch
from torch import Tensor

ODD = dict(D=13, Q=19, C=9, R=6, G=11, H=3, J=5, N=4)
GLM53 = dict(D=6144, Q=2048, C=512, R=64, G=128, H=64, J=32, N=192)
SLOTS = 23

# Ulps of a low-precision result. torch 2.11 ignores that a value is rounded between two steps.
ROUNDED_BETWEEN_STEPS = torch.__version__ >= "2.13"
ULPS = 1 if ROUNDED_BETWEEN_STEPS else 2


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def table(rows: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = 3 * torch.randn(rows, rotary_dim // 2)
    return angles.cos(), angles.sin()


def slots(rows: int, padding: int) -> Tensor:
    """Distinct slots but the last one (where -1 would lead), and -1 at any `padding` places."""
    where = torch.randperm(SLOTS - 1)[:rows]
    where[torch.randperm(rows)[:padding]] = -1
    return where


def norm_rope_cache_args(
    rows: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    index: bool = True,
    padding: int = 1,
    sliced: bool = True,
) -> list[Tensor | None]:
    """Everything but the numbers. sliced: rows are parts of one merged projection.

    The caches are full of NaN.
    """
    q_dim, latent_dim, rotary_dim, key_dim = (sizes[k] for k in "QCRG")
    merged = draw(rows, q_dim + latent_dim + rotary_dim, dtype=dtype)
    q, kv = merged[:, :q_dim], merged[:, q_dim:]
    if not sliced:
        q, kv = q.contiguous(), kv.contiguous()
    cos, sin = table(rows, rotary_dim)
    return [
        q,
        (torch.rand(q_dim) * 2).to(dtype),
        kv,
        (torch.rand(latent_dim) * 2).to(dtype),
        cos,
        sin,
        slots(rows, padding),
        torch.full((SLOTS, latent_dim + rotary_dim), math.nan, dtype=cache_dtype),
        3 + 2 * draw(rows, key_dim, dtype=dtype) if index else None,
        (torch.rand(key_dim) * 2).to(dtype) if index else None,
        draw(key_dim, dtype=dtype) if index else None,
        torch.full((SLOTS, key_dim), math.nan, dtype=cache_dtype) if index else None,
    ]


def index_query_args(
    rows: int,
    sizes: dict[str, int],
    dtype: torch.dtype,
    *,
    index: bool = True,
    sliced: bool = True,
) -> list[Tensor | None]:
    heads, index_heads = sizes["H"], sizes["J"]
    q = draw(rows, heads, sizes["N"] + sizes["R"], dtype=dtype)[..., sizes["N"] :]
    return [
        draw(rows, heads, sizes["C"], dtype=dtype),
        q if sliced else q.contiguous(),
        *table(rows, sizes["R"]),
        draw(rows, index_heads, sizes["G"], dtype=dtype) if index else None,
        draw(rows, index_heads) if index else None,
    ]


def embed_eh_norm_args(
    rows: int, sizes: dict[str, int], dtype: torch.dtype, *, sliced: bool = True
) -> list[Tensor]:
    """The first row is at position 0, and its embedding is full of NaN."""
    dim = sizes["D"]
    embeddings = draw(17, dim, dtype=dtype)
    ids = torch.randint(1, 17, (rows,))
    ids[:1], embeddings[0] = 0, math.nan
    hidden = 2 * draw(rows, 2 * dim, dtype=dtype)[:, dim:]
    return [
        ids,
        torch.arange(rows) * 5,
        embeddings,
        hidden if sliced else hidden.contiguous(),
        (torch.rand(dim) * 2).to(dtype),
        (torch.rand(dim) * 2).to(dtype),
    ]


def add_rms_norm_args(
    rows: int, sizes: dict[str, int], dtype: torch.dtype, *, sliced: bool = True
) -> list[Tensor]:
    x = draw(rows, 2 * sizes["D"], dtype=dtype)[:, : sizes["D"]]
    return [
        x if sliced else x.contiguous(),
        2 * draw(rows, sizes["D"], dtype=dtype),
        (torch.rand(sizes["D"]) * 2).to(dtype),
    ]


def error(got: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> float:
    """Largest difference in ulps of `dtype` (default: fp32); NaN only equals NaN.

    Means and rotations cancel, so small values have the ulp of 1 (fp32) or 1/16 (less precise).
    """
    assert got.dtype == expected.dtype and got.shape == expected.shape
    if not torch.equal(got.isnan(), expected.isnan()):
        return math.inf
    got, expected = got.double().nan_to_num(), expected.double().nan_to_num()
    eps = torch.finfo(dtype or torch.float32).eps
    ulp = eps * expected.abs().clamp(min=1 if eps < 1e-6 else 1 / 16).log2().floor().exp2()
    return float(((got - expected).abs() / ulp).max()) if got.numel() else 0.0
