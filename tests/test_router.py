"""The router: biased choice, unbiased weights, groups, ties, fp32 whatever the model's dtype."""

import copy

import pytest
import torch

from glm53.model import Router, Transformer
from tests.tiny import randomise, tiny_config

BIAS = 7 + 0.001 * torch.arange(8, dtype=torch.float32)


def _router(**overrides):
    fields = dict(n_routed_experts=8, num_experts_per_tok=2) | overrides
    router = Router(tiny_config(**fields))
    with torch.no_grad():
        router.weight.normal_()
    return router


def _casts():
    return {
        "to": lambda m: m.to(torch.bfloat16),
        "half": lambda m: m.half(),
        "bfloat16": lambda m: m.bfloat16(),
        "double": lambda m: m.double(),
        "type": lambda m: m.type(torch.bfloat16),
        "deepcopy": lambda m: copy.deepcopy(m).half(),
        "twice": lambda m: m.half().bfloat16(),
    }


@pytest.mark.parametrize("cast", _casts().values(), ids=_casts().keys())
def test_no_cast_touches_the_bias(cast):
    """bf16 has two values in the bias's range: the choice would be another one."""
    router = _router()
    router.e_score_correction_bias.copy_(BIAS)
    with torch.no_grad():
        router.weight.zero_()
    router = cast(router)
    assert router.weight.dtype != torch.float32
    assert router.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(router.e_score_correction_bias, BIAS)
    ids, _ = router(torch.randn(3, 60, dtype=router.weight.dtype))
    assert sorted(ids[0].tolist()) == [6, 7]
    assert "e_score_correction_bias" in router.state_dict()


@pytest.mark.parametrize("order", ["cast first", "materialise first"])
def test_bias_from_meta(order):
    with torch.device("meta"):
        model = Transformer(tiny_config(), mtp=True)
    if order == "cast first":
        model = model.to(torch.bfloat16).to_empty(device="cpu")
    else:
        model = model.to_empty(device="cpu").to(torch.bfloat16)
    source = randomise(Transformer(tiny_config(), mtp=True))
    model.load_state_dict(source.state_dict())
    for layer, expected in zip(model.model.layers[1:], source.model.layers[1:], strict=True):
        bias = layer.mlp.gate.e_score_correction_bias
        assert bias.device.type == "cpu" and bias.dtype == torch.float32
        assert torch.equal(bias, expected.mlp.gate.e_score_correction_bias)
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_weights_are_scores_without_the_bias():
    router, x = _router(), torch.randn(5, 60)
    router.e_score_correction_bias.copy_(BIAS)
    ids, weights = router(x)
    scores = (x.double() @ router.weight.double().T).sigmoid()
    for t in range(5):
        ranked = sorted(range(8), key=lambda e: -(scores[t, e] + BIAS[e].double()).item())[:2]
        assert sorted(ids[t].tolist()) == sorted(ranked)
        chosen = scores[t, ids[t]]
        expected = chosen / chosen.sum() * 2.5
        torch.testing.assert_close(weights[t].double(), expected, rtol=1e-5, atol=1e-6)


def test_unnormalised_weights():
    router, x = _router(norm_topk_prob=False), torch.randn(5, 60)
    ids, weights = router(x)
    scores = (x @ router.weight.T).sigmoid().gather(1, ids)
    torch.testing.assert_close(weights, 2.5 * scores)


def test_bf16_model_routes_in_fp32():
    router = _router().bfloat16()
    x = torch.randn(64, 60, dtype=torch.bfloat16)
    ids, weights = router(x)
    assert weights.dtype == torch.float32
    scores = (x.float() @ router.weight.float().T).sigmoid()
    expected = scores.gather(1, ids)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) * 2.5)
    rounded = torch.nn.functional.linear(x, router.weight).sigmoid()
    assert not torch.equal(rounded.float(), scores)  # there was something to lose


def test_equal_scores_go_to_the_lowest_ids():
    router = _router(num_experts_per_tok=3)
    with torch.no_grad():
        router.weight.zero_()
    ids, weights = router(torch.randn(2, 60))
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 2.5 / 3))


def test_groups_are_ranked_by_their_best_two():
    """Group 0 has the single best expert, group 1 the best pair."""
    router = _router(n_group=2, topk_group=1)
    choice = [0.9, 0.0, 0.0, 0.0, 0.6, 0.1, 0.7, 0.2]
    router.e_score_correction_bias.zero_()
    assert sorted(router.choose(torch.tensor([choice]))[0].tolist()) == [4, 6]
    wide = _router(n_group=2, topk_group=2)
    assert sorted(wide.choose(torch.tensor([choice]))[0].tolist()) == [0, 6]


def test_dropped_groups_lose_even_against_negative_scores():
    """A dropped expert is at -inf, not at 0: a bias may make kept scores negative."""
    router = _router(n_group=2, topk_group=1, num_experts_per_tok=4)
    router.e_score_correction_bias.fill_(-3.0)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.2, 0.3, 0.3, 0.3, 0.3]])
    assert sorted(router.choose(scores)[0].tolist()) == [0, 1, 2, 3]


def test_given_experts_are_used_with_their_own_scores():
    router, x = _router(), torch.randn(3, 60)
    given = torch.tensor([[0, 5], [7, 2], [4, 4]])
    ids, weights = router(x, given)
    assert torch.equal(ids, given)
    scores = (x @ router.weight.T).sigmoid().gather(1, given)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True) * 2.5)


def test_routed_scale_leaves_the_shared_expert_alone():
    """Doubling routed_scaling_factor doubles the routed part of the sum only."""
    outputs = []
    x = torch.randn(4, 60)
    for scale in (2.5, 5.0):
        model = randomise(Transformer(tiny_config(routed_scaling_factor=scale), mtp=False))
        moe = model.model.layers[1].mlp
        outputs.append((moe(x, None, None), moe.shared_experts(x)))
    (one, shared), (two, _) = outputs
    torch.testing.assert_close(two - shared, 2 * (one - shared), rtol=1e-4, atol=1e-5)
    assert shared.abs().max() > 1e-3


@torch.no_grad()
def test_all_tokens_to_two_experts():
    """Experts without a token: finite, and unread."""
    model = randomise(Transformer(tiny_config(num_experts_per_tok=2), mtp=False))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:2] += 100
        layer.mlp.experts.gate_up_proj[2:] = torch.nan
        layer.mlp.experts.down_proj[2:] = torch.nan
    for length in (1, 20):
        assert model(torch.randint(131, (1, length))).isfinite().all()
