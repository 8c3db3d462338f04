"""The multi-token-prediction layer against the loop-written oracle (transformers has none)."""

import pytest
import torch

from glm53.batch import Batch, Selection
from glm53.cache import KVCache
from glm53.model import Transformer
from tests.reference import Reference
from tests.tiny import randomise, tiny_config

LENGTH = 26  # over three times index_topk


def _setup(seed=0, **overrides):
    config = tiny_config(**overrides)
    model = randomise(Transformer(config), seed).eval()
    ids = torch.randint(config.vocab_size, (LENGTH + 1,))
    batch = Batch.uncached(ids[None, :-1], None)
    return config, model, ids, batch


def _close(got, expected):
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error <= 1e-4, error


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True)])
@torch.no_grad()
def test_first_draft_equals_oracle(seed, flags):
    config, model, ids, batch = _setup(
        seed, rope_interleave=flags[0], indexer_rope_interleave=flags[1]
    )
    hidden = model.model(batch)
    drafted, selection = model.draft(ids[1:], hidden, batch)
    oracle = Reference(config, model.state_dict())
    expected = oracle.draft(ids[1:].tolist(), hidden)
    assert min(expected.cut_gaps(config.mtp_layer, config.index_topk)) > 1e-5
    got = [[p for p in row if p >= 0] for row in selection.logical.tolist()]
    assert got == expected.selections[config.mtp_layer]
    _close(drafted, expected.hidden)
    _close(model.lm_head(drafted), expected.logits)


@torch.no_grad()
def test_three_paged_draft_steps_equal_oracle():
    """Later steps feed the post-norm output back: row p + 1 sees rows 0..p of step 0."""
    config, model, ids, _ = _setup(2)
    cache = KVCache(config, 2, mtp=True, dtype=torch.float32)
    for layer in cache.layers:
        for tensor in layer:
            if tensor is not None:
                tensor.fill_(torch.nan)
    pages = [1]
    prompt, next_ids = ids[:-1].tolist(), ids[1:].tolist()
    batch = Batch.paged([(prompt, 0, pages)], 64)
    hidden = model.model(batch, cache)
    drafted, _ = model.draft(ids[1:], hidden, batch, cache)
    oracle = Reference(config, model.state_dict())
    rows = hidden.double()
    for step in range(3):
        expected = oracle.draft(next_ids, rows)
        _close(drafted[-1:], expected.hidden[-1:])
        token = model.lm_head(drafted[-1:]).argmax(-1)
        assert token.item() == expected.logits[-1].argmax().item()
        next_ids.append(token.item())
        rows = torch.cat([rows, expected.hidden[-1:]])
        batch = Batch.paged([(token.tolist(), LENGTH + step, pages)], 64)
        drafted, _ = model.draft(token, drafted[-1:], batch, cache)


@torch.no_grad()
def test_later_steps_may_reuse_the_first_steps_selection():
    """With a given selection the indexer neither chooses nor stores a key."""
    config, model, ids, _ = _setup(3)
    cache = KVCache(config, 1, mtp=True, dtype=torch.float32)
    index_keys = cache.layers[config.mtp_layer].index_keys
    index_keys.fill_(torch.nan)
    batch = Batch.paged([(ids[:-1].tolist(), 0, [0])], 64)
    hidden = model.model(batch, cache)
    drafted, first = model.draft(ids[1:], hidden, batch, cache)
    oracle = Reference(config, model.state_dict())
    step_0 = oracle.draft(ids[1:].tolist(), hidden)
    chosen = step_0.selections[config.mtp_layer]

    token = model.lm_head(drafted[-1:]).argmax(-1)
    given = Selection(first.logical[-1:], first.physical[-1:], first.counts[-1:])
    batch = Batch.paged([(token.tolist(), LENGTH, [0])], 64)
    got, used = model.draft(token, drafted[-1:], batch, cache, given)
    expected = oracle.draft(
        [*ids[1:].tolist(), token.item()],
        torch.cat([hidden.double(), step_0.hidden[-1:]]),
        selection=[*chosen, chosen[-1]],
    )
    _close(got, expected.hidden[-1:])
    assert used is given
    assert index_keys[:LENGTH].isfinite().all() and index_keys[LENGTH].isnan().all()
    fresh, _ = model.draft(token, drafted[-1:], batch, cache)
    assert not torch.allclose(fresh, got, rtol=1e-2)


@torch.no_grad()
def test_selection_rows_of_the_requests_that_stay_are_kept():
    """Request 1 is dropped after the first step: 0 and 2 keep the seed that was theirs."""
    config, model, _, _ = _setup(4)
    lengths, pages = (LENGTH, 15, 40), ([4], [0], [2])
    tokens = [torch.randint(config.vocab_size, (n + 3,)).tolist() for n in lengths]

    def draft(requests, kept):
        """Drafts of steps 0, 1, 2 per request of `kept`, and the selection of step 0."""
        cache = KVCache(config, 5, mtp=True, dtype=torch.float32)
        for layer in cache.layers:
            for tensor in layer:
                if tensor is not None:
                    tensor.fill_(torch.nan)
        batch = Batch.paged([(tokens[r][: lengths[r]], 0, pages[r]) for r in requests], 64)
        next_ids = torch.tensor([i for r in requests for i in tokens[r][1 : lengths[r] + 1]])
        drafted, seed = model.draft(next_ids, model.model(batch, cache), batch, cache)
        last = torch.tensor([lengths[r] for r in requests]).cumsum(0) - 1
        rows = last[[requests.index(r) for r in kept]]
        drafted, batch, steps = drafted[rows], batch.select(rows), []
        seed = Selection(seed.logical[rows], seed.physical[rows], seed.counts[rows])
        for step in (1, 2):
            steps.append(drafted)
            batch = batch.advance(1)
            ids = torch.tensor([tokens[r][lengths[r] + step] for r in kept])
            drafted, used = model.draft(ids, drafted, batch, cache, seed)
            assert used is seed
        return torch.stack([*steps, drafted], 1), seed

    together, seed = draft([0, 1, 2], [0, 2])
    for i, r in enumerate((0, 2)):
        alone, own = draft([r], [r])
        assert torch.equal(seed.logical[i], own.logical[0])
        _close(together[i], alone[0].double())
    assert not torch.equal(seed.logical[0], seed.logical[1])


