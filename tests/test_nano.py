"""The embedded model: its files, its figures, and the training code that made them."""

import importlib
import json
import lzma
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from glm53.batch import Batch
from glm53.checkpoint import load_transformer
from glm53.config import GLM53Config

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
net = importlib.import_module("nano_model")
files = importlib.import_module("nano_files")
trainer = importlib.import_module("train_nano")
measure = importlib.import_module("nano_evaluate")

FOLDER = files.FOLDER
CONFIG = json.loads((FOLDER / "config.json").read_text())
# Which tensors of the official checkpoint are not E4M3.
BF16 = r"norm|embed_tokens|lm_head|weights_proj|eh_proj|mlp\.gate\.weight"


@pytest.fixture(scope="module")
def trained():
    model = net.NanoModel()
    model.load_state_dict(files.load_exported(FOLDER))
    return model


@pytest.fixture(scope="module")
def library():
    return load_transformer(
        FOLDER, GLM53Config.from_pretrained(FOLDER), dtype=torch.float32, progress=False
    )


@pytest.fixture(scope="module")
def held_out():
    """The held-out files; only the sources that were held out prove anything."""
    listed = json.loads(files.MANIFEST.read_text())["held_out"]
    texts = {n: t for n, t in files.standard_library().items() if n in listed}
    if any(files.digest(text) != listed[name] for name, text in texts.items()):
        pytest.skip("the standard library here is not the one of the manifest")
    return texts


def test_folder_fits_16_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16_000_000


def test_shape_is_that_of_glm_5_3():
    layers = CONFIG["num_hidden_layers"]
    assert layers >= 8 and CONFIG["num_nextn_predict_layers"] == 1
    assert CONFIG["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * (layers - 3)
    expected = ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(layers)]
    assert CONFIG["indexer_types"] == expected
    assert CONFIG["index_n_heads"] >= 16 and CONFIG["n_shared_experts"] == 1
    fields = ("index_topk", "max_position_embeddings", "kv_lora_rank", "index_head_dim")
    assert [CONFIG[f] for f in fields] == [64, 2048, 128, 128]


def test_tensors_are_stored_as_the_official_checkpoint_stores_them():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        names = set(file.keys())
        for name in names:
            tensor = file.get_slice(name)
            if name.endswith("_scale_inv"):
                rows, columns = file.get_slice(name.removesuffix("_scale_inv")).get_shape()
                assert tensor.get_shape() == [-(-rows // 128), -(-columns // 128)], name
                expected = "F32"
            elif name.endswith("e_score_correction_bias"):
                expected = "F32"
            else:
                expected = "BF16" if re.search(BF16, name) else "F8_E4M3"
                assert (expected == "F8_E4M3") == (f"{name}_scale_inv" in names), name
            assert tensor.get_dtype() == expected, name
    owners = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert owners == {0, 1, 2, 6, CONFIG["num_hidden_layers"]}
    assert not any("layers.8.embed_tokens" in n or "shared_head.head" in n for n in names)


def test_library_agrees_with_the_training_forward(trained, library):
    ids = torch.randint(0, net.VOCAB, (1, 211), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        hidden = trained.hidden(ids, net.IndexState(None, sparse=True), torch.float32)
        ours = library(ids)
    expected = trained.lm_head(hidden)
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_library_drafts_agree_with_the_training_forward(trained, library):
    ids = torch.randint(0, net.VOCAB, (1, 140), generator=torch.Generator().manual_seed(4))
    batch, following = Batch.uncached(ids[:, :-1], None), ids[:, 1:]
    with torch.no_grad():
        hidden = library.model(batch)
        ours, _ = library.draft(following[0], hidden, batch)
        index = net.IndexState(None, sparse=True)
        expected = trained.draft_hidden(hidden[None], [following], index)[0][0]
    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_held_out_text_takes_fewer_bits_than_xz(trained, held_out):
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    held_out = {"bz2.py": held_out["bz2.py"]}
    figures = measure.text_figures(trained, tokenizer, held_out)
    # One small archive flatters us, so xz learns from another library module before it.
    prefix = Path(lzma.__file__).with_name("typing.py").read_bytes()
    archive = "".join(held_out.values()).encode()
    xz = len(lzma.compress(prefix + archive, preset=9)) - len(lzma.compress(prefix, preset=9))
    assert figures["bits/byte, sparse attention"] < 0.9 * 8 * xz / len(archive)
    assert abs(figures["sparse minus dense loss at S = 1024, %"]) < 2
    assert figures["right drafts of 3 a row, text"] > 0.6


def test_drafts_of_generated_code(trained, held_out, monkeypatch):
    monkeypatch.setattr(measure, "PROMPTS", 4)
    monkeypatch.setattr(measure, "NEW_TOKENS", 48)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    figures = measure.generation_figures(trained, tokenizer, held_out, FOLDER)
    assert figures["right drafts of 3 a step, greedy generation"] > 1.0


def test_windows_count_every_token_once():
    for length in (2, 1025, 1026, 2500):
        ids = list(range(length))
        counted = [w[0, -n:].tolist() for w, n in measure.windows(ids)]
        assert [i for part in counted for i in part] == ids[1:]


def test_leading_right_drafts():
    right = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
    assert measure.consecutive(right).tolist() == [3, 1, 0, 2]


def test_tokenizer_round_trip_and_markers():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    source = "class A:\n\tdef f(self, x_1):\n        return '\N{SNOWMAN}' + 1234  # \r\n\n\n"
    assert tokenizer.decode(tokenizer.encode(source)) == source
    assert len(tokenizer) == CONFIG["vocab_size"]
    ids = [tokenizer.convert_tokens_to_ids(t) for t in files.SPECIAL + files.MARKUP]
    assert len(set(ids)) == 17 and min(ids) == net.VOCAB - 17
    stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert CONFIG["eos_token_id"] == [tokenizer.convert_tokens_to_ids(t) for t in stops]
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == CONFIG["eos_token_id"]
    text = "<think>a</think>b<|user|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text[:-8]


@pytest.mark.parametrize(
    ("settings", "effort"), [({}, "Max"), ({"reasoning_effort": "low"}, "Low")]
)
def test_chat_template_turns(settings, effort):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "r", "content": " a "},
        {"role": "user", "content": "p"},
    ]
    template = AutoTokenizer.from_pretrained(FOLDER).apply_chat_template
    text = template(messages, tokenize=False, add_generation_prompt=True, **settings)
    head = f"[gMASK]<sop><|system|>Reasoning Effort: {effort}<|user|>q<|assistant|>"
    assert text == head + "<think>r</think>a<|user|>p<|assistant|><think>"
    cleared = template(messages, tokenize=False, clear_thinking=True, **settings)
    assert cleared == head + "<think></think>a<|user|>p"


def test_chat_template_tools():
    function = {"name": "f", "description": "\N{SNOWMAN}", "strict": True}
    tools = [{"type": "function", "function": function}, {"name": "later", "defer_loading": True}]
    calls = [{"function": {"name": "f", "arguments": {"k": "v", "n": [1, None]}}}]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "y"},
    ]
    template = AutoTokenizer.from_pretrained(FOLDER).apply_chat_template
    text = template(messages, tools=tools, tokenize=False)
    assert '<tools>\n{"name": "f", "description": "\N{SNOWMAN}"}\n</tools>' in text
    assert text.endswith(
        "<|assistant|><think></think><tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>"
        "<arg_key>n</arg_key><arg_value>[1, null]</arg_value></tool_call>"
        "<|observation|><tool_response>x</tool_response><tool_response>y</tool_response>"
    )
    calls[0]["function"]["arguments"] = "{}"
    with pytest.raises(Exception, match="must be a mapping"):
        template(messages, tokenize=False)


