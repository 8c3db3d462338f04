"""Small random models, and folders on disk in the form that the official checkpoints have.

What is written here is written from the published tensor table, not with the package's own
checkpoint code, so that a test may use either side as the other's oracle.
"""

import dataclasses
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from glm53.config import GLM53Config, QuantizationConfig

E4M3_MAX = 448.0

# The modules that the FP8 repositories store as E4M3, by their last name. Everything else (norms,
# router, indexer.weights_proj, eh_proj, embedding, head) stays in the checkpoint's dtype.
E4M3_MODULES = frozenset(
    """
    q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj wq_b wk gate_proj up_proj down_proj
    """.split()
)


def tiny_config(**overrides) -> GLM53Config:
    """4 layers (1 dense, 3 MoE; the third shares), MTP; no size a power of two, index_topk 7.

    Overrides are fields of GLM53Config. Give `indexer_types` and `mlp_layer_types` with
    `num_hidden_layers`.
    """
    fields = dict(
        vocab_size=131,
        hidden_size=60,
        intermediate_size=44,
        moe_intermediate_size=22,
        num_hidden_layers=4,
        num_attention_heads=3,
        q_lora_rank=36,
        kv_lora_rank=20,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=14,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        index_topk=7,
        index_n_heads=18,
        index_head_dim=14,
        indexer_types=("full", "full", "shared", "full"),
        mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
        index_share_for_mtp_iteration=True,
        rope_theta=10_000.0,
        max_position_embeddings=4099,
        rms_norm_eps=1e-5,
        eos_token_id=(3, 5, 7),
        pad_token_id=3,
        num_nextn_predict_layers=1,
        dtype="float32",
    )
    return GLM53Config(**(fields | overrides))


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Norm weights uniform(0.2, 2), everything else normal(0, 0.15), router bias 7 + 0.1 normal.

    The values do not depend on the model's dtype or device, except for rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shape = tensor.shape
        if name.endswith("e_score_correction_bias"):
            values = 7 + 0.1 * torch.randn(shape, generator=generator)
        elif name.endswith("norm.weight") and tensor.dim() == 1:
            values = torch.empty(shape).uniform_(0.2, 2, generator=generator)
        else:
            values = 0.15 * torch.randn(shape, generator=generator)
        tensor.copy_(values)
    return model


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """E4M3 values and fp32 scales [ceil(rows / block), ceil(columns / block)]: block max / 448."""
    (rows, columns), weight = weight.shape, weight.float()
    padded = F.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-8) / E4M3_MAX
    scaled = (blocks / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return values.to(torch.float8_e4m3fn), scales


def disk_tensors(
    model: nn.Module,
    *,
    fp8: bool = False,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Every tensor of `model` under its name on disk: per expert; FP8 with its scales."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu()
        if ".mlp.experts." in name:
            prefix, kind = name.rsplit(".", 1)
            for e, expert in enumerate(tensor):
                if kind == "gate_up_proj":
                    half = expert.shape[0] // 2
                    tensors[f"{prefix}.{e}.gate_proj.weight"] = expert[:half]
                    tensors[f"{prefix}.{e}.up_proj.weight"] = expert[half:]
                else:
                    tensors[f"{prefix}.{e}.down_proj.weight"] = expert
        else:
            tensors[name] = tensor
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if name.endswith("e_score_correction_bias"):
            written[name] = tensor.float().clone()
        elif fp8 and kind == "weight" and module.rsplit(".", 1)[-1] in E4M3_MODULES:
            written[name], written[f"{module}.weight_scale_inv"] = quantise(tensor, block)
        else:
            written[name] = tensor.to(dtype, copy=True).contiguous()
    return written


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> dict[str, str]:
    """Tensors dealt round-robin to `shards` files, with an index if more than one: the weight map.

    Dealing separates a weight from its scale and the experts of a layer from each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return dict.fromkeys(tensors, "model.safetensors")
    weight_map = {}
    names = list(tensors)
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def write_config(
    folder: Path,
    config: GLM53Config,
    *,
    fp8: bool = False,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> GLM53Config:
    """Write config.json as the official one describes itself; returns the config it describes."""
    quantization = None
    if fp8:
        # The released list names `indexers_proj`, which is no tensor, and not weights_proj.
        skip = ("lm_head", "model.embed_tokens", "model.layers.0.self_attn.indexers_proj")
        quantization = QuantizationConfig(weight_block_size=block, modules_to_not_convert=skip)
    name = str(dtype).removeprefix("torch.")
    config = dataclasses.replace(config, dtype=name, quantization_config=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2))
    return config


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    config: GLM53Config,
    *,
    fp8: bool = False,
    block: tuple[int, int] = (128, 128),
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """config.json and safetensors of `model` in `folder`; returns the tensors as written."""
    write_config(folder, config, fp8=fp8, block=block, dtype=dtype)
    tensors = disk_tensors(model, fp8=fp8, block=block, dtype=dtype)
    write_shards(folder, tensors, shards)
    return tensors


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' model of a checkpoint, in eval mode.

    Eager experts and attention: its grouped GEMM refuses rows that are no multiple of 16 bytes.
    """
    from transformers import GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()
