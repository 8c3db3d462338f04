"""A chain is replaced only if it computes what the operator does, and nobody needs its parts."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from glm53 import model as network
from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile.rewrites import rewrite
from glm53.model import MTPLayer, RMSNorm, rope_table
from tests.compile.tracing import decode_graphs
from tests.tiny import randomise, tiny_config

NAMES = ("norm_rope_cache", "index_query", "embed_eh_norm")
ONE_LAYER = dict(
    num_hidden_layers=1,
    indexer_types=("full",),
    mlp_layer_types=("dense",),
    num_nextn_predict_layers=0,
)
BOTH = (1, True, 1, True)


def decoder(**overrides) -> fx.GraphModule:
    (graph,) = decode_graphs(tiny_config(**(ONE_LAYER | overrides)), 2)
    return graph


@pytest.fixture(scope="module")
def plain():
    return decoder()


def calls(graph: fx.GraphModule, name: str) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if name in str(node.target)]


def fused(graph: fx.GraphModule) -> tuple[int, bool, int, bool]:
    """norm_rope_cache, with index keys?, index_query, with index queries?"""
    counts = rewrite(graph, NAMES)
    graph.graph.lint()
    keys = [node.args[8] is not None for node in calls(graph, "norm_rope_cache")]
    queries = [node.args[4] is not None for node in calls(graph, "index_query")]
    assert (len(keys), len(queries)) == (counts["norm_rope_cache"], counts["index_query"])
    return len(keys), any(keys), len(queries), any(queries)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("index_interleave", [True, False])
def test_constants_are_read_from_the_graph(interleave, index_interleave):
    config = dict(
        rope_interleave=interleave,
        indexer_rope_interleave=index_interleave,
        latent_norm_eps=3e-4,
    )
    graph = decoder(**config)
    assert fused(graph) == BOTH
    (cache,), (query,) = calls(graph, "norm_rope_cache"), calls(graph, "index_query.default")
    assert cache.args[12:] == (3e-4, 1e-6, interleave, index_interleave)
    assert query.args[6:] == (18**-0.5 * 14**-0.5, interleave, index_interleave)


def test_one_moves_up_and_the_order_of_names_does_not_matter(plain):
    graph = copy.deepcopy(plain)
    rewrite(graph, ("skinny_linear", "skinny_attention", *NAMES))
    nodes = list(graph.graph.nodes)
    (cache,), (query,) = calls(graph, "norm_rope_cache"), calls(graph, "index_query.default")
    (select,) = calls(graph, "index_select")
    assert cache < nodes[nodes.index(query)] < select
    assert not calls(graph, "cache_write")
    assert cache.args[8] < cache  # the projection of index keys


class OtherNorm(RMSNorm):
    def outside(self, x):
        x_fp32 = x.float()
        normed = x_fp32 * (torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True)) + self.eps)
        return self.weight * normed.to(x.dtype)

    def swapped(self, x):
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight

    def unrounded(self, x):
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed


@pytest.mark.parametrize("name", ["outside", "swapped", "unrounded"])
def test_other_norms(monkeypatch, name):
    monkeypatch.setattr(RMSNorm, "forward", getattr(OtherNorm, name))
    assert fused(decoder()) == (0, False, 1, True)


def backwards(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool) -> Tensor:
    x1, x2 = x[..., 0::2], x[..., 1::2]
    rotated = torch.stack((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).flatten(-2)
    return rotated.to(x.dtype)


def test_another_rope(monkeypatch):
    monkeypatch.setattr(network, "rope", backwards)
    assert fused(decoder()) == (0, False, 0, False)


def chain_before(node: fx.Node, name: str) -> fx.Node:
    """The first node called `name` on the way back from `node` along first arguments."""
    while name not in str(node.target):
        inputs = node.all_input_nodes
        node = inputs[0]
    return node


def use(graph: fx.GraphModule, node: fx.Node) -> None:
    """Someone else needs its value."""
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    output.args = ((*output.args[0], node),)


def test_a_value_inside_is_used_elsewhere(plain):
    graph = copy.deepcopy(plain)
    latents, keys = (node.args[0] for node in calls(graph, "cache_write"))
    normed_C = latents.args[0][0]
    assert normed_C.target is operator.mul
    use(graph, normed_C)
    assert fused(graph) == (0, False, 1, True)

    for value in (keys, keys.args[0]):
        graph = copy.deepcopy(plain)
        use(graph, next(node for node in graph.graph.nodes if node.name == value.name))
        assert fused(graph) == (1, False, 1, True)

    graph = copy.deepcopy(plain)
    (select,) = calls(graph, "index_select")
    use(graph, select.args[0].args[0][0])
    assert fused(graph) == (1, True, 1, False)


def test_the_ends_may_be_used_elsewhere(plain):
    """The normed query latent, and what the chains start from."""
    graph = copy.deepcopy(plain)
    use(graph, calls(graph, "linear")[0])
    (select,) = calls(graph, "index_select")
    use(graph, select.args[0])
    assert fused(graph) == BOTH


def test_index_keys_that_were_read_stay_behind(plain):
    graph = copy.deepcopy(plain)
    latents, keys = calls(graph, "cache_write")
    with graph.graph.inserting_after(latents):
        use(graph, graph.graph.call_method("sum", (keys.args[2],)))
    assert fused(graph) == (1, False, 1, True)
    assert len(calls(graph, "cache_write")) == 1


@pytest.mark.parametrize("writer", ["method", "operator"])
def test_index_keys_do_not_pass_a_write(plain, writer):
    graph = copy.deepcopy(plain)
    latents, keys = calls(graph, "cache_write")
    with graph.graph.inserting_before(keys):
        if writer == "method":
            graph.graph.call_method("add_", (latents.args[2], 1))
        else:
            graph.graph.call_function(torch.ops.aten.add_.Tensor, (latents.args[2], 1))
    assert fused(graph) == (1, False, 1, True)


def test_index_keys_do_not_leave_an_autocast_region(plain):
    graph = copy.deepcopy(plain)
    _, keys = calls(graph, "cache_write")
    enter, leave = calls(graph, "_enter_autocast")[0], calls(graph, "_exit_autocast")[0]
    projection = chain_before(keys.args[0], "linear")
    projection.prepend(enter)
    projection.append(leave)
    assert fused(graph) == (1, False, 1, True)


def test_other_slots(plain):
    graph = copy.deepcopy(plain)
    _, keys = calls(graph, "cache_write")
    (positions,) = (node for node in graph.graph.nodes if node.name == "l_batch_positions")
    keys.args = (keys.args[0], positions, keys.args[2])
    assert fused(graph) == (1, False, 1, True)


def test_another_table(plain):
    graph = copy.deepcopy(plain)
    latents, keys = calls(graph, "cache_write")
    cos, sin = (node for node in graph.graph.nodes if node.name in ("cos", "sin"))
    for node in [n for n in cos.users if latents < n < keys and n.target is operator.mul]:
        node.replace_input_with(cos, sin)
    assert fused(graph) == (1, False, 1, True)


def test_another_eps(plain):
    graph = copy.deepcopy(plain)
    normed_C = calls(graph, "cache_write")[0].args[0].args[0][0]
    mean_plus_eps = normed_C.args[1].args[0].args[1].args[0]
    mean_plus_eps.args = (mean_plus_eps.args[0], 1e-5)
    assert fused(graph) == (0, False, 1, True)


def test_another_dtype(plain):
    """As under autocast: the product with a weight of higher precision has that precision."""
    graph = copy.deepcopy(plain)
    weight = calls(graph, "cache_write")[0].args[0].args[0][0].args[0]
    weight.meta["example_value"] = weight.meta["example_value"].double()
    assert fused(graph) == (0, False, 1, True)


def query_norm(graph: fx.GraphModule) -> fx.Node:
    """The normed query latent: the input of the first product behind a norm in attention."""
    latents, _ = calls(graph, "cache_write")
    return next(n.args[0] for n in calls(graph, "linear") if n > latents)


def test_the_query_latent_is_needed_before_the_write(plain):
    graph = copy.deepcopy(plain)
    latents, _ = calls(graph, "cache_write")
    with graph.graph.inserting_before(latents):
        use(graph, graph.graph.call_method("sum", (query_norm(graph),)))
    assert fused(graph) == (0, False, 1, True)


@pytest.mark.parametrize("of", ["query", "index keys"])
def test_projected_from_something_else(plain, of):
    graph = copy.deepcopy(plain)
    products = calls(graph, "linear")
    if of == "query":
        norm_input = chain_before(query_norm(graph).args[1], "linear")
        norm_input.replace_input_with(norm_input.args[0], norm_input.args[0].args[0])
        assert fused(graph) == (0, False, 1, True)
    else:
        _, keys = calls(graph, "cache_write")
        projection = chain_before(keys.args[0], "linear")
        projection.replace_input_with(projection.args[0], projection.args[0].args[0])
        assert fused(graph) == (1, False, 1, True)
    assert len(calls(graph, "linear")) == len(products)


def query_parts(graph: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    """The absorbed query and the index query."""
    (mla,), (select,) = calls(graph, "sparse_mla"), calls(graph, "index_select")
    return mla.args[0].args[0][0], select.args[0]


def test_queries_of_another_dtype(plain):
    graph = copy.deepcopy(plain)
    latent, _ = query_parts(graph)
    latent.meta["example_value"] = latent.meta["example_value"].double()
    assert fused(graph) == (1, True, 0, False)


def test_head_weights_of_another_dtype(plain):
    graph = copy.deepcopy(plain)
    (select,) = calls(graph, "index_select")
    weights = select.args[1].args[0]
    weights.meta["example_value"] = weights.meta["example_value"].double()
    assert fused(graph) == (1, True, 1, False)


def test_index_queries_with_another_table(plain):
    graph = copy.deepcopy(plain)
    (select,) = calls(graph, "index_select")
    cos, sin = (node for node in graph.graph.nodes if node.name in ("cos", "sin"))
    _, keys = calls(graph, "cache_write")
    for node in [n for n in cos.users if keys < n < select]:
        node.replace_input_with(cos, sin)
    assert fused(graph) == (1, True, 1, False)


def test_index_queries_are_needed_before_the_selection(plain):
    graph = copy.deepcopy(plain)
    (select,) = calls(graph, "index_select")
    with graph.graph.inserting_before(select):
        use(graph, graph.graph.call_method("sum", (select.args[0],)))
    assert fused(graph) == (1, True, 1, False)


@torch.no_grad()
def traced(function, *arguments, names=NAMES):
    """The graph, its rewritten form, and the result of that."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(copy.deepcopy(graph))
        rewrite(graph, names)
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    result = torch.compile(function, fullgraph=True, dynamic=None, backend=backend)(*arguments)
    return *graphs, result


