"""Paged cache: per token and layer one latent row, per token and full layer one index key.

Latent and index key of a token share a page number and a slot, so that they are cached, freed and
reused as one. Each layer's pages are a tensor of their own. Bytes per token

    layers * (kv_lora_rank + qk_rope_head_dim) * itemsize + full layers * index_head_dim * itemsize

with the MTP layer (full) counted when it is loaded.

A cache with `hot_tokens` is host-backed: latents are in host memory (pinned if there is a GPU), the
index keys, which every step scans in full, on the device, and so is a hot set of so many latent
rows per layer, see `glm53.residency`. Without, everything is on the device.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from glm53.config import GLM53Config
from glm53.residency import HotRows, Residency

PAGE_SIZE = 64  # tokens; the block size of the sparse MLA and index-logits kernels for GPUs


class LayerCache(NamedTuple):
    """latent [slots, kv_lora_rank + qk_rope_head_dim]; index_keys [slots, index_head_dim].

    hot: if latent is in host memory, the rows of it that the device has. Whoever writes latents
    calls `hot.residency.invalidate` first.
    """

    latent: Tensor
    index_keys: Tensor | None
    hot: HotRows | None = None


def _full_layers(config: GLM53Config, mtp: bool) -> list[bool]:
    return [kind == "full" for kind in config.indexer_types] + [True] * mtp


def bytes_per_token(config: GLM53Config, dtype: torch.dtype, *, mtp: bool) -> int:
    """Cache bytes that one token needs over all layers; mtp: is the MTP layer loaded."""
    full = _full_layers(config, mtp)
    latents = len(full) * (config.kv_lora_rank + config.qk_rope_head_dim)
    return (latents + sum(full) * config.index_head_dim) * dtype.itemsize


def cache_bytes(
    config: GLM53Config, dtype: torch.dtype, num_tokens: int, *, hot_tokens: int | None, mtp: bool
) -> tuple[int, int]:
    """Bytes on the device and in host memory of a cache of `num_tokens`.

    Host-backed, the device has per token an index key and 4 bytes of map for every full layer, per
    hot row a latent for every layer and 16 bytes for every full one, and 4 bytes per full layer.
    """
    token_bytes = bytes_per_token(config, dtype, mtp=mtp)
    if hot_tokens is None:
        return num_tokens * token_bytes, 0
    full = _full_layers(config, mtp)
    latent = len(full) * (config.kv_lora_rank + config.qk_rope_head_dim) * dtype.itemsize
    device = num_tokens * (token_bytes - latent) + hot_tokens * (latent + 16 * sum(full))
    return device + 4 * sum(full) * (num_tokens + 1), num_tokens * latent


def fitting_tokens(
    config: GLM53Config,
    dtype: torch.dtype,
    device_room: int,
    host_room: int | None,
    *,
    hot_tokens: int | None,
    mtp: bool,
) -> int:
    """Tokens of the largest cache that fits so many bytes on the device and in host memory.

    host_room None: the device's memory is the host's.
    """
    fixed, _ = cache_bytes(config, dtype, 0, hot_tokens=hot_tokens, mtp=mtp)
    device, host = cache_bytes(config, dtype, 1, hot_tokens=hot_tokens, mtp=mtp)
    if host_room is None:
        device, host = device + host, 0
    fitting = (device_room - fixed) // (device - fixed)
    return min(fitting, (host_room or 0) // host) if host else fitting


def check_hot_tokens(hot_tokens: int | None, config: GLM53Config) -> None:
    """ValueError unless it is None or so many rows that any query's selection fits."""
    if hot_tokens is None:
        return
    if not hasattr(hot_tokens, "__index__") or hot_tokens < config.index_topk:
        raise ValueError(
            f"kv_cache_hot_tokens={hot_tokens!r}: must be an integer, at least index_topk="
            f"{config.index_topk}, the rows that one query reads"
        )


