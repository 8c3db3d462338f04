#!/usr/bin/env python3
"""Writes the medium checkpoint: random weights of a size at which speed means something.

529 million parameters in bfloat16 (1.06 GB), of which a decoded token meets 248 million (497 MB):
the shape that docs/performance.md measures. 10 layers; layers 0-2 are dense; layers 0, 1, 2 and 6
are full, as GLM-5.3's schedule says (index_topk_freq 4, index_skip_topk_offset 3), the others share
the selection of the last full layer. The same seed and torch version give the same bytes.

This library and transformers load the folder. It has no tokenizer: prompts are ids.
"""

import argparse
import sys
from pathlib import Path

import torch
from roofline import decode_cost

from glm53 import GLM53Config
from glm53.checkpoint import save_transformer
from glm53.model import Transformer

MAX_POSITIONS = 65536


def medium_config(**overrides) -> GLM53Config:
    """Overrides are keys of config.json."""
    data = dict(
        model_type="glm_moe_dsa",
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=10,
        first_k_dense_replace=3,
        num_attention_heads=16,
        q_lora_rank=512,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_routed_experts=32,
        n_shared_experts=1,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        index_topk=512,
        index_n_heads=8,
        index_head_dim=128,
        index_topk_freq=4,
        index_skip_topk_offset=3,
        rope_theta=8_000_000.0,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        eos_token_id=[1],
        pad_token_id=0,
        dtype="bfloat16",
    )
    return GLM53Config.from_dict(data | overrides)


def num_parameters(config: GLM53Config) -> int:
    """Counted on a model without storage."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


@torch.no_grad()
def random_transformer(config: GLM53Config, seed: int) -> Transformer:
    """Every projection keeps the scale of its input: normal(0, 1 / fan_in).

    Attention scores, index scores, router logits and logits then have a standard deviation near 1,
    so attention neither averages over everything nor copies one token. Norm weights are uniform
    in [0.5, 1.5), router biases small.
    """
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(getattr(torch, config.dtype)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            values = 0.05 * torch.randn(tensor.shape, generator=generator)
        elif name.endswith("norm.weight"):
            values = 0.5 + torch.rand(tensor.shape, generator=generator)
        elif name.endswith("norm.bias"):
            values = 0.1 * torch.randn(tensor.shape, generator=generator)
        else:
            fan_in = 1 if name.endswith("embed_tokens.weight") else tensor.shape[-1]
            values = torch.randn(tensor.shape, generator=generator).mul_(fan_in**-0.5)
        tensor.copy_(values)
    return model.eval()


def write(folder: Path, config: GLM53Config, seed: int) -> None:
    save_transformer(random_transformer(config, seed), config, folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = medium_config()
    read = decode_cost(config, context=0, batch=1)
    try:
        write(arguments.folder, config, arguments.seed)
    except (OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{num_parameters(config) / 1e6:.0f}M parameters in {arguments.folder}; a token reads "
        f"{read.weight_bytes / 1e6:.0f} MB of them"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
