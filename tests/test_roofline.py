"""scripts/roofline.py: bytes and FLOPs against sizes of real tensors and numbers worked by hand."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from glm53.cache import KVCache, bytes_per_token
from glm53.model import Transformer
from glm53.ops.index_select import index_select_ref
from glm53.ops.sparse_mla import sparse_mla_ref
from tests.tiny import tiny_config

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import roofline
from make_medium import medium_config

MATRICES = (
    10 * (524_288 + 2_097_152 + 589_824 + 3_670_016 + 4_194_304)  # q_a, q_b, kv_a, kv_b, o
    + 4 * (524_288 + 131_072 + 8_192)  # indexers: wq_b, wk, weights_proj
    + 3 * 6_291_456  # dense layers
    + 7 * (32_768 + 9 * 1_572_864)  # router, 8 routed experts and the shared one
    + 16_777_216  # lm_head
)
# Two norms, q and kv norm in every layer; index key norms; final norm; one embedding.
VECTORS = 10 * (2 * 1024 + 2 * 512) + 4 * 2 * 128 + 1024 + 1024
BIASES = 7 * 32


def test_decoding_on_the_medium_model_by_hand():
    cost = roofline.decode_cost(medium_config(), context=8191, batch=1, experts_read=8)
    assert cost.weight_bytes == 2 * (MATRICES + VECTORS) + 4 * BIASES
    assert cost.latent_bytes == 10 * 512 * 576 * 2
    assert cost.index_key_bytes == 4 * 8192 * 128 * 2
    attention = 10 * 2 * 512 * 16 * (576 + 512)
    index = 4 * 2 * 8192 * 8 * (128 + 1)
    assert cost.flops == 2 * MATRICES + attention + index
    assert cost.bytes == cost.weight_bytes + cost.latent_bytes + cost.index_key_bytes


def test_short_contexts_score_nothing():
    """With index_topk = 512 visible keys all are selected, with 513 all are scored."""
    config = medium_config()
    short = roofline.decode_cost(config, context=511, batch=1)
    assert short.index_key_bytes == 0 and short.latent_bytes == 10 * 512 * 576 * 2
    longer = roofline.decode_cost(config, context=512, batch=1)
    assert longer.index_key_bytes == 4 * 513 * 128 * 2
    assert longer.latent_bytes == short.latent_bytes
    assert longer.flops - short.flops == 4 * 2 * 513 * 8 * 129


def test_weights_are_those_of_a_real_model():
    """Everything but the embedding table and the experts that are not read, in their dtypes."""
    config = tiny_config(num_nextn_predict_layers=0, dtype="bfloat16")
    state = Transformer(config).to(torch.bfloat16).state_dict()
    read = sum(t.nbytes for t in state.values())
    embedding = state["model.embed_tokens.weight"]
    experts = sum(t.nbytes for name, t in state.items() if ".mlp.experts." in name)
    for rows, distinct in ((1, 3), (2, 5), (4, 6)):
        expected = read - embedding.nbytes + rows * embedding[0].nbytes
        expected -= experts * (6 - distinct) // 6
        cost = roofline.decode_cost(config, context=20, batch=rows, experts_read=distinct)
        assert cost.weight_bytes == expected


def test_cache_bytes_are_those_of_a_real_cache():
    """A context that index_topk holds is read whole, but for the index keys."""
    config = tiny_config(num_nextn_predict_layers=0, index_topk=64)
    cache = KVCache(config, 1, mtp=False, dtype=torch.float32)
    latents = sum(layer.latent.nbytes for layer in cache.layers)
    cost = roofline.decode_cost(config, context=63, batch=1, cache_itemsize=4)
    assert (cost.latent_bytes, cost.index_key_bytes) == (latents, 0)
    config = tiny_config(num_nextn_predict_layers=0, index_topk=63)
    cost = roofline.decode_cost(config, context=63, batch=1, cache_itemsize=4)
    whole = 64 * bytes_per_token(config, torch.float32, mtp=False)
    assert cost.latent_bytes + cost.index_key_bytes == whole - latents // 64


def test_flops_of_attention_and_indexer_are_those_of_the_references():
    """Counted while they run, row by row, on a prompt in uneven chunks."""
    config = tiny_config(num_nextn_predict_layers=0)
    length, topk, heads, latent = 23, config.index_topk, 3, 20
    q_THX, rows_MX = torch.randn(length, heads, 26), torch.randn(length, 26)
    q_TJG, keys_MG = torch.randn(length, 18, 14), torch.randn(length, 14)
    lengths_T = torch.arange(1, length + 1, dtype=torch.int32)
    request_T = torch.zeros(length, dtype=torch.int32)
    table_BP = torch.zeros(1, 1, dtype=torch.int32)
    index = (q_TJG, torch.randn(length, 18), keys_MG, table_BP, request_T, lengths_T)
    logical_TL = index_select_ref(*index, topk, length, 1)
    counts_T = lengths_T.clamp(max=topk)
    with FlopCounterMode(display=False) as attention:
        sparse_mla_ref(q_THX, rows_MX, logical_TL, counts_T, latent, 1.0)
    scored = lengths_T > topk
    scored_index = (q_TJG[scored], index[1][scored], keys_MG, table_BP, request_T, lengths_T)
    with FlopCounterMode(display=False) as indexer:
        index_select_ref(*scored_index[:4], request_T[scored], lengths_T[scored], topk, length, 1)
    head_sums = 2 * 18 * int(lengths_T[scored].sum())  # not a matrix product in the reference
    index_flops = indexer.get_total_flops() + head_sums

    whole = roofline.prefill_cost(config, length, 5)
    alone = sum(roofline.layer_parameters(config, i).matrices for i in range(4))
    experts = 3 * roofline.layer_parameters(config, 3).expert * config.num_experts_per_tok
    linear = 2 * length * (alone + experts) + 2 * 131 * 60
    assert whole.flops == linear + 4 * attention.get_total_flops() + 3 * index_flops


def test_a_prompt_costs_the_sum_of_its_chunks():
    config = tiny_config(num_nextn_predict_layers=0)
    chunks = [(0, 5), (5, 5), (10, 3)]
    total = roofline.Cost()
    for past, new in chunks:
        total += roofline.forward_cost(config, [(past, new)], head_rows=int(past == 10))
    assert roofline.prefill_cost(config, 13, 5) == total
    # Requests of one forward share its weights, not its cache.
    both = roofline.forward_cost(config, [(9, 1), (40, 1)], head_rows=2, experts_read=6)
    one, other = (
        roofline.forward_cost(config, [(past, 1)], head_rows=1, experts_read=6) for past in (9, 40)
    )
    assert both.latent_bytes == one.latent_bytes + other.latent_bytes
    assert both.index_key_bytes == one.index_key_bytes + other.index_key_bytes
    assert both.weight_bytes - one.weight_bytes == 60 * 2  # an embedding
    assert both.flops == one.flops + other.flops


def test_expected_experts_are_those_of_random_choices():
    config = medium_config()
    assert roofline.expected_experts(config, 1) == 8
    choices = torch.rand(2000, 5, 32).topk(8).indices.flatten(1)
    drawn = sum(row.unique().numel() for row in choices) / 2000
    assert roofline.expected_experts(config, 5) == pytest.approx(drawn, rel=0.01)


def test_rates_of_the_machine(monkeypatch):
    monkeypatch.setattr(roofline, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "GEMM_DIM", 64)
    ticks = iter(range(1000))
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: 0.5 * next(ticks))
    machine = roofline.Probe(torch.device("cpu"), torch.float32).measure()
    assert machine == roofline.Machine(2 * (1 << 20), 2 * 2 * 64**3)
    bound_by_reading = roofline.Cost(weight_bytes=1 << 22, flops=1)
    assert bound_by_reading.floor_seconds(machine) == 2
    bound_by_computing = roofline.Cost(weight_bytes=1, flops=12 * 64**3)
    assert bound_by_computing.floor_seconds(machine) == 3