def test_block_scales_of_odd_shapes():
    weight = torch.randn(131, 259) * torch.logspace(-3, 1, 259)
    codes, scale = files.quantise(weight)
    assert codes.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    restored = files.dequantise(codes, scale)
    # E4M3 has 3 mantissa bits; below 2^-6 of the scale its spacing is 2^-9.
    spacing = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:131, :259] * 2**-9
    assert ((restored - weight).abs() <= torch.maximum(weight.abs() / 16, spacing) * 1.001).all()
    assert restored[:128, :128].abs().max() == pytest.approx(weight[:128, :128].abs().max())


def test_fused_cross_entropy_and_gradients():
    hidden, weight = torch.randn(150, 48), torch.randn(91, 48)
    targets, results = torch.randint(0, 91, (150,)), []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            loss, choice = net.LinearCrossEntropy.apply(h, w, targets)
            assert torch.equal(choice, (h @ w.t()).argmax(-1))
        else:
            loss = F.cross_entropy(h @ w.t(), targets)
        (3 * loss).backward()
        results.append((loss.detach(), h.grad, w.grad))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("length", [5, 128, 300])
def test_blocked_attention(length):
    q, k, v = torch.randn(3, 2, 3, length, 8).unbind(0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    torch.testing.assert_close(net.causal_attention(q, k, v, None), expected)
    mask = torch.zeros(2, length, length).masked_fill(
        torch.ones(length, length).triu(1).bool() | (torch.rand(2, length, length) < 0.3), -1e9
    )
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=1.0)
    torch.testing.assert_close(net.causal_attention(q, k, v, mask)[:, :, 1:], expected[:, :, 1:])


