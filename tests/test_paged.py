"""Paged == uncached: any chunking, any mix of requests, any pages; only selected rows are read."""

import copy

import pytest
import torch

import glm53.model as model_module
from glm53.batch import Batch, Trace
from glm53.cache import PAGE_SIZE, KVCache
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config

TOLERANCE = 1e-5  # of the largest logit
# Three requests of two, one and three pages, scattered over the pool; page 4 belongs to nobody.
LENGTHS, PAGES = (97, 30, 131), ([6, 1], [3], [0, 5, 2])


@pytest.fixture(scope="module")
def model():
    return randomise(Transformer(tiny_config(), mtp=False)).eval()


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(131, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def cold(model, requests):
    """Hidden states of each request alone, without a cache."""
    with torch.no_grad():
        return [model.model(Batch.uncached(torch.tensor([ids]), None)) for ids in requests]


def poisoned_cache(config, num_pages=7):
    cache = KVCache(config, num_pages, mtp=False, dtype=torch.float32)
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(torch.nan)
    return cache


def run(model, requests, steps, cache=None, pages=PAGES):
    """Hidden states per request; steps: lists of (request, how many rows) in batch order."""
    cache = poisoned_cache(model.config) if cache is None else cache
    done, outputs = [0] * len(requests), [[] for _ in requests]
    for step in steps:
        rows = [(requests[r][done[r] : done[r] + count], done[r], pages[r]) for r, count in step]
        parts = model.model(Batch.paged(rows, PAGE_SIZE), cache).split([len(t) for t, _, _ in rows])
        for (r, count), part in zip(step, parts, strict=True):
            done[r] += count
            outputs[r].append(part)
    return [torch.cat(parts) if parts else None for parts in outputs]


def assert_equal(model, got, expected):
    got, expected = model.lm_head(got), model.lm_head(expected[: got.shape[0]])
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def _chunks(length, size):
    return [min(size, length - start) for start in range(0, length, size)]


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
@torch.no_grad()
def test_chunks_of_one_request(model, requests, cold, size):
    steps = [[(0, count)] for count in _chunks(LENGTHS[0], size)]
    assert_equal(model, run(model, requests, steps)[0], cold[0])


def _shared_steps(lengths, size):
    """Requests end at different steps; their chunks share a batch while they last."""
    chunks = [_chunks(n, size) for n in lengths]
    order = sorted(range(len(lengths)), key=lambda r: (r + 1) % 3)
    return [
        [(r, chunks[r][i]) for r in order if i < len(chunks[r])]
        for i in range(max(map(len, chunks)))
    ]


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
@torch.no_grad()
def test_chunks_of_three_requests_in_one_batch(model, requests, cold, size):
    steps = _shared_steps(LENGTHS, size)
    for got, expected in zip(run(model, requests, steps), cold, strict=True):
        assert_equal(model, got, expected)


def _smallest_gap(monkeypatch, model, ids):
    """Of all rows and full layers: score gap at the cut, relative to the row's largest score.

    A row alone and a row among others are rounded differently, which may decide a smaller gap.
    """
    gaps, index_select = [], model_module.index_select
    topk = model.config.index_topk

    def spy(q, weights, keys, *args, **kwargs):
        dots = torch.einsum("tjg,sg->tjs", q.double(), keys.double()).relu()
        scores = torch.einsum("tj,tjs->ts", weights.double(), dots)
        for t in range(topk, len(ids)):
            ranked = scores[t, : t + 1].sort(descending=True).values
            gaps.append(((ranked[topk - 1] - ranked[topk]) / ranked.abs().max()).item())
        return index_select(q, weights, keys, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model_module, "index_select", spy)
        model.model(Batch.uncached(torch.tensor([ids]), None))
    return min(gaps)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("num_requests", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, 2])
@torch.no_grad()
def test_long_grid(monkeypatch, seed, num_requests, flags):
    """Expert groups, both rope pairings of attention and indexer, every chunk size."""
    config = tiny_config(
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        rope_interleave=flags[0],
        indexer_rope_interleave=flags[1],
    )
    model = randomise(Transformer(config, mtp=False), 20 + seed).eval()
    lengths = [LENGTHS[(r + seed) % 3] - seed - r for r in range(num_requests)]
    requests = [torch.randint(131, (n,)).tolist() for n in lengths]
    for r, length in enumerate(lengths):
        while _smallest_gap(monkeypatch, model, requests[r]) < 1e-6:
            requests[r] = torch.randint(131, (length,)).tolist()
    pages = [PAGES[2], [4, 6, 1], [8, 3, 7]]
    alone = [model.model(Batch.uncached(torch.tensor([ids]), None)) for ids in requests]
    for size in (1, 5, 64, 1000):
        cache = poisoned_cache(config, 9)
        got = run(model, requests, _shared_steps(lengths, size), cache, pages)
        for rows, expected in zip(got, alone, strict=True):
            assert_equal(model, rows, expected)


@torch.no_grad()
def test_decode_rows_mixed_with_prefill(model, requests, cold):
    """Request 1 decodes while 0 and then 2 are prefilled beside it; 0 joins the decoders."""
    steps = [[(1, 20)]]
    steps += [[(1, 1), (0, 24)] for _ in range(4)]
    steps += [[(0, 1), (1, 1), (2, 50)], [(1, 1), (2, 7)], [(2, 74), (1, 1)], [(1, 1)]]
    for got, expected in zip(run(model, requests, steps), cold, strict=True):
        assert_equal(model, got, expected)


