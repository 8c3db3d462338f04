"""The fused operators in compiled graphs: how many, how often they run, and equal results."""

import copy
import re
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor.graph import GraphLowering

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork, backend
from glm53.compile.split import target_name
from glm53.model import Transformer
from tests.compile.test_split import schedule
from tests.tiny import randomise, tiny_config

FUSED = ("norm_rope_cache", "index_query", "embed_eh_norm")
FUSED_EVENTS = [f"glm53::{name}" for name in FUSED]
PAGES = 6
FP32, BF16 = torch.float32, torch.bfloat16


def network(config, dtype=FP32) -> Transformer:
    return randomise(Transformer(config).to(dtype)).eval()


@pytest.fixture
def uncompiled(monkeypatch):
    """Pieces run as they are given to Inductor, node by node."""
    monkeypatch.setattr(backend, "_compile", lambda piece, inputs, options: piece.forward)
    torch._dynamo.reset()


def tensors(cache: KVCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer if tensor is not None]


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == BF16 else torch.int32)


def warm_cache(config, lengths, dtype) -> tuple[KVCache, list[list[int]]]:
    """NaN but for the keys of requests of so many tokens, in scattered pages."""
    with torch.inference_mode(False):
        cache = KVCache(config, PAGES, mtp=True, dtype=dtype)
    pages = [[page] for page in torch.randperm(PAGES)[: len(lengths)].tolist()]
    for tensor in tensors(cache):
        tensor.fill_(torch.nan)
        for (page,), length in zip(pages, lengths, strict=True):
            tensor[page * PAGE_SIZE :][:length].normal_()
    return cache, pages


def twin_of(cache: KVCache, config, dtype) -> KVCache:
    twin, _ = warm_cache(config, [], dtype)
    for ours, theirs in zip(tensors(twin), tensors(cache), strict=True):
        ours.copy_(theirs)
    return twin


def forwards(model, step: Batch, hidden: Tensor, cache: KVCache) -> list[Tensor]:
    """Results of decoder and of two draft steps, the second with the first one's selection."""
    ids = step.input_ids.flip(0)
    decoded = model.model(step, cache)
    drafted, selection = model.draft(ids, hidden, step, cache)
    again, _ = model.draft(ids, hidden * 0.5, step, cache, selection)
    return [decoded, drafted, again]


def step_of(config, rows, dtype) -> tuple[Batch, KVCache]:
    """Rows of three requests of different length, and one of padding."""
    lengths = [31, 0, 12]
    cache, pages = warm_cache(config, lengths, dtype)
    counts = [rows - 2, 1, 1]
    requests = [
        (torch.randint(131, (count,)).tolist(), length, page)
        for count, length, page in zip(counts, lengths, pages, strict=True)
    ]
    return Batch.paged(requests, PAGE_SIZE).pad(rows + 1, 1, 1), cache


