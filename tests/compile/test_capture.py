"""Captured pieces are replayed on fixed memory, in order with the breaks, and fall back cleanly.

Pieces are not compiled here: they are what Inductor would get, run as they are.
"""

import logging
import re
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

BUCKETS = (2, 8)
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
        mock.patch.object(backend, "_compile", lambda piece, inputs, options: piece.forward),
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


@pytest.fixture
def uncompiled():
    with mock.patch.object(backend, "_compile", lambda piece, inputs, options: piece.forward):
        yield


def decoder(captures: FakeCaptures, **attributes):
    """Eager network and its form with one graph, of the decoder at 2 rows, not yet captured."""
    torch._dynamo.reset()
    network = randomise(Transformer(tiny_config(num_nextn_predict_layers=0))).eval()
    ours = CompiledNetwork(network, CompileConfig(buckets=(2,), rewrites=REWRITES), captures)
    for name, value in attributes.items():
        setattr(ours.backend, name, value)
    return network, ours


def assert_equal(steps: Steps, network, ours, count: int = 2) -> None:
    """The decoder's results and caches, over several steps."""
    for _ in range(count):
        batch = steps.batch()
        expected = network.model(batch, steps.eager)
        torch.testing.assert_close(ours.model(batch, steps.cache), expected, rtol=2e-5, atol=2e-5)
        for mine, theirs in zip(tensors(steps.cache), tensors(steps.eager), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5, equal_nan=True)


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_pieces_and_breaks_alternate(uncompiled):
    """Selections are new tensors each time; what the pieces are given lies where it lay before."""
    captures = FakeCaptures()
    log, given, selections = captures.recorder.log, [], []

    def at_break(*arguments):
        log.append("break")
        selections.append(torch.ops.glm53.index_select(*arguments))
        return selections[-1]

    def addresses(inputs):
        given.append(tuple(x.data_ptr() for x in inputs))
        return given[-1]

    network, ours = decoder(captures, at_break=at_break)
    steps = Steps(network, ours, make_cache(), 20, 1)
    with mock.patch.object(capture, "_addresses", addresses):
        assert_equal(steps, network, ours, 1)
        assert [x for x in log if x != "warm up"] == ["record", "replay"] + 3 * [
            "break",
            "record",
            "replay",
        ]
        first = given[:]
        for _ in range(3):
            log.clear()
            given.clear()
            assert_equal(steps, network, ours, 1)
            assert log == ["replay", "break"] * 3 + ["replay"]
            assert given == first
    assert len({x.data_ptr() for x in selections}) == len(selections)
    assert all(map(len, first))


@pytest.mark.parametrize("fail_at", [1, 3, 4])
def test_without_memory_the_compiled_pieces_run(uncompiled, caplog, fail_at):
    captures = FakeCaptures(fail_at)
    network, ours = decoder(captures)
    steps = Steps(network, ours, make_cache(), 20, 2)
    assert_equal(steps, network, ours, 3)
    (line,) = warnings_of(caplog)
    held = PIECE_BYTES * (fail_at - 1)
    assert re.search(rf"decoder_2 .*{held} bytes.*{1 << 19}.*out of the memory that", line)
    report = captures.reports["decoder_2"]
    assert report.dropped and report.captured == 0
    assert captures.recorder.log[-1] != "replay"
    # Nothing else is tried, and nothing more is said.
    results = ours.lm_head(torch.ones(2, 60))
    torch.testing.assert_close(results, network.lm_head(torch.ones(2, 60)))
    assert captures.reports["head_2"].captures == 0
    assert len(warnings_of(caplog)) == 1
    assert "no memory for decoder_2, head_2" in captures.summary()


def test_what_was_captured_before_stays(uncompiled, caplog):
    """Memory runs out at the second of two graphs, in its third piece."""
    captures = FakeCaptures(fail_at=1 + 3)
    network, ours = decoder(captures)
    hidden = torch.randn(2, 60)
    ours.lm_head(hidden)
    steps = Steps(network, ours, make_cache(), 20, 2)
    assert_equal(steps, network, ours, 2)
    assert len(warnings_of(caplog)) == 1
    captures.recorder.log.clear()
    torch.testing.assert_close(ours.lm_head(2 * hidden), network.lm_head(2 * hidden))
    assert captures.recorder.log == ["replay"]
    assert captures.reports["head_2"].captured == 1


