"""Tensors that do not fit the config, checkpoints that do not exist or do not fit the device."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch

import glm53.checkpoint.fit as fit
import glm53.checkpoint.read as read
from glm53.checkpoint import (
    CheckpointError,
    available_bytes,
    check_fits,
    resolve_folder,
)
from glm53.config import GLM53Config
from glm53.model import Transformer
from tests.test_checkpoint import load, make
from tests.tiny import (
    disk_tensors,
    tiny_config,
    write_checkpoint,
    write_config,
    write_shards,
)

ROOT = Path(__file__).resolve().parents[1]
BLOCK = (8, 12)
SCALE = "_scale_inv"
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def make_small() -> tuple[GLM53Config, Transformer]:
    return make(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
        num_nextn_predict_layers=0,
        n_routed_experts=3,
        num_experts_per_tok=2,
    )


def write(folder: Path, config: GLM53Config, tensors: dict, *, fp8: bool, shards: int = 1) -> None:
    write_config(folder, config, fp8=fp8, block=BLOCK)
    write_shards(folder, tensors, shards)


def error_of(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


# Tensors that do not fit: one error with all of them


def test_one_error_names_everything(tmp_path):
    config, model = make()
    tensors = disk_tensors(model, fp8=True, block=BLOCK)
    del tensors["model.norm.weight"], tensors[EXPERT], tensors[EXPERT + SCALE]
    del tensors[KV_B + SCALE]
    del tensors["model.layers.4.self_attn.q_b_proj.weight"]
    tensors["model.layers.5.enorm.weight"] = torch.ones(60)
    tensors["model.layers.1.mlp.experts.6.up_proj.weight"] = torch.ones(22, 60)
    tensors["model.embed_tokens.weight"] = torch.ones(130, 60)
    tensors["lm_head.weight"] = torch.ones(131, 60, dtype=torch.int8)
    tensors["model.layers.0.eh_proj.weight_scale_inv"] = torch.ones(2, 2)
    tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.ones(2, 2)
    tensors["model.layers.1.mlp.gate.weight_scale_inv"] = torch.ones(1, 5)
    write(tmp_path, config, tensors, fp8=True, shards=3)
    lines = error_of(tmp_path).splitlines()
    assert str(tmp_path) in lines[0]
    assert {line.strip() for line in lines[1:]} == {
        "missing: model.norm.weight [60]",
        f"missing: {EXPERT} [22, 60]",
        "missing: model.layers.4.self_attn.q_b_proj.weight [48, 36]",
        "unexpected: model.layers.5.enorm.weight [60]",
        "unexpected: model.layers.1.mlp.experts.6.up_proj.weight [22, 60]",
        "mis-shaped: model.embed_tokens.weight is [130, 60], must be [131, 60]",
        "mis-shaped: model.layers.0.self_attn.o_proj.weight_scale_inv is [2, 2], must be [8, 4], "
        "weight_block_size [8, 12]",
        "dtype that cannot be read: lm_head.weight is I8",
        f"FP8 without scale: {KV_B} needs {KV_B}_scale_inv",
        "scale without weight: model.layers.0.eh_proj.weight_scale_inv",
        "scale without weight: model.layers.4.self_attn.q_b_proj.weight_scale_inv",
        "scale without FP8 weight: model.layers.1.mlp.gate.weight_scale_inv, whose weight is F32",
    }


@pytest.mark.parametrize("fp8", [False, True])
def test_every_missing_tensor_is_noticed(tmp_path, fp8):
    config, model = make_small()
    tensors = disk_tensors(model, fp8=fp8, block=BLOCK)
    write_config(tmp_path, config, fp8=fp8, block=BLOCK)
    for name in tensors:
        write_shards(tmp_path, {n: t for n, t in tensors.items() if n != name})
        assert re.search(rf"(missing|needs|weight): .*{re.escape(name)}\b", error_of(tmp_path)) or (
            f"needs {name}" in error_of(tmp_path)
        )


def test_every_wrong_shape_is_noticed(tmp_path):
    config, model = make_small()
    tensors = disk_tensors(model, fp8=True, block=BLOCK)
    write_config(tmp_path, config, fp8=True, block=BLOCK)
    for name, tensor in tensors.items():
        longer = torch.cat((tensor.float(), tensor.float()[:1])).to(tensor.dtype)
        write_shards(tmp_path, tensors | {name: longer})
        assert f"mis-shaped: {name} is {list(longer.shape)}" in error_of(tmp_path)


def test_fp8_without_scale_needs_no_quantization_config_to_be_an_error(tmp_path):
    config, model = make()
    tensors = {n: t for n, t in disk_tensors(model, fp8=True).items() if not n.endswith(SCALE)}
    write(tmp_path, config, tensors, fp8=False)
    assert error_of(tmp_path).count("FP8 without scale") == len(
        [t for t in tensors.values() if t.dtype == torch.float8_e4m3fn]
    )


def test_fp8_needs_a_block_size(tmp_path):
    config, model = make()
    write(tmp_path, config, disk_tensors(model, fp8=True), fp8=False)
    assert f"FP8 without quantization_config in config.json: {KV_B}" in error_of(tmp_path)


def test_scales_of_another_block_size(tmp_path):
    config, model = make()
    write(tmp_path, config, disk_tensors(model, fp8=True, block=(12, 8)), fp8=True)
    message = error_of(tmp_path)
    assert f"{KV_B}_scale_inv is [6, 3], must be [9, 2], weight_block_size [8, 12]" in message


def test_stacked_experts_and_single_ones_together(tmp_path):
    config, model = make()
    stacked = "model.layers.1.mlp.experts.gate_up_proj"
    extra = {stacked: model.state_dict()[stacked].clone()}
    write(tmp_path, config, disk_tensors(model) | extra, fp8=False)
    assert f"given twice: {EXPERT}, also part of {stacked}" in error_of(tmp_path)


def test_config_without_the_mtp_layer_of_the_files(tmp_path):
    _, model = make()
    tensors = disk_tensors(model)
    write_checkpoint(tmp_path, model, tiny_config(num_nextn_predict_layers=0))
    message = error_of(tmp_path)
    names = [n for n in tensors if n.startswith("model.layers.4.")]
    assert len(names) > 20 and all(f"unexpected: {n} " in message for n in names)


def test_half_an_mtp_layer(tmp_path):
    config, model = make()
    tensors = disk_tensors(model)
    del tensors["model.layers.4.shared_head.norm.weight"]
    write(tmp_path, config, tensors, fp8=False)
    assert "missing: model.layers.4.shared_head.norm.weight [60]" in error_of(tmp_path)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_mtp_embedding_or_head_of_its_own_is_refused(tmp_path, name, fp8):
    config, model = make()
    name = f"model.layers.4.{name}"
    source = "lm_head.weight" if "head" in name else "model.embed_tokens.weight"
    tensors = disk_tensors(model, fp8=fp8, block=BLOCK)
    tensors[name] = tensors[source].clone()
    write(tmp_path, config, tensors, fp8=fp8, shards=3)
    load(tmp_path)
    tensors[name][130, 59] += 1e-3
    write(tmp_path, config, tensors, fp8=fp8, shards=3)
    assert f"{name} differs from {source}" in error_of(tmp_path)


def test_tied_model_with_another_head_is_refused(tmp_path):
    config, model = make(tie_word_embeddings=True)
    head = {"lm_head.weight": torch.ones(131, 60)}
    write(tmp_path, config, disk_tensors(model) | head, fp8=False)
    assert "lm_head.weight differs from model.embed_tokens.weight" in error_of(tmp_path)


# Where a checkpoint is


def test_a_local_folder_never_touches_the_network(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "nano").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("runs/nano", "runs", ".", tmp_path, str(tmp_path), Path("runs/nano")):
        assert resolve_folder(name).is_dir()
    for name in ("runs/nan", "./a", "/no/such", "~/no/such", "a", "a/b/c", "a/", "..\\a", ""):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            resolve_folder(name)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        resolve_folder(Path("zai-org/GLM-5.3"))
    with pytest.raises(NotADirectoryError, match="file"):
        resolve_folder("file")


def test_a_hub_id_downloads_only_data(tmp_path, monkeypatch):
    calls = []

    def download(repo_id, **kwargs):
        calls.append((repo_id, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("zai-org/GLM-5.3") == tmp_path
    [(repo_id, kwargs)] = calls
    assert repo_id == "zai-org/GLM-5.3"
    files = """config.json model-00001-of-00141.safetensors chat_template.jinja tokenizer.json
        pytorch_model.bin modeling.py README.md original/consolidated.safetensors x.pt""".split()
    kept = huggingface_hub.utils.filter_repo_objects(files, **kwargs)
    assert list(kept) == files[:4]


def test_what_the_hub_says_is_passed_on(monkeypatch):
    def download(repo_id, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot be reached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"'nobody/nothing'.*cannot be reached"):
        resolve_folder("nobody/nothing")


def test_the_hub_client_is_imported_only_for_a_hub_id(tmp_path):
    code = """
