"""The dense call: masks, labels, logits_to_keep, input errors, dtypes and devices, gradients."""

import pytest
import torch
import torch.nn.functional as F

import glm53.model as model_module
from glm53.batch import Batch, Trace
from glm53.model import Transformer, rope_table
from tests.reference import Reference
from tests.tiny import randomise, tiny_config

TOLERANCE = 1e-5  # of the largest logit


@pytest.fixture(scope="module")
def model():
    return randomise(Transformer(tiny_config(), mtp=False)).eval()


def _ids(*shape):
    return torch.randint(131, shape)


def _close(got, expected):
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()


def _mask(side, width, lengths):
    mask = torch.zeros(len(lengths), width)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1 if side == "left" else 0
        mask[row, :length] = 1 if side == "right" else mask[row, :length]
    return mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_rows_equal_runs_of_one(model, side, dtype):
    lengths, width = (12, 24, 1), 24
    ids, mask = _ids(3, width), _mask(side, width, lengths)
    logits = model(ids, mask.to(dtype))
    for row, length in enumerate(lengths):
        keep = mask[row].bool()
        assert keep.sum() == length
        _close(logits[row, keep], model(ids[row : row + 1, keep])[0])
        assert not logits[row, ~keep].any()


@torch.no_grad()
def test_holes_and_padding_values_do_not_matter(model):
    """Masked positions may be anywhere and hold any id."""
    ids = _ids(1, 30)
    mask = torch.ones_like(ids)
    mask[0, [0, 4, 5, 19, 29]] = 0
    other = torch.where(mask.bool(), ids, 7)
    assert torch.equal(model(ids, mask), model(other, mask))
    _close(model(ids, mask)[0, mask[0].bool()], model(ids[mask.bool()][None])[0])


@torch.no_grad()
def test_a_fully_masked_request(model):
    ids, mask = _ids(3, 20), torch.ones(3, 20)
    mask[1] = 0
    logits = model(ids, mask)
    assert not logits[1].any()
    _close(logits[[0, 2]], model(ids[[0, 2]]))


@torch.no_grad()
def test_only_masked_rows(model):
    assert not model(_ids(2, 5), torch.zeros(2, 5)).any()


@torch.no_grad()
def test_requests_of_a_batch_do_not_meet(model):
    ids = _ids(3, 26)
    batch = model(ids)
    for row in range(3):
        _close(batch[row], model(ids[row : row + 1])[0])


@torch.no_grad()
def test_no_token_sees_the_future(model):
    ids = _ids(1, 30)
    changed = ids.clone()
    changed[0, 17:] = (changed[0, 17:] + 1) % 131
    before, after = model(ids), model(changed)
    _close(after[:, :17], before[:, :17])
    assert not torch.allclose(after[:, 17], before[:, 17], rtol=1e-2)


@torch.no_grad()
def test_logits_to_keep(model):
    ids = _ids(2, 20)
    everything = model(ids)
    for keep in (1, 3, 20):
        _close(model(ids, logits_to_keep=keep), everything[:, -keep:])
    mask = _mask("left", 20, (9, 20))
    _close(model(ids, mask, logits_to_keep=2), model(ids, mask)[:, -2:])


@torch.no_grad()
def test_loss_is_shifted_cross_entropy(model):
    ids = _ids(2, 20)
    labels = ids.clone()
    labels[0, :7] = -100
    loss, logits = model(ids, labels=labels)
    log_probs = logits.double().log_softmax(-1)
    terms = [
        -log_probs[b, t, labels[b, t + 1]]
        for b in range(2)
        for t in range(19)
        if labels[b, t + 1] != -100
    ]
    assert len(terms) == 32
    assert loss.item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-6)
    again, kept = model(ids, labels=labels, logits_to_keep=1)
    assert again == loss and kept.shape == (2, 1, 131)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_loss_of_padded_rows_is_that_of_runs_of_one(model, side):
    """No token is scored against the zero logits of padding; labels on padding say nothing."""
    lengths, width = (12, 24, 2), 24
    ids, mask = _ids(3, width), _mask(side, width, lengths)
    loss, _ = model(ids, mask, labels=ids)
    total = 0.0
    for row, length in enumerate(lengths):
        alone = ids[row, mask[row].bool()][None]
        total += (length - 1) * model(alone, labels=alone)[0].item()
    assert loss.item() == pytest.approx(total / (sum(lengths) - 3), rel=1e-5)


@torch.no_grad()
def test_a_label_behind_a_hole_is_ignored(model):
    """It is not predicted by the position before it, and no other position has its logits."""
    ids, mask = _ids(1, 20), torch.ones(1, 20)
    mask[0, 9] = 0
    ignored = ids.clone()
    ignored[0, 9:11] = -100
    assert model(ids, mask, labels=ids)[0] == model(ids, mask, labels=ignored)[0]
    assert model(ids, mask, labels=ids)[0] != model(ids, labels=ids)[0]


@torch.no_grad()
def test_labels_may_be_int32(model):
    ids = _ids(2, 12)
    assert model(ids, labels=ids.int())[0] == model(ids, labels=ids)[0]


@torch.no_grad()
def test_loss_of_a_bf16_model_is_fp32(model):
    low = randomise(Transformer(tiny_config(), mtp=False)).to(torch.bfloat16)
    ids = _ids(1, 20)
    loss, logits = low(ids, labels=ids)
    assert loss.dtype == torch.float32 and logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


