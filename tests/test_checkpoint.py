"""Loading and saving: every form a published or saved checkpoint has ends in the same weights."""

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glm53.checkpoint import load_transformer
from glm53.checkpoint.fp8 import dequantise, scale_shape
from glm53.checkpoint.names import disk_places, stacked_places
from glm53.config import GLM53Config
from glm53.model import Transformer
from tests.test_config import glm53 as published_config
from tests.tiny import (
    E4M3_MODULES,
    disk_tensors,
    randomise,
    tiny_config,
    write_checkpoint,
    write_config,
    write_shards,
)

ROOT = Path(__file__).resolve().parents[1]


def make(**overrides) -> tuple[GLM53Config, Transformer]:
    config = tiny_config(**overrides)
    model = Transformer(config)
    randomise(model)
    return config, model


def load(folder: Path, **kwargs) -> Transformer:
    config = GLM53Config.from_pretrained(folder)
    return load_transformer(folder, config, progress=False, **kwargs)


def assert_same_state(model: Transformer, state: dict[str, torch.Tensor]) -> None:
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


def dequantised(tensors: dict[str, torch.Tensor], block: tuple[int, int]) -> dict:
    """Per-expert tensors in fp32, each element multiplied by the scale of its block."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        result[name] = tensor.float()
        scale = tensors.get(name + "_scale_inv")
        if scale is not None:
            rows = torch.arange(tensor.shape[0]) // block[0]
            columns = torch.arange(tensor.shape[1]) // block[1]
            result[name] = tensor.float() * scale[rows][:, columns]
    return result


def one_per_file(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Files are read in the order of their names, so this fixes the order of arrival."""
    weight_map = {name: f"shard-{i:04d}.safetensors" for i, name in enumerate(tensors)}
    for name, file in weight_map.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# FP8


def test_dequantise_by_hand():
    values = torch.tensor([[1.0, -2, 448], [0.5, 4, 1], [8, 1, -0.25]]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 10.0], [0.5, 100.0]])
    out = torch.full((3, 3), torch.nan)
    dequantise(values, scale, (2, 2), out)
    assert out.tolist() == [[2, -4, 4480], [1, 8, 10], [4, 0.5, -25]]


