"""KVCache: bytes per token. PagePool: reference counts against a plain model of them."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm53.cache import (
    PAGE_SIZE,
    KVCache,
    PagePool,
    bytes_per_token,
    cache_bytes,
    fitting_tokens,
)
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("mtp", "dtype", "expected"),
    [
        # 4 latents of 20 + 6, 3 index keys of 14; with the MTP layer 5 and 4.
        (False, torch.float32, 4 * (4 * 26 + 3 * 14)),
        (False, torch.bfloat16, 2 * (4 * 26 + 3 * 14)),
        (True, torch.float32, 4 * (5 * 26 + 4 * 14)),
        (True, torch.bfloat16, 2 * (5 * 26 + 4 * 14)),
    ],
)
def test_bytes_per_token(mtp, dtype, expected):
    config = tiny_config()
    assert bytes_per_token(config, dtype, mtp=mtp) == expected
    cache = KVCache(config, 3, mtp=mtp, dtype=dtype)
    assert cache.nbytes == 3 * PAGE_SIZE * expected
    storages = {
        t.untyped_storage().data_ptr(): t for layer in cache.layers for t in layer if t is not None
    }
    assert sum(t.untyped_storage().nbytes() for t in storages.values()) == cache.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mtp", [False, True])
def test_bytes_of_a_host_backed_cache(mtp, dtype):
    """9 hot rows of 26 numbers a layer; a map of slots to rows, and two of rows, a full layer."""
    config, tokens, layers, full = tiny_config(), 3 * PAGE_SIZE, 4 + mtp, 3 + mtp
    host = tokens * layers * 26 * dtype.itemsize
    device = (tokens * full * 14 + 9 * layers * 26) * dtype.itemsize
    device += full * (4 * (tokens + 1) + 2 * 8 * 9)
    assert cache_bytes(config, dtype, tokens, hot_tokens=9, mtp=mtp) == (device, host)
    cache = KVCache(config, 3, mtp=mtp, dtype=dtype, hot_tokens=9)
    assert cache.nbytes == device + host
    assert sum(layer.latent.nbytes for layer in cache.layers) == host
    assert {layer.hot.rows.shape for layer in cache.layers} == {(9, 26)}
    # The layers of an index group share what says where its rows are.
    residencies = [layer.hot.residency for layer in cache.layers]
    assert residencies[2] is residencies[1]
    assert len({id(r) for r in residencies}) == full
    assert [r.num_layers for r in residencies] == [1, 2, 2, 1, 1][:layers]
    plain = tokens * bytes_per_token(config, dtype, mtp=mtp)
    assert cache_bytes(config, dtype, tokens, hot_tokens=None, mtp=mtp) == (plain, 0)


@pytest.mark.parametrize("hot_tokens", [None, 9])
@pytest.mark.parametrize(
    ("device_room", "host_room"), [(10**6, None), (10**6, 10**7), (10**8, 10**6)]
)
def test_the_largest_cache_that_fits(device_room, host_room, hot_tokens):
    config, dtype = tiny_config(), torch.bfloat16
    fitting = fitting_tokens(config, dtype, device_room, host_room, hot_tokens=hot_tokens, mtp=True)
    fits = []
    for tokens in (fitting, fitting + 1):
        device, host = cache_bytes(config, dtype, tokens, hot_tokens=hot_tokens, mtp=True)
        if host_room is None:
            fits.append(device + host <= device_room)
        else:
            fits.append(device <= device_room and host <= host_room)
    assert fits == [True, False]


def test_real_model_bytes_per_token():
    """78 layers, 21 of them full, one MTP layer: 96,640 bytes in bf16 (95,232 without MTP).

    Host-backed, 5,720 are on the device.
    """
    types = tuple("shared" if max(i - 2, 0) % 4 else "full" for i in range(78))
    config = tiny_config(
        num_hidden_layers=78,
        indexer_types=types,
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
    )
    assert types.count("full") == 21
    assert bytes_per_token(config, torch.bfloat16, mtp=True) == 96_640
    assert bytes_per_token(config, torch.bfloat16, mtp=False) == 95_232
    one, none = (
        cache_bytes(config, torch.bfloat16, tokens, hot_tokens=2048, mtp=True) for tokens in (1, 0)
    )
    assert one[0] - none[0] == 22 * (128 * 2 + 4) == 5_720
    assert one[1] == 79 * 576 * 2


def test_every_layer_has_tensors_of_its_own():
    cache = KVCache(tiny_config(), 2, mtp=True, dtype=torch.float32)
    assert [layer.index_keys is not None for layer in cache.layers] == [1, 1, 0, 1, 1]
    for layer in cache.layers:
        assert layer.latent.shape == (2 * PAGE_SIZE, 26)
        assert layer.index_keys is None or layer.index_keys.shape == (2 * PAGE_SIZE, 14)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(num_pages=0), "page"),
        (dict(dtype=torch.float16), "kv_cache_dtype"),
        (dict(hot_tokens=6), "kv_cache_hot_tokens=6: .* index_topk=7"),
    ],
)
def test_impossible_caches_are_refused(bad, message):
    arguments = dict(num_pages=1, mtp=False, dtype=torch.float32) | bad
    with pytest.raises(ValueError, match=message):
        KVCache(tiny_config(), **arguments)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share and drop lists of pages in any order."""

    @initialize(size=st.integers(1, 9))
    def start(self, size):
        self.size, self.pool, self.holders = size, PagePool(size), []

    @rule(count=st.integers(0, 10))
    def allocate(self, count):
        held = {page for pages in self.holders for page in pages}
        pages = self.pool.allocate(count)
        if count > self.size - len(held):
            assert pages is None
        else:
            assert len(pages) == len(set(pages)) == count
            assert not held & set(pages)
            assert all(0 <= page < self.size for page in pages)
            self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.holders))
        part = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.share(part)
        self.holders.append(part)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def counts_are_the_holders(self):
        if not hasattr(self, "pool"):
            return
        held = [page for pages in self.holders for page in pages]
        for page in range(self.size):
            assert self.pool._references[page] == held.count(page)
        assert self.pool.num_free == self.size - len(set(held))


TestPoolMachine = PoolMachine.TestCase


def test_double_release_and_sharing_a_free_page_are_caught():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError):
        pool.release([page])
    with pytest.raises(AssertionError):
        pool.share([page])
    assert pool.num_free == 2


def test_failed_allocation_changes_nothing():
    pool = PagePool(3)
    pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert len(pool.allocate(1)) == 1