@torch.no_grad()
def test_lengths_around_index_topk(model, requests, cold):
    """Decode from 1 to beyond index_topk: nothing happens at the border."""
    steps = [[(0, 1)] for _ in range(3 * model.config.index_topk)]
    assert_equal(model, run(model, requests, steps)[0], cold[0])


@torch.no_grad()
def test_other_pages_keep_every_byte(model, requests):
    cache = poisoned_cache(model.config)
    run(model, requests, [[(0, 90)], [(0, 7), (1, 30)]], cache)
    used = [page for r in (0, 1) for page in PAGES[r]]
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                by_page = tensor.view(7, PAGE_SIZE, -1)
                for page in set(range(7)) - set(used):
                    assert by_page[page].isnan().all()
                written = by_page[[6, 1, 3]].isnan().any(-1)
                assert written.sum() == 3 * PAGE_SIZE - 97 - 30


def _prefilled(model, requests):
    cache = poisoned_cache(model.config)
    run(model, requests, [[(0, 90), (1, 25)]], cache)
    step = [([requests[0][90]], 90, PAGES[0]), ([requests[1][25]], 25, PAGES[1])]
    return cache, Batch.paged(step, PAGE_SIZE)


def _slots(batch, selected):
    """Slots of each row's selected positions."""
    out = set()
    for r, row in enumerate(selected.tolist()):
        for p in row:
            if p >= 0:
                out.add(PAGES[r][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE)
    return out


@torch.no_grad()
def test_decode_reads_only_selected_latents(model, requests):
    """Every unselected latent is NaN: the output is equal, bit for bit."""
    cache, batch = _prefilled(model, requests)
    trace = Trace()
    expected = model.model(batch, copy.deepcopy(cache), record=trace)
    full, poisoned = None, 0
    for layer, tensors in enumerate(cache.layers):
        full = layer if model.config.is_full(layer) else full
        keep = _slots(batch, trace.selections[full])
        assert len(keep) <= 2 * model.config.index_topk
        for slot in range(tensors.latent.shape[0]):
            if slot not in keep:
                poisoned += tensors.latent[slot].isfinite().all().item()
                tensors.latent[slot] = torch.nan
    assert poisoned > 2 * 80  # they were there to be read
    assert torch.equal(model.model(batch, cache), expected)


@torch.no_grad()
def test_a_selected_latent_is_really_read(model, requests):
    """The control: poisoning one selected row is noticed."""
    cache, batch = _prefilled(model, requests)
    trace = Trace()
    model.model(batch, copy.deepcopy(cache), record=trace)
    cache.layers[0].latent[_slots(batch, trace.selections[0][:1]).pop()] = torch.nan
    out = model.model(batch, cache)
    assert out[0].isnan().any() and out[1].isfinite().all()


@torch.no_grad()
def test_decode_does_not_read_beyond_its_length(model, requests):
    """Rows that a rejected draft or an earlier owner left behind the length are never seen."""
    cache, batch = _prefilled(model, requests)
    expected = model.model(batch, copy.deepcopy(cache))
    # 4 rejected drafts of request 0 were written, with whatever values, at positions 90..93.
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                for position in range(90, 94):
                    slot = PAGES[0][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                    tensor[slot] = 1e4
    assert torch.equal(model.model(batch, cache), expected)


@torch.no_grad()
def test_reused_pages_give_the_cold_result(model, requests, cold):
    """A page of a finished request serves the next one without being cleared."""
    cache = poisoned_cache(model.config)
    run(model, requests, [[(0, 97), (2, 131)]], cache)
    assert_equal(model, run(model, requests, [[(0, 40)], [(0, 57)]], cache)[0], cold[0])


@torch.no_grad()
def test_bf16_cache_is_the_rounded_one(model, requests, cold):
    cache = KVCache(model.config, 7, mtp=False, dtype=torch.bfloat16)
    got = run(model, requests, [[(1, 3)], [(1, 27)]], cache)[1]
    error = (got - cold[1]).norm() / cold[1].norm()
    assert 1e-5 < error < 0.2
    assert cache.layers[0].latent.dtype == torch.bfloat16


def test_padding_rows_write_nothing_and_give_finite_output(model, requests):
    """Slot -1, length 0: five rows padded to eight equal the five, and no byte changes."""
    batch = Batch.paged([(requests[1][:5], 0, PAGES[1])], PAGE_SIZE)

    def pad(rows, value):
        return torch.cat([rows, rows.new_full((3,), value)])

    padded = Batch(
        input_ids=pad(batch.input_ids, 0),
        positions=pad(batch.positions, 0),
        request=pad(batch.request, 0),
        lengths=pad(batch.lengths, 0),
        slots=pad(batch.slots, -1),
        block_table=batch.block_table,
        page_size=PAGE_SIZE,
        block_stride=PAGE_SIZE,
    )
    first, second = poisoned_cache(model.config), poisoned_cache(model.config)
    with torch.no_grad():
        expected, got = model.model(batch, first), model.model(padded, second)
    assert (got[:5] - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert got[5:].isfinite().all()
    for a, b in zip(first.layers, second.layers, strict=True):
        for x, y in zip(a, b, strict=True):
            if x is not None:
                assert torch.equal(x.isnan(), y.isnan())
                torch.testing.assert_close(x, y, equal_nan=True, rtol=1e-5, atol=1e-5)
