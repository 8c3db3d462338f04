"""Configuration: every published form, every refusal, and the round trip through transformers."""

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from glm53.config import GLM53Config, QuantizationConfig

FULL_53 = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)


def glm53() -> dict:
    """zai-org/GLM-5.3, key by key (the 541-entry skip list shortened)."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [154820, 154827, 154829],
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "head_dim": 192,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if i in FULL_53 else "shared" for i in range(78)],
        "initializer_range": 0.02,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "pretraining_tp": 1,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.indexers_proj"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.15.0",
        "use_cache": True,
        "v_head_dim": 256,
        "vocab_size": 154880,
    }


def glm52() -> dict:
    """GLM-5.2: the same schedule, no router dtype, BF16."""
    data = glm53()
    del data["moe_router_dtype"], data["quantization_config"]
    return data


def glm5() -> dict:
    """GLM-5 and 5.1: an indexer on every layer, the older key forms."""
    data = glm52()
    for key in ("indexer_types", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"):
        del data[key]
    for key in ("mlp_layer_types", "rope_parameters", "dtype", "index_share_for_mtp_iteration"):
        del data[key]
    return data | {
        "rope_theta": 1000000,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 202752,
    }


def tiny(**changes: object) -> dict:
    """A small config.json; a change to None removes the key."""
    data = {
        "model_type": "glm_moe_dsa",
        "vocab_size": 131,
        "hidden_size": 60,
        "intermediate_size": 52,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 5,
        "num_attention_heads": 3,
        "q_lora_rank": 28,
        "kv_lora_rank": 18,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 9,
        "n_routed_experts": 12,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "index_topk": 7,
        "index_n_heads": 5,
        "index_head_dim": 14,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    } | changes
    return {key: value for key, value in data.items() if value is not None}


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_glm53_values():
    config = GLM53Config.from_dict(glm53())
    assert config.full_layers == FULL_53
    assert (config.qk_head_dim, config.softmax_scale) == (256, 0.0625)
    assert config.eos_token_id == (154820, 154827, 154829)
    assert (config.bos_token_id, config.pad_token_id) == (None, 154820)
    assert config.rope_theta == 8e6
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert config.index_share_for_mtp_iteration
    assert config.quantization_config is not None
    assert config.quantization_config.weight_block_size == (128, 128)
    assert "lm_head" in config.quantization_config.modules_to_not_convert


def test_every_scalar_of_the_file_reaches_the_field_of_that_name():
    data, config = glm53(), GLM53Config.from_dict(glm53())
    names = {field.name for field in dataclasses.fields(config)}
    plain = {key for key in names & set(data) if isinstance(data[key], int | float | str)}
    assert len(plain) > 30
    assert {key: getattr(config, key) for key in plain} == {key: data[key] for key in plain}


def test_mtp_layer_is_full_and_sparse():
    config = GLM53Config.from_dict(glm53())
    assert config.mtp_layer == 78
    assert config.is_full(78) and config.is_sparse(78)
    assert [config.is_full(i) for i in (0, 3, 74, 77)] == [True, False, True, False]
    assert [config.is_sparse(i) for i in (0, 2, 3, 77)] == [False, False, True, True]


@pytest.mark.parametrize("layer", [-1, 5, 78])
def test_layers_that_do_not_exist(layer):
    config = GLM53Config.from_dict(tiny())
    assert config.mtp_layer is None
    for question in (config.is_full, config.is_sparse):
        with pytest.raises(IndexError, match=str(layer)):
            question(layer)


def test_glm52_and_glm5_forms():
    newer, older = GLM53Config.from_dict(glm52()), GLM53Config.from_dict(glm5())
    assert newer.full_layers == FULL_53 and newer.quantization_config is None
    assert older.full_layers == tuple(range(78))
    assert older.rope_theta == 1e6 and older.dtype == "bfloat16"
    assert older.mlp_layer_types == newer.mlp_layer_types
    assert older.rope_interleave and older.indexer_rope_interleave


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, "FFFFF"),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 3}, "FFFFF"),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 2}, "FFSSF"),
        ({"index_topk_freq": 2}, "FFSFS"),
        ({"index_topk_freq": 2, "index_topk_pattern": "FSSFS"}, "FSSFS"),
        ({"index_topk_pattern": ["full", "shared", "full", "full", "shared"]}, "FSFFS"),
        ({"index_topk_pattern": list("FFSSS")}, "FFSSS"),
        (
            {
                "indexer_types": ["full", "full", "full", "shared", "full"],
                "index_topk_pattern": "FSSSS",
                "index_topk_freq": 2,
            },
            "FFFSF",
        ),
    ],
)
def test_indexer_schedule_priority(keys, expected):
    types = GLM53Config.from_dict(tiny(**keys)).indexer_types
    assert "".join(kind[0].upper() for kind in types) == expected


@pytest.mark.parametrize("freq, offset", [(4, 3), (2, 2), (3, 1), (5, 0), (4, 7)])
def test_schedule_equals_transformers(freq, offset):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GlmMoeDsaConfig(
        num_hidden_layers=23, index_topk_freq=freq, index_skip_topk_offset=offset
    )
    data = tiny(num_hidden_layers=23, index_topk_freq=freq, index_skip_topk_offset=offset)
    if theirs.indexer_types[0] == "shared":
        with pytest.raises(ValueError, match="indexer_types"):
            GLM53Config.from_dict(data)
    else:
        assert list(GLM53Config.from_dict(data).indexer_types) == theirs.indexer_types


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, "DSSSS"),
        ({"first_k_dense_replace": 0}, "SSSSS"),
        ({"first_k_dense_replace": 9}, "DDDDD"),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, "DDSDS"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "dense"]}, "SDSDD"),
    ],
)
def test_mlp_schedule_priority(keys, expected):
    types = GLM53Config.from_dict(tiny(**keys)).mlp_layer_types
    assert "".join(kind[0].upper() for kind in types) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5000},
        {"rope_theta": 5000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5000.0}, "rope_theta": 5000},
        {"rope_parameters": {"rope_theta": 5000, "partial_rotary_factor": 1.0}},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5000},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5000}},
    ],
)
def test_theta_wherever_it_stands(keys):
    data = tiny(rope_theta=None) | keys
    assert GLM53Config.from_dict(data).rope_theta == 5000


@pytest.mark.parametrize(
    "keys, words",
    [
        ({}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": 1, "rope_parameters": {"rope_theta": 2}}, "rope_theta=2.*contradicts"),
        (
            {"rope_scaling": {"rope_theta": 3}, "rope_parameters": {"rope_theta": 2}},
            "rope_scaling.rope_theta=3",
        ),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.*'yarn'"),
        ({"rope_parameters": {"rope_theta": 1, "rope_type": "llama3"}}, "llama3"),
        ({"rope_parameters": {"rope_theta": 1, "partial_rotary_factor": 0.5}}, "partial.*0.5"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]"),
    ],
)
def test_theta_refused(keys, words):
    with pytest.raises(ValueError, match=words):
        GLM53Config.from_dict(tiny(rope_theta=None) | keys)


@pytest.mark.parametrize("reverse", [False, True])
def test_stale_head_dim_is_ignored_in_every_key_order(reverse):
    items = list(glm53().items())
    front = [("head_dim", 192), *[item for item in items if item[0] != "head_dim"]]
    config = GLM53Config.from_dict(dict(reversed(front) if reverse else front))
    assert (config.qk_rope_head_dim, config.qk_head_dim) == (64, 256)
    again = GLM53Config.from_dict(config.to_dict())
    assert (again.qk_rope_head_dim, again.qk_head_dim) == (64, 256)


@pytest.mark.parametrize("main", [True, False, None])
@pytest.mark.parametrize("indexer", [True, False, None])
def test_interleave_flags_are_independent(main, indexer):
    config = GLM53Config.from_dict(tiny(rope_interleave=main, indexer_rope_interleave=indexer))
    assert config.rope_interleave is (main is not False)
    assert config.indexer_rope_interleave is (indexer is not False)
    assert GLM53Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "eos, expected", [(7, (7,)), ([3, 5, 7], (3, 5, 7)), ([], ()), (None, ()), (0, (0,))]
)
def test_eos_forms(eos, expected):
    assert GLM53Config.from_dict(tiny(eos_token_id=eos)).eos_token_id == expected


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("hidden_size", -4),
        ("hidden_size", "60"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 5.0),
        ("num_attention_heads", True),
        ("index_topk", 0),
        ("index_head_dim", 4),
        ("qk_rope_head_dim", 5),
        ("n_group", 5),
        ("n_group", 12),
        ("topk_group", 2),
        ("num_experts_per_tok", 13),
        ("rms_norm_eps", 0.0),
        ("rope_theta", float("nan")),
        ("routed_scaling_factor", float("inf")),
        ("norm_topk_prob", 1),
        ("rope_interleave", "false"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("swiglu_limit", 10.0),
        ("num_nextn_predict_layers", 2),
        ("dtype", "float8_e4m3fn"),
        ("eos_token_id", 131),
        ("eos_token_id", [3, -1]),
        ("eos_token_id", "</s>"),
        ("pad_token_id", 500),
        ("qk_head_dim", 192),
        ("indexer_types", ["shared", "full", "full", "full", "full"]),
        ("indexer_types", ["full"] * 4),
        ("indexer_types", ["full", "both", "full", "full", "full"]),
        ("indexer_types", 3),
        ("index_topk_pattern", "SFFFF"),
        ("index_topk_pattern", "FFXFF"),
        ("index_topk_freq", 0),
        ("mlp_layer_types", ["dense"] * 6),
        ("mlp_layer_types", ["dense", "moe", "sparse", "sparse", "sparse"]),
        ("first_k_dense_replace", -1),
        ("model_type", "deepseek_v32"),
        ("architectures", ["GlmMoeDsaModel"]),
    ],
)
def test_refused_with_field_and_value(field, value):
    with pytest.raises(ValueError) as error:
        GLM53Config.from_dict(tiny(**{field: value}))
    names = ("indexer_types",) if field == "index_topk_pattern" and value[0] == "S" else (field,)
    assert any(name in str(error.value) for name in names)
    text = repr(value) if not isinstance(value, list) else repr(value[-1])
    assert text in str(error.value) or "shared" in str(error.value) or "both" in str(error.value)


def test_schedule_that_starts_shared_by_offset():
    with pytest.raises(ValueError, match="indexer_types"):
        GLM53Config.from_dict(tiny(index_topk_freq=4, index_skip_topk_offset=0))


def test_groups_limit_experts_per_token():
    assert GLM53Config.from_dict(tiny(n_group=3, topk_group=1, num_experts_per_tok=4)).n_group == 3
    with pytest.raises(ValueError, match="num_experts_per_tok=5"):
        GLM53Config.from_dict(tiny(n_group=3, topk_group=1, num_experts_per_tok=5))


def test_every_missing_key_is_named():
    with pytest.raises(ValueError) as error:
        GLM53Config.from_dict(tiny(hidden_size=None, q_lora_rank=None, index_topk=None))
    assert all(name in str(error.value) for name in ("hidden_size", "q_lora_rank", "index_topk"))
    with pytest.raises(ValueError, match="first_k_dense_replace"):
        GLM53Config.from_dict(tiny(first_k_dense_replace=None))


@pytest.mark.parametrize("model_type", ["glm5_next", "glm4_moe", "llama", None])
def test_other_architectures_by_name(model_type):
    with pytest.raises(ValueError, match=repr(model_type)):
        GLM53Config.from_dict({"model_type": model_type})


def test_direct_construction_and_replace_are_validated():
    config = GLM53Config.from_dict(tiny())
    with pytest.raises(ValueError, match="index_topk=0"):
        dataclasses.replace(config, index_topk=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.index_topk = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "quantization, words",
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt.*NVFP4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({}, "None"),
        ({"quant_method": "fp8"}, "weight_block_size=None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size=\(128,\)"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e5m2"}, "e5m2"),
        (
            {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"},
            "static",
        ),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "expert_dtype": "fp4"}, "fp4"),
    ],
)
def test_quantised_forms_refused_by_name(quantization, words):
    with pytest.raises(ValueError, match=words):
        GLM53Config.from_dict(tiny(quantization_config=quantization))


def test_quantised_form_read():
    data = {"quant_method": "fp8", "weight_block_size": [3, 5], "ignored_layers": ["a"]}
    config = GLM53Config.from_dict(tiny(quantization_config=data))
    assert config.quantization_config == QuantizationConfig(
        weight_block_size=(3, 5), modules_to_not_convert=("a",)
    )


def test_modelopt_side_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match="modelopt"):
        GLM53Config.from_pretrained(tmp_path)


def test_unknown_keys_warn_once_naming_all():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GLM53Config.from_dict(tiny(zeta=1, alpha=2, use_cache=True, ep_size=8))
    assert len(caught) == 1
    assert "alpha, zeta" in str(caught[0].message)
    assert "ep_size" not in str(caught[0].message)


def test_unknown_keys_of_the_quantisation_warn_too():
    block = {"quant_method": "fp8", "weight_block_size": [8, 8], "scale_fmt": "ue8m0", "beta": 1}
    with pytest.warns(UserWarning, match=r"alpha, quantization_config\.beta$"):
        GLM53Config.from_dict(tiny(quantization_config=block, alpha=2))


@pytest.mark.parametrize("data", [[], None, "config"])
def test_what_is_no_mapping_is_refused(data):
    with pytest.raises(ValueError, match="must be a mapping"):
        GLM53Config.from_dict(data)


def test_a_file_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config\.json"):
        GLM53Config.from_pretrained(tmp_path)


def test_latent_norm_eps_is_separate():
    config = GLM53Config.from_dict(tiny(rms_norm_eps=2e-5, latent_norm_eps=3e-5))
    assert (config.rms_norm_eps, config.latent_norm_eps) == (2e-5, 3e-5)
    assert GLM53Config.from_dict(config.to_dict()) == config


def test_dtype_keys():
    assert GLM53Config.from_dict(tiny(torch_dtype="float16")).dtype == "float16"
    with pytest.raises(ValueError, match="torch_dtype='float16'"):
        GLM53Config.from_dict(tiny(dtype="float32", torch_dtype="float16"))


@pytest.mark.parametrize("make", [glm53, glm52, glm5, tiny])
def test_round_trip_through_json(make):
    config = GLM53Config.from_dict(make())
    assert GLM53Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_from_pretrained_reads_the_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(glm53()), encoding="utf-8")
    assert GLM53Config.from_pretrained(tmp_path) == GLM53Config.from_dict(glm53())
    assert GLM53Config.from_pretrained(str(tmp_path)).hidden_size == 6144


@pytest.mark.parametrize("text", ["{", "[1]", '"a"'])
def test_from_pretrained_names_a_bad_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        GLM53Config.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GLM53Config.from_pretrained(tmp_path / "nowhere")


def test_reading_needs_neither_transformers_nor_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny()))
    source = Path(sys.modules[GLM53Config.__module__].__file__ or "")
    code = (
        "import sys, runpy\n"
        "for name in ('transformers', 'torch', 'numpy', 'huggingface_hub'):\n"
        "    sys.modules[name] = None\n"
        f"names = runpy.run_path({str(source)!r}, run_name='config_alone')\n"
    )
    # dataclasses with slots need the defining module to be registered, which run_path undoes.
    code += f"c = names['GLM53Config'].from_pretrained({str(tmp_path)!r}); assert c.index_topk == 7"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers")
    keys = {"index_topk_pattern": "FFSFS", "n_group": 3, "topk_group": 2, "eos_token_id": [3, 5]}
    config = GLM53Config.from_dict(tiny(num_nextn_predict_layers=1, **keys))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert type(theirs).__name__ == "GlmMoeDsaConfig"
    for field in dataclasses.fields(config):
        if field.name in ("rope_theta", "dtype", "quantization_config"):
            continue
        ours = getattr(config, field.name)
        assert getattr(theirs, field.name) == (list(ours) if isinstance(ours, tuple) else ours)
    assert theirs.rope_parameters["rope_theta"] == 10000.0
    assert theirs.head_dim == 6 and theirs.num_key_value_heads == 3

    theirs.save_pretrained(tmp_path / "again")
    assert GLM53Config.from_pretrained(tmp_path / "again") == config


def test_a_config_made_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.GlmMoeDsaConfig(num_hidden_layers=6).save_pretrained(tmp_path)
    config = GLM53Config.from_pretrained(tmp_path)
    assert config.indexer_types == ("full",) * 6
    assert config.eos_token_id == (1,) and config.bos_token_id == 0
    assert not config.num_nextn_predict_layers