def check_results(model, compiled, rows, dtype):
    """Hidden states and both caches after a decoder step and two draft steps."""
    config, exact = model.config, copy.deepcopy(model).float()
    step, cache = step_of(config, rows, dtype)
    hidden = torch.randn(rows + 1, config.hidden_size).to(dtype)
    twin, reference = twin_of(cache, config, dtype), twin_of(cache, config, FP32)
    before = [as_bits(tensor).clone() for tensor in tensors(cache)]

    expected = forwards(model, step, hidden, cache)
    results = forwards(compiled, step, hidden, twin)
    truths = forwards(exact, step, hidden.float(), reference)
    for ours, theirs, truth in zip(results, expected, truths, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        check_close(ours[:rows], theirs[:rows], truth[:rows])
    written = torch.zeros(PAGES * PAGE_SIZE, dtype=torch.bool)
    written[step.slots[:rows]] = True
    stores = zip(*map(tensors, (twin, cache, reference)), before, strict=True)
    for ours, theirs, truth, bits in stores:
        assert torch.equal(as_bits(ours)[~written], bits[~written])
        check_close(ours[written], theirs[written], truth[written])


def check_close(ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
    """To what fp32 gives: in bf16 about as close as eager mode is."""
    error, usual = ours.float() - truth, theirs.float() - truth
    if ours.dtype == FP32:
        assert error.abs().max() <= 3e-5 * truth.abs().max()
    else:
        assert error.square().mean() <= 2 * usual.square().mean()


def check_padding_alone_writes_nothing(compiled, rows, dtype):
    config = compiled.config
    step, cache = step_of(config, rows, dtype)
    step = Batch.paged([], PAGE_SIZE).pad(rows, 1, 1)
    before = [as_bits(tensor).clone() for tensor in tensors(cache)]
    forwards(compiled, step, torch.zeros(rows, config.hidden_size, dtype=dtype), cache)
    for tensor, bits in zip(tensors(cache), before, strict=True):
        assert torch.equal(as_bits(tensor), bits)


ALONE = [pytest.param((name,), marks=pytest.mark.slow, id=name) for name in FUSED]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("rewrites", [(), *ALONE, FUSED], ids="+".join)
def test_equals_eager(uncompiled, rewrites, dtype):
    """In a bucket (static) and in the graph of any number of rows; both forms of rope.

    In bf16 without a choice of keys and experts, which another rounding may turn.
    """
    interleave = dtype == FP32
    no_choice = dict(index_topk=40, num_experts_per_tok=6) if dtype == BF16 else {}
    config = tiny_config(
        rope_interleave=interleave, indexer_rope_interleave=not interleave, **no_choice
    )
    model = network(config, dtype)
    compiled = CompiledNetwork(model, CompileConfig(buckets=(4,), rewrites=rewrites))
    for rows in (3, 6):
        check_results(model, compiled, rows, dtype)
        check_padding_alone_writes_nothing(compiled, rows, dtype)


# Of an entry: norm_rope_cache, of these with index keys; index_query, with index queries.
CHAINS = {
    2: {"decoder": (2, 1, 2, 1, 0), "draft": (1, 1, 1, 1, 1), "redraft": (1, 0, 1, 0, 1)},
    78: {"decoder": (78, 21, 78, 21, 0), "draft": (1, 1, 1, 1, 1), "redraft": (1, 0, 1, 0, 1)},
}


def with_index(report, name: str, argument: int) -> int:
    """Fused nodes of the whole network that have the index branch."""
    times = Counter(report.pieces)
    return sum(
        times[number]
        * sum(
            target_name(node) == name and node.args[argument] is not None
            for node in graph.graph.nodes
        )
        for number, graph in enumerate(report.graphs)
    )


def counted(report) -> tuple[int, ...]:
    return (
        report.count("glm53.norm_rope_cache"),
        with_index(report, "glm53.norm_rope_cache", 8),
        report.count("glm53.index_query"),
        with_index(report, "glm53.index_query", 4),
        report.count("glm53.embed_eh_norm"),
    )


def check_counts(compiled, chains):
    """Nodes in the final pieces, and calls of a step; nothing of the chains is left."""
    step, cache = step_of(compiled.config, 3, FP32)
    hidden = torch.zeros(4, compiled.config.hidden_size)
    _, selection = compiled.draft(step.input_ids, hidden, step, cache)
    compiled.draft(step.input_ids, hidden, step, cache, selection)
    compiled.model(step, cache)
    reports = dict(zip(("draft", "redraft", "decoder"), compiled.backend.reports, strict=True))
    for entry, expected in chains.items():
        with torch.profiler.profile() as profile:
            if entry == "decoder":
                compiled.model(step, cache)
            else:
                given = selection if entry == "redraft" else None
                compiled.draft(step.input_ids, hidden, step, cache, given)
        assert counted(reports[entry]) == expected
        assert reports[entry].count("glm53.cache_write") == 0
        calls = Counter(event.name for event in profile.events())
        ran = tuple(calls[name] for name in FUSED_EVENTS)
        assert ran == (expected[0], expected[2], expected[4])
        assert calls["glm53::cache_write"] == 0


def real_schedule():
    return tiny_config(
        num_hidden_layers=78,
        indexer_types=schedule(78),
        mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
    )


@torch.inference_mode()
def test_counts_on_the_real_schedule(uncompiled):
    model = network(real_schedule())
    compiled = CompiledNetwork(model, CompileConfig(buckets=(4,), rewrites=FUSED))
    check_counts(compiled, CHAINS[78])


@pytest.mark.slow
@torch.inference_mode()
def test_counts_on_the_real_schedule_compiled():
    torch._dynamo.reset()
    model = network(real_schedule())
    compiled = CompiledNetwork(model, CompileConfig(buckets=(4,), rewrites=FUSED))
    with torch._inductor.config.patch(force_disable_caches=True):
        check_counts(compiled, CHAINS[78])


def dispatched(event) -> int:
    """Operators called inside another, at any depth."""
    inside = sum(map(dispatched, event.cpu_children))
    return inside + sum(
        child.name.startswith(("aten::", "glm53::")) for child in event.cpu_children
    )


@torch.inference_mode()
def test_compiled():
    """Inductor calls the operators, on the caches themselves, and each is one fused thing."""
    torch._dynamo.reset()
    config = tiny_config(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
    )
    model, codes = network(config), []
    compiled = CompiledNetwork(model, CompileConfig(buckets=(4,), rewrites=FUSED))
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        mock.patch.object(GraphLowering, "save_output_code", codes.append),
    ):
        check_counts(compiled, CHAINS[2])
    allocated = re.findall(r"empty_strided\w*\(\((\d+)", "".join(codes))
    assert len(allocated) > 20
    assert max(map(int, allocated)) < PAGES * PAGE_SIZE
    for rows in (3, 6):
        check_results(model, compiled, rows, FP32)
        check_padding_alone_writes_nothing(compiled, rows, FP32)

    step, cache = step_of(config, 3, FP32)
    with torch.profiler.profile() as profile:
        compiled.model(step, cache)
    fused = [event for event in profile.events() if event.name in FUSED_EVENTS]
    assert len(fused) == 4
    # Of a layer; the operators' references call more than 60.
    assert sum(map(dispatched, fused)) <= 2 * 8
