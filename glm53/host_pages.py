"""Host tier of the prefix cache: evicted pages, whole, in host memory.

A page's latents and index keys of all layers move together, so that a page that comes back has
both. Beside a cache on a GPU the memory is pinned, and copies are queued on the current stream: it
orders them after the kernels that wrote the page, and before those that reuse it.
"""

import torch

from glm53.cache import PAGE_SIZE, KVCache


class HostPages:
    """As many slots of one page as fit into a number of bytes, all allocated at once."""

    def __init__(self, cache: KVCache, num_bytes: int) -> None:
        """ValueError: not even one page fits."""
        self._cache = cache
        page_bytes = cache.page_bytes(mtp=cache.mtp)
        self.capacity = num_bytes // page_bytes
        if not self.capacity:
            raise ValueError(
                f"prefix_host_bytes={num_bytes}: a page of {PAGE_SIZE} tokens needs {page_bytes}"
            )
        on_gpu = cache.layers[0].latent.device.type == "cuda"
        self._slots = torch.empty(
            self.capacity, page_bytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu
        )
        self.bytes_saved = self.bytes_loaded = 0

    def save(self, page: int, slot: int, kind: bool) -> None:
        """Copy a page to a slot. kind: does it carry the MTP layer's rows."""
        num_bytes = self._cache.page_bytes(mtp=kind)
        self._cache.read_page(page, self._slots[slot, :num_bytes], mtp=kind)
        self.bytes_saved += num_bytes

    def load(self, slot: int, page: int, kind: bool) -> None:
        """Copy a slot back to a page."""
        num_bytes = self._cache.page_bytes(mtp=kind)
        self._cache.write_page(page, self._slots[slot, :num_bytes], mtp=kind)
        self.bytes_loaded += num_bytes
