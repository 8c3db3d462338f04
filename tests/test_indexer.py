"""Rotary pairings and the lightning indexer: which keys a row attends to, in which precision."""

import math

import pytest
import torch

import glm53.model
from glm53.batch import Batch, Trace
from glm53.model import Transformer, rope, rope_table
from tests.reference import Reference
from tests.tiny import randomise, tiny_config

FLAGS = [(True, True), (True, False), (False, True), (False, False)]


def _build(seed=0, **overrides):
    config = tiny_config(**overrides)
    return config, randomise(Transformer(config, mtp=False), seed).eval()


def _positions(logical):
    return [[p for p in row if p >= 0] for row in logical.tolist()]


def test_pairs_of_four_dims():
    """Scores over positions: interleaved turns dims (0, 1), half-split turns (0, 2)."""
    config = tiny_config(qk_rope_head_dim=4, rope_theta=100.0)
    cos, sin = rope_table(torch.tensor([1, 0]), config)
    q, k = torch.eye(4)[0], torch.eye(4)
    for interleave, partner in ((True, 1), (False, 2)):
        turned = rope(q, cos[0], sin[0], interleave)
        scores = [
            torch.dot(turned, rope(k[j], cos[1], sin[1], interleave)).item() for j in range(4)
        ]
        expected = [0.0] * 4
        expected[0], expected[partner] = math.cos(1), math.sin(1)
        assert scores == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("interleave", [True, False])
def test_scores_depend_on_distance_only(interleave):
    config = tiny_config(rope_theta=8e6, max_position_embeddings=1 << 20)
    q, k = torch.randn(2, 6)
    scores = []
    for start in (0, 5, 1000):
        cos, sin = rope_table(torch.tensor([start + 3, start]), config)
        turned = rope(q, cos[0], sin[0], interleave), rope(k, cos[1], sin[1], interleave)
        scores.append(torch.dot(*turned).item())
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-3)


def test_angles_near_a_million_positions_are_fp32():
    """bf16 angles would be off by thousands of radians there."""
    config = tiny_config(rope_theta=8e6)
    positions = torch.tensor([2**20 - 1, 2**20 - 2])
    cos, sin = rope_table(positions, config)
    assert cos.dtype == sin.dtype == torch.float32
    for t, position in enumerate(positions.tolist()):
        for j in range(3):
            angle = position * 8e6 ** (-2 * j / 6)
            assert cos[t, j].item() == pytest.approx(math.cos(angle), abs=0.05)
            assert sin[t, j].item() == pytest.approx(math.sin(angle), abs=0.05)
    bf16 = rope(torch.ones(2, 6, dtype=torch.bfloat16), cos, sin, True)
    assert bf16.dtype == torch.bfloat16


@torch.no_grad()
def test_four_flag_combinations_are_four_networks_each_equal_to_the_oracle():
    ids = torch.randint(131, (1, 26))
    outputs, chosen = [], []
    for main, index in FLAGS:
        config, model = _build(rope_interleave=main, indexer_rope_interleave=index)
        trace = Trace()
        logits = model(ids, record=trace)[0]
        outcome = Reference(config, model.state_dict())(ids[0].tolist())
        for layer in config.full_layers:
            assert min(outcome.cut_gaps(layer, config.index_topk)) > 1e-5
            assert _positions(trace.selections[layer]) == outcome.selections[layer]
        for layer, experts in outcome.experts.items():
            assert [sorted(row) for row in trace.experts[layer].tolist()] == experts
        error = (logits.double() - outcome.logits).abs().max()
        assert error <= 1e-4 * outcome.logits.abs().max()
        outputs.append(logits)
        chosen.append(_positions(trace.selections[0]))
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(outputs[i], outputs[j], rtol=1e-2)
    # Layer 0 sees the same input in all four: its choice depends on the indexer's flag alone.
    assert chosen[0] == chosen[2] != chosen[1] == chosen[3]


@pytest.mark.parametrize("length", [6, 7, 8, 24])
@torch.no_grad()
def test_no_cliff_at_index_topk(length):
    """One below, at, one above index_topk = 7, and far above: no forced sinks, no window."""
    config, model = _build(seed=1)
    ids = torch.randint(131, (1, length))
    outcome = Reference(config, model.state_dict())(ids[0].tolist())
    logits = model(ids)[0]
    assert (logits.double() - outcome.logits).abs().max() <= 1e-4 * outcome.logits.abs().max()