import sys
from glm53.checkpoint.folder import resolve_folder
resolve_folder(sys.argv[1])
assert "huggingface_hub" not in sys.modules
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=True)


# Does it fit


def test_check_fits_gives_the_numbers():
    check_fits({"weights": 1}, "cpu")
    with pytest.raises(MemoryError) as caught:
        check_fits({"weights": 2**50, "cache": 2**40}, "cpu")
    assert "1049600.00 GiB needed on cpu" in str(caught.value)
    assert "weights 1048576.00 GiB, cache 1024.00 GiB" in str(caught.value)
    assert re.search(r"\d+\.\d\d GiB available", str(caught.value))
    with pytest.raises(ValueError, match="device='meta'"):
        check_fits({"weights": 1}, "meta")


def test_nothing_is_read_when_it_does_not_fit(tmp_path, monkeypatch):
    config, model = make()
    write_checkpoint(tmp_path, model, config)
    size = sum(t.nbytes for t in model.state_dict().values())
    monkeypatch.setattr(read._Plan, "fill", lambda *args: pytest.fail("read"))
    monkeypatch.setattr(fit, "available_bytes", lambda device: size - 1)
    with pytest.raises(MemoryError, match=r"weights 0\.00 GiB"):
        load(tmp_path)
    monkeypatch.setattr(fit, "available_bytes", lambda device: 2 * size)
    with pytest.raises(MemoryError, match=r"cache 2\.00 GiB"):
        load(tmp_path, extra_bytes={"cache": 2**31})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_cuda_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=f"device='{device}'.*0 CUDA devices"):
        available_bytes(device)


@pytest.mark.parametrize("dtype, warned", [(torch.float32, 0), (torch.bfloat16, 1)])
def test_rounded_router_biases_are_one_warning(tmp_path, caplog, dtype, warned):
    config, model = make_small()
    tensors = disk_tensors(model)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].to(dtype)
    write_config(tmp_path, config)
    write_shards(tmp_path, tensors)
    load(tmp_path)
    found = [r for r in caplog.records if "e_score_correction_bias" in r.getMessage()]
    assert len(found) == warned


def test_available_bytes_respects_a_container_limit(tmp_path, monkeypatch):
    system = available_bytes("cpu")
    monkeypatch.setattr(fit, "_CGROUP", tmp_path)
    assert abs(available_bytes("cpu") - system) < 2**30
    (tmp_path / "memory.current").write_text("70000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 1000\ninactive_file 4000\n")
    (tmp_path / "memory.max").write_text("100000\n")
    assert available_bytes("cpu") == 100_000 - 70_000 + 5_000
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(available_bytes("cpu") - system) < 2**30