@torch.no_grad()
def test_a_copy_of_the_hidden_state_drafts_what_the_head_says_of_it():
    """eh_proj takes the hidden half and the block adds nothing: the draft is a known one."""
    config, model, ids, batch = _setup(6)
    layer = model.model.layers[config.mtp_layer]
    layer.eh_proj.weight.zero_()
    layer.eh_proj.weight[:, config.hidden_size :] = torch.eye(config.hidden_size)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.experts.down_proj.zero_()
    layer.mlp.shared_experts.down_proj.weight.zero_()
    hidden = model.model(batch)

    def norm(x, weight):
        return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    head = model.lm_head.weight.double()
    expected = norm(norm(hidden.double(), layer.hnorm.weight), layer.shared_head.norm.weight)
    drafted, _ = model.draft(ids[1:], hidden, batch)
    _close(drafted, expected)
    _close(model.lm_head(drafted), expected @ head.T)
    # With weights of one the norms only scale: the layer repeats the model's own next token.
    layer.hnorm.weight.fill_(1), layer.shared_head.norm.weight.fill_(1)
    repeated = model.lm_head(model.draft(ids[1:], hidden, batch)[0])
    assert torch.equal(repeated.argmax(-1), model.lm_head(hidden).argmax(-1))
    assert repeated.argmax(-1).unique().numel() > 3


@torch.no_grad()
def test_output_is_normed_exactly_once():
    _, model, ids, batch = _setup()
    norm, calls = model.model.layers[-1].shared_head.norm, []
    norm.register_forward_hook(lambda module, args, output: calls.append((args, output)))
    drafted, _ = model.draft(ids[1:], model.model(batch), batch)
    assert len(calls) == 1
    (owed, residual), (normed, _) = calls[0]
    assert torch.equal(drafted, normed)
    block_out = owed + residual
    scale = (block_out.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(drafted, norm.weight * block_out / scale)


@torch.no_grad()
def test_embedding_of_position_zero_is_not_used():
    _, model, ids, batch = _setup()
    hidden = model.model(batch)
    one, _ = model.draft(ids[1:], hidden, batch)
    other_first = ids[1:].clone()
    other_first[0] = (other_first[0] + 1) % 131
    assert torch.equal(model.draft(other_first, hidden, batch)[0], one)
    other_second = ids[1:].clone()
    other_second[1] = (other_second[1] + 1) % 131
    assert not torch.equal(model.draft(other_second, hidden, batch)[0], one)


@torch.no_grad()
def test_embedding_half_comes_first():
    """Zero columns of eh_proj make the draft blind to exactly one of its inputs."""
    config, model, ids, batch = _setup()
    hidden, width = model.model(batch), config.hidden_size
    weight = model.model.layers[-1].eh_proj.weight
    saved = weight.clone()
    weight[:, :width] = 0
    assert torch.equal(
        model.draft(ids[1:], hidden, batch)[0], model.draft(ids[:-1], hidden, batch)[0]
    )
    weight.copy_(saved)
    weight[:, width:] = 0
    noise = torch.randn_like(hidden)
    assert torch.equal(
        model.draft(ids[1:], hidden, batch)[0], model.draft(ids[1:], noise, batch)[0]
    )


@torch.no_grad()
def test_selection_comes_from_the_layers_own_indexer():
    config, model, ids, batch = _setup()
    hidden = model.model(batch)
    before = model.draft(ids[1:], hidden, batch)[1].logical
    model.model.layers[3].self_attn.indexer.wk.weight.neg_()
    assert torch.equal(model.draft(ids[1:], hidden, batch)[1].logical, before)
    model.model.layers[config.mtp_layer].self_attn.indexer.wk.weight.neg_()
    assert not torch.equal(model.draft(ids[1:], hidden, batch)[1].logical, before)


@torch.no_grad()
def test_main_forward_does_not_run_it():
    _, model, _ids, batch = _setup()
    expected = model.model(batch)
    for parameter in model.model.layers[-1].parameters():
        parameter.fill_(torch.nan)
    assert torch.equal(model.model(batch), expected)


def test_shares_embedding_and_head():
    """No copies: the layer adds its own block, three norms and eh_proj, nothing of vocab size."""
    config = tiny_config()
    with_mtp = {n: p.shape for n, p in Transformer(config).named_parameters()}
    without = {n: p.shape for n, p in Transformer(config, mtp=False).named_parameters()}
    added = set(with_mtp) - set(without)
    assert set(without) < set(with_mtp)
    assert all(name.startswith("model.layers.4.") for name in added)
    assert not any(config.vocab_size in with_mtp[name] for name in added)
    own = {n.removeprefix("model.layers.4.") for n in added} - {
        n.removeprefix("model.layers.3.") for n in without
    }
    assert own == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}


def test_without_the_layer_drafting_is_refused():
    config = tiny_config(num_nextn_predict_layers=0)
    model = Transformer(config)
    batch = Batch.uncached(torch.tensor([[1, 2]]), None)
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        model.draft(torch.tensor([2, 3]), torch.zeros(2, config.hidden_size), batch)
