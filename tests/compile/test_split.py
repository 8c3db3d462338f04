"""The graph is cut at the indexer only, and equal pieces are compiled once."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile.split import compile_pieces, signature
from glm53.model import Transformer
from tests.tiny import randomise, tiny_config


def schedule(layers: int) -> tuple[str, ...]:
    """GLM-5.3's: layers 0 to 2 are full, then every fourth from layer 6 on."""
    return tuple("full" if i < 3 or i % 4 == 2 else "shared" for i in range(layers))


def network(layers: int) -> Transformer:
    config = tiny_config(
        num_hidden_layers=layers,
        indexer_types=schedule(layers),
        mlp_layer_types=("dense",) * 3 + ("sparse",) * (layers - 3),
        num_nextn_predict_layers=0,
    )
    return randomise(Transformer(config)).eval()


def traced(model: Transformer):
    """The split of a decode step: result, report, and how many pieces reached the compiler."""
    cache = KVCache(model.config, 2, mtp=False, dtype=torch.float32)
    tokens = torch.arange(40).tolist()
    batch = Batch.paged([(tokens[:39], 0, [1])], PAGE_SIZE)
    step = Batch.paged([(tokens[39:], 39, [1])], PAGE_SIZE)
    reports, compiled = [], []

    def backend(graph, example_inputs):
        def compile_piece(piece, inputs):
            compiled.append(piece)
            return piece.forward

        function, report = compile_pieces(graph, compile_piece)
        reports.append(report)
        return function

    with torch.no_grad():
        model.model(batch, cache)
        expected = model.model(step, cache)
        torch._dynamo.reset()
        decode = torch.compile(model.model, fullgraph=True, dynamic=False, backend=backend)
        result = decode(step, cache)
    assert torch.equal(result, expected)
    (report,) = reports
    return report, len(compiled)


def piece(function, *inputs):
    """The signature of a traced function."""
    graph = make_fx(function)(*inputs)
    return signature(graph, inputs)


def test_pieces_that_differ_in_anything_have_different_signatures():
    """A signature that two of these shared would run one's code in the place of the other's."""
    x, y = torch.ones(3, 4), torch.ones(3, 4)

    def base(x, y):
        return x * y + 2

    same = piece(lambda a, b: a * b + 2, x, y)
    assert piece(base, x, y) == same
    others = [
        (lambda x, y: x * y + 3, x, y),  # a constant
        (lambda x, y: y * x + 2, x, y),  # the order of operands
        (lambda x, y: x * x + 2, x, y),  # wiring
        (lambda x, y: x * y - 2, x, y),  # an operator
        (base, x[:2], y[:2]),  # shapes
        (base, torch.ones(4, 3).T, y),  # strides
        (base, x.double(), y),  # dtypes
        (base, x.to("meta"), y.to("meta")),  # devices
    ]
    signatures = [piece(function, *inputs) for function, *inputs in others]
    assert len({same, *signatures}) == len(others) + 1


@pytest.mark.parametrize("layers", [14, 78])
def test_full_layers_are_the_only_breaks(layers):
    full = schedule(layers).count("full")
    report, compiled = traced(network(layers))
    assert report.breaks == full
    assert len(report.pieces) == full + 1
    assert compiled == len(report.graphs) == 5
    assert max(report.pieces) == 4
    assert report.count("glm53.index_select") == 0
    assert report.count("glm53.sparse_mla") == layers
    assert report.count("glm53.cache_write") == layers + full
    assert report.count("glm53.logical_to_physical") == full
    assert report.count("glm53.routed_experts") == layers - 3