def test_indexer_loss_is_the_kl_divergence():
    """Against torch's kl_div of the attention averaged over heads and layers of the group."""
    index = net.IndexState(torch.tensor([2, 4]), sparse=False)
    index.scores = torch.randn(1, 2, 5, requires_grad=True)
    future = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()
    target = 0
    for _ in range(2):
        q, k = torch.randn(2, 1, 3, 5, 4).unbind(0)
        index.observe(q, k)
        dots = (q[:, :, [2, 4]] @ k.transpose(-1, -2)).masked_fill(future, -torch.inf)
        target = target + dots.softmax(-1).sum(1) / 6
    log_q = index.scores.masked_fill(future, -torch.inf).log_softmax(-1)
    scores = index.scores
    index.close_group()
    expected = F.kl_div(log_q.masked_fill(future, 0), target, reduction="sum") / 2
    torch.testing.assert_close(index.losses[0], expected)
    index.losses[0].backward()
    assert scores.grad.isfinite().all() and (scores.grad[0, 0, 3:] == 0).all()


def test_muon_updates_are_orthogonal():
    for shape in ((2, 24, 64), (1, 64, 24)):
        values = torch.linalg.svdvals(trainer.orthogonalise(torch.randn(shape)).float())
        assert values.min() > 0.5 and values.max() < 1.4


def test_expert_bias_moves_towards_the_idle():
    model = net.NanoModel()
    optimiser, moe = trainer.Optimiser(model), model.moe_layers()[0]
    moe.load.copy_(torch.tensor([9.0, 1, 5, 5, 5, 5, 5, 5]))
    optimiser.step(1.0)
    bias = moe.gate.e_score_correction_bias
    assert bias[0] < 0 < bias[1] and (bias[2:] == 0).all() and moe.load.sum() == 0


def test_windows_cover_the_stream_evenly():
    ids = np.arange(2000, dtype=np.uint16)
    windows = trainer.Windows((ids, ids))
    rows = windows.take(0, 100, 16)
    assert rows.shape == (100, 16 + trainer.LOOKAHEAD) and (rows.diff(dim=1) == 1).all()
    starts = rows[:, 0].sort().values
    assert starts.diff().max() < 2.2 * 2000 / 100
    resumed = trainer.Windows((ids, ids))
    resumed.counts = [100, 0]
    assert torch.equal(resumed.take(0, 3, 16), windows.take(0, 3, 16))


@pytest.fixture
def small_run(tmp_path, monkeypatch):
    """A run folder whose micro-batches are two windows of 32 tokens."""
    texts = {f"f{i}.py": f"def f{i}(x):\n    return x + {i}\n" * 40 for i in range(6)}
    monkeypatch.setattr(files, "corpus", lambda: (texts | {"test/t.py": texts["f0.py"]}, texts))
    monkeypatch.setattr(trainer, "TOKENS", 64)
    monkeypatch.setattr(trainer, "schedule", lambda progress: (1.0, 1.0))
    monkeypatch.setattr(trainer, "plan", lambda progress, micro, step: (micro % 2, 32, 3))
    (tmp_path / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    monkeypatch.setattr(trainer.Run, "held_out_slice", lambda self: (torch.ones(1, 9).long(), 8))
    return tmp_path


@pytest.mark.parametrize("phase", ["dense", "warm-up", "sparse"])
def test_a_run_resumes_where_it_stopped(small_run, monkeypatch, phase):
    monkeypatch.setattr(trainer, "INDEX_START", 2.0 if phase == "dense" else 0.0)
    monkeypatch.setattr(trainer, "SPARSE_START", 0.0 if phase == "sparse" else 2.0)
    run = trainer.Run(small_run)
    before = {n: p.clone() for n, p in run.model.named_parameters()}
    run.train(minutes=0.005)
    changed = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    moving = any("indexer" in name for name in changed)
    assert run.step > 0 and moving == (phase != "dense") and "lm_head.weight" in changed
    again = trainer.Run(small_run)
    assert (again.step, again.counts, again.elapsed) == (run.step, run.counts, run.elapsed)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    for name, tensor in run.optimiser.state.items():
        assert torch.equal(tensor, again.optimiser.state[name]), name
    again.train(minutes=again.elapsed / 60 + 0.002)
    assert again.step > run.step


def test_schedule_ends_low_and_starts_indexers_late():
    assert trainer.schedule(0.0)[0] == 0 and trainer.schedule(0.3)[0] == 1
    assert trainer.schedule(1.0)[0] <= 0.05
    factors = [trainer.schedule(p / 100)[0] for p in range(55, 101)]
    assert factors == sorted(factors, reverse=True) and math.isfinite(sum(factors))


def test_changed_sources_are_reported(monkeypatch, caplog):
    listed = json.loads(files.MANIFEST.read_text())
    name = next(iter(listed["held_out"]))
    monkeypatch.setattr(files, "standard_library", lambda: {name: "x = 1\n", "new.py": "y = 2\n"})
    train, held = files.corpus()
    assert list(train) == ["new.py"] and list(held) == [name]
    assert "figures will differ" in caplog.text


def test_held_out_files_are_not_trained_on():
    listed = json.loads(files.MANIFEST.read_text())
    assert 20 <= len(listed["held_out"]) <= 40
    assert not set(listed["held_out"]) & set(listed["train"])
    assert not set(listed["held_out"].values()) & set(listed["train"].values())
    assert not any(files.is_test(name) for name in listed["held_out"])
