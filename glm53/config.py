"""The model's configuration: config.json of the GLM-5, 5.1, 5.2 and 5.3 checkpoints, resolved.

Reading needs nothing but the file: no transformers, no torch, no network. Whatever the file leaves
implicit (the indexer schedule, the MLP schedule, where theta lives) is made explicit here, once, so
that no other file derives it again. Everything that cannot be computed faithfully is refused by
name before a weight is read.
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsaForCausalLM"

# Keys that other programs write or read and that change nothing in the forward pass.
_IRRELEVANT_KEYS = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path architectures attention_dropout auto_map
    chunk_size_feed_forward dtype ep_size experts_implementation head_dim id2label index_topk_freq
    index_topk_pattern index_skip_topk_offset is_encoder_decoder label2id layer_types
    first_k_dense_replace model_type moe_layer_freq moe_router_dtype num_key_value_heads
    output_attentions output_hidden_states output_router_logits pretraining_tp problem_type
    qk_head_dim return_dict rope_parameters rope_scaling rope_theta torch_dtype
    transformers_version use_cache
    """.split()
)

# Keys with one value that this library computes. Another value means another network.
_FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "mlp_bias": (False,),
    "swiglu_limit": (),
    "compression_config": (),
}

_POSITIVE_INTS = """
    vocab_size hidden_size intermediate_size moe_intermediate_size num_hidden_layers
    num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group index_topk
    index_n_heads index_head_dim max_position_embeddings
""".split()
_POSITIVE_FLOATS = """
    routed_scaling_factor rope_theta rms_norm_eps latent_norm_eps initializer_range
""".split()
_BOOLS = """
    norm_topk_prob index_share_for_mtp_iteration rope_interleave indexer_rope_interleave
    attention_bias tie_word_embeddings
""".split()
_QUANTIZATION_KEYS = frozenset(
    """
    quant_method fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers
    scale_fmt expert_dtype
    """.split()
)
_DTYPES = ("bfloat16", "float16", "float32")
_INDEXER_KINDS = {"F": "full", "S": "shared", "full": "full", "shared": "shared"}


def _require(holds: bool, field: str, value: object, rule: str) -> None:
    if not holds:
        raise ValueError(f"{field}={value!r}: {rule}")


