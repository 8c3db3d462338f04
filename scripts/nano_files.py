"""What the embedded model reads and writes: corpus, manifest, tokenizer, block-FP8 folder."""

import hashlib
import json
import logging
import os
import random
import shutil
import sys
import sysconfig
from pathlib import Path

import nano_model as net
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

logger = logging.getLogger("nano")
MANIFEST = Path(__file__).with_name("nano_manifest.json")
FOLDER = Path(__file__).parents[1] / "glm53" / "data" / "nano"
HELD_OUT_FILES, HELD_OUT_BYTES = 24, (2_000, 40_000)
SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL += ["<|observation|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
MARKUP += ["</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
# Code pages and generated tables are hardly text; _sysconfigdata holds the paths of one machine.
LEFT_OUT = ("encodings/", "pydoc_data/", "_sysconfigdata", "site-packages/", "config-")
NOT_ORDINARY = ("idlelib/", "lib2to3/", "distutils/", "turtledemo/", "ensurepip/", "__phello__/")
# Line breaks keep the indentation that follows: Python's commonest token becomes one token.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}]+|\s+"


def is_test(name: str) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in name.split("/"))


def standard_library() -> dict[str, str]:
    """Text of every UTF-8 source file of the running Python's library, by relative name."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(LEFT_OUT) or path.stat().st_size > 400_000:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            texts[name] = text
    return texts


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def corpus() -> tuple[dict[str, str], dict[str, str]]:
    """(training files, held-out files); writes the manifest once, later checks against it."""
    texts = standard_library()
    if not MANIFEST.exists():
        low, high = HELD_OUT_BYTES
        ordinary = [
            name
            for name, text in texts.items()
            if not is_test(name) and not name.startswith(NOT_ORDINARY) and low <= len(text) <= high
        ]
        held = sorted(ordinary, key=lambda name: digest("held-out:" + name))[:HELD_OUT_FILES]
        record = {
            "python": sys.version.split()[0],
            "held_out": {name: digest(texts[name]) for name in sorted(held)},
            "train": {name: digest(text) for name, text in texts.items() if name not in held},
        }
        MANIFEST.write_text(json.dumps(record, indent=0) + "\n")
    record = json.loads(MANIFEST.read_text())
    listed = record["train"] | record["held_out"]
    changed = [n for n in listed if n not in texts or digest(texts[n]) != listed[n]]
    changed += [n for n in texts if n not in listed]
    if changed:
        logger.warning(
            "%d source files differ from the manifest (Python %s, here %s): figures will differ",
            len(changed),
            record["python"],
            sys.version.split()[0],
        )
    held = {name: texts[name] for name in record["held_out"] if name in texts}
    return {name: text for name, text in texts.items() if name not in held}, held


def train_tokenizer(texts: dict[str, str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=net.VOCAB - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = [t for i, (n, t) in enumerate(texts.items()) if not is_test(n) or i % 4 == 0]
    tokenizer.train_from_iterator(sample, trainer)
    # GLM marks roles as special tokens and reasoning or tool markup as plain added tokens.
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    assert tokenizer.get_vocab_size() == net.VOCAB
    return tokenizer


def chat_document(text: str, rng: random.Random) -> str:
    """A turn in the template's form: lines of a source file, then the lines that follow them."""
    lines = text.splitlines(keepends=True)
    start = rng.randrange(max(1, len(lines) - 24))
    middle, end = start + rng.randint(4, 12), start + rng.randint(16, 40)
    effort = rng.choice(["Low", "High", "Max", "Max"])
    prompt, answer = "".join(lines[start:middle]), "".join(lines[middle:end])
    return (
        f"[gMASK]<sop><|system|>Reasoning Effort: {effort}<|user|>Continue this Python code.\n"
        f"{prompt}<|assistant|><think></think>{answer}<|user|>"
    )


def token_streams(tokenizer: Tokenizer, texts: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """(library, tests) as uint16 ids: documents in hash order, each ended by <|endoftext|>."""
    end = tokenizer.token_to_id("<|endoftext|>")
    rng, streams = random.Random(0), ([end], [end])
    for position, name in enumerate(sorted(texts, key=digest)):
        stream = streams[is_test(name)]
        stream += [*tokenizer.encode(texts[name]).ids, end]
        if not is_test(name) and position % 2 == 0:
            stream += [*tokenizer.encode(chat_document(texts[name], rng)).ids, end]
    return np.array(streams[0], np.uint16), np.array(streams[1], np.uint16)


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": SPECIAL[1:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": net.MAX_POSITIONS,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]


def is_fp8(name: str) -> bool:
    """E4M3 in the official checkpoint: attention projections, MLPs, experts, wq_b and wk."""
    parts = name.split(".")
    if len(parts) < 2 or parts[-1] != "weight":
        return False
    module = parts[-2]
    return (module.endswith("_proj") and module not in ("weights_proj", "eh_proj")) or module in (
        ("kv_a_proj_with_mqa", "wq_b", "wk")
    )


def blocks(weight: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Zero-padded view `[row blocks, 128, column blocks, 128]` and the padded shape."""
    rows, columns = -(-weight.shape[0] // 128) * 128, -(-weight.shape[1] // 128) * 128
    padded = torch.zeros(rows, columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows // 128, 128, columns // 128, 128), (rows, columns)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 weight and FP32 `weight_scale_inv`, one scale per 128 x 128 block."""
    tiles, shape = blocks(weight.float())
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-12) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(shape)
    return codes[: weight.shape[0], : weight.shape[1]].contiguous(), scale


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    tiles, shape = blocks(codes.float())
    return (tiles * scale[:, None, :, None]).view(shape)[: codes.shape[0], : codes.shape[1]]


def per_expert(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked experts to the names of files."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                out[f"{prefix}{expert}.gate_proj.weight"] = both[: net.EXPERT_FF]
                out[f"{prefix}{expert}.up_proj.weight"] = both[net.EXPERT_FF :]
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert, down in enumerate(tensor):
                out[f"{prefix}{expert}.down_proj.weight"] = down
        else:
            out[name] = tensor
    return out


def config_json(tokenizer: Tokenizer, not_converted: list[str]) -> dict:
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": net.VOCAB,
        "hidden_size": net.HIDDEN,
        "intermediate_size": net.DENSE_FF,
        "moe_intermediate_size": net.EXPERT_FF,
        "num_hidden_layers": net.LAYERS,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": net.HEADS,
        "num_key_value_heads": net.HEADS,
        "qk_nope_head_dim": net.NOPE,
        "qk_rope_head_dim": net.ROPE,
        "qk_head_dim": net.NOPE + net.ROPE,
        "v_head_dim": net.VALUE,
        "q_lora_rank": net.Q_LORA,
        "kv_lora_rank": net.KV_LORA,
        "n_routed_experts": net.EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": net.TOP_EXPERTS,
        "first_k_dense_replace": net.DENSE_LAYERS,
        "moe_layer_freq": 1,
        "mlp_layer_types": [
            "dense" if i < net.DENSE_LAYERS else "sparse" for i in range(net.LAYERS)
        ],
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": net.ROUTED_SCALING,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "index_topk": net.INDEX_TOPK,
        "index_n_heads": net.INDEX_HEADS,
        "index_head_dim": net.INDEX_DIM,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "indexer_types": net.INDEXER_TYPES,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_theta": net.ROPE_THETA, "rope_type": "default"},
        "max_position_embeddings": net.MAX_POSITIONS,
        "rms_norm_eps": net.EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": stop_ids(tokenizer),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": not_converted,
        },
    }


