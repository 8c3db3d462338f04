"""A process group of which only this process exists."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group() -> Iterator[str]:
    """Its name. It has eight ranks; a collective leaves what it is given as it is."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()
