"""No piece of a static bucket needs the host, by a list of every operator that one calls."""

from unittest import mock

import pytest
import torch
from torch import fx

from glm53.cache import KVCache
from glm53.compile import CompileConfig, CompiledNetwork, backend, capturable, capture
from glm53.compile.config import ALL_REWRITES
from glm53.model import Transformer
from glm53.ops.cache_write import cache_write_ref, write_on_device
from tests.compile.fake_graphs import FakeCaptures
from tests.tiny import tiny_config

OURS = {
    "glm53.cache_write",
    "glm53.embed_eh_norm",
    "glm53.index_query",
    "glm53.norm_rope_cache",
}
ATEN = set(
    """
    _softmax _to_copy _unsafe_view add amax arange as_strided bitwise_and bitwise_not bmm cat
    clamp clone cos detach div embedding eq expand floor_divide gather ge gt index logsumexp lt
    masked_fill masked_fill_ mean mm mul mul_ native_layer_norm permute pow reciprocal remainder
    rsqrt scalar_tensor sigmoid silu sin slice sort split split_with_sizes stack sub sum t
    transpose unbind unsqueeze view where
    """.split()
)


@pytest.fixture(scope="module")
def inspected():
    """(operators, those that need the host) of every distinct piece, on a device that is not the
    CPU: a tensor made there by mistake is noticed."""
    torch._dynamo.reset()
    found: dict[str, list] = {}

    def inspect(piece, inputs):
        result = capturable.operators(piece, inputs)
        found.setdefault("pieces", []).append(result)
        return result

    network = Transformer(tiny_config()).to("meta").eval()
    captures = FakeCaptures()
    ours = CompiledNetwork(network, CompileConfig(buckets=(2, 32), rewrites=ALL_REWRITES), captures)
    cache = KVCache(tiny_config(), 80, mtp=True, dtype=torch.float32, device="meta")
    with (
        torch.inference_mode(),
        mock.patch.object(backend, "_compile", lambda piece, inputs, options: piece.forward),
        mock.patch.object(capture, "operators", inspect),
    ):
        for _ in ours.warm_up(cache):
            pass
    return captures, found["pieces"]


def test_no_piece_needs_the_host(inspected):
    captures, pieces = inspected
    reports = captures.reports
    assert {r.partition("_")[0] for r in reports} == {"decoder", "draft", "redraft", "head"}
    assert {name for name, report in reports.items() if report.host} == set()
    assert all(report.captured for report in reports.values())
    # 4 pieces of a decoder (3 distinct: layers 0 and 1 are not alike), 2 of a draft.
    assert len(pieces) == len(reports) // 4 * (4 + 2 + 1 + 1)


def test_every_operator_is_known(inspected):
    called = set().union(*(called for called, _ in inspected[1]))
    ours = {name for name in called if not name.startswith(("aten.", "prim."))}
    assert ours <= OURS
    assert {name.removeprefix("aten.") for name in called if name.startswith("aten.")} <= ATEN


def inspect(function, *inputs) -> set[str]:
    """What needs the host in a function of tensors."""
    found = []

    def compiler(graph: fx.GraphModule, example_inputs: list):
        fakes = [n.meta["example_value"] for n in graph.graph.nodes if n.op == "placeholder"]
        found.append(capturable.operators(graph, fakes)[1])
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)(*inputs)
    return found[0]


@torch.library.custom_op("glm53_test::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@unknown.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_what_needs_the_host_is_found():
    x, ids, on_meta = torch.randn(5), torch.tensor([3, 1]), torch.randn(3, device="meta")
    assert inspect(lambda x, ids: x[ids].sin(), x, ids) == set()
    assert inspect(lambda x: unknown(x.sin()), x) == {"glm53_test.unknown"}  # a forgotten tag
    table = torch.zeros(2, 3, dtype=torch.int32)
    request = torch.zeros(2, dtype=torch.int32)
    select = torch.ops.glm53.index_select

    def scored(q, weights, keys):
        return select(q, weights, keys, table, request, request, 3, 1, 1)

    q, weights, keys = torch.randn(2, 3, 4), torch.randn(2, 3), torch.randn(5, 4)
    assert inspect(scored, q, weights, keys) == {"glm53.index_select"}
    found = inspect(lambda x: x * torch.ones(3).to("meta"), on_meta)
    assert "aten.ones on another device" in found and "aten.mul on another device" not in found
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert inspect(lambda x: x.nonzero().sum(), x) == {"aten.nonzero"}
        assert inspect(lambda x: x[x > 0].sum(), x) >= {"aten.index"}


@pytest.mark.parametrize("slots", [[3, 0, 9], [-1, 4, -1], [0, -1, 2], [-1, -1, -1], []])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_write_without_the_host(slots, dtype):
    """Bit for bit: NaN of any payload stays what it was."""
    cache = torch.randint(-(2**15), 2**15, (11, 14), dtype=torch.int16).view(dtype)
    expected = cache.clone()
    rows, where = torch.randn(len(slots), cache.shape[1]), torch.tensor(slots, dtype=torch.int64)
    cache_write_ref(rows, where, expected)
    write_on_device(rows, where, cache)
    assert torch.equal(cache.view(torch.int16), expected.view(torch.int16))
