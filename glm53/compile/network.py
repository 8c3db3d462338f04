"""The compiled network: the entries of `Transformer` that generation calls, at bucketed row counts.

A batch of at most the largest bucket is padded to the next bucket, whose graph has static shapes;
larger batches share one graph with dynamic shapes. A padding row has slot -1 and length 0: it
writes no cache byte, sees no key, and its result is cut off. On CUDA the graphs of the buckets are
captured: their arguments are copied to where they were captured, their results from there.

Every (entry, bucket) is a function of its own for Dynamo, see `glm53.compile.isolate`.
"""

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53.batch import TENSORS, Batch, Selection, Trace
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile.backend import Backend
from glm53.compile.capture import Captures, CUDARecorder
from glm53.compile.config import INDEX_SCORES, CompileConfig
from glm53.compile.index_scores import IndexScores
from glm53.compile.isolate import compile_alone
from glm53.compile.static_inputs import StaticInputs
from glm53.model import Transformer

logger = logging.getLogger(__name__)

DYNAMIC = 0  # stands for the bucket of batches larger than every bucket


class CompiledNetwork:
    """Computes what the network computes. Weights stay the network's own, in place: an update of
    them needs no new compilation.

    calls: how often each (entry, bucket) ran; DYNAMIC is the bucket of larger batches.
    """

    def __init__(
        self, network: Transformer, config: CompileConfig, captures: Captures | None = None
    ) -> None:
        """captures: holds the captured graphs; by default CUDA graphs, where `config` wants them.

        Make it when weights and cache have their memory: captures are bound by what is left.
        """
        self.network = network
        self.config = network.config
        rewrites = config.rewrites_on(network.device)
        on_cpu = network.device.type == "cpu" and INDEX_SCORES in rewrites
        self._index_scores = IndexScores() if on_cpu else None
        self.backend = Backend(
            tuple(name for name in rewrites if name != INDEX_SCORES),
            self._index_scores.index_select if self._index_scores is not None else None,
        )
        if captures is None and config.cuda_graphs and network.device.type == "cuda":
            captures = Captures(CUDARecorder(network.device))
        self.captures = captures
        self._static = {bucket: StaticInputs() for bucket in config.buckets}
        self.calls: Counter[tuple[str, int]] = Counter()
        self._buckets = config.buckets
        self._compiled: dict[tuple[str, int], Callable] = {}

        def decoder(batch, cache):
            return network.model(batch, cache)

        def draft(next_ids_T, hidden_TD, batch, cache):
            return network.draft(next_ids_T, hidden_TD, batch, cache)

        def redraft(next_ids_T, hidden_TD, batch, cache, selection):
            return network.draft(next_ids_T, hidden_TD, batch, cache, selection)

        def head(hidden_TD):
            return network.lm_head(hidden_TD)

        self._functions = {f.__name__: f for f in (decoder, draft, redraft, head)}

    def model(
        self,
        batch: Batch,
        cache: KVCache,
        record: Trace | None = None,
        replay: Trace | None = None,
    ) -> Tensor:
        """`Transformer.model`. Forwards that record or replay decisions run eagerly: what they
        hand in and out differs from layer to layer."""
        if record is not None or replay is not None:
            return self.network.model(batch, cache, record, replay)
        rows = batch.num_rows
        padded, bucket = self._padded(batch, cache)
        return self._own(self._call("decoder", bucket, padded, cache)[:rows], bucket)

    def draft(
        self,
        next_ids_T: Tensor,
        hidden_TD: Tensor,
        batch: Batch,
        cache: KVCache,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Selection]:
        """`Transformer.draft`."""
        rows = batch.num_rows
        padded, bucket = self._padded(batch, cache)
        size = padded.num_rows
        next_ids_T = self._held("next_ids", _rows(next_ids_T, size), bucket)
        hidden_TD = self._held("hidden", _rows(hidden_TD, size), bucket)
        if bucket == DYNAMIC:
            torch._dynamo.mark_dynamic(next_ids_T, 0)
            torch._dynamo.mark_dynamic(hidden_TD, 0)
        if selection is None:
            out = self._call("draft", bucket, next_ids_T, hidden_TD, padded, cache)
        else:
            assert selection.fetch is None
            given = Selection(
                _rows(selection.logical, size, -1),
                _rows(selection.physical, size, -1),
                _rows(selection.counts, size),
            )
            if bucket == DYNAMIC:
                for rows_TL in (given.logical, given.physical, given.counts):
                    torch._dynamo.mark_dynamic(rows_TL, 0)
            elif self.captures is not None:
                given = self._static[bucket].selection(given)
            out = self._call("redraft", bucket, next_ids_T, hidden_TD, padded, cache, given)
        hidden_TD, used = out
        used = Selection(
            self._own(used.logical[:rows], bucket),
            self._own(used.physical[:rows], bucket),
            self._own(used.counts[:rows], bucket),
        )
        return self._own(hidden_TD[:rows], bucket), used

    def lm_head(self, hidden_TD: Tensor) -> Tensor:
        """`Transformer.lm_head`, of [T, D]."""
        rows = hidden_TD.shape[0]
        bucket = self._bucket(rows)
        hidden_TD = self._held("hidden", _rows(hidden_TD, bucket or rows), bucket)
        if bucket == DYNAMIC:
            torch._dynamo.mark_dynamic(hidden_TD, 0)
        return self._own(self._call("head", bucket, hidden_TD)[:rows], bucket)

    @property
    def _entries(self) -> tuple[str, ...]:
        drafting = ("draft", "redraft") if self.network.mtp_layer_idx is not None else ()
        return ("decoder", "head", *drafting)

    @property
    def num_graphs(self) -> int:
        """How many graphs `warm_up` compiles."""
        return len(self._entries) * (len(self._buckets) + 1) + (self._index_scores is not None)

    def warm_up(self, cache: KVCache) -> Iterator[str]:
        """Compiles everything, one graph before each item; an item says which it was.

        The rows are padding: nothing is written. Buckets are captured as they come.
        """
        device = self.network.device
        sizes = [self._buckets[-1] + 1, *reversed(self._buckets)]
        if self._index_scores is not None:
            keys_MG = cache.layers[0].index_keys
            assert keys_MG is not None
            self._index_scores.warm_up(keys_MG, self.config.index_n_heads, PAGE_SIZE)
            yield "index scores"
        for size, entry in itertools.product(sizes, self._entries):
            batch = Batch.paged([], PAGE_SIZE, device).pad(size, 1, 1)
            hidden_TD = torch.zeros(
                size, self.config.hidden_size, dtype=self.network.dtype, device=device
            )
            if entry == "decoder":
                self.model(batch, cache)
            elif entry == "head":
                self.lm_head(hidden_TD)
            else:
                selection = None
                if entry == "redraft":
                    none_TL = torch.full(
                        (size, self.config.index_topk), -1, dtype=torch.int32, device=device
                    )
                    # Two tensors: Dynamo would note that they are one.
                    counts_T = torch.zeros_like(batch.lengths)
                    selection = Selection(none_TL, none_TL.clone(), counts_T)
                self.draft(batch.input_ids, hidden_TD, batch, cache, selection)
            yield f"{entry}, {size} rows" if size in self._buckets else f"{entry}, more rows"
        if self.captures is not None:
            logger.info("%s", self.captures.summary())

    def _bucket(self, rows: int) -> int:
        return next((bucket for bucket in self._buckets if rows <= bucket), DYNAMIC)

    def _padded(self, batch: Batch, cache: KVCache) -> tuple[Batch, int]:
        bucket = self._bucket(batch.num_rows)
        if bucket != DYNAMIC:  # some requests may have no row left, as when they stop to draft
            batch = batch.compact(bucket)
        if bucket != DYNAMIC and self.captures is not None:
            width = -(-self.config.max_position_embeddings // PAGE_SIZE)
            padded = batch.pad(bucket, bucket, min(width, cache.num_pages))
            return self._static[bucket].batch(padded), bucket
        # Sizes of 1 would be taken for constants, in the graph of any size.
        padded = batch.pad(bucket or batch.num_rows, bucket or 2, 2)
        torch._dynamo.mark_dynamic(padded.block_table, 1)
        if bucket == DYNAMIC:
            for name in TENSORS:
                torch._dynamo.mark_dynamic(getattr(padded, name), 0)
        return padded, bucket

    def _held(self, name: str, tensor: Tensor, bucket: int) -> Tensor:
        """The argument, where a captured graph expects it."""
        if bucket == DYNAMIC or self.captures is None:
            return tensor
        return self._static[bucket].hold(name, tensor)

    def _own(self, result: Tensor, bucket: int) -> Tensor:
        """The result, safe from the next replay of whatever graph."""
        return result if bucket == DYNAMIC or self.captures is None else result.clone()

    def _call(self, entry: str, bucket: int, *arguments):
        self.calls[entry, bucket] += 1
        compiled = self._compiled.get((entry, bucket))
        if compiled is None:
            name = f"{entry}_{bucket or 'dynamic'}"
            backend: Callable = self.backend
            if bucket != DYNAMIC and self.captures is not None:
                recording = self.captures.recording(name)
                backend = functools.partial(backend, recording=recording)
            compiled = compile_alone(self._functions[entry], name, backend)
            self._compiled[entry, bucket] = compiled
        return compiled(*arguments)


def _rows(tensor: Tensor, rows: int, value: float = 0) -> Tensor:
    """Padded along the first dim."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing), value=value)
