"""Write rows into their cache slots: cache[slots[t]] = rows[t] for every t with slots[t] >= 0.

Besides `tiered_sparse_mla` the one operator of the model that mutates an argument. Rows whose slot
is negative (padding, or a page that another rank owns) leave every byte of the cache as it was.

The cache may lie in host memory while rows and slots are on a device: then the call returns when
the rows are there, and so after every copy out of the cache that the device's stream still had.

rows_TA [T, A], slots_T [T] int64, cache [M, A] with M slots; rows are cast to the cache's dtype.
"""

import torch
from torch import Tensor


def cache_write_ref(rows_TA: Tensor, slots_T: Tensor, cache: Tensor) -> None:
    """The semantics, one row at a time."""
    for row_A, slot in zip(rows_TA, slots_T.tolist(), strict=True):
        if slot >= 0:
            cache[slot] = row_A.to(cache.dtype)


def write_on_device(rows_TA: Tensor, slots_T: Tensor, cache: Tensor) -> None:
    """The kernel for CUDA: it reads nothing on the host.

    A scatter has no mask, so a row without a slot repeats the write of a row that has one; if none
    has, every row writes to the first slot what is there.
    """
    if slots_T.shape[0] == 0:
        return
    ramp_T = torch.arange(slots_T.shape[0], device=slots_T.device)
    source_T = torch.where(slots_T >= 0, ramp_T, slots_T.argmax())
    slots_T = slots_T[source_T]
    where_T = slots_T.clamp(min=0)
    rows_TA = torch.where(
        (slots_T >= 0)[:, None], rows_TA[source_T].to(cache.dtype), cache[where_T]
    )
    cache.index_put_((where_T,), rows_TA)


def _write(rows_TA: Tensor, slots_T: Tensor, cache: Tensor) -> None:
    if cache.device.type == "cuda":
        write_on_device(rows_TA, slots_T, cache)
        return
    written = slots_T >= 0
    if not written.all():
        slots_T, rows_TA = slots_T[written], rows_TA[written]
    cache.index_copy_(0, slots_T.to(cache.device), rows_TA.to(cache))


def _fake(rows_TA: Tensor, slots_T: Tensor, cache: Tensor) -> None:
    return None


# Not by `custom_op`, which takes four times as long as the write itself to prepare a mutating call.
torch.library.define(
    "glm53::cache_write", torch.library.infer_schema(_write, mutates_args=("cache",))
)
for _device in ("cpu", "cuda"):
    torch.library.impl("glm53::cache_write", _device, _write)
torch.library.register_fake("glm53::cache_write", _fake)
_cache_write = torch.ops.glm53.cache_write.default


def cache_write(rows_TA: Tensor, slots_T: Tensor, cache: Tensor) -> None:
    """Store row t in slot slots_T[t] of cache, in place; negative slots are skipped.

    Slots of one call must be distinct. A slot past the end of the cache raises IndexError (on CUDA
    it ends the process's use of the device).
    """
    _cache_write(rows_TA, slots_T, cache)
