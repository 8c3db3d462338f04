"""Saving: bit-equal, whole or not at all, and transformers on the other side."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from glm53.checkpoint import save_transformer
from glm53.config import GLM53Config
from glm53.model import Transformer
from tests.test_checkpoint import assert_same_state, load, make
from tests.test_checkpoint_faults import make_small
from tests.tiny import (
    disk_tensors,
    load_reference,
    randomise,
    tiny_config,
    write_checkpoint,
    write_config,
    write_shards,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_size", [5_000_000_000, 100_000, 1])
def test_save_and_load_are_bit_equal(tmp_path, dtype, max_shard_size):
    config, model = make()
    model.to(dtype)
    save_transformer(model, config, tmp_path, max_shard_size)
    saved = GLM53Config.from_pretrained(tmp_path)
    assert saved.dtype == str(dtype).removeprefix("torch.")
    assert_same_state(load(tmp_path), model.state_dict())
    files = sorted(tmp_path.glob("*.safetensors"))
    names = set()
    for file in files:
        with safe_open(file, framework="pt") as shard:
            assert not names & set(shard.keys())
            names |= set(shard.keys())
            size = sum(shard.get_tensor(n).nbytes for n in shard.keys())
            assert size <= max_shard_size or len(shard.keys()) == 1
    assert names == disk_tensors(model).keys()
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1) == (max_shard_size < 10**9)
    if index.exists():
        state = model.state_dict().values()
        total = json.loads(index.read_text())["metadata"]["total_size"]
        assert total == sum(t.nbytes for t in state)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_save_drops_quantisation_and_says_which_layers_there_are(tmp_path):
    config, model = make()
    fp8, out = tmp_path / "fp8", tmp_path / "out"
    main = {n: t for n, t in disk_tensors(model, fp8=True).items() if "layers.4." not in n}
    config = write_config(fp8, config, fp8=True, dtype=torch.bfloat16)
    write_shards(fp8, main)
    loaded = load(fp8)
    save_transformer(loaded, config, out)
    data = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in data and data["num_nextn_predict_layers"] == 0
    assert data["dtype"] == "bfloat16"
    assert_same_state(load(out), loaded.state_dict())


def test_save_keeps_a_wider_router(tmp_path):
    config, model = make()
    write_checkpoint(tmp_path / "a", model, config)
    loaded = load(tmp_path / "a", dtype=torch.bfloat16)
    save_transformer(loaded, config, tmp_path / "b")
    assert_same_state(load(tmp_path / "b"), loaded.state_dict())
    gate = load(tmp_path / "b").model.layers[1].mlp.gate.weight
    assert torch.equal(gate, model.model.layers[1].mlp.gate.weight)


def test_save_replaces_another_checkpoint(tmp_path):
    config, model = make()
    save_transformer(model, config, tmp_path, 50_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    smaller, other = make(num_nextn_predict_layers=0)
    save_transformer(other, smaller, tmp_path, 400_000)
    assert_same_state(load(tmp_path), other.state_dict())
    save_transformer(other, smaller, tmp_path)
    assert_same_state(load(tmp_path), other.state_dict())
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_size", [5_000_000_000, 90_000])
def test_transformers_loads_what_is_saved(tmp_path, tied, max_shard_size):
    from transformers import GlmMoeDsaForCausalLM

    config, model = make(tie_word_embeddings=tied)
    save_transformer(model, config, tmp_path, max_shard_size)
    reference, info = GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith("model.layers.4.") for name in info["unexpected_keys"])
    input_ids = torch.randint(0, config.vocab_size, (2, 29))
    with torch.no_grad():
        expected, logits = reference(input_ids).logits, model(input_ids)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("per_expert", [True, False])
@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_loads_what_transformers_saves(tmp_path, per_expert, max_shard_size):
    config, model = make()
    write_checkpoint(tmp_path / "ours", model, config)
    reference = load_reference(tmp_path / "ours")
    reference.save_pretrained(
        tmp_path / "theirs", max_shard_size=max_shard_size, save_original_format=per_expert
    )
    loaded = load(tmp_path / "theirs")
    main = {n: t for n, t in model.state_dict().items() if not n.startswith("model.layers.4.")}
    assert_same_state(loaded, main)
    input_ids = torch.randint(0, config.vocab_size, (2, 31))
    with torch.no_grad():
        expected, logits = reference(input_ids).logits, loaded(input_ids)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


# 4 shards are written, 4 old files removed (config.json first), 6 new ones moved in.
@pytest.mark.parametrize("step", range(14))
def test_an_interrupted_save_never_loads_as_something_wrong(tmp_path, monkeypatch, step):
    config, old = make_small()
    save_transformer(old, config, tmp_path, 150_000)
    _, new = make_small()
    randomise(new, seed=1)
    done = 0

    def interrupt(original):
        def call(*args, **kwargs):
            nonlocal done
            done += 1
            if done > step:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt(Path.replace))
        patch.setattr(Path, "unlink", interrupt(Path.unlink))
        patch.setattr("glm53.checkpoint.save.save_file", interrupt(save_file))
        with pytest.raises(KeyboardInterrupt):
            save_transformer(new, config, tmp_path, 100_000)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    if step <= 4:
        loaded = load(tmp_path).state_dict()
        assert all(torch.equal(loaded[n], t) for n, t in old.state_dict().items())
    else:
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            load(tmp_path)
    save_transformer(new, config, tmp_path)
    loaded = load(tmp_path).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in new.state_dict().items())


def test_further_files_go_the_same_way(tmp_path, monkeypatch):
    config, model = make_small()
    folder, source = tmp_path / "out", tmp_path / "source.json"
    source.write_text("new copy")
    files = {"copied.json": source, "written.json": "new text"}
    save_transformer(model, config, folder, files=files)
    assert (folder / "copied.json").read_text() == "new copy"
    assert (folder / "written.json").read_text() == "new text"
    source.write_text("newer")

    def fail(*_args, **_kwargs):
        raise OSError("disk full")

    for place in ("shutil.copyfile", "glm53.checkpoint.save.save_file"):
        with monkeypatch.context() as patch:
            patch.setattr(place, fail)
            with pytest.raises(OSError, match="disk full"):
                save_transformer(model, config, folder, files=files)
        assert (folder / "copied.json").read_text() == "new copy"
        assert_same_state(load(folder), model.state_dict())


def test_what_killed_saves_left_is_removed(tmp_path):
    config, model = make_small()
    for name in (".saving-abc", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(99))
    save_transformer(model, config, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors", ".other"}


@pytest.mark.parametrize("size", [0, -1])
def test_shard_size_must_be_positive(tmp_path, size):
    config, model = make_small()
    with pytest.raises(ValueError, match=f"max_shard_size={size}"):
        save_transformer(model, config, tmp_path, size)
    assert not list(tmp_path.iterdir())


def test_a_model_on_meta_is_not_saved(tmp_path):
    config = tiny_config()
    with torch.device("meta"):
        model = Transformer(config)
    with pytest.raises(ValueError, match="meta"):
        save_transformer(model, config, tmp_path)
    assert not list(tmp_path.iterdir())
