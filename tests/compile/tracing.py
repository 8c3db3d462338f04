"""Graphs as Dynamo hands them to a backend."""

import torch

from glm53.batch import TENSORS, Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.config import GLM53Config
from glm53.model import Transformer
from tests.tiny import randomise


def decode_graphs(config: GLM53Config, rows: int | None) -> list[torch.fx.GraphModule]:
    """The graphs of a decode step of so many requests (None: a dynamic number)."""
    model = randomise(Transformer(config)).eval()
    size = 5 if rows is None else rows
    cache = KVCache(config, size, mtp=False, dtype=torch.float32)
    batch = Batch.paged([([7], 20, [page]) for page in range(size)], PAGE_SIZE)
    if rows is None:
        for name in TENSORS:
            torch._dynamo.mark_dynamic(getattr(batch, name), 0)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.normal_()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model.model, fullgraph=True, dynamic=False, backend=backend)(batch, cache)
    return graphs
