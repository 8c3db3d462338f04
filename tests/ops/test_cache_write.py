"""cache_write: rows reach their slots, everything else keeps every byte."""

import pytest
import torch

from glm53.ops import cache_write
from glm53.ops.cache_write import cache_write_ref


def _case(rows: int = 5, width: int = 7, slots: int = 13):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(rows, width, generator=generator)
    where = torch.randperm(slots, generator=generator)[:rows]
    return values, where, torch.randn(slots, width, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_reference_and_loop(dtype):
    rows, slots, before = _case()
    slots[2] = -1
    before = before.to(dtype)
    by_loop, by_ref, by_op = before.clone(), before.clone(), before.clone()
    for t in range(5):
        if t != 2:
            by_loop[slots[t]] = rows[t].to(dtype)
    cache_write_ref(rows, slots, by_ref)
    cache_write(rows, slots, by_op)
    assert torch.equal(by_ref, by_loop)
    assert torch.equal(by_op, by_loop)


def test_padding_rows_leave_every_byte():
    rows, _, cache = _case()
    cache[:] = torch.nan
    before = cache.view(torch.int32).clone()
    cache_write(rows, torch.full((5,), -1), cache)
    assert torch.equal(cache.view(torch.int32), before)


def test_neighbours_of_a_written_slot_stay_unwritten():
    rows, slots, cache = _case()
    cache[:] = torch.nan
    cache_write(rows, slots, cache)
    untouched = torch.ones(13, dtype=torch.bool)
    untouched[slots] = False
    assert cache[untouched].isnan().all()
    assert torch.equal(cache[slots], rows)


def test_no_rows():
    _, _, cache = _case()
    before = cache.clone()
    cache_write(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), cache)
    assert torch.equal(cache, before)


def test_writes_through_a_strided_view():
    pool = torch.zeros(13, 2, 7)
    rows, slots, _ = _case()
    cache_write(rows, slots, pool[:, 1])
    assert torch.equal(pool[slots, 1], rows)
    assert not pool[:, 0].any()


def test_slot_past_the_end_raises():
    rows, slots, cache = _case()
    slots[0] = 13
    with pytest.raises((IndexError, RuntimeError)):
        cache_write(rows, slots, cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    rows, slots, cache = _case()
    slots[1] = -1
    torch.library.opcheck(torch.ops.glm53.cache_write.default, (rows, slots, cache.to(dtype)))
