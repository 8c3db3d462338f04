"""routed_experts: grouped experts against one matrix product per token and expert."""

import math

import pytest
import torch

from glm53.ops import routed_experts
from glm53.ops.routed_experts import routed_experts_ref

OP = torch.ops.glm53.routed_experts.default

TOKENS, HIDDEN, INNER, EXPERTS, TOPK = 7, 5, 3, 6, 2
ROUTINGS = {
    "mixed": [[0, 3], [5, 1], [3, 0], [2, 5], [1, 2], [5, 3], [0, 1]],
    "one expert for all": [[4, -1]] * TOKENS,
    "two experts for all": [[0, 1]] * TOKENS,
    "experts without tokens": [[5, 0], [0, 5]] * 3 + [[0, 5]],
    "other ranks' experts": [[-1, 3], [EXPERTS, 1], [-1, -1], [2, 99], [1, -1], [-5, 3], [0, 1]],
    "nothing local": [[-1, -1]] * TOKENS,
    "one token": [[2, 4]],
    "no token": [],
}


def _case(ids, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.tensor(ids, dtype=torch.int64).view(-1, TOPK)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    weights = torch.rand(ids.shape, generator=g, dtype=torch.float64)
    weights = weights.to(torch.float32 if dtype == torch.bfloat16 else dtype)
    return (
        draw(ids.shape[0], HIDDEN),
        draw(EXPERTS, 2 * INNER, HIDDEN),
        draw(EXPERTS, HIDDEN, INNER),
        ids,
        weights,
    )


def loop_experts(x, gate_up, down, ids, weights):
    """One scalar at a time in the inner dimension, fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            if not 0 <= e < EXPERTS:
                continue
            for f in range(INNER):
                gate = torch.dot(gate_up[e, f].double(), x[t].double()).item()
                up = torch.dot(gate_up[e, INNER + f].double(), x[t].double()).item()
                hidden = gate / (1 + math.exp(-gate)) * up
                out[t] += weights[t, k].double() * hidden * down[e, :, f].double()
    return out


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS.keys())
@pytest.mark.parametrize("implementation", [routed_experts, routed_experts_ref])
def test_equals_loops(ids, implementation):
    case = _case(ids, torch.float64)
    out = implementation(*case)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, loop_experts(*case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS.keys())
def test_fp32(ids):
    case = _case(ids)
    torch.testing.assert_close(
        routed_experts(*case).double(), loop_experts(*case), rtol=1e-5, atol=1e-5
    )


def test_bf16_sums_in_fp32():
    case = _case(ROUTINGS["mixed"], torch.bfloat16)
    out = routed_experts(*case)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), loop_experts(*case), rtol=0.03, atol=0.03)


def test_sum_over_experts_is_not_rounded_to_bf16():
    """256 + 8 * 1: a bf16 running sum stays at 256, the fp32 sum reaches 264."""
    gate = 32.0  # silu(32) == 32, so that every expert's output is 32
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    gate_up = torch.tensor([[gate], [1]], dtype=torch.bfloat16).expand(9, 2, 1)
    down = torch.ones(9, 1, 1, dtype=torch.bfloat16)
    weights = torch.tensor([[256 / gate] + [1 / gate] * 8])
    out = routed_experts(x, gate_up, down, torch.arange(9)[None], weights)
    assert out.item() == 264


def test_experts_without_tokens_are_not_read():
    x, gate_up, down, ids, weights = _case(ROUTINGS["experts without tokens"])
    expected = routed_experts(x, gate_up, down, ids, weights)
    gate_up[1:5], down[1:5] = torch.nan, torch.nan
    assert torch.equal(routed_experts(x, gate_up, down, ids, weights), expected)


def test_weights_of_foreign_experts_are_not_read():
    x, gate_up, down, ids, weights = _case(ROUTINGS["other ranks' experts"])
    expected = routed_experts(x, gate_up, down, ids, weights)
    weights[(ids < 0) | (ids >= EXPERTS)] = torch.nan
    assert torch.equal(routed_experts(x, gate_up, down, ids, weights), expected)


def test_one_token_does_not_touch_another():
    x, gate_up, down, ids, weights = _case(ROUTINGS["mixed"])
    expected = routed_experts(x, gate_up, down, ids, weights)
    x[3] = torch.nan
    out = routed_experts(x, gate_up, down, ids, weights)
    others = [0, 1, 2, 4, 5, 6]
    torch.testing.assert_close(out[others], expected[others])
    assert out[3].isnan().all()


def test_shards_of_experts_add_up():
    """Two ranks, each with its half of the experts and the other half's ids mapped out."""
    x, gate_up, down, ids, weights = case = _case(ROUTINGS["mixed"], torch.float64)
    half = EXPERTS // 2
    low = routed_experts(x, gate_up[:half], down[:half], ids, weights)
    high = routed_experts(x, gate_up[half:], down[half:], ids - half, weights)
    torch.testing.assert_close(low + high, routed_experts(*case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mixed", "other ranks' experts", "no token"])
def test_gradients_equal_autograd_of_the_reference(name):
    grads = []
    for function in (routed_experts, routed_experts_ref):
        x, gate_up, down, ids, weights = _case(ROUTINGS[name], torch.float64)
        leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
        (
            function(x, gate_up, down, ids, weights).sin().sum() + 0 * sum(map(torch.sum, leaves))
        ).backward()
        grads.append([t.grad for t in leaves])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-12)


def test_gradients_with_frozen_experts():
    """Only the activations ask: no gradient of the experts, the same gradient of the input."""
    x, gate_up, down, ids, weights = _case(ROUTINGS["mixed"], torch.float64)
    gate_up.requires_grad_(), down.requires_grad_()
    (full,) = torch.autograd.grad(
        routed_experts(x.requires_grad_(), gate_up, down, ids, weights).sum(), x
    )
    frozen = routed_experts(x, gate_up.detach(), down.detach(), ids, weights)
    (got,) = torch.autograd.grad(frozen.sum(), x)
    assert torch.equal(got, full)


def test_backward_under_autocast():
    """Gradients are computed in fp32 from bf16 activations, whatever the region says."""
    x, gate_up, down, ids, weights = _case(ROUTINGS["mixed"])
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    expected = torch.autograd.grad(routed_experts(x, gate_up, down, ids, weights).sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        out = routed_experts(x, gate_up, down, ids, weights)
        got = torch.autograd.grad(out.sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_gradcheck():
    x, gate_up, down, ids, weights = _case([[0, 3], [-1, 3]], torch.float64)
    leaves = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    assert torch.autograd.gradcheck(lambda a, b, c, d: routed_experts(a, b, c, ids, d), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x, gate_up, down, ids, weights = _case(ROUTINGS["other ranks' experts"], dtype)
    leaves = [t.requires_grad_() for t in (x, gate_up, down)]
    torch.library.opcheck(OP, (*leaves, ids, weights.requires_grad_()))


@pytest.mark.parametrize("needs_expert_grads", [False, True])
def test_opcheck_of_the_backward(needs_expert_grads):
    case = _case(ROUTINGS["mixed"])
    args = (torch.randn(TOKENS, HIDDEN), *case, needs_expert_grads)
    torch.library.opcheck(torch.ops.glm53.routed_experts_backward.default, args)
