"""Paged cache: per token and layer one latent row, per token and full layer one index key.

Latent and index key of a token share a page number and a slot, so that they are cached, freed and
reused as one. Each layer's pages are a tensor of their own. Bytes per token

    layers * (kv_lora_rank + qk_rope_head_dim) * itemsize + full layers * index_head_dim * itemsize

with the MTP layer (full) counted when it is loaded.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from glm53.config import GLM53Config

PAGE_SIZE = 64  # tokens; the block size of the sparse MLA and index-logits kernels for GPUs


class LayerCache(NamedTuple):
    """latent [slots, kv_lora_rank + qk_rope_head_dim]; index_keys [slots, index_head_dim]."""

    latent: Tensor
    index_keys: Tensor | None


def _full_layers(config: GLM53Config, mtp: bool) -> list[bool]:
    return [kind == "full" for kind in config.indexer_types] + [True] * mtp


def bytes_per_token(config: GLM53Config, dtype: torch.dtype, *, mtp: bool) -> int:
    """Cache bytes that one token needs over all layers; mtp: is the MTP layer loaded."""
    full = _full_layers(config, mtp)
    latents = len(full) * (config.kv_lora_rank + config.qk_rope_head_dim)
    return (latents + sum(full) * config.index_head_dim) * dtype.itemsize


class KVCache:
    """The page tensors of every layer. Uninitialised: nothing reads a slot before it is written."""

    def __init__(
        self,
        config: GLM53Config,
        num_pages: int,
        *,
        mtp: bool,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"a cache needs at least one page of {PAGE_SIZE} tokens")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"kv_cache_dtype must be bfloat16 or float32, got {dtype}")
        self.num_pages = num_pages
        self.dtype = dtype
        slots = num_pages * PAGE_SIZE
        width = config.kv_lora_rank + config.qk_rope_head_dim

        def empty(dim: int) -> Tensor:
            return torch.empty(slots, dim, dtype=dtype, device=device)

        self.layers = [
            LayerCache(empty(width), empty(config.index_head_dim) if full else None)
            for full in _full_layers(config, mtp)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes really allocated."""
        return sum(t.nbytes for layer in self.layers for t in layer if t is not None)


class PagePool:
    """Which pages are in use, and by how many holders. Host side; knows no tensors."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page; all of them must be in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference to each page; a page without references is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released more often than taken"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def references(self, page: int) -> int:
        return self._references[page]