def test_the_bound_is_kept(uncompiled, caplog):
    captures = FakeCaptures(max_bytes=3 * PIECE_BYTES)
    network, ours = decoder(captures)
    assert_equal(Steps(network, ours, make_cache(), 33, 2), network, ours)
    (line,) = warnings_of(caplog)
    assert f"{4 * PIECE_BYTES} bytes of at most {3 * PIECE_BYTES}" in line


def test_other_errors_are_not_taken_for_missing_memory(uncompiled):
    network, ours = decoder(FakeCaptures())
    steps = Steps(network, ours, make_cache(), 6, 1)
    failing = mock.patch.object(ours.captures.recorder, "record", side_effect=RuntimeError("sync"))
    with failing, pytest.raises(RuntimeError, match="sync"):
        ours.model(steps.batch(), steps.cache)


def test_moved_weights_and_caches_are_captured_again(uncompiled, caplog):
    network, ours = decoder(FakeCaptures())
    steps = Steps(network, ours, make_cache(), 20, 2)
    assert_equal(steps, network, ours)
    report = ours.captures.reports["decoder_2"]
    assert report.captures == 4
    with torch.compiler.set_stance("fail_on_recompile"):
        # In place: nothing to do.
        network.load_state_dict({n: 1.1 * t for n, t in network.state_dict().items()})
        assert_equal(steps, network, ours)
        assert report.captures == 4 and not warnings_of(caplog)
        # One tensor that the third piece reads: it and the one after.
        weight = network.model.layers[2].mlp.shared_experts.up_proj.weight
        weight.data = 1.7 * weight.data
        assert_equal(steps, network, ours)
        assert report.captures == 6
        # Another cache: every piece writes to it.
        other = Steps(network, ours, make_cache(), 33, 1)
        assert_equal(other, network, ours)
        assert report.captures == 10 and report.captured == 4
    assert len(warnings_of(caplog)) == 2
    assert "decoder_2, piece 2: inputs moved" in warnings_of(caplog)[0]


def test_a_break_that_needs_nothing_from_the_host_is_captured_too(uncompiled):
    """Its lengths are those of the step all the same."""
    network, ours = decoder(FakeCaptures(), break_on_device=True)
    steps = Steps(network, ours, make_cache(), 5, 2)
    assert_equal(steps, network, ours, 1)
    ours.captures.recorder.log.clear()
    assert_equal(steps, network, ours, 5)
    assert ours.captures.recorder.log == ["replay"] * 5
    assert ours.captures.reports["decoder_2"].captured == 1


def test_operators_that_need_the_host_are_not_captured(uncompiled):
    with mock.patch.object(capturable, "rewrite"):
        network, ours = decoder(FakeCaptures(), rewrites=("skinny_linear",))
        assert_equal(Steps(network, ours, make_cache(), 20, 2), network, ours)
    report = ours.captures.reports["decoder_2"]
    assert report.host == {"glm53.sparse_mla", "glm53.routed_experts"}
    assert report.captures == 0 and ours.captures.recorder.log == []
    assert "decoder_2 (glm53.routed_experts, glm53.sparse_mla)" in ours.captures.summary()


def test_rows_of_fewer_requests_than_the_table_has(uncompiled):
    """Requests that stopped drafting have no row but are in the table: no graph of its own."""
    network, ours = decoder(FakeCaptures())
    steps = Steps(network, ours, make_cache(), 33, 5)
    assert_equal(Steps(network, ours, steps.cache, 6, 1), network, ours)
    steps.sync()
    with torch.compiler.set_stance("fail_on_recompile"):
        some = steps.batch().select(torch.tensor([1, 4]))
        expected = network.model(some, steps.eager)
        torch.testing.assert_close(ours.model(some, steps.cache), expected, rtol=2e-5, atol=2e-5)