@torch.no_grad()
def test_index_topk_from_the_length_on_is_dense():
    ids, length = torch.randint(131, (1, 24)), 24
    _, sparse = _build(seed=2)
    results = {}
    for topk in (24, 25, 2048):
        config, model = _build(seed=2, index_topk=topk)
        results[topk] = model(ids)[0]
    assert torch.equal(results[24], results[25]) and torch.equal(results[24], results[2048])
    everything = {layer: [list(range(t + 1)) for t in range(length)] for layer in (0, 1, 3)}
    dense = Reference(config, model.state_dict())(ids[0].tolist(), selections=everything).logits
    assert (results[24].double() - dense).abs().max() <= 1e-4 * dense.abs().max()
    assert (sparse(ids)[0].double() - dense).abs().max() > 1e-2 * dense.abs().max()


@torch.no_grad()
def test_runs_on_full_layers_only(monkeypatch):
    calls = []
    plain = glm53.model.index_select
    monkeypatch.setattr(
        glm53.model, "index_select", lambda *a, **k: calls.append(a) or plain(*a, **k)
    )
    config, model = _build()
    trace = Trace()
    model(torch.randint(131, (2, 24)), record=trace)
    assert len(calls) == len(config.full_layers) == 3
    assert sorted(trace.selections) == [0, 1, 3]
    assert model.model.layers[2].self_attn.indexer is None
    assert not any("layers.2.self_attn.indexer" in name for name in model.state_dict())


@torch.no_grad()
def test_scores_of_a_bf16_model_stay_fp32(monkeypatch):
    """Head weights leave their projection in fp32, from bf16 inputs and weights."""
    calls = []
    plain = glm53.model.index_select
    monkeypatch.setattr(
        glm53.model, "index_select", lambda *a, **k: calls.append(a) or plain(*a, **k)
    )
    config, model = _build()
    model = model.to(torch.bfloat16)
    inputs = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0])
    )
    model(torch.randint(131, (1, 24)))
    q, weights, keys = calls[0][:3]
    assert (q.dtype, weights.dtype, keys.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    projection = model.model.layers[0].self_attn.indexer.weights_proj.weight
    exact = inputs[0].double() @ projection.double().T
    exact *= config.index_n_heads**-0.5 * config.index_head_dim**-0.5
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_queries_come_from_the_normed_latent():
    """q_a_layernorm's weights change the choice."""
    _, model = _build()
    batch = Batch.uncached(torch.randint(131, (1, 24)), None)
    traces = []
    for scale in (1.0, -1.0):
        weight = model.model.layers[0].self_attn.q_a_layernorm.weight
        weight[::2] *= scale
        traces.append(Trace())
        model.model(batch, record=traces[-1])
    assert not torch.equal(traces[0].selections[0], traces[1].selections[0])


def test_index_key_norm_is_a_layer_norm_with_bias():
    """A constant added to every key dim before the norm is removed by it; an RMS norm keeps it."""
    config, model = _build()
    indexer = model.model.layers[0].self_attn.indexer
    assert isinstance(indexer.k_norm, torch.nn.LayerNorm) and indexer.k_norm.eps == 1e-6
    assert indexer.k_norm.bias is not None and config.rms_norm_eps != 1e-6


def test_selection_runs_under_no_grad(monkeypatch):
    """No graph is kept for what cannot be differentiated."""
    calls = []
    plain = glm53.model.index_select

    def spy(q, weights, keys, *args, **kwargs):
        calls.append((torch.is_grad_enabled(), q.requires_grad, keys.requires_grad))
        return plain(q, weights, keys, *args, **kwargs)

    monkeypatch.setattr(glm53.model, "index_select", spy)
    _, model = _build()
    model(torch.randint(131, (1, 24)))
    assert calls == [(False, False, False)] * 3


def test_indexer_parameters_get_no_gradient():
    _, model = _build()
    model(torch.randint(131, (1, 24))).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (".indexer." in name), name
