"""Every rewrite computes what it replaces, and replaces exactly the products of few rows."""

import pytest
import torch
import torch.nn.functional as F

from glm53.compile.index_scores import IndexScores
from glm53.compile.rewrites import REWRITES, rewrite, skinny_attention, skinny_experts
from glm53.compile.rewrites.skinny_linear import absorb_query, absorb_value, linear_by_rows
from glm53.ops.routed_experts import routed_experts_ref
from glm53.ops.sparse_mla import sparse_mla_ref
from tests.compile.tracing import decode_graphs
from tests.tiny import tiny_config

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def close(ours, exact, dtype):
    assert ours.dtype == dtype
    assert (ours.double() - exact).abs().max() <= DTYPES[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products(rows, dtype):
    x, w = torch.randn(rows, 37).to(dtype), torch.randn(23, 37).to(dtype)
    bias = torch.randn(23).to(dtype)
    close(linear_by_rows(x, w), x.double() @ w.double().T, dtype)
    close(linear_by_rows(x, w, bias), x.double() @ w.double().T + bias.double(), dtype)
    q, w_uk, w_uv = torch.randn(rows, 3, 5), torch.randn(3, 5, 11), torch.randn(3, 7, 11)
    q, w_uk, w_uv = q.to(dtype), w_uk.to(dtype), w_uv.to(dtype)
    exact = torch.einsum("thn,hnc->thc", q.double(), w_uk.double())
    close(absorb_query(q, w_uk), exact, dtype)
    out = torch.randn(rows, 3, 11).to(dtype)
    close(absorb_value(out, w_uv), torch.einsum("thc,hvc->thv", out.double(), w_uv.double()), dtype)


def test_products_of_views():
    """Inductor reads the input of a product where it lies: at an offset, in strides."""

    def products(x, w):
        y = x * 2 + 1
        views = (
            y.split([3, 8], -1)[1],
            y[:1, 2:10].expand(2, -1),
            y.T.contiguous().T[:, 3:],
            x[:, 3:],
        )
        return [linear_by_rows(view, w) for view in (*views, y[:, :8])]

    x, w = torch.randn(2, 11), torch.randn(7, 8)
    torch._dynamo.reset()
    for ours, expected in zip(torch.compile(products)(x, w), products(x, w), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_experts_leave_out_unknown_ids(rows, dtype):
    x = torch.randn(rows, 13).to(dtype)
    gate_up, down = torch.randn(5, 14, 13).to(dtype), torch.randn(5, 13, 7).to(dtype)
    ids = torch.tensor([[4, 0, 2], [1, 5, -1], [-1, -1, 7], [2, 0, 3], [4, 3, 0]])[:rows]
    weights = torch.rand(rows, 3)
    ours = skinny_experts.experts_by_pairs(x, gate_up, down, ids, weights)
    doubles = (t.double() for t in (x, gate_up, down))
    close(ours, routed_experts_ref(*doubles, ids, weights.double()), dtype)


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("cache_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_reads_selected_rows_only(dtype, cache_dtype, repeats):
    """3 rows and 6; NaN also in row 0, which a careless stand-in for invalid entries would be."""
    rows = torch.full((50, 12), torch.nan).to(cache_dtype or dtype)
    indices = [[3, 9, 40, -1, -1], [-1] * 5, [49, 1, 7, 8, 2]] * repeats
    indices = torch.tensor(indices, dtype=torch.int32)
    read = indices[indices >= 0].long()
    rows[read] = torch.randn(len(read), 12).to(rows)
    q, counts = torch.randn(len(indices), 4, 12).to(dtype), (indices >= 0).sum(-1).int()
    out, lse = skinny_attention.gathered_mla(q, rows, indices, counts, 9, 0.3)
    exact, exact_lse = sparse_mla_ref(q.double(), rows.double(), indices, counts, 9, 0.3)
    close(out, exact, dtype)
    assert not out[1].any()
    assert lse[1].isneginf().all()
    torch.testing.assert_close(lse[[0, 2]].double(), exact_lse[[0, 2]], rtol=1e-5, atol=1e-5)


# Of a decoder with 4 layers, 3 full ones, of which 3 have routed experts.
LINEAR = 4 * 4 + 3 * 3 + 1 * 3 + 3 * (1 + 3)  # attention, indexer, dense MLP, router and shared


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 17, None])
def test_counts(rows):
    """None: the number of rows is dynamic."""
    (graph,) = decode_graphs(tiny_config(num_nextn_predict_layers=0), rows)
    few = rows is not None
    products = LINEAR * (few and rows <= 4) + 4 * (few and rows <= 2) + 4 * (few and rows <= 16)
    assert rewrite(graph, REWRITES) == {
        "norm_rope_cache": 4,
        "index_query": 4,
        "embed_eh_norm": 0,
        "skinny_linear": products,
        "skinny_experts": 3 if few and rows <= 16 else 0,
        "skinny_attention": 4 if few and rows <= 16 else 0,
        "inline_conversion": 3,
    }


def test_wide_products_of_four_rows_are_left_to_the_gemm():
    config = tiny_config(
        num_hidden_layers=1,
        indexer_types=("full",),
        mlp_layer_types=("dense",),
        num_nextn_predict_layers=0,
        intermediate_size=1032,
    )
    for rows, wide in ((4, 1), (5, 10), (2, 0)):
        (graph,) = decode_graphs(config, rows)
        rewrite(graph, ("skinny_linear",))
        left = [node for node in graph.graph.nodes if node.target is F.linear]
        assert len(left) == wide
        if rows == 4:
            assert left[0].args[0].meta["example_value"].shape == (4, 1032)


def test_no_rewrite_leaves_the_model_as_it_is():
    (graph,) = decode_graphs(tiny_config(num_nextn_predict_layers=0), 1)
    before = str(graph.graph)
    assert rewrite(graph, ()) == {}
    assert str(graph.graph) == before
    assert sum(node.target is F.linear for node in graph.graph.nodes) == LINEAR


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_keys", [7, 8, 9, 24, 61])
def test_index_scores_of_scattered_pages(num_keys, dtype):
    """11 heads: more than one loop carries. Beyond num_keys lies NaN."""
    keys, page_size = torch.full((80, 14), torch.nan).to(dtype), 8
    pages = torch.randperm(10, dtype=torch.int32)
    positions = torch.arange(num_keys)
    rows = pages[positions // page_size].long() * page_size + positions % page_size
    keys[rows] = torch.randn(num_keys, 14).to(dtype)
    q, weights = torch.randn(3, 11, 14).to(dtype), torch.randn(3, 11)
    ours = IndexScores().scores(q, weights, keys, pages, num_keys, page_size, page_size)
    for t in range(3):
        dots = (q[t].double() @ keys[rows].double().T).relu()
        exact = (weights[t].double()[:, None] * dots).sum(0)
        torch.testing.assert_close(ours[t].double(), exact, rtol=1e-5, atol=1e-5)
