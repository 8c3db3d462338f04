"""Inductor's own partitioning honours the tag and finds as many partitions as the split has pieces.

Private API of Inductor throughout: on a CPU it partitions nothing, so `should_partition` is shown
every node as one of a GPU. A torch release that changes it fails here, and is then looked at.
"""

import contextlib
from unittest import mock

import pytest
import torch
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.utils import set_customized_partition_wrappers

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile.rewrites import REWRITES, capturable, rewrite
from glm53.compile.split import compile_pieces
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config


@contextlib.contextmanager
def partitions():
    """Names of the nodes that stand between two partitions, by why; and calls of partitions."""
    should_partition, reasons, calls = Scheduler.should_partition, [], []

    def seen_as_gpu(self, node, *arguments, **keywords):
        with mock.patch.object(BaseSchedulerNode, "is_gpu", lambda self: True):
            reason = should_partition(self, node, *arguments, **keywords)
        if reason:
            reasons.append(str(reason))
        return reason

    def wrapper(function, metadata):
        def call(*arguments):
            calls.append(metadata.partition_index)
            return function(*arguments)

        return call

    with (
        mock.patch.object(Scheduler, "should_partition", seen_as_gpu),
        torch._inductor.config.patch(graph_partition=True, force_disable_caches=True),
    ):
        set_customized_partition_wrappers(wrapper)
        try:
            yield reasons, calls
        finally:
            set_customized_partition_wrappers(None)


@pytest.mark.slow
def test_as_many_partitions_as_pieces():
    config = tiny_config(
        num_hidden_layers=3,
        indexer_types=("full", "shared", "full"),
        mlp_layer_types=("dense",) * 3,
        num_nextn_predict_layers=0,
    )
    model = randomise(Transformer(config)).eval()
    cache, twin = (KVCache(model.config, 2, mtp=False, dtype=torch.float32) for _ in range(2))
    tokens = torch.randint(131, (21,)).tolist()
    prompt = Batch.paged([(tokens[:20], 0, [1])], PAGE_SIZE)
    step = Batch.paged([(tokens[20:], 20, [1])], PAGE_SIZE)
    pieces = []

    def backend(graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        rewrite(graph, REWRITES)
        capturable.rewrite(graph.graph)
        graph.recompile()
        pieces.extend(compile_pieces(graph, lambda piece, inputs: piece.forward)[1].pieces)
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    with torch.no_grad(), partitions() as (reasons, calls):
        for each in (cache, twin):
            model.model(prompt, each)
        decode = torch.compile(model.model, backend=backend, fullgraph=True, dynamic=False)
        result, expected = decode(step, cache), model.model(step, twin)
    assert (result - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert len(pieces) == 3
    assert calls == [0, 1, 2]
    assert len(reasons) >= 2
