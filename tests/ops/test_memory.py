"""Bounded memory: no temporary grows with context times heads, and nothing expands K or V.

The custom ops' Python kernels run under a dispatch mode that sees every tensor they create.
"""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INDEX = importlib.import_module("glm53.ops.index_select")
SPARSE = importlib.import_module("glm53.ops.sparse_mla")
HEADS, DIM, LATENT, TOPK, PAGE = 16, 6, 10, 64, 64


class Sizes(TorchDispatchMode):
    """Element counts of everything created while active."""

    def __init__(self):
        super().__init__()
        self.numels = [0]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {id(t) for t in tree_leaves((args, kwargs))}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and id(t) not in given and t._base is None:
                self.numels.append(t.untyped_storage().nbytes() // t.itemsize)
        return out


def _select_args(context, rows):
    pages = context // PAGE
    return (
        torch.randn(rows, HEADS, DIM),
        torch.randn(rows, HEADS),
        torch.randn(context, DIM),
        torch.randperm(pages, dtype=torch.int32)[None],
        torch.zeros(rows, dtype=torch.int32),
        torch.arange(context - rows + 1, context + 1, dtype=torch.int32),
        TOPK,
        PAGE,
        PAGE,
    )


def _peak(function, args):
    with Sizes() as sizes:
        function(*args)
    assert len(sizes.numels) > 3, "the mode saw nothing of the kernel"
    return max(sizes.numels)


def test_the_mode_sees_a_dense_score_tensor():
    """The instrument itself: the reference makes [heads, keys] scores, and that is noticed."""
    context = 4096
    assert _peak(INDEX.index_select_ref, _select_args(context, 2)) >= HEADS * context


@pytest.mark.parametrize("rows", [1, 40])
def test_index_scores_never_exist_per_head_and_context(monkeypatch, rows):
    monkeypatch.setattr(INDEX, "TILE_KEYS", 256)
    monkeypatch.setattr(INDEX, "TILE_ELEMENTS", 1 << 14)
    for context in (4096, 16384):
        peak = _peak(INDEX._index_select._init_fn, _select_args(context, rows))
        # A tile, or what a single row needs whatever the tile: its scores and its block table.
        assert peak <= max(INDEX.TILE_ELEMENTS, context), (context, peak)
        assert peak < HEADS * context


def test_index_tiles_at_the_shipped_size():
    context, rows = 16384, 300
    peak = _peak(INDEX._index_select._init_fn, _select_args(context, rows))
    assert peak <= INDEX.TILE_ELEMENTS < rows * context < rows * context * HEADS


def test_keys_are_tiled_at_the_shipped_size():
    """A single row whose scores per head and key exceed a tile: TILE_KEYS is what bounds it."""
    context = 2 * INDEX.TILE_ELEMENTS // HEADS
    peak = _peak(INDEX._index_select._init_fn, _select_args(context, 1))
    assert peak <= context < INDEX.TILE_ELEMENTS < HEADS * context


def test_attention_temporaries_do_not_grow_with_the_context():
    peaks = []
    for context in (4096, 16384):
        indices = torch.randint(context, (8, TOPK), dtype=torch.int32)
        args = (
            torch.randn(8, HEADS, LATENT),
            torch.randn(context, LATENT),
            indices,
            torch.full((8,), TOPK, dtype=torch.int32),
            LATENT - 2,
            1.0,
        )
        peaks.append(_peak(SPARSE._sparse_mla._init_fn, args))
    assert peaks[0] == peaks[1] < 4096 * HEADS


def test_attention_tiles_are_bounded_over_rows(monkeypatch):
    monkeypatch.setattr(SPARSE, "TILE_ELEMENTS", 2 * TOPK * LATENT)
    rows = 50
    args = (
        torch.randn(rows, 2, LATENT),
        torch.randn(4096, LATENT),
        torch.randint(4096, (rows, TOPK), dtype=torch.int32),
        torch.full((rows,), TOPK, dtype=torch.int32),
        LATENT - 2,
        1.0,
    )
    # Indices and masks of all rows are inputs' size; nothing has rows * selected * latent.
    assert _peak(SPARSE._sparse_mla._init_fn, args) <= rows * TOPK < rows * TOPK * LATENT


def test_backward_of_attention_is_bounded_too(monkeypatch):
    monkeypatch.setattr(SPARSE, "TILE_ELEMENTS", 2 * TOPK * LATENT)
    rows, context = 50, 1024
    q, pool = torch.randn(rows, 2, LATENT), torch.randn(context, LATENT)
    indices = torch.randint(context, (rows, TOPK), dtype=torch.int32)
    counts = torch.full((rows,), TOPK, dtype=torch.int32)
    out, lse = SPARSE.sparse_mla(q, pool, indices, counts, value_dim=LATENT - 2, scale=1.0)
    args = (torch.randn_like(out), torch.randn_like(lse), q, pool, indices, out, lse)
    peak = _peak(SPARSE._sparse_mla_backward._init_fn, (*args, LATENT - 2, 1.0))
    assert peak <= context * LATENT < rows * TOPK * LATENT
