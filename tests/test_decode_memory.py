"""One paged decode row: what the network allocates does not depend on the context's length.

Except inside the lightning indexer, which scores every visible key. A dispatch mode sees every
tensor that the forward creates, also inside the custom ops, whose kernels it calls itself.
"""

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config

CONTEXTS = (200, 4000)
PAGES = [-(-context // PAGE_SIZE) for context in CONTEXTS]
TILE_KEYS = 64


def _kernel(file: str, name: str):
    kernel = getattr(importlib.import_module(f"glm53.ops.{file}"), name)
    return getattr(kernel, "_init_fn", kernel)


OPERATORS = {
    getattr(torch.ops.glm53, name).default: _kernel(file, kernel)
    for name, file, kernel in (
        ("cache_write", "cache_write", "_write"),
        ("index_select", "index_select", "_index_select"),
        ("logical_to_physical", "index_select", "_logical_to_physical"),
        ("sparse_mla", "sparse_mla", "_sparse_mla"),
        ("routed_experts", "routed_experts", "_routed_experts"),
    )
}


class Allocations(TorchDispatchMode):
    """Bytes of every storage created while active, by the custom op inside which that was."""

    def __init__(self):
        super().__init__()
        self.inside = "network"
        self.nbytes = {name: [] for name in ("network", *(str(op) for op in OPERATORS))}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in OPERATORS:
            assert self.inside == "network"
            self.inside = str(func)
            with self:
                out = OPERATORS[func](*args, **kwargs)
            self.inside = "network"
            return out
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **kwargs)
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                self.nbytes[self.inside].append(t.untyped_storage().nbytes())
        return out


CONFIG = tiny_config(index_topk=7)


@pytest.fixture(scope="module")
def measured():
    """Allocations of one decode row at each context length."""
    module = importlib.import_module("glm53.ops.index_select")
    shipped, module.TILE_KEYS = module.TILE_KEYS, TILE_KEYS
    model = randomise(Transformer(CONFIG, mtp=False)).eval()
    out = []
    for context, num_pages in zip(CONTEXTS, PAGES, strict=True):
        cache = KVCache(CONFIG, num_pages, mtp=False, dtype=torch.float32)
        for layer in cache.layers:
            for tensor in layer:
                if tensor is not None:
                    tensor.normal_()
        batch = Batch.paged([([5], context - 1, list(range(num_pages)))], PAGE_SIZE)
        with torch.no_grad(), Allocations() as seen:
            model.model(batch, cache)
        out.append(seen.nbytes)
    module.TILE_KEYS = shipped
    return out


def test_the_mode_sees_network_and_kernels(measured):
    for nbytes in measured:
        assert all(len(sizes) > 4 for sizes in nbytes.values())
        # The attention output of a row, and one head's scores of a tile of keys.
        assert CONFIG.num_attention_heads * CONFIG.v_head_dim * 4 in nbytes["network"]
        assert CONFIG.index_n_heads * TILE_KEYS * 4 in nbytes["glm53.index_select.default"]


def test_outside_the_indexer_nothing_grows_with_the_context(measured):
    """No per-head keys or values, no gather of what was not selected, no mask of the context."""
    short, long = measured
    for name in set(short) - {"glm53.index_select.default"}:
        assert short[name] == long[name], name


def test_the_indexer_keeps_scores_of_a_row_and_tiles_of_keys(measured):
    """Nothing is both as long as the context and as wide as the heads or a key."""
    short, long = (m["glm53.index_select.default"] for m in measured)
    full_layers, grown = len(CONFIG.full_layers), CONTEXTS[1] - CONTEXTS[0]
    tile = TILE_KEYS * 4 * max(CONFIG.index_n_heads, CONFIG.index_head_dim)
    assert max(short) == tile  # so that the short context is tiled already
    # int64 positions and running counts are the widest thing per key.
    assert max(long) <= max(tile, 8 * CONTEXTS[1])
    per_key = 4 * CONFIG.index_n_heads  # relu(q . k), a tile at a time
    per_key += 4 * CONFIG.index_head_dim  # the gathered key
    per_key += 6 * 8  # its position, page and row, and their terms
    per_key += 6 * 8  # its score and copies of it; masks and running counts
    assert sum(long) - sum(short) <= full_layers * per_key * grown
