"""What a forward must read and compute, and how fast this machine reads and multiplies.

Bytes are those that no implementation can avoid reading from memory: the weights that the rows
meet, each once; the selected latents; the index keys that have to be scored. Activations, logits
and what is written are left out. FLOPs are those of matrix products, 2 for a multiply-add, with
attention in the absorbed form. The floor of a forward is the larger of bytes / read bandwidth and
FLOPs / GEMM rate.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from glm53 import GLM53Config

BANDWIDTH_BYTES = 512 << 20  # far beyond any last-level cache
GEMM_DIM = 2048
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """Of one forward or, added up, of several."""

    weight_bytes: float = 0
    latent_bytes: float = 0
    index_key_bytes: float = 0
    flops: float = 0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.latent_bytes + self.index_key_bytes

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.latent_bytes + other.latent_bytes,
            self.index_key_bytes + other.index_key_bytes,
            self.flops + other.flops,
        )

    def floor_seconds(self, machine: "Machine") -> float:
        return max(self.bytes / machine.bytes_per_second, self.flops / machine.flops_per_second)


@dataclass(frozen=True)
class Machine:
    """Rates measured just now."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class LayerParameters:
    """Elements of a layer. matrices: every row is multiplied by them; vectors: norm weights and
    biases in the model's dtype; fp32: the router's bias; expert: one routed expert."""

    matrices: int
    vectors: int
    fp32: int
    expert: int


def layer_parameters(config: GLM53Config, layer: int) -> LayerParameters:
    hidden, heads = config.hidden_size, config.num_attention_heads
    q_latent, latent = config.q_lora_rank, config.kv_lora_rank
    matrices = hidden * (q_latent + latent + config.qk_rope_head_dim)
    matrices += q_latent * heads * config.qk_head_dim
    matrices += latent * heads * (config.qk_nope_head_dim + config.v_head_dim)
    matrices += heads * config.v_head_dim * hidden
    vectors = 2 * hidden + q_latent + latent
    if config.is_full(layer):
        index_heads, index_dim = config.index_n_heads, config.index_head_dim
        matrices += q_latent * index_heads * index_dim + hidden * (index_dim + index_heads)
        vectors += 2 * index_dim
    if not config.is_sparse(layer):
        return LayerParameters(matrices + 3 * hidden * config.intermediate_size, vectors, 0, 0)
    experts, expert = config.n_routed_experts, 3 * hidden * config.moe_intermediate_size
    matrices += experts * hidden + config.n_shared_experts * expert
    return LayerParameters(matrices, vectors, experts, expert)


def expected_experts(config: GLM53Config, rows: int) -> float:
    """Distinct experts that so many rows are routed to if every choice is equally likely."""
    experts = config.n_routed_experts
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** rows)


def forward_cost(
    config: GLM53Config,
    chunks: Sequence[tuple[int, int]],
    *,
    head_rows: int,
    experts_read: float | None = None,
    itemsize: int = 2,
    cache_itemsize: int = 2,
) -> Cost:
    """One forward over chunks, one per request: (tokens in the cache before, new rows).

    head_rows: rows whose logits are computed. experts_read: distinct experts read in a MoE layer,
    on average; None is `expected_experts`. Of a chunk with several rows the latents that its last
    row selects are counted: the rows before may select the same.
    """
    rows = sum(new for _, new in chunks)
    if experts_read is None:
        experts_read = expected_experts(config, rows)
    topk, heads, latent = config.index_topk, config.num_attention_heads, config.kv_lora_rank
    row_dim = latent + config.qk_rope_head_dim
    visible = [length for past, new in chunks for length in range(past + 1, past + new + 1)]
    selected = sum(min(length, topk) for length in visible)
    scored = sum(length for length in visible if length > topk)
    attention_flops = 2 * selected * heads * (row_dim + latent)
    index_flops = 2 * scored * config.index_n_heads * (config.index_head_dim + 1)
    latents_read = sum(min(past + new, topk) for past, new in chunks)
    keys_read = sum(past + new for past, new in chunks if past + new > topk)

    hidden, vocabulary = config.hidden_size, config.vocab_size
    elements: float = hidden * (rows + 1)  # embeddings of the rows, final norm
    elements += vocabulary * hidden * (head_rows > 0)
    flops: float = 2 * head_rows * vocabulary * hidden
    fp32 = full_layers = 0
    for layer in range(config.num_hidden_layers):
        parameters = layer_parameters(config, layer)
        elements += parameters.matrices + parameters.vectors + experts_read * parameters.expert
        fp32 += parameters.fp32
        flops += 2 * rows * parameters.matrices
        flops += 2 * rows * config.num_experts_per_tok * parameters.expert
        flops += attention_flops + index_flops * config.is_full(layer)
        full_layers += config.is_full(layer)
    return Cost(
        weight_bytes=elements * itemsize + 4 * fp32,
        latent_bytes=config.num_hidden_layers * latents_read * row_dim * cache_itemsize,
        index_key_bytes=full_layers * keys_read * config.index_head_dim * cache_itemsize,
        flops=flops,
    )


def decode_cost(config: GLM53Config, context: int, batch: int, **options) -> Cost:
    """One token for each of `batch` requests that have `context` tokens in the cache."""
    return forward_cost(config, [(context, 1)] * batch, head_rows=batch, **options)


def prefill_cost(config: GLM53Config, length: int, chunk: int, **options) -> Cost:
    """A prompt in chunks of rows, up to its first new token."""
    total = Cost()
    for past in range(0, length, chunk):
        new = min(chunk, length - past)
        last = past + new == length
        total += forward_cost(config, [(past, new)], head_rows=int(last), **options)
    return total


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fastest(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times)


class Probe:
    """Measures `Machine` with torch's current number of threads, best of 3; keeps its buffers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.buffer = torch.ones(BANDWIDTH_BYTES // 4, device=device)
        self.matrix = torch.randn(GEMM_DIM, GEMM_DIM, device=device).to(dtype)
        self.measure()  # the first use of a shape prepares kernels

    def measure(self) -> Machine:
        return Machine(
            self.buffer.nbytes / _fastest(self.buffer.sum, self.device),
            2 * GEMM_DIM**3 / _fastest(lambda: self.matrix @ self.matrix, self.device),
        )
