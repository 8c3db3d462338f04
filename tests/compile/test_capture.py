"""Captured pieces are replayed on fixed memory, in order with the breaks, and fall back cleanly.

Pieces are not compiled here: they are what Inductor would get, run as they are.
"""

import logging
from unittest import mock

import pytest
import torch
from torch import Tensor

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork, backend, capture
from glm53.compile.rewrites import REWRITES, capturable
from glm53.model import Transformer
from tests.compile.fake_graphs import PIECE_BYTES, FakeCaptures
from tests.tiny import randomise, tiny_config

BUCKETS = (1, 4, 8)
PAGES = 84  # 12 for each of 7 requests
CONFIG = CompileConfig(buckets=BUCKETS, rewrites=REWRITES)
# Pieces of each entry of a model with 3 full layers; the MTP layer breaks in its first step only.
PIECES = {"decoder": 4, "head": 1, "draft": 2, "redraft": 1}


def make_cache() -> KVCache:
    with torch.inference_mode(False):  # as an engine's cache, which outlives its steps
        return KVCache(tiny_config(), PAGES, mtp=True, dtype=torch.float32)


def tensors(cache: KVCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer if tensor is not None]


def prepared(captures: FakeCaptures, config: CompileConfig = CONFIG, **attributes):
    """A network, and its form with captured pieces after the warm-up, which writes nothing."""
    torch._dynamo.reset()
    network = randomise(Transformer(tiny_config())).eval()
    ours = CompiledNetwork(network, config, captures)
    for name, value in attributes.items():
        setattr(ours.backend, name, value)
    cache = make_cache()
    for tensor in tensors(cache):
        tensor.fill_(torch.nan)
    with (
        torch.inference_mode(),
        mock.patch.object(backend, "_compile", lambda piece, inputs: piece.forward),
    ):
        list(ours.warm_up(cache))
    assert all(tensor.isnan().all() for tensor in tensors(cache))
    return network, ours, cache


@pytest.fixture(scope="module")
def captured():
    return prepared(FakeCaptures())


@pytest.fixture(autouse=True)
def no_recompile():
    with torch.inference_mode():
        yield


class Steps:
    """Decode steps of some requests, computed twice: on a cache of theirs, eagerly, and on the
    cache that was captured."""

    def __init__(self, network, ours, cache, length: int, requests: int) -> None:
        self.network, self.ours, self.cache = network, ours, cache
        self.eager = make_cache()
        pages = torch.randperm(PAGES).tolist()
        self.pages = [pages[12 * i : 12 * (i + 1)] for i in range(requests)]
        self.lengths = [max(0, length - 3 * i) for i in range(requests)]
        for tensor in tensors(self.eager):
            tensor.fill_(torch.nan)
        for r, before in enumerate(self.lengths):
            slots = torch.tensor([self.slot(r, p) for p in range(before)], dtype=torch.int64)
            for tensor in tensors(self.eager):
                tensor[slots] = torch.randn(before, tensor.shape[1])
        self.sync()

    def slot(self, request: int, position: int) -> int:
        return self.pages[request][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE

    def sync(self) -> None:
        for mine, theirs in zip(tensors(self.cache), tensors(self.eager), strict=True):
            mine.copy_(theirs)

    def batch(self) -> Batch:
        rows = [
            (torch.randint(131, (1,)).tolist(), length, pages)
            for length, pages in zip(self.lengths, self.pages, strict=True)
        ]
        self.lengths = [length + 1 for length in self.lengths]
        return Batch.paged(rows, PAGE_SIZE)

    def run(self) -> list[Tensor]:
        """One step, with the draft of its tokens and another draft step; what ours computed."""
        batch, results = self.batch(), []
        ids = torch.randint(131, (batch.num_rows,))
        for network, cache in ((self.network, self.eager), (self.ours, self.cache)):
            hidden = network.model(batch, cache)
            logits = network.lm_head(hidden)
            drafted, selection = network.draft(ids, hidden, batch, cache)
            again, _ = network.draft(ids, drafted, batch, cache, selection)
            logical, counts = selection.logical, selection.counts
            results.append([hidden, logits, drafted, again, logical, counts])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        for expected, got in zip(tensors(self.eager), tensors(self.cache), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)
        return results[1]


def captures_of(ours) -> dict[str, int]:
    return {name: report.captures for name, report in ours.captures.reports.items()}


@pytest.mark.parametrize("requests", [1, 2, 3, 7])
@pytest.mark.parametrize("length", [5, 6, 7, 20, 33, 700])
def test_replays_equal_eager(captured, length, requests):
    """And are replays: nothing is captured, compiled or run beside them."""
    steps = Steps(*captured, length, requests)
    captures, before = captured[1].captures, captures_of(captured[1])
    captures.recorder.log.clear()
    with torch.compiler.set_stance("fail_on_recompile"):
        results = [steps.run() for _ in range(3)]
    assert captures.recorder.log == ["replay"] * 3 * sum(PIECES.values())
    assert captures_of(captured[1]) == before
    kept = [[x.clone() for x in step] for step in results]
    steps.run()
    for step, copy in zip(results, kept, strict=True):  # nobody overwrites a result
        assert all(torch.equal(x, y) for x, y in zip(step, copy, strict=True))


def test_every_piece_of_every_bucket_is_captured(captured):
    reports = captured[1].captures.reports
    assert list(reports)[:4] == [f"{entry}_8" for entry in PIECES]  # largest first
    for bucket in BUCKETS:
        for entry, pieces in PIECES.items():
            report = reports[f"{entry}_{bucket}"]
            assert (report.captured, report.captures, report.bytes) == (
                pieces,
                pieces,
                pieces * PIECE_BYTES,
            )
    assert len(reports) == len(BUCKETS) * len(PIECES)  # the dynamic graphs are not