class KVCache:
    """The page tensors of every layer. Uninitialised: nothing reads a slot before it is written.

    hot_tokens: keep latents in host memory and so many rows of each layer on the device; at least
    index_topk. None: everything on the device.
    """

    def __init__(
        self,
        config: GLM53Config,
        num_pages: int,
        *,
        mtp: bool,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        hot_tokens: int | None = None,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"a cache needs at least one page of {PAGE_SIZE} tokens")
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"kv_cache_dtype must be bfloat16 or float32, got {dtype}")
        check_hot_tokens(hot_tokens, config)
        self.num_pages = num_pages
        self.dtype = dtype
        self.config = config
        self.mtp = mtp
        self._device = device
        slots = num_pages * PAGE_SIZE
        width = config.kv_lora_rank + config.qk_rope_head_dim
        on_host = {"pin_memory": torch.device(device).type == "cuda"}
        on_device = {"device": device}

        def empty(rows: int, dim: int, where: dict) -> Tensor:
            return torch.empty(rows, dim, dtype=dtype, **where)

        self.layers: list[LayerCache] = []
        self._residencies: list[Residency] = []  # of each index group
        for full in _full_layers(config, mtp):
            index_keys = empty(slots, config.index_head_dim, on_device) if full else None
            if hot_tokens is None:
                self.layers.append(LayerCache(empty(slots, width, on_device), index_keys))
                continue
            if full:
                self._residencies.append(Residency(slots, hot_tokens, device))
            hot = HotRows(empty(hot_tokens, width, on_device), self._residencies[-1])
            hot.residency.num_layers += 1
            self.layers.append(LayerCache(empty(slots, width, on_host), index_keys, hot))
        self._check_index_groups()

    @property
    def nbytes(self) -> int:
        """Bytes really allocated, on the device and in host memory."""
        tensors = [t for layer in self.layers for t in layer[:2] if t is not None]
        tensors += [layer.hot.rows for layer in self.layers if layer.hot is not None]
        return sum(t.nbytes for t in tensors) + sum(r.nbytes for r in self._residencies)

    @property
    def hot_traffic(self) -> tuple[int, int, int]:
        """Hits, misses and fetched bytes of the hot set so far, see `Residency`; 0 without one."""
        groups = self._residencies
        return (
            sum(group.hits for group in groups),
            sum(group.misses for group in groups),
            sum(group.fetched_bytes for group in groups),
        )

    def page_bytes(self, *, mtp: bool) -> int:
        """Bytes of one page over all layers; mtp: with the MTP layer's."""
        return PAGE_SIZE * bytes_per_token(self.config, self.dtype, mtp=mtp)

    def read_page(self, page: int, data: Tensor, *, mtp: bool) -> None:
        """Copy a page to `data` [page_bytes] uint8: layer by layer its latents, then its index keys
        if it has them; mtp: the MTP layer's too.

        From a GPU to pinned memory the copy is only queued, in the order of the current stream.
        """
        queued = data.is_pinned()
        for rows, part in self._page_parts(page, data, mtp):
            part.copy_(rows, non_blocking=queued)

    def write_page(self, page: int, data: Tensor, *, mtp: bool) -> None:
        """The reverse of `read_page`."""
        first = page * PAGE_SIZE
        slots = torch.arange(first, first + PAGE_SIZE, device=self._device)
        for residency in self._residencies:  # hot copies of what the page held before
            residency.invalidate(slots)
        queued = data.is_pinned()
        for rows, part in self._page_parts(page, data, mtp):
            rows.copy_(part, non_blocking=queued)

    def _page_parts(self, page: int, data: Tensor, mtp: bool) -> Iterator[tuple[Tensor, Tensor]]:
        assert mtp <= self.mtp and data.shape == (self.page_bytes(mtp=mtp),)
        slots = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        offset = 0
        for layer in self.layers[: len(self.layers) - (self.mtp and not mtp)]:
            for tensor in layer[:2]:
                if tensor is not None:
                    rows = tensor[slots]
                    part = data[offset : offset + rows.nbytes]
                    yield rows, part.view(self.dtype).view(rows.shape)
                    offset += rows.nbytes

    def _check_index_groups(self) -> None:
        """What a full layer selects are rows of every layer of its group, by number."""
        for layer in self.layers:
            latent, keys = self.layers[0].latent, layer.index_keys
            assert layer.latent.shape == latent.shape, "one page table for all layers"
            assert layer.latent.stride() == latent.stride() and layer.latent.dtype == latent.dtype
            assert keys is None or keys.shape[0] == latent.shape[0], "latent and key share a slot"


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