@pytest.fixture(scope="module")
def drafting():
    """Arguments of MTPLayer.draft but for the cache, of two rows, the first at position 0."""
    config = tiny_config()
    layer = randomise(MTPLayer(config, 4)).eval()
    batch = Batch.paged([([7, 8, 9], 0, [1])], PAGE_SIZE)
    table_WD = torch.randn(config.vocab_size, config.hidden_size)
    hidden_TD = torch.randn(3, config.hidden_size)

    def draft(lookup):
        def function(ids_T, hidden_TD):
            cache = KVCache(config, 2, mtp=True, dtype=torch.float32).layers[4]
            rope = rope_table(batch.positions, config)
            return layer.draft(lookup(ids_T), hidden_TD, rope, batch, cache)[0]

        return function, batch.input_ids, hidden_TD

    return draft, table_WD


def mtp_input(graph: fx.GraphModule) -> int:
    count = rewrite(graph, NAMES)["embed_eh_norm"]
    graph.graph.lint()
    return count


def test_mtp_input(drafting):
    draft, table_WD = drafting
    function, *arguments = draft(lambda ids_T: F.embedding(ids_T, table_WD))
    graph, _, result = traced(function, *arguments)
    with torch.no_grad():
        torch.testing.assert_close(result, function(*arguments), rtol=1e-4, atol=1e-5)

    (filled,) = calls(graph, "masked_fill")
    equal = filled.args[1].args[0]
    other = copy.deepcopy(graph)
    for node in other.graph.nodes:
        if node.name == equal.name:
            node.args = (node.args[0], 1)
    assert mtp_input(other) == 0
    other = copy.deepcopy(graph)
    use(other, next(node for node in other.graph.nodes if node.name == filled.name))
    assert mtp_input(other) == 0
    assert mtp_input(graph) == 1


def test_mtp_input_of_a_gathered_table(drafting):
    """Two halves of the vocabulary on two ranks, whose sum is the embedding."""
    draft, table_WD = drafting
    halves = table_WD.clone(), table_WD.clone()
    halves[0][8:], halves[1][:8] = 0, 0
    function, *arguments = draft(lambda ids: F.embedding(ids, halves[0]) + halves[1][ids])
    _, graph, result = traced(function, *arguments)
    assert len(calls(graph, "gathered_eh_norm")) == 1
    with torch.no_grad():
        torch.testing.assert_close(result, function(*arguments), rtol=1e-4, atol=1e-5)