@pytest.mark.parametrize(
    "shape, block",
    [*itertools.product([(1, 1), (7, 9), (10, 6)], [(1, 1), (3, 2), (5, 6), (128, 4)])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantise_any_block(shape, block, dtype):
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    scale = torch.rand(scale_shape(shape, block)) + 0.3
    out = torch.full(shape, torch.nan, dtype=dtype)
    dequantise(values, scale, block, out)
    for i, j in itertools.product(*map(range, shape)):
        expected = values[i, j].float() * scale[i // block[0], j // block[1]]
        assert out[i, j] == expected.to(dtype)


@pytest.mark.parametrize("block", [(128, 128), (7, 11), (1, 60), (5, 1)])
@pytest.mark.parametrize("shards", [1, 4])
def test_fp8_checkpoint(tmp_path, block, shards):
    config, model = make()
    tensors = write_checkpoint(tmp_path, model, config, fp8=True, block=block, shards=shards)
    assert sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) > 80
    loaded = load(tmp_path, dtype=torch.float32)
    expected = dequantised(tensors, block)
    for name, tensor in disk_tensors(loaded).items():
        assert torch.equal(tensor, expected[name]), name
    # Quantised to 3 bits of mantissa, so near the original: no scale is applied twice or inverted.
    for name, tensor in model.state_dict().items():
        error = (loaded.state_dict()[name] - tensor).abs().max()
        assert error <= 0.04 * tensor.abs().max(), name


def test_fp8_is_rounded_once_from_fp32(tmp_path):
    config, model = make(num_nextn_predict_layers=0)
    tensors = write_checkpoint(tmp_path, model, config, fp8=True, block=(9, 7), shards=3)
    loaded = load(tmp_path, dtype=torch.bfloat16)
    expected = dequantised(tensors, (9, 7))
    for name, tensor in disk_tensors(loaded, dtype=torch.bfloat16).items():
        if not name.endswith(("e_score_correction_bias", "mlp.gate.weight")):
            assert torch.equal(tensor, expected[name].bfloat16()), name


def test_e8m0_scales(tmp_path):
    config, model = make(num_nextn_predict_layers=0)
    tensors = disk_tensors(model, fp8=True, block=(8, 8))
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = torch.exp2(tensor.log2().round()).to(torch.float8_e8m0fnu)
    write_config(tmp_path, config, fp8=True, block=(8, 8))
    write_shards(tmp_path, tensors)
    name = "model.layers.0.mlp.down_proj.weight"
    floats = {n: t.float() for n, t in tensors.items() if n.startswith(name)}
    weight = load(tmp_path).state_dict()[name]
    assert torch.equal(weight, dequantised(floats, (8, 8))[name])


@pytest.mark.parametrize("order", ["forward", "reversed", "scales first", "scales last", "mixed"])
def test_one_tensor_per_file_in_any_order(tmp_path, order):
    config, model = make()
    tensors = disk_tensors(model, fp8=True, block=(16, 9))
    write_config(tmp_path, config, fp8=True, block=(16, 9))
    position = {name: i for i, name in enumerate(tensors)}
    sort = {
        "forward": position.get,
        "reversed": lambda name: -position[name],
        "scales first": lambda name: not name.endswith("_scale_inv"),
        "scales last": lambda name: name.endswith("_scale_inv"),
        "mixed": lambda name: (position[name] * 7919) % 1009,
    }
    one_per_file(tmp_path, {name: tensors[name] for name in sorted(tensors, key=sort[order])})
    loaded = disk_tensors(load(tmp_path))
    for name, expected in dequantised(tensors, (16, 9)).items():
        assert torch.equal(loaded[name], expected), name


@pytest.mark.parametrize("files", [*itertools.product("ab", repeat=4)])
def test_two_pairs_over_two_files(tmp_path, files):
    config, model = make(num_nextn_predict_layers=0)
    tensors = disk_tensors(model, fp8=True, block=(6, 10))
    write_config(tmp_path, config, fp8=True, block=(6, 10))
    pairs = [
        f"model.layers.{i}.self_attn.kv_b_proj.weight{end}"
        for i in (0, 1)
        for end in ("", "_scale_inv")
    ]
    weight_map = dict.fromkeys(tensors, "c.safetensors")
    weight_map |= {n: f"{file}.safetensors" for n, file in zip(pairs, files, strict=True)}
    for file in set(weight_map.values()):
        part = {n: t for n, t in tensors.items() if weight_map[n] == file}
        save_file(part, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded, expected = disk_tensors(load(tmp_path)), dequantised(tensors, (6, 10))
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


# dtypes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(tmp_path, stored, dtype):
    config, model = make()
    tensors = write_checkpoint(tmp_path, model, config, dtype=stored, shards=2)
    loaded = load(tmp_path, dtype=dtype)
    dtype = dtype or stored
    assert loaded.dtype == dtype
    for name, tensor in loaded.state_dict().items():
        wide = name.endswith(("mlp.gate.weight", "indexer.weights_proj.weight"))
        bias = name.endswith("e_score_correction_bias")
        expected = torch.promote_types(dtype, stored) if wide else dtype
        assert tensor.dtype == (torch.float32 if bias else expected), name
    places = disk_places(loaded)
    for name, tensor in tensors.items():
        part = loaded.state_dict()[places[name].parameter][places[name].index]
        assert torch.equal(part, tensor.to(part.dtype)), name


def test_router_bias_keeps_its_spread(tmp_path):
    config, model = make()
    bias = 7 + 0.001 * torch.arange(6)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(bias)
    write_checkpoint(tmp_path, model, config, dtype=torch.bfloat16)
    loaded = load(tmp_path)
    assert torch.equal(loaded.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    chosen = loaded.model.layers[1].mlp.gate.choose(torch.full((1, 6), 0.5))
    assert sorted(chosen[0].tolist()) == [3, 4, 5]


def test_dtype_must_be_a_float_of_the_family(tmp_path):
    config, model = make()
    write_checkpoint(tmp_path, model, config)
    with pytest.raises(ValueError, match=r"dtype=torch\.float64"):
        load(tmp_path, dtype=torch.float64)


# Names


def test_places_tile_every_parameter():
    _, model = make()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    written = {name: torch.zeros(tensor.shape, dtype=torch.int) for name, tensor in state.items()}
    places = disk_places(model)
    for place in places.values():
        part = written[place.parameter][place.index]
        assert tuple(part.shape) == place.shape
        part += 1
    assert all((count == 1).all() for count in written.values())
    assert len({(p.parameter, str(p.index)) for p in places.values()}) == len(places)
    assert places.keys() == disk_tensors(model).keys()
    assert all(name in state for name in stacked_places(model))


def test_names_of_the_published_checkpoint():
    """Counts that zai-org/GLM-5.3 publishes, and that its index adds up to."""
    with torch.device("meta"):
        places = disk_places(Transformer(GLM53Config.from_dict(published_config())))
    fp8 = [p for n, p in places.items() if n.split(".")[-2] in E4M3_MODULES]
    assert len(places) + len(fp8) == 118_629
    assert sum(p.shape[0] * p.shape[1] for p in fp8) == 751_226_191_872
    assert sum(name.startswith("model.layers.78.") for name in places) == 791


def test_every_parameter_is_written(tmp_path):
    config, model = make()
    write_checkpoint(tmp_path, model, config, fp8=True, block=(7, 7), shards=3)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        assert torch.empty(3).isnan().all()
        loaded = load(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert tensors.keys() == (dict(model.named_parameters()) | dict(model.named_buffers())).keys()
    for name, tensor in tensors.items():
        assert tensor.device.type == "cpu" and not tensor.isnan().any(), name
    assert all(p.requires_grad for p in loaded.parameters())


# Layers that own less than others


def test_indexers_of_shared_layers_are_ignored(tmp_path, caplog):
    config, model = make()
    tensors = disk_tensors(model, fp8=True, block=(8, 8))
    indexer = "model.layers.1.self_attn.indexer."
    own = {n: t for n, t in tensors.items() if indexer in n}
    extra = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in own.items()}
    assert len(extra) == 7
    write_config(tmp_path, config, fp8=True, block=(8, 8))
    write_shards(tmp_path, tensors | extra, shards=2)
    with caplog.at_level(logging.INFO, logger="glm53"):
        loaded = load(tmp_path)
    assert [r.getMessage() for r in caplog.records] == [
        "ignored 7 indexer tensors of layers that share an earlier selection: 2"
    ]
    assert not any("layers.2.self_attn.indexer" in name for name in loaded.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_mtp_layer_shares_embedding_and_head(tmp_path, tied):
    config, model = make(tie_word_embeddings=tied)
    tensors = disk_tensors(model)
    if tied:
        del tensors["lm_head.weight"]
    copies = {
        "model.layers.4.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.4.shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }
    for name, extra in (("without", {}), ("with", copies)):
        write_config(tmp_path / name, config)
        write_shards(tmp_path / name, tensors | extra, shards=2)
        loaded = load(tmp_path / name)
        assert_same_state(loaded, model.state_dict())
        assert loaded.mtp_layer_idx == 4
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_tied_head_may_be_in_the_file(tmp_path):
    config, model = make(tie_word_embeddings=True, num_nextn_predict_layers=0)
    tensors = disk_tensors(model)
    write_config(tmp_path, config)
    write_shards(tmp_path, tensors)
    assert_same_state(load(tmp_path), model.state_dict())


def test_files_without_the_mtp_layer(tmp_path, caplog):
    config, model = make()
    write_config(tmp_path, config)
    main = {n: t for n, t in disk_tensors(model).items() if not n.startswith("model.layers.4.")}
    write_shards(tmp_path, main)
    with caplog.at_level(logging.INFO, logger="glm53"):
        loaded = load(tmp_path)
    assert loaded.mtp_layer_idx is None and len(loaded.model.layers) == 4
    assert [r.getMessage() for r in caplog.records] == [
        "the files hold no tensor of the MTP layer 4: loaded without it"
    ]


def test_the_mtp_layer_adds_one_layer(tmp_path):
    config, model = make(indexer_types=("full",) * 4, mlp_layer_types=("sparse",) * 4)
    write_checkpoint(tmp_path, model, config)
    loaded = load(tmp_path)
    count = sum(p.numel() for p in loaded.parameters())
    main = sum(p.numel() for p in Transformer(config, mtp=False).parameters())
    layer = sum(p.numel() for p in loaded.model.layers[0].parameters())
    assert count - main == layer + 2 * 60 * 60 + 3 * 60  # eh_proj; enorm, hnorm, shared_head.norm


# Progress, memory


def test_progress_bar_counts_bytes_and_tensors(tmp_path, capsys):
    config, model = make()
    tensors = write_checkpoint(tmp_path, model, config)
    load_transformer(tmp_path, config)
    assert f"tensors={len(tensors)}/{len(tensors)}" in capsys.readouterr().err
    load(tmp_path)
    assert capsys.readouterr().err == ""


PEAK = """
import re, sys, torch
from glm53.checkpoint import load_transformer
from glm53.config import GLM53Config
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
def load(folder):
    return load_transformer(folder, GLM53Config.from_pretrained(folder), progress=False)
load(sys.argv[1])  # whatever PyTorch imports on first use
before = status("VmRSS")
model = load(sys.argv[2])
print(status("VmHWM") - before, sum(t.nbytes for t in model.state_dict().values()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("fp8", [False, True])
def test_peak_memory_is_the_model_and_one_shard(tmp_path, fp8):
    config, model = make(
        hidden_size=300, moe_intermediate_size=350, n_routed_experts=14, intermediate_size=700
    )
    small, large = tmp_path / "small", tmp_path / "large"
    write_checkpoint(small, make()[1], make()[0], fp8=fp8)
    tensors = write_checkpoint(large, model, config, fp8=fp8, block=(32, 32), shards=12)
    shard = max(p.stat().st_size for p in large.glob("*.safetensors"))
    model_bytes = sum(t.nbytes for t in model.state_dict().values())
    assert model_bytes > 75e6 and shard < 0.12 * model_bytes and len(tensors) > 200
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PEAK, str(small), str(large)]
    output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    peak, loaded_bytes = map(int, output.split())
    assert loaded_bytes == model_bytes
    assert peak <= model_bytes + shard + 8e6
    assert peak >= 0.9 * model_bytes  # the measurement sees the model
