"""Record and replay of selections and routed experts, and the error of a layer that has neither."""

import pytest
import torch

from glm53.batch import Batch, Trace
from glm53.model import Transformer, rope_table
from tests.reference import Reference
from tests.tiny import randomise, tiny_config


@pytest.fixture
def model():
    return randomise(Transformer(tiny_config(), mtp=False)).eval()


IDS = torch.arange(60).view(2, 30) * 7 % 131


@torch.no_grad()
def test_what_is_recorded(model):
    trace = Trace()
    model(IDS, record=trace)
    assert sorted(trace.selections) == [0, 1, 3]
    assert sorted(trace.experts) == [1, 2, 3]
    for selection in trace.selections.values():
        assert selection.shape == (60, 7) and selection.dtype == torch.int32
        for t, row in enumerate(selection.tolist()):
            valid = min(7, t % 30 + 1)
            assert row[:valid] == sorted(set(row[:valid])) and row[valid:] == [-1] * (7 - valid)
            assert 0 <= row[0] and row[valid - 1] <= t % 30
    for experts in trace.experts.values():
        assert experts.shape == (60, 3) and experts.dtype == torch.int64


@torch.no_grad()
def test_recording_changes_nothing_and_own_replay_is_bit_equal(model):
    plain, trace, again = model(IDS), Trace(), Trace()
    assert torch.equal(model(IDS, record=trace), plain)
    assert torch.equal(model(IDS, replay=trace, record=again), plain)
    for layer, selection in trace.selections.items():
        assert torch.equal(again.selections[layer], selection)
    for layer, experts in trace.experts.items():
        assert torch.equal(again.experts[layer], experts)