@torch.no_grad()
def test_bf16_is_near_the_oracle_of_its_own_weights():
    """Within bf16's rounding of the oracle in fp64 that holds the same rounded weights."""
    config = tiny_config(index_topk=64)  # every key: rounding must not choose other ones
    low = randomise(Transformer(config, mtp=False)).to(torch.bfloat16)
    ids = _ids(1, 30)
    expected = Reference(config, low.state_dict())(ids[0].tolist()).logits
    error = (low(ids)[0].double() - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(input_ids=torch.zeros(5, dtype=torch.int64)), "input_ids"),
        (dict(input_ids=torch.zeros(0, 5, dtype=torch.int64)), "input_ids"),
        (dict(input_ids=torch.zeros(1, 0, dtype=torch.int64)), "input_ids"),
        (dict(input_ids=torch.zeros(1, 4100, dtype=torch.int64)), "max_position_embeddings"),
        (dict(input_ids=_ids(2, 5), attention_mask=torch.ones(2, 6)), "attention_mask"),
        (dict(input_ids=_ids(2, 5), attention_mask=torch.ones(5)), "attention_mask"),
        (dict(input_ids=_ids(2, 5), labels=_ids(2, 4)), "labels"),
        (dict(input_ids=_ids(2, 5), labels=_ids(2, 5).float()), "labels"),
        (dict(input_ids=_ids(2, 5), logits_to_keep=-1), "logits_to_keep"),
        (dict(input_ids=_ids(1, 2), attention_mask=torch.tensor([[-torch.inf, 0.0]])), "1 for"),
        (dict(input_ids=_ids(1, 2), attention_mask=torch.tensor([[-1e9, 0.0]])), "1 for"),
        (dict(input_ids=_ids(1, 2), attention_mask=torch.tensor([[0.5, 1.0]])), "1 for"),
        (dict(input_ids=_ids(1, 2), attention_mask=torch.tensor([[2, 1]])), "1 for"),
        (dict(input_ids=_ids(1, 2), attention_mask=torch.tensor([[torch.nan, 1]])), "1 for"),
    ],
)
def test_wrong_arguments_are_named(model, arguments, named):
    with pytest.raises(ValueError, match=named):
        model(**arguments)


def test_id_out_of_vocabulary_raises(model):
    for bad in (131, -1):
        with pytest.raises((IndexError, ValueError)):
            model(torch.tensor([[1, bad]]))


def test_tied_embeddings_are_one_parameter():
    model = Transformer(tiny_config(tie_word_embeddings=True), mtp=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_no_parameter_is_dead():
    """Every parameter but the indexers' gets a gradient; an indexer's only output is a choice."""
    model = randomise(Transformer(tiny_config(), mtp=False))
    model(_ids(4, 30)).sin().sum().backward()
    for name, parameter in model.named_parameters():
        if ".indexer." not in name:
            assert parameter.grad is not None and parameter.grad.any(), name


def test_trains_a_step_down():
    """Backward through the sparse path lowers the loss: gradients point the right way."""
    model = randomise(Transformer(tiny_config(), mtp=False), seed=4)
    ids = _ids(2, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(4):
        loss, _ = model(ids, labels=ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[1] < losses[0]


def test_trains_under_autocast():
    """bf16 products in the dense layers; choices, attention and expert gradients keep fp32."""
    model = randomise(Transformer(tiny_config(index_topk=64), mtp=False))
    ids = _ids(2, 30)
    trace = Trace()
    expected, _ = model(ids, labels=ids, record=trace)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss, logits = model(ids, labels=ids, replay=trace)
        loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected.item(), rel=0.05)
    for name, parameter in model.named_parameters():
        if name in gradients:
            error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
            assert error < 0.2, (name, error)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 11, 30])
def test_autocast_at_any_length(length):
    """Few rows have keys of their own in attention, many share them."""
    model = randomise(Transformer(tiny_config(index_topk=64), mtp=False))
    ids = _ids(1, length)
    expected = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).norm() / expected.norm() < 0.1


@torch.no_grad()
def test_autocast_does_not_reach_router_and_head_weights():
    """Both are fp32 on purpose: in bf16 near ties are decided by rounding."""
    model = randomise(Transformer(tiny_config(), mtp=False))
    layer, x = model.model.layers[1], torch.randn(40, 60)
    heads = []
    plain = model_module.index_select

    def spy(q, weights, *args, **kwargs):
        heads.append(weights)
        return plain(q, weights, *args, **kwargs)

    batch = Batch.uncached(_ids(1, 40), None)
    arguments = (torch.randn(40, 36), rope_table(batch.positions, model.config), batch, None)
    expected = layer.mlp.gate(x)
    model_module.index_select = spy
    try:
        layer.self_attn.indexer(x, *arguments)
        with torch.autocast("cpu", torch.bfloat16):
            got = layer.mlp.gate(x)
            layer.self_attn.indexer(x, *arguments)
    finally:
        model_module.index_select = plain
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert torch.equal(heads[0], heads[1])


def test_gradients_with_frozen_experts_are_the_same(model):
    ids = _ids(1, 25)
    whole = randomise(Transformer(tiny_config(), mtp=False))
    frozen = randomise(Transformer(tiny_config(), mtp=False))
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    for candidate in (whole, frozen):
        candidate(ids, labels=ids)[0].backward()
    expected = dict(whole.named_parameters())
    for name, parameter in frozen.named_parameters():
        if ".mlp.experts." in name:
            assert parameter.grad is None
        elif parameter.grad is not None:
            assert torch.equal(parameter.grad, expected[name].grad), name


def test_built_on_meta_costs_nothing_and_is_filled_by_a_state_dict():
    with torch.device("meta"):
        empty = Transformer(tiny_config(), mtp=False)
    assert all(t.is_meta for t in empty.state_dict().values())
    source = randomise(Transformer(tiny_config(), mtp=False))
    empty.load_state_dict(source.state_dict(), assign=True)
    ids = _ids(1, 20)
    with torch.no_grad():
        assert torch.equal(empty(ids), source(ids))
