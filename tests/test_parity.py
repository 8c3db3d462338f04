"""The network against transformers' GlmMoeDsaForCausalLM, in fp32 on random odd-sized models.

Two exact implementations still order near-equal index scores differently, because their hidden
states differ in the last bits. So the reference's score gap at the cut is measured, its choice is
replayed for rows whose gap is below 1e-5 of the row's score scale, and those rows are counted.
Every other row must have made the same choice.
"""

import contextlib
from dataclasses import dataclass

import pytest
import torch

from glm53.batch import Trace
from glm53.config import GLM53Config
from glm53.model import Transformer
from tests.reference import Reference
from tests.tiny import randomise, tiny_config

transformers = pytest.importorskip("transformers")

LOGIT_TOLERANCE = 1e-4  # of the largest logit
GRADIENT_TOLERANCE = 1e-4  # of a parameter's largest gradient
NEAR_TIE = 1e-5  # of a row's largest index score


@dataclass
class Theirs:
    """transformers' outputs, and per full layer its index scores and selection [B, S, ...]."""

    logits: torch.Tensor
    loss: torch.Tensor | None
    scores: dict[int, torch.Tensor]
    selections: dict[int, torch.Tensor]


def build(config: GLM53Config, seed: int, attention: str = "eager"):
    """Our model and transformers' with the same weights."""
    ours = randomise(Transformer(config, mtp=False), seed).eval()
    hf_config = transformers.GlmMoeDsaConfig.from_dict(config.to_dict())
    # The grouped GEMM refuses rows that are no multiple of 16 bytes.
    hf_config._experts_implementation = "eager"
    theirs = transformers.GlmMoeDsaForCausalLM._from_config(
        hf_config, attn_implementation=attention
    )
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs.eval()


def run_theirs(model, ids, **kwargs) -> Theirs:
    """Forward with every indexer's scores and choice recorded."""
    scores, selections, inside = {}, {}, []
    plain_topk = torch.Tensor.topk

    def topk(self, *args, **kwargs):
        if inside:
            scores[inside[-1]] = self.detach().clone()
        return plain_topk(self, *args, **kwargs)

    def leave(module, args, kwargs, output):
        selections[inside.pop()] = output.clone()

    with contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.model.layers):
            indexer = block.self_attn.indexer
            if indexer is not None:
                enter = indexer.register_forward_pre_hook(
                    lambda *_, layer=layer: inside.append(layer)
                )
                stack.callback(enter.remove)
                stack.callback(indexer.register_forward_hook(leave, with_kwargs=True).remove)
        torch.Tensor.topk = topk
        try:
            out = model(ids, **kwargs)
        finally:
            torch.Tensor.topk = plain_topk
    return Theirs(out.logits, out.loss, scores, selections)


def agreed_choices(ours: Transformer, ids, theirs: Theirs, mask=None) -> tuple[Trace, float]:
    """Our own choices, with theirs at near-ties, and the fraction of such rows.

    Fails where a row that is no near-tie was decided differently.
    """
    config = ours.config
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    replay, near_rows, rows = Trace(), 0, 0
    for layer in config.full_layers:
        own = Trace()
        ours(ids, mask, record=own, replay=replay)
        chosen = own.selections[layer].clone()
        scores, selected = theirs.scores[layer][keep], theirs.selections[layer][keep]
        request = torch.arange(ids.shape[0])[:, None].expand_as(ids)[keep]
        for t in range(chosen.shape[0]):
            visible = scores[t] > -1e30  # causality and padding, additive
            first = int(keep[request[t]].nonzero()[0])
            expected = sorted(p - first for p in selected[t].tolist() if visible[p])
            ranked = scores[t][visible].sort(descending=True).values
            near = False
            if ranked.numel() > config.index_topk:
                gap = ranked[config.index_topk - 1] - ranked[config.index_topk]
                near = bool(gap < NEAR_TIE * ranked.abs().max())
            rows, near_rows = rows + 1, near_rows + near
            if near:
                chosen[t] = torch.tensor(expected, dtype=torch.int32)
            else:
                got = [p for p in chosen[t].tolist() if p >= 0]
                assert got == expected, f"layer {layer}, row {t}"
        replay.selections[layer] = chosen
    return replay, near_rows / rows


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


