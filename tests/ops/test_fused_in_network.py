"""The fused operators compute what the network's own modules compute, on the same inputs."""

import pytest
import torch

from glm53 import model as network
from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, LayerCache
from glm53.model import Attention, MTPLayer, ResidualRMSNorm, rope_table
from glm53.ops import all_reduce_add_rms_norm, embed_eh_norm, index_query, norm_rope_cache
from tests.fused_cases import ULPS, error
from tests.tiny import randomise, tiny_config

BF16 = torch.bfloat16
ROWS = [([5, 6, 7, 8, 9], 3, [1]), ([11], 40, [0])]


def empty_caches(config):
    latent = torch.full((2 * PAGE_SIZE, config.kv_lora_rank + config.qk_rope_head_dim), torch.nan)
    keys = torch.full((2 * PAGE_SIZE, config.index_head_dim), torch.nan)
    return LayerCache(latent.to(BF16), keys.to(BF16))


@torch.no_grad()
@pytest.mark.parametrize("full", [True, False], ids=["full", "shared"])
def test_attention(monkeypatch, full):
    """Both caches byte by byte, the queries of attention and indexer, the head weights."""
    config = tiny_config(rope_interleave=True, indexer_rope_interleave=False)
    layer = randomise(Attention(config, 1, full)).to(BF16)
    batch = Batch.paged(ROWS, PAGE_SIZE)
    batch.slots[2] = -1
    x = torch.randn(6, config.hidden_size).to(BF16)
    cos, sin = rope_table(batch.positions, config)
    theirs, ours = empty_caches(config), empty_caches(config)

    seen = {}

    def record(name):
        operator = getattr(network, name)

        def recorded(*args, **kwargs):
            seen[name] = args
            return operator(*args, **kwargs)

        monkeypatch.setattr(network, name, recorded)

    record("index_select")
    record("sparse_mla")
    layer.q_b_proj.register_forward_pre_hook(lambda _, args: seen.update(q_latent=args[0]))
    selection = network.Selection(*torch.zeros(2, 6, 7, dtype=torch.int32), torch.ones(6).int())
    layer((x), (cos, sin), batch, theirs, None if full else selection, None, None)

    indexer = layer.indexer
    index_args = ()
    if indexer is not None:
        index_args = (
            indexer.wk(x),
            indexer.k_norm.weight,
            indexer.k_norm.bias,
            ours.index_keys,
        )
    q_latent = norm_rope_cache(
        layer.q_a_proj(x),
        layer.q_a_layernorm.weight,
        layer.kv_a_proj_with_mqa(x),
        layer.kv_a_layernorm.weight,
        cos,
        sin,
        batch.slots,
        ours.latent,
        *index_args,
        eps=config.latent_norm_eps,
        interleave=config.rope_interleave,
        index_eps=network.INDEX_KEY_NORM_EPS,
        index_interleave=config.indexer_rope_interleave,
    )
    assert error(q_latent, seen["q_latent"], BF16) <= ULPS
    assert error(ours.latent, theirs.latent, BF16) <= ULPS
    assert int((~ours.latent.isnan().any(-1)).sum()) == 5
    if full:
        assert error(ours.index_keys, theirs.index_keys, BF16) <= 1

    # From the network's latent, so that the queries can be compared bit for bit.
    q = layer.q_b_proj(seen["q_latent"]).unflatten(-1, (config.num_attention_heads, -1))
    query = seen["sparse_mla"][0]
    index_args = ()
    if indexer is not None:
        index_args = (
            indexer.wq_b(seen["q_latent"]).unflatten(-1, (config.index_n_heads, -1)),
            torch.nn.functional.linear(x.float(), indexer.weights_proj.weight.float()),
        )
    got = index_query(
        query[..., : config.kv_lora_rank],
        q[..., config.qk_nope_head_dim :],
        cos,
        sin,
        *index_args,
        interleave=config.rope_interleave,
        index_interleave=config.indexer_rope_interleave,
        weight_scale=config.index_n_heads**-0.5 * config.index_head_dim**-0.5,
    )
    assert torch.equal(got[0], query)
    if full:
        assert torch.equal(got[1], seen["index_select"][0])
        assert torch.equal(got[2], seen["index_select"][1])


@torch.no_grad()
def test_mtp_input():
    config = tiny_config()
    layer = randomise(MTPLayer(config, 4)).to(BF16)
    table = torch.randn(config.vocab_size, config.hidden_size).to(BF16)
    batch = Batch.paged([([5, 6, 7], 0, [1])], PAGE_SIZE)
    hidden = torch.randn(3, config.hidden_size).to(BF16)
    seen = []
    layer.eh_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    layer.draft(
        table[batch.input_ids],
        hidden,
        rope_table(batch.positions, config),
        batch,
        empty_caches(config),
    )
    got = embed_eh_norm(
        batch.input_ids,
        batch.positions,
        table,
        hidden,
        layer.enorm.weight,
        layer.hnorm.weight,
        eps=config.rms_norm_eps,
    )
    assert error(got, seen[0], BF16) <= ULPS


@torch.no_grad()
def test_owed_sum():
    norm = randomise(ResidualRMSNorm(60, 1e-5)).to(BF16)
    x, residual = torch.randn(2, 5, 60).to(BF16)
    normed, stream = norm(x, residual)
    got = all_reduce_add_rms_norm(x, residual, norm.weight, eps=1e-5, group_name=None)
    assert error(got[0], normed, BF16) <= ULPS
    assert torch.equal(got[1], stream)