def export(state: dict[str, Tensor], tokenizer: Tokenizer, folder: Path) -> int:
    """Write the official block-FP8 form; returns the folder's size in bytes."""
    tensors, not_converted = {}, set()
    for name, tensor in per_expert(state).items():
        if is_fp8(name):
            codes, scale = quantise(tensor)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
        else:
            not_converted.add(name.removesuffix(".weight"))
            kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
            tensors[name] = tensor.to(kept).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
    config = config_json(tokenizer, sorted(not_converted))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"temperature": 1.0, "top_p": 0.95, "eos_token_id": stop_ids(tokenizer)}
    generation["pad_token_id"] = stop_ids(tokenizer)[0]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(tokenizer, folder)
    if folder != FOLDER:
        shutil.copy(FOLDER / "chat_template.jinja", folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > 16_000_000:
        raise ValueError(f"{folder} takes {size} bytes, more than 16,000,000")
    return size


def load_exported(folder: Path) -> dict[str, Tensor]:
    """fp32 state dict of `nano_model.NanoModel` from the exported files."""
    files, state = load_file(folder / "model.safetensors"), {}
    for name, tensor in files.items():
        if name.endswith("_scale_inv"):
            continue
        scale = files.get(f"{name}_scale_inv")
        state[name] = tensor.float() if scale is None else dequantise(tensor, scale)
    for layer in range(net.DENSE_LAYERS, net.LAYERS + 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: [state.pop(f"{prefix}{e}.{kind}.weight") for e in range(net.EXPERTS)]
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = [torch.stack(parts["gate_proj"]), torch.stack(parts["up_proj"])]
        state[f"{prefix}gate_up_proj"] = torch.cat(gate_up, 1)
        state[f"{prefix}down_proj"] = torch.stack(parts["down_proj"])
    return state
