"""KVCache: bytes per token. PagePool: reference counts against a plain model of them."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm53.cache import PAGE_SIZE, KVCache, PagePool, bytes_per_token
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


def test_real_model_bytes_per_token():
    """78 layers, 21 of them full, one MTP layer: 96,640 bytes in bf16 (95,232 without MTP)."""
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


def test_every_layer_has_tensors_of_its_own():
    cache = KVCache(tiny_config(), 2, mtp=True, dtype=torch.float32)
    assert [layer.index_keys is not None for layer in cache.layers] == [1, 1, 0, 1, 1]
    for layer in cache.layers:
        assert layer.latent.shape == (2 * PAGE_SIZE, 26)
        assert layer.index_keys is None or layer.index_keys.shape == (2 * PAGE_SIZE, 14)


@pytest.mark.parametrize("bad", [dict(num_pages=0), dict(dtype=torch.float16)])
def test_impossible_caches_are_refused(bad):
    arguments = dict(num_pages=1, mtp=False, dtype=torch.float32) | bad
    with pytest.raises(ValueError, match="page" if "num_pages" in bad else "kv_cache_dtype"):
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
            assert self.pool.references(page) == held.count(page)
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