@torch.no_grad()
def test_foreign_selections_are_used(model):
    """Replaying "the row itself only" is what the oracle computes with that selection."""
    own_only = torch.full((60, 7), -1, dtype=torch.int32)
    own_only[:, 0] = torch.arange(60) % 30
    logits = model(IDS, replay=Trace(selections=dict.fromkeys((0, 1, 3), own_only)))
    oracle = Reference(model.config, model.state_dict())
    selections = {layer: [[t] for t in range(30)] for layer in (0, 1, 3)}
    expected = oracle(IDS[0].tolist(), selections=selections).logits
    assert (logits[0].double() - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert not torch.allclose(logits, model(IDS), rtol=1e-2)


@torch.no_grad()
def test_a_partial_replay_leaves_the_other_layers_free(model):
    own_only = torch.full((60, 7), -1, dtype=torch.int32)
    own_only[:, 0] = torch.arange(60) % 30
    free, record = Trace(), Trace()
    model(IDS, record=free)
    model(IDS, replay=Trace(selections={1: own_only}), record=record)
    assert torch.equal(record.selections[0], free.selections[0])
    assert torch.equal(record.selections[1], own_only)
    assert not torch.equal(record.selections[3], free.selections[3])


@torch.no_grad()
def test_foreign_experts_are_used(model):
    trace = Trace()
    model(IDS, record=trace)
    foreign = Trace(experts={layer: (ids + 1) % 6 for layer, ids in trace.experts.items()})
    record = Trace()
    changed = model(IDS, replay=foreign, record=record)
    assert not torch.allclose(changed, model(IDS), rtol=1e-2)
    for layer, experts in foreign.experts.items():
        assert torch.equal(record.experts[layer], experts)
    # Experts nobody was sent to may hold anything.
    foreign.experts = {layer: torch.tensor([[0, 2, 5]]).expand(60, 3) for layer in foreign.experts}
    expected = model(IDS, replay=foreign)
    for layer in model.model.layers[1:]:
        layer.mlp.experts.gate_up_proj[[1, 3, 4]] = torch.nan
    assert torch.equal(model(IDS, replay=foreign), expected)


@torch.no_grad()
def test_bf16_decisions_replayed_in_fp32(model):
    """What a trainer does: the rollout's sets, at the trainer's precision."""
    trace, record = Trace(), Trace()
    low = randomise(Transformer(tiny_config(), mtp=False)).to(torch.bfloat16)
    low(IDS, record=trace)
    model(IDS, replay=trace, record=record)
    for layer, selection in trace.selections.items():
        assert torch.equal(record.selections[layer], selection)
    for layer, experts in trace.experts.items():
        assert torch.equal(record.experts[layer], experts)


def _selection(**rows):
    """Every row selects itself; then the given rows."""
    selection = torch.full((60, 7), -1, dtype=torch.int32)
    selection[:, 0] = torch.arange(60) % 30
    for name, row in rows.items():
        selection[int(name[1:])] = torch.tensor(row, dtype=torch.int32)
    return selection


EXPERTS = torch.tensor([[0, 2, 5]]).repeat(60, 1)


def _with_id(expert):
    ids = EXPERTS.clone()
    ids[8, 1] = expert
    return ids


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (Trace({2: _selection()}), r"selections\[2\]: full layers are \[0, 1, 3\]"),
        (Trace({4: _selection()}), r"selections\[4\]: full layers"),
        (Trace({1: _selection()[:59]}), r"selections\[1\]: shape must be \(60, 7\)"),
        (Trace({1: _selection()[:, :6]}), r"selections\[1\]: shape must be \(60, 7\)"),
        (Trace({1: _selection().long()}), r"selections\[1\]: dtype must be torch.int32"),
        (
            Trace({3: _selection(t34=[0, 5, *[-1] * 5])}),
            r"selections\[3\]: row 34 sees 5 positions and selects \[0, 5",
        ),
        (Trace({0: _selection(t7=[0, -2, *[-1] * 5])}), r"selections\[0\]: row 7 sees 8"),
        (Trace({0: _selection(t7=[3, 2, *[-1] * 5])}), r"ascend.*row 7 is \[3, 2"),
        (Trace({0: _selection(t7=[3, 3, *[-1] * 5])}), r"ascend.*row 7 is \[3, 3"),
        (Trace({0: _selection(t7=[-1, 3, *[-1] * 5])}), r"ascend.*row 7 is \[-1, 3"),
        (Trace({}, {0: EXPERTS}), r"experts\[0\]: MoE layers are \[1, 2, 3\]"),
        (Trace({}, {1: EXPERTS[:, :2]}), r"experts\[1\]: shape must be \(60, 3\)"),
        (Trace({}, {1: EXPERTS.int()}), r"experts\[1\]: dtype must be torch.int64"),
        (
            Trace({}, {2: _with_id(6)}),
            r"experts\[2\]: .* in \[0, 6\).* row 8 is \[0, 6, 5\]",
        ),
        (Trace({}, {2: _with_id(5)}), r"experts\[2\]: .* distinct; row 8 is \[0, 5, 5\]"),
        (Trace({}, {2: [[0, 2, 5]]}), r"experts\[2\]: must be a tensor, got list"),
        (Trace({}, {2: _with_id(-1)}), r"experts\[2\]: expert ids .* row 8 is \[0, -1, 5\]"),
    ],
)
@torch.no_grad()
def test_a_replay_that_does_not_fit_is_refused(model, trace, message):
    """Also where a whole batch is replayed into the network without its head."""
    with pytest.raises(ValueError, match=message):
        model(IDS, replay=trace)
    with pytest.raises(ValueError, match=message):
        model.model(Batch.uncached(IDS, None), replay=trace)


def test_replay_is_differentiable(model):
    trace = Trace()
    loss, _ = model(IDS, labels=IDS, record=trace)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(IDS, labels=IDS, replay=trace)[0].backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.equal(parameter.grad, expected[name]), name


@torch.no_grad()
def test_layers_by_hand_equal_the_whole(model):
    """Two pipeline stages, the second starting on a shared layer: the selection travels along."""
    batch = Batch.uncached(IDS, None)
    table = rope_table(batch.positions, model.config)
    x, residual, selection = model.model.embed_tokens(batch.input_ids), None, None
    for layer in model.model.layers[0:2]:
        x, residual, selection = layer(x, residual, table, batch, None, selection)
    for layer in model.model.layers[2:4]:
        x, residual, selection = layer(x, residual, table, batch, None, selection)
    assert torch.equal(model.model.norm(x, residual)[0], model.model(batch))


@torch.no_grad()
def test_a_shared_layer_alone_says_what_it_lacks(model):
    batch = Batch.uncached(IDS, None)
    table = rope_table(batch.positions, model.config)
    x = model.model.embed_tokens(batch.input_ids)
    with pytest.raises(ValueError, match=r"layer 2 shares .* Selection"):
        model.model.layers[2](x, None, table, batch)
