"""Every operator in one graph with ordinary code around it: compiled == eager, gradients too."""

import torch

from glm53.ops import (
    cache_write,
    index_select,
    logical_to_physical,
    routed_experts,
    sparse_mla,
)


def test_write_then_read_over_several_calls():
    """A read before the write sees the old bytes, a read after it the new ones."""

    def step(rows, slots, cache):
        seen_before = cache.sum()
        cache_write(rows * 2, slots, cache)
        return seen_before, cache[slots.clamp(min=0)].sum(-1), cache.sum()

    compiled = torch.compile(step, fullgraph=True)
    cache = torch.randn(13, 7)
    twin = cache.clone()
    for seed in range(3):
        rows, slots = torch.randn(5, 7), torch.randperm(13)[:5]
        slots[seed] = -1
        expected, got = step(rows, slots, cache), compiled(rows, slots, twin)
        torch.testing.assert_close(got, expected)
        assert torch.equal(cache, twin)


def test_selection_of_tied_integer_scores():
    """index_select and the translation of what it selected, ties included."""
    lengths = torch.tensor([0, 5, 6, 31, 40], dtype=torch.int32)
    request = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    table = torch.randperm(10, dtype=torch.int32).view(2, 5)
    keys = torch.randint(-2, 3, (100, 4)).float()

    def step(q, weights):
        selected = index_select(
            q * 2,
            weights - 1,
            keys,
            table,
            request,
            lengths,
            index_topk=6,
            page_size=10,
            block_stride=10,
        )
        rows, counts = logical_to_physical(selected, table, request, page_size=10, block_stride=10)
        return selected, rows + 1, counts * 2

    q, weights = torch.randint(-2, 3, (5, 2, 4)).float(), torch.randint(-2, 3, (5, 2)).float()
    for got, expected in zip(
        torch.compile(step, fullgraph=True)(q, weights), step(q, weights), strict=True
    ):
        assert torch.equal(got, expected)


def _loss_and_gradients(function, *leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    value = function(*leaves)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def test_sparse_attention():
    indices = torch.tensor([[0, 3, 7], [-1, -1, -1], [-1, 5, 3]], dtype=torch.int32)
    counts = torch.tensor([3, 0, 2], dtype=torch.int32)

    def loss(q, rows):
        out, lse = sparse_mla(q * 1.5, rows, indices, counts, value_dim=6, scale=0.3)
        return out.pow(2).sum() + lse.masked_fill(counts[:, None] == 0, 0).sum()

    leaves = torch.randn(3, 5, 9).double(), torch.randn(8, 9).double()
    expected = _loss_and_gradients(loss, *leaves)
    got = _loss_and_gradients(torch.compile(loss, fullgraph=True), *leaves)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_experts():
    ids = torch.tensor([[0, 3], [-1, 3], [9, 1]])

    def loss(x, gate_up, down, weights):
        return routed_experts(x * 2, gate_up, down, ids, weights).sin().sum()

    shapes = (3, 5), (4, 6, 5), (4, 5, 3), (3, 2)
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = _loss_and_gradients(loss, *leaves)
    got = _loss_and_gradients(torch.compile(loss, fullgraph=True), *leaves)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