VARIANTS = {
    "schedule of 4/3": dict(
        num_hidden_layers=8,
        indexer_types=("full", "full", "full", *["shared"] * 3, "full", "shared"),
        mlp_layer_types=("dense", "dense", "dense", *["sparse"] * 5),
    ),
    "two expert groups": dict(
        n_group=2, topk_group=1, n_routed_experts=10, num_experts_per_tok=3, index_topk=5
    ),
    "three groups, two kept": dict(
        n_group=3, topk_group=2, n_routed_experts=9, num_experts_per_tok=5, norm_topk_prob=False
    ),
    "every layer full, two shared experts": dict(
        indexer_types=("full",) * 4, n_shared_experts=2, index_n_heads=33, index_topk=11
    ),
    "one full layer": dict(
        indexer_types=("full", *["shared"] * 3), num_experts_per_tok=1, rope_theta=8e6
    ),
    "all dense, tied, wide heads": dict(
        mlp_layer_types=("dense",) * 4,
        tie_word_embeddings=True,
        v_head_dim=9,
        qk_nope_head_dim=21,
        qk_rope_head_dim=10,
        index_head_dim=10,
        num_attention_heads=5,
    ),
    "all sparse, hidden not even": dict(
        mlp_layer_types=("sparse",) * 4,
        hidden_size=51,
        q_lora_rank=35,
        kv_lora_rank=27,
        rms_norm_eps=1e-3,
        index_topk=1,
    ),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_logits(overrides, seed):
    config = tiny_config(**overrides)
    assert config.index_n_heads >= 16  # else whole groups of keys tie at exactly 0
    ours, theirs = build(config, seed, attention="sdpa" if seed else "eager")
    ids = torch.randint(config.vocab_size, (2, 47))
    assert ids.shape[1] > 3 * config.index_topk
    expected = run_theirs(theirs, ids)
    replay, near_ties = agreed_choices(ours, ids, expected)
    assert near_ties < 0.01
    assert relative_error(ours(ids, replay=replay), expected.logits) <= LOGIT_TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 14))
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_logits_of_more_seeds(overrides, seed):
    """Other weights and lengths, and either attention implementation of transformers."""
    config = tiny_config(**overrides)
    ours, theirs = build(config, seed, attention="sdpa" if seed % 2 else "eager")
    ids = torch.randint(config.vocab_size, (1 + seed % 3, 37 + 5 * seed))
    expected = run_theirs(theirs, ids)
    replay, near_ties = agreed_choices(ours, ids, expected)
    assert near_ties < 0.02
    assert relative_error(ours(ids, replay=replay), expected.logits) <= LOGIT_TOLERANCE


@torch.no_grad()
def test_the_router_bias_decides():
    """The offset of 7 is in both models: without it other experts are chosen."""
    ours, _ = build(tiny_config(), 0)
    ids, with_bias, without = torch.randint(131, (1, 30)), Trace(), Trace()
    ours(ids, record=with_bias)
    for layer in ours.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        assert bias.mean() > 6.5 and bias.dtype == torch.float32
        bias.zero_()
    ours(ids, record=without)
    assert any(not torch.equal(with_bias.experts[i], without.experts[i]) for i in (1, 2, 3))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_padded_batches(side, attention):
    config = tiny_config()
    ours, theirs = build(config, 3, attention)
    ids = torch.randint(config.vocab_size, (3, 31))
    mask = torch.ones_like(ids)
    for row, length in enumerate((12, 31, 24)):
        if side == "left":
            mask[row, : 31 - length] = 0
        else:
            mask[row, length:] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = run_theirs(theirs, ids, attention_mask=mask, position_ids=positions)
    replay, near_ties = agreed_choices(ours, ids, expected, mask)
    assert near_ties < 0.01
    logits, keep = ours(ids, mask, replay=replay), mask.bool()
    assert relative_error(logits[keep], expected.logits[keep]) <= LOGIT_TOLERANCE


def test_loss_and_gradients():
    config = tiny_config(n_group=2, topk_group=1, num_experts_per_tok=2)
    ours, theirs = build(config, 1)
    # Without the padding token: transformers' embedding has no gradient in that row.
    ids = torch.randint(config.pad_token_id + 1, config.vocab_size, (2, 33))
    labels = ids.clone()
    labels[0, :5], labels[1, 20:25] = -100, -100
    expected = run_theirs(theirs, ids, labels=labels)
    with torch.no_grad():
        _, near_ties = agreed_choices(ours, ids, expected)
    assert near_ties == 0  # so that both differentiate the same function
    loss, logits = ours(ids, labels=labels)
    assert relative_error(logits, expected.logits) <= LOGIT_TOLERANCE
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)

    loss.backward(), expected.loss.backward()
    wanted = dict(theirs.named_parameters())
    compared = 0
    for name, parameter in ours.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None and wanted[name].grad is None
        else:
            assert parameter.grad is not None, name
            assert relative_error(parameter.grad, wanted[name].grad) <= GRADIENT_TOLERANCE, name
            compared += 1
    assert compared == sum(".indexer." not in name for name in wanted)


@torch.no_grad()
def test_logits_to_keep():
    config = tiny_config()
    ours, theirs = build(config, 2)
    ids = torch.randint(config.vocab_size, (2, 25))
    for keep in (1, 4, 25):
        got, expected = ours(ids, logits_to_keep=keep), theirs(ids, logits_to_keep=keep).logits
        assert got.shape == expected.shape == (2, keep, config.vocab_size)
        assert relative_error(got, expected) <= LOGIT_TOLERANCE


@torch.no_grad()
def test_the_loop_written_oracle_agrees_too():
    """Two references, so that one of them being wrong does not pass unnoticed."""
    config = tiny_config(n_group=3, topk_group=2, num_experts_per_tok=3)
    ours, theirs = build(config, 5)
    ids = torch.randint(config.vocab_size, (1, 29))
    expected = run_theirs(theirs, ids)
    outcome = Reference(config, ours.state_dict())(ids[0].tolist())
    for layer in config.full_layers:
        assert min(outcome.cut_gaps(layer, config.index_topk)) > NEAR_TIE
        for t, chosen in enumerate(outcome.selections[layer]):
            theirs_t = expected.selections[layer][0, t].tolist()
            assert chosen == sorted(p for p in theirs_t if p <= t)
    assert relative_error(expected.logits[0].double(), outcome.logits) <= LOGIT_TOLERANCE