def _is_int(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationConfig:
    """How a checkpoint's linear weights are stored: E4M3 values, one fp32 scale per 2-D block.

    `weight_block_size` is (rows, columns) of a block; the last block of a side may be partial.
    `modules_to_not_convert` is the file's own list. It is a hint only: the released GLM-5.3 list
    names a module that does not exist, so what is quantised is decided by which scales are there.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    modules_to_not_convert: tuple[str, ...] = ()
    fmt: str = "e4m3"
    activation_scheme: str = "dynamic"

    def __post_init__(self) -> None:
        prefix, block = "quantization_config.", self.weight_block_size
        ok = isinstance(block, tuple) and len(block) == 2 and all(_is_int(n, 1) for n in block)
        _require(ok, prefix + "weight_block_size", block, "must be two positive integers")
        _require(self.fmt == "e4m3", prefix + "fmt", self.fmt, "only 'e4m3' is read")
        scheme = self.activation_scheme
        _require(scheme == "dynamic", prefix + "activation_scheme", scheme, "must be 'dynamic'")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "QuantizationConfig":
        """Read config.json's `quantization_config`.

        Raises:
            ValueError: any form other than block-scaled FP8, by the name of its `quant_method`.
        """
        _require(isinstance(data, Mapping), "quantization_config", data, "must be an object")
        method, prefix = data.get("quant_method"), "quantization_config."
        if method != "fp8":
            algorithm = data.get("quant_algo") or data.get("format")
            label = f"{method!r} ({algorithm})" if algorithm else repr(method)
            raise ValueError(
                f"{prefix}quant_method={label} is not supported: only 'fp8' with E4M3 block scales "
                "(weight_block_size) is read"
            )
        for name, allowed in (("scale_fmt", ("float", "ue8m0")), ("expert_dtype", ("fp8",))):
            value = data.get(name)
            _require(value in (None, *allowed), prefix + name, value, f"must be in {allowed}")
        block, skip = data.get("weight_block_size"), data.get("modules_to_not_convert")
        _require(_is_list(block), prefix + "weight_block_size", block, "must be [rows, columns]")
        return cls(
            weight_block_size=tuple(block),  # pyright: ignore[reportArgumentType]
            modules_to_not_convert=tuple(
                data.get("ignored_layers") or () if skip is None else skip
            ),
            fmt=data.get("fmt", "e4m3"),
            activation_scheme=data.get("activation_scheme", "dynamic"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The `quantization_config` object of a config.json."""
        return {
            "quant_method": "fp8",
            "fmt": self.fmt,
            "activation_scheme": self.activation_scheme,
            "weight_block_size": list(self.weight_block_size),
            "modules_to_not_convert": list(self.modules_to_not_convert),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GLM53Config:
    """Every number of the network, under config.json's names. Validated on construction.

    Sizes and counts are positive ints. Differences from the file:

    - `indexer_types` and `mlp_layer_types` are always resolved, one entry a main layer.
    - `eos_token_id` is a tuple, empty when the file names none.
    - `latent_norm_eps` (ours) is the eps of `q_a_layernorm` and `kv_a_layernorm`: transformers uses
      1e-6 there whatever `rms_norm_eps` says, vLLM and SGLang use `rms_norm_eps`.
    - `rope_interleave` and `indexer_rope_interleave` default to True, each by itself: every GLM-5.x
      checkpoint rotates adjacent pairs in both places and transformers does so whatever the
      file says. (Half-split is what DeepSeek-V3.2's indexer uses, which is another model_type.)
    - `num_nextn_predict_layers` defaults to 0, `index_share_for_mtp_iteration` to False.

    Raises:
        ValueError: an impossible or unsupported value, with field and value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    index_share_for_mtp_iteration: bool = False
    rope_theta: float
    rope_interleave: bool = True
    indexer_rope_interleave: bool = True
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_nextn_predict_layers: int = 0
    dtype: str = "bfloat16"
    quantization_config: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        self._check_types()
        self._check_schedules()
        self._check_attention()
        self._check_experts()
        self._check_tokens()

    def _check_types(self) -> None:
        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            _require(_is_int(value, 1), name, value, "must be a positive integer")
        for name in _POSITIVE_FLOATS:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            ok = number and math.isfinite(value) and value > 0
            _require(ok, name, value, "must be a positive finite number")
        for name in _BOOLS:
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "must be true or false")
        mtp = self.num_nextn_predict_layers
        _require(_is_int(mtp) and mtp <= 1, "num_nextn_predict_layers", mtp, "must be 0 or 1")
        act, dtype = self.hidden_act, self.dtype
        _require(act == "silu", "hidden_act", act, "only 'silu' is supported")
        _require(dtype in _DTYPES, "dtype", dtype, f"must be one of {', '.join(_DTYPES)}")

    def _check_schedules(self) -> None:
        for name, allowed in (
            ("indexer_types", ("full", "shared")),
            ("mlp_layer_types", ("dense", "sparse")),
        ):
            types, layers = getattr(self, name), self.num_hidden_layers
            ok = isinstance(types, tuple) and all(kind in allowed for kind in types)
            _require(ok, name, types, f"must be a tuple of {allowed[0]!r} and {allowed[1]!r}")
            rule = f"has {len(types)} entries for num_hidden_layers={layers}"
            _require(len(types) == layers, name, types, rule)
        types = self.indexer_types
        _require(types[0] == "full", "indexer_types", types, "layer 0 has nothing to share")

    def _check_attention(self) -> None:
        rope, index = self.qk_rope_head_dim, self.index_head_dim
        _require(rope % 2 == 0, "qk_rope_head_dim", rope, "must be even: RoPE rotates pairs")
        rule = f"must hold the rotated part, qk_rope_head_dim={rope}"
        _require(index >= rope, "index_head_dim", index, rule)
        _require(not self.attention_bias, "attention_bias", True, "biases are not supported")

    def _check_experts(self) -> None:
        groups, experts = self.n_group, self.n_routed_experts
        group_size, rest = divmod(experts, groups)
        _require(rest == 0, "n_group", groups, f"must divide n_routed_experts={experts}")
        rule = "a group is ranked by its best two experts, and has only one"
        _require(groups == 1 or group_size >= 2, "n_group", groups, rule)
        kept = self.topk_group
        _require(kept <= groups, "topk_group", kept, f"must be at most n_group={groups}")
        rule = f"only {kept * group_size} experts are kept by topk_group={kept}"
        chosen = self.num_experts_per_tok
        _require(chosen <= kept * group_size, "num_experts_per_tok", chosen, rule)

    def _check_tokens(self) -> None:
        eos, rule = self.eos_token_id, f"must be a token id below vocab_size={self.vocab_size}"
        _require(isinstance(eos, tuple), "eos_token_id", eos, "must be a tuple of token ids")
        single = (("bos_token_id", self.bos_token_id), ("pad_token_id", self.pad_token_id))
        ids = [(name, value) for name, value in single if value is not None]
        for name, value in ids + [("eos_token_id", value) for value in eos]:
            _require(_is_int(value) and value < self.vocab_size, name, value, rule)

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head: nope part, then rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores. Default RoPE has no further correction."""
        return self.qk_head_dim**-0.5

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Ascending ids of the main layers that own an indexer (the MTP layer not included)."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    @property
    def mtp_layer(self) -> int | None:
        """Id of the MTP layer (`num_hidden_layers`), None where the checkpoint has none."""
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    def is_full(self, layer: int) -> bool:
        """Whether `layer` owns an indexer. The MTP layer always does."""
        return layer == self.mtp_layer or self.indexer_types[self._main_layer(layer)] == "full"

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts. The MTP layer's always is."""
        return layer == self.mtp_layer or self.mlp_layer_types[self._main_layer(layer)] == "sparse"

    def _main_layer(self, layer: int) -> int:
        if not 0 <= layer < self.num_hidden_layers:
            raise IndexError(f"layer={layer}: the model has {self.num_hidden_layers} main layers")
        return layer

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "GLM53Config":
        """Read `folder/config.json`.

        Raises:
            FileNotFoundError: no config.json in `folder`.
            ValueError: not JSON, another architecture, an unsupported quantised form, or a bad
                value: with file or field.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"no config.json in {str(folder)!r}")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path}: must hold a JSON object, it holds {type(data).__name__}")
        # TensorRT Model Optimizer may describe its format here and nowhere in config.json.
        if (path.parent / "hf_quant_config.json").exists():
            raise ValueError(f"hf_quant_config.json in {str(folder)!r}: modelopt is not supported")
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "GLM53Config":
        """Resolve a config.json given as a dict. Warns once, naming every unknown key.

        Raises:
            ValueError: see the class, and every required key that is missing, all at once.
        """
        _require(isinstance(data, Mapping), "config", data, "must be a mapping")
        _check_architecture(data)
        quantization = data.get("quantization_config")
        if quantization is not None:
            quantization = QuantizationConfig.from_dict(quantization)
        for name, allowed in _FIXED_KEYS.items():
            value = data.get(name)
            rule = f"only {allowed[0]!r} is supported" if allowed else "not supported"
            _require(value is None or value in allowed, name, value, rule)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        derived = {"indexer_types", "mlp_layer_types", "rope_theta"}
        required = {n for n, f in fields.items() if f.default is dataclasses.MISSING} - derived
        missing = [n for n in fields if n in required and data.get(n) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        values = {n: data[n] for n in fields if data.get(n) is not None}
        layers = data["num_hidden_layers"]
        _require(_is_int(layers, 1), "num_hidden_layers", layers, "must be a positive integer")
        values |= {
            "indexer_types": _indexer_types(data),
            "mlp_layer_types": _mlp_layer_types(data),
            "rope_theta": _rope_theta(data),
            "quantization_config": quantization,
        }
        eos = data.get("eos_token_id")
        values["eos_token_id"] = () if eos is None else tuple(eos) if _is_list(eos) else (eos,)
        if data.get("torch_dtype") is not None:
            dtype, old = values.setdefault("dtype", data["torch_dtype"]), data["torch_dtype"]
            _require(dtype == old, "torch_dtype", old, f"contradicts dtype={dtype!r}")
        config = cls(**values)
        width = data.get("qk_head_dim")
        rule = f"qk_nope_head_dim + qk_rope_head_dim is {config.qk_head_dim}"
        _require(width in (None, config.qk_head_dim), "qk_head_dim", width, rule)
        unknown = sorted(set(data) - set(fields) - set(_FIXED_KEYS) - _IRRELEVANT_KEYS)
        inner = sorted(set(data.get("quantization_config") or ()) - _QUANTIZATION_KEYS)
        unknown += [f"quantization_config.{key}" for key in inner]
        if unknown:
            warnings.warn(f"config.json keys not used: {', '.join(unknown)}", stacklevel=2)
        return config

    def to_dict(self) -> dict[str, Any]:
        """A config.json that transformers and `from_dict` read, as plain JSON values.

        Keys that transformers would otherwise fill with a default of its own (the head counts and
        head_dim of its attention base class, the ids) are always written.
        """
        data: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            data[field.name] = list(value) if isinstance(value, tuple) else value
        data["rope_parameters"] = {"rope_theta": data.pop("rope_theta"), "rope_type": "default"}
        data["num_key_value_heads"] = self.num_attention_heads
        data["head_dim"] = self.qk_rope_head_dim
        data["qk_head_dim"] = self.qk_head_dim
        data["scoring_func"], data["topk_method"] = "sigmoid", "noaux_tc"
        if self.quantization_config is None:
            del data["quantization_config"]
        else:
            data["quantization_config"] = self.quantization_config.to_dict()
        return data


def _check_architecture(data: Mapping[str, Any]) -> None:
    model_type, names = data.get("model_type"), data.get("architectures")
    flash = " (GLM-5.3-Flash is a different network)" if model_type == "glm5_next" else ""
    rule = f"only {MODEL_TYPE!r} is supported{flash}"
    _require(model_type == MODEL_TYPE, "model_type", model_type, rule)
    ok = names is None or (_is_list(names) and list(names) == [ARCHITECTURE])
    _require(ok, "architectures", names, f"only [{ARCHITECTURE!r}] is supported")


def _indexer_types(data: Mapping[str, Any]) -> tuple[str, ...]:
    """indexer_types, else index_topk_pattern, else the freq/offset schedule, else all full."""
    for name in ("indexer_types", "index_topk_pattern"):
        pattern = data.get(name)
        if pattern is not None:
            ok = isinstance(pattern, str | list | tuple)
            _require(ok, name, pattern, "must be a list of layer kinds or a string of F and S")
            for kind in pattern:
                ok = isinstance(kind, str) and kind in _INDEXER_KINDS
                _require(ok, name, kind, "must be 'full' (F) or 'shared' (S)")
            return tuple(_INDEXER_KINDS[kind] for kind in pattern)
    freq, offset = data.get("index_topk_freq"), data.get("index_skip_topk_offset")
    # transformers, vLLM and SGLang agree on an absent offset: it means 2.
    freq, offset = 1 if freq is None else freq, 2 if offset is None else offset
    _require(_is_int(freq, 1), "index_topk_freq", freq, "must be a positive integer")
    _require(_is_int(offset), "index_skip_topk_offset", offset, "must be an integer >= 0")
    layers = range(data["num_hidden_layers"])
    return tuple("shared" if max(i - offset + 1, 0) % freq else "full" for i in layers)


def _mlp_layer_types(data: Mapping[str, Any]) -> tuple[str, ...]:
    """mlp_layer_types, else `first_k_dense_replace` dense layers, then one in `moe_layer_freq`."""
    types = data.get("mlp_layer_types")
    if types is not None:
        _require(_is_list(types), "mlp_layer_types", types, "must be a list")
        return tuple(types)
    first, freq = data.get("first_k_dense_replace"), data.get("moe_layer_freq")
    freq = 1 if freq is None else freq
    rule = "must be an integer >= 0 where mlp_layer_types is absent"
    _require(_is_int(first), "first_k_dense_replace", first, rule)
    _require(_is_int(freq, 1), "moe_layer_freq", freq, "must be a positive integer")
    layers = range(data["num_hidden_layers"])
    return tuple("sparse" if i >= int(first or 0) and i % freq == 0 else "dense" for i in layers)


def _rope_theta(data: Mapping[str, Any]) -> float:
    """theta from wherever it stands; a conflict, an absence or scaled RoPE is an error."""
    found = {"rope_theta": data["rope_theta"]} if data.get("rope_theta") is not None else {}
    for name in ("rope_parameters", "rope_scaling"):
        parameters = data.get(name)
        if parameters is None:
            continue
        _require(isinstance(parameters, Mapping), name, parameters, "must be an object or null")
        neutral = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
        for key, value in parameters.items():
            if key == "rope_theta" and value is not None:
                found[f"{name}.{key}"] = value
            elif key != "rope_theta":
                ok = key in neutral and value in (None, neutral[key])
                _require(ok, f"{name}.{key}", value, "only default RoPE is supported")
    if not found:
        raise ValueError("rope_theta is missing: neither top-level nor in rope_parameters")
    theta = next(iter(found.values()))
    for name, value in found.items():
        _require(value == theta, name, value, f"contradicts {next(iter(found))}={theta!r}")
    return theta
