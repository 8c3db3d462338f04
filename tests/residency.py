"""For the tests of the host-backed cache: an LRU in plain Python, what an engine's steps would do
to it, poison for hot rows that hold nothing, and a run that is compared bit for bit."""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from glm53 import GLM53, Completion, SamplingParams
from glm53.engine import Engine
from glm53.model import Attention
from tests.engines import with_engine
from tests.speculation import check_counts, poison_stale


def tiles_of(selections: Sequence[Sequence[int]], limit: int) -> list[slice]:
    """Runs of selections whose union has at most `limit` members, each as long as possible."""
    tiles, start = [], 0
    union: set[int] = set()
    for i, slots in enumerate(selections):
        if len(union | set(slots)) > limit:
            tiles.append(slice(start, i))
            start, union = i, set()
        union |= set(slots)
    return [*tiles, slice(start, len(selections))] if selections else []


class LRU:
    """Slots that have a copy, the least recently used first."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.held: OrderedDict[int, None] = OrderedDict()
        self.hits = self.misses = 0
        self.widest = 0  # union of a step

    def step(self, written: Sequence[int], selections: Sequence[Sequence[int]]) -> None:
        for slot in written:
            self.held.pop(slot, None)
        self.widest = max(self.widest, len({slot for slots in selections for slot in slots}))
        for tile in tiles_of(selections, self.num_rows):
            wanted = list(dict.fromkeys(slot for slots in selections[tile] for slot in slots))
            hits = sum(slot in self.held for slot in wanted)
            self.hits += hits
            self.misses += len(wanted) - hits
            for slot in wanted:
                self.held.pop(slot, None)
            while len(self.held) + len(wanted) > self.num_rows:
                self.held.popitem(last=False)
            self.held |= dict.fromkeys(wanted)


class Watch:
    """Hooks of a model while one engine steps: hidden states of every forward, and one LRU for
    each full layer, fed with what its attention was given and chose."""

    def __init__(self, model: GLM53, num_rows: int) -> None:
        self.hidden: list[Tensor] = []
        self.lrus: dict[int, LRU] = {}
        self.num_rows = num_rows
        network = model.network
        norms = [
            network.model.norm,
            *[layer.shared_head.norm for layer in network.model.layers[-1:]],
        ]
        self._handles = [norm.register_forward_hook(self._saw_hidden) for norm in norms]
        for layer in network.model.layers:
            if layer.self_attn.indexer is not None:
                self._handles.append(layer.self_attn.register_forward_hook(self._saw_attention))

    def _saw_hidden(self, module, args, output) -> None:
        self.hidden.append(output[0].clone())

    def _saw_attention(self, module: Attention, args, output) -> None:
        batch, selections = args[2], output[1].physical.tolist()
        lru = self.lrus.setdefault(module.layer_idx, LRU(self.num_rows))
        lru.step(batch.slots.tolist(), [[i for i in row if i >= 0] for row in selections])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def poison_cache(engine: Engine) -> None:
    """NaN into everything: latents in host memory, index keys, hot rows."""
    for layer in engine._cache.layers:
        for tensor in (*layer[:2], None if layer.hot is None else layer.hot.rows):
            if tensor is not None:
                tensor.fill_(math.nan)


def poison_empty_rows(engine: Engine) -> int:
    """NaN into every hot row that is no slot's copy; how many held numbers."""
    count = 0
    for layer in engine._cache.layers:
        residency = layer.hot.residency
        slots = residency._row_of_slot.tolist()[:-1]
        resident = {row for row in slots if row >= 0}
        assert len(resident) == sum(row >= 0 for row in slots), "two slots in one hot row"
        empty = [row for row in range(layer.hot.rows.shape[0]) if row not in resident]
        count += int(layer.hot.rows[empty].isfinite().all(-1).sum())
        layer.hot.rows[empty] = math.nan
    return count


def run(
    model: GLM53,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    hot_tokens: int | None,
    prepare=None,
    **arguments,
) -> tuple[list[Completion], Watch, Engine]:
    """All prompts through an engine of their own, all memory that holds nothing poisoned.

    prepare: called with the engine before its first step.
    """
    own = with_engine(model, kv_cache_hot_tokens=hot_tokens, **arguments)
    engine = own.engine()
    poison_cache(engine)
    if prepare is not None:
        prepare(engine)
    watch = Watch(own, hot_tokens or 10**9)
    finished: dict[int, Completion] = {}
    try:
        for prompt in prompts:
            engine.add(prompt, params)
        while engine.num_unfinished:
            for delta in engine.step():
                if delta.completion is not None:
                    finished[delta.request_id] = delta.completion
            check_counts(engine)
            if hot_tokens is not None:
                poison_empty_rows(engine)
            poison_stale(engine)
    finally:
        watch.remove()
    return [finished[i] for i in sorted(finished)], watch, engine


def assert_same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    """Tokens, log-probabilities and acceptance, to the last bit."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.error is None
        assert a.token_ids == b.token_ids
        assert a.logprobs == b.logprobs
        assert a.prompt_logprobs == b.prompt_logprobs
        assert (a.finish_reason, a.metrics.drafted) == (b.finish_reason, b.metrics.drafted)
        assert a.metrics.accepted_at == b.metrics.accepted_at


def assert_same_hidden(ours: Watch, theirs: Watch) -> None:
    assert len(ours.hidden) == len(theirs.hidden)
    for a, b in zip(ours.hidden, theirs.hidden, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def assert_counts(engine: Engine, watch: Watch) -> None:
    """Hits, misses and bytes that the engine reports are those of the plain LRUs."""
    config, stats = engine._network.config, engine.stats
    lrus = watch.lrus
    assert stats.hot_hits == sum(lru.hits for lru in lrus.values())
    assert stats.hot_misses == sum(lru.misses for lru in lrus.values())
    assert stats.hot_hits > 0 and stats.hot_misses > 0
    row_bytes = (config.kv_lora_rank + config.qk_rope_head_dim) * engine._cache.dtype.itemsize
    leaders = sorted(config.full_layers)
    layers = (
        {  # up to the next full layer
            layer: following - layer
            for layer, following in zip(
                leaders, [*leaders[1:], config.num_hidden_layers], strict=True
            )
        }
        | {config.mtp_layer: 1}
    )
    expected = sum(lru.misses * layers[layer] * row_bytes for layer, lru in lrus.items())
    assert stats.fetched_bytes == expected
