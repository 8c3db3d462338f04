"""scripts/make_medium.py: the size it promises, the same bytes again, and sane activations."""

import sys
from pathlib import Path

import pytest
import torch

from glm53 import GLM53, Trace
from glm53.ops import sparse_mla
from tests.tiny import load_reference

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import make_medium
from roofline import decode_cost

TINY = dict(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=5,
    first_k_dense_replace=1,
    num_attention_heads=3,
    q_lora_rank=36,
    kv_lora_rank=20,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    n_routed_experts=6,
    num_experts_per_tok=3,
    index_topk=7,
    index_n_heads=18,
    index_head_dim=14,
    max_position_embeddings=512,
    dtype="float32",
)


def test_the_medium_model_has_the_size_that_the_documents_name():
    config = make_medium.medium_config()
    assert round(make_medium.num_parameters(config) / 1e6) == 529
    read = decode_cost(config, context=0, batch=1).weight_bytes
    assert round(read / 2 / 1e6) == 248 and round(read / 1e6) == 497
    assert config.full_layers == (0, 1, 2, 6)
    assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 7
    assert config.max_position_embeddings == 65536 and config.mtp_layer is None


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    config = make_medium.medium_config(**TINY | {"dtype": "bfloat16"})
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_medium.write(tmp_path / name, config, seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b and a != c
    texts = [(tmp_path / n / "config.json").read_text() for n in "ab"]
    assert texts[0] == texts[1]


@torch.no_grad()
def test_this_library_and_transformers_load_the_same(tmp_path):
    make_medium.write(tmp_path, make_medium.medium_config(**TINY), 0)
    ids = torch.randint(131, (2, 40))
    ours = GLM53.from_pretrained(tmp_path, progress=False)(ids)
    theirs = load_reference(tmp_path)(ids).logits
    # More than index_topk positions: a different selection anywhere would show.
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_activations_keep_their_scale(monkeypatch):
    """With the medium model's depth at a fourth of its width: logits near 1, attention that is
    neither uniform nor one-hot, all experts used."""
    sizes = dict(hidden_size=256, q_lora_rank=128, kv_lora_rank=128, intermediate_size=512)
    sizes |= dict(num_attention_heads=4, moe_intermediate_size=64, vocab_size=1024, index_topk=64)
    config = make_medium.medium_config(**sizes, dtype="float32")
    model = make_medium.random_transformer(config, 0)
    effective = []

    def watched(q_THX, rows_MX, indices_TL, counts_T, **options):
        last = indices_TL[-1].long()  # the last row sees more than index_topk positions
        probs_HL = (options["scale"] * q_THX[-1] @ rows_MX[last].T).softmax(-1)
        effective.append(torch.special.entr(probs_HL).sum(-1).exp())
        return sparse_mla(q_THX, rows_MX, indices_TL, counts_T, **options)

    monkeypatch.setattr("glm53.model.sparse_mla", watched)
    trace = Trace()
    logits_BSW = model(torch.randint(1024, (1, 200)), record=trace)
    assert isinstance(logits_BSW, torch.Tensor)
    assert 0.5 < logits_BSW.std() < 2
    keys_of_a_head = torch.stack(effective).mean(-1)  # of 64
    assert len(effective) == 10 and keys_of_a_head.min() > 10 and keys_of_a_head.max() < 60
    assert len(trace.experts) == 7
    for chosen_TK in trace.experts.values():
        share_E = torch.bincount(chosen_TK.flatten(), minlength=32) / chosen_TK.shape[0]
        assert share_E.min() > 0.02 and share_E.max() < 0.9


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["a", "--seed", "x"]])
def test_wrong_arguments(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_medium.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        make_medium.main()
    assert stop.value.code == 2


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    config = make_medium.medium_config(**TINY)
    monkeypatch.setattr(make_medium, "medium_config", lambda: config)
    monkeypatch.setattr(sys, "argv", ["make_medium.py", str(tmp_path / "file")])
    assert make_medium.main() == 1
    assert capsys.readouterr().err.startswith("error: ")
