"""fixed_shapes: a row's bits do not depend on the other rows; without it they do, so this bites."""

import pytest
import torch

from glm53.ops import fixed_shapes, index_select, routed_experts, sparse_mla

ROWS = 16
KEPT = (0, 5, 15)  # row numbers, which stay where they are


def _noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _attention(row: int | None) -> torch.Tensor:
    """Row t selects 20 + 3t keys of 200, in steps of 1 to 3; alone: all other rows nothing."""
    indices = torch.full((ROWS, 128), -1, dtype=torch.int32)
    for t in range(ROWS):
        if row in (None, t):
            indices[t, : 20 + 3 * t] = torch.arange(20 + 3 * t) * (1 + t % 3)
    counts = (indices >= 0).sum(1, dtype=torch.int32)
    query, rows = _noise(ROWS, 3, 70), _noise(200, 70, seed=1)
    return sparse_mla(query, rows, indices, counts, value_dim=50, scale=0.1)[0]


def _experts(row: int | None) -> torch.Tensor:
    """6 experts, 3 of them per row; alone: all other rows go to experts that are not here."""
    ids = torch.stack([torch.randperm(6, generator=torch.manual_seed(t))[:3] for t in range(ROWS)])
    if row is not None:
        ids[torch.arange(ROWS) != row] = -1
    gate_up, down = _noise(6, 90, 301, seed=2), _noise(6, 301, 45, seed=3)
    return routed_experts(_noise(ROWS, 301), gate_up, down, ids, torch.full((ROWS, 3), 0.3))


def _selection(row: int | None) -> torch.Tensor:
    """Keys that differ by a rounding error, so that it decides; alone: lengths of 0 elsewhere."""
    keys = _noise(1, 61, seed=4) + 1e-7 * _noise(400, 61, seed=5)
    lengths = torch.arange(300, 300 + ROWS, dtype=torch.int32)
    if row is not None:
        lengths[torch.arange(ROWS) != row] = 0
    return index_select(
        _noise(ROWS, 3, 61, seed=6),
        _noise(ROWS, 3, seed=7),
        keys,
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int32),
        lengths,
        index_topk=100,
        page_size=400,
        block_stride=1,
    )


@pytest.mark.parametrize("operator", [_attention, _experts, _selection])
def test_a_row_does_not_depend_on_the_others(operator):
    with fixed_shapes():
        together = operator(None)
        assert all(torch.equal(operator(row)[row], together[row]) for row in KEPT)
    derived = operator(None)
    assert not all(torch.equal(operator(row)[row], derived[row]) for row in KEPT)
    if operator is not _selection:
        assert torch.allclose(derived, together, rtol=1e-4, atol=1e-4)
