#!/usr/bin/env python3
"""Time of every operator at the shapes of one layer, with its share of the machine's roofline.

Two models: `medium` (scripts/make_medium.py) and `glm-5.3`. Rows are decoding requests, one row
each. Inputs of successive calls differ and are together larger than any cache, as in a model,
where other layers' weights come in between.

Columns: median time; bytes that must be read and written over it; FLOPs over it; the floor, which
is the larger of bytes / read bandwidth and FLOPs / GEMM rate, both measured before every operator;
and time over floor.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_report import describe_machine
from make_medium import medium_config
from roofline import Probe, synchronise
from torch import Tensor

from glm53 import GLM53Config
from glm53.cache import PAGE_SIZE
from glm53.ops import cache_write, index_select, logical_to_physical, routed_experts, sparse_mla

ROTATED_BYTES = 256 << 20  # inputs of successive calls; several times a last-level cache
WARM_UP_CALLS = 2
PAGING = dict(page_size=PAGE_SIZE, block_stride=PAGE_SIZE)
OPS = (
    "linear",
    "routed_experts",
    "index_select",
    "logical_to_physical",
    "sparse_mla",
    "cache_write",
)


def glm53_config() -> GLM53Config:
    """The shapes of GLM-5.3 that a layer has; fewer layers."""
    return medium_config(
        vocab_size=154880,
        hidden_size=6144,
        intermediate_size=12288,
        moe_intermediate_size=2048,
        num_attention_heads=64,
        q_lora_rank=2048,
        n_routed_experts=256,
        index_topk=2048,
        index_n_heads=32,
        max_position_embeddings=1048576,
    )


MODELS: dict[str, Callable[[], GLM53Config]] = {"medium": medium_config, "glm-5.3": glm53_config}


@dataclass
class Case:
    """calls: endless, each ready to run. bytes: read and written by one call; flops: of one."""

    op: str
    shape: str
    calls: Iterator[Callable[[], object]]
    bytes: float
    flops: float


@dataclass(frozen=True)
class Sizes:
    config: GLM53Config
    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def copies(self, nbytes: int) -> int:
        """How many tensors of so many bytes a cache cannot hold."""
        return -(-ROTATED_BYTES // nbytes)


def linear_cases(sizes: Sizes, rows: int) -> Iterator[Case]:
    """The projections of a layer and the head, as (out, in)."""
    config = sizes.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    shapes = {
        "q_a_proj": (config.q_lora_rank, hidden),
        "q_b_proj": (heads * config.qk_head_dim, config.q_lora_rank),
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "o_proj": (hidden, heads * config.v_head_dim),
        "indexer.wq_b": (config.index_n_heads * config.index_head_dim, config.q_lora_rank),
        "gate_proj": (config.intermediate_size, hidden),
        "down_proj": (hidden, config.intermediate_size),
        "shared_experts.gate_proj": (config.moe_intermediate_size, hidden),
        "lm_head": (config.vocab_size, hidden),
    }
    for name, (out_dim, in_dim) in shapes.items():
        yield linear_case(sizes, name, rows, out_dim, in_dim)


def linear_case(sizes: Sizes, name: str, rows: int, out_dim: int, in_dim: int) -> Case:
    weight_bytes = out_dim * in_dim * sizes.dtype.itemsize
    weights = [sizes.random(out_dim, in_dim) for _ in range(sizes.copies(weight_bytes))]
    x = sizes.random(rows, in_dim)
    return Case(
        "linear",
        f"{name} {out_dim} x {in_dim}, {rows} rows",
        (lambda w=w: F.linear(x, w) for w in itertools.cycle(weights)),
        weight_bytes + rows * (out_dim + in_dim) * sizes.dtype.itemsize,
        2 * rows * out_dim * in_dim,
    )


def routed_experts_cases(sizes: Sizes, rows: int) -> Iterator[Case]:
    """Experts in memory: as many as rotation needs, at most the model's; every call draws anew."""
    config = sizes.config
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    chosen = config.num_experts_per_tok
    expert_bytes = 3 * hidden * inner * sizes.dtype.itemsize
    held = min(config.n_routed_experts, max(2 * chosen, sizes.copies(expert_bytes)))
    gate_up, down = sizes.random(held, 2 * inner, hidden), sizes.random(held, hidden, inner)
    x = sizes.random(rows, hidden)
    weights = torch.full((rows, chosen), 1 / chosen, device=sizes.device)
    order = torch.stack([torch.randperm(held) for _ in range(64 * rows)])[:, :chosen]
    draws = order.view(64, rows, chosen).to(sizes.device)
    distinct = statistics.mean(draw.unique().numel() for draw in draws)
    yield Case(
        "routed_experts",
        f"{held} of {config.n_routed_experts} experts, top {chosen}, {hidden} x {inner}, "
        f"{rows} rows",
        (
            lambda ids=ids: routed_experts(x, gate_up, down, ids, weights)
            for ids in itertools.cycle(draws)
        ),
        distinct * expert_bytes + 2 * rows * hidden * sizes.dtype.itemsize,
        2 * rows * chosen * 3 * hidden * inner,
    )


def paged_pool(sizes: Sizes, rows: int, context: int, dim: int) -> tuple[Tensor, list[Tensor]]:
    """Cache rows of several sets of requests, and each set's block table; pages are shuffled."""
    pages = -(-context // PAGE_SIZE)
    sets = sizes.copies(rows * pages * PAGE_SIZE * dim * sizes.dtype.itemsize)
    order = torch.randperm(sets * rows * pages).view(sets, rows, pages)
    pool = sizes.random(sets * rows * pages * PAGE_SIZE, dim)
    return pool, list(order.to(sizes.device, torch.int32))


def index_cases(sizes: Sizes, rows: int, context: int) -> Iterator[Case]:
    """Rows that decode, one per request, each with `context` visible keys."""
    config, itemsize = sizes.config, sizes.dtype.itemsize
    heads, dim, topk = config.index_n_heads, config.index_head_dim, config.index_topk
    keys, tables = paged_pool(sizes, rows, context, dim)
    queries, weights = sizes.random(rows, heads, dim), torch.randn(rows, heads).to(sizes.device)
    request = torch.arange(rows, dtype=torch.int32, device=sizes.device)
    lengths = torch.full_like(request, context)
    scored = rows * context * (context > topk)
    options = dict(index_topk=topk, **PAGING)
    yield Case(
        "index_select",
        f"{heads} x {dim}, {rows} rows, context {context}",
        (
            lambda t=t: index_select(queries, weights, keys, t, request, lengths, **options)
            for t in itertools.cycle(tables)
        ),
        scored * dim * itemsize + rows * topk * 4,
        2 * scored * heads * (dim + 1),
    )


def latent_cases(sizes: Sizes, rows: int, context: int) -> Iterator[Case]:
    """The same rows, after they have selected."""
    config, itemsize = sizes.config, sizes.dtype.itemsize
    topk, heads = min(config.index_topk, context), config.num_attention_heads
    latent, dim = config.kv_lora_rank, config.kv_lora_rank + config.qk_rope_head_dim
    pool, tables = paged_pool(sizes, rows, context, dim)
    request = torch.arange(rows, dtype=torch.int32, device=sizes.device)
    chosen = [torch.randperm(context)[:topk].sort().values for _ in range(rows)]
    logical = torch.stack(chosen).to(sizes.device, torch.int32)
    yield Case(
        "logical_to_physical",
        f"top {topk}, {rows} rows, context {context}",
        (
            lambda t=t: logical_to_physical(logical, t, request, **PAGING)
            for t in itertools.cycle(tables)
        ),
        rows * (2 * topk + tables[0].shape[1] + 1) * 4,
        0,
    )
    selections = [logical_to_physical(logical, t, request, **PAGING) for t in tables]
    queries = sizes.random(rows, heads, dim)
    options = dict(value_dim=latent, scale=config.softmax_scale)
    yield Case(
        "sparse_mla",
        f"{heads} heads, top {topk}, {rows} rows, context {context}",
        (lambda s=s: sparse_mla(queries, pool, *s, **options) for s in itertools.cycle(selections)),
        rows * (topk * dim + heads * (dim + latent)) * itemsize,
        2 * rows * topk * heads * (dim + latent),
    )
    new_rows = sizes.random(rows, dim)
    slots = [torch.randperm(pool.shape[0])[:rows].to(sizes.device) for _ in range(16)]
    yield Case(
        "cache_write",
        f"{dim}, {rows} rows, pool of {pool.shape[0]}",
        (lambda s=s: cache_write(new_rows, s, pool) for s in itertools.cycle(slots)),
        2 * rows * dim * itemsize,
        0,
    )


def cases(arguments: argparse.Namespace, sizes: Sizes) -> Iterator[Case]:
    for rows in arguments.rows:
        if "linear" in arguments.ops:
            yield from linear_cases(sizes, rows)
        if "routed_experts" in arguments.ops:
            yield from routed_experts_cases(sizes, rows)
        for context in arguments.contexts:
            if "index_select" in arguments.ops:
                yield from index_cases(sizes, rows, context)
            yield from (c for c in latent_cases(sizes, rows, context) if c.op in arguments.ops)


def measure(case: Case, probe: Probe, calls: int) -> dict:
    machine = probe.measure()
    times = []
    for call in itertools.islice(case.calls, WARM_UP_CALLS + calls):
        synchronise(probe.device)
        start = time.perf_counter()
        call()
        synchronise(probe.device)
        times.append(time.perf_counter() - start)
    times = times[WARM_UP_CALLS:]
    floor = max(case.bytes / machine.bytes_per_second, case.flops / machine.flops_per_second)
    return {
        "op": case.op,
        "shape": case.shape,
        "bytes": case.bytes,
        "flops": case.flops,
        **asdict(machine),
        "seconds": times,
        "median_seconds": statistics.median(times),
        "floor_seconds": floor,
        "times_floor": statistics.median(times) / floor,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["medium"])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192], help="of a row")
    parser.add_argument("--calls", type=int, default=10, help="timed calls of each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    threads = 1 if arguments.threads is None else arguments.threads
    if min(*arguments.rows, *arguments.contexts, arguments.calls, threads) < 1:
        parser.error("rows, contexts, calls and threads must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    probe = Probe(device, dtype)
    results = []
    print("| model | operator | shape | us | GB/s | GFLOP/s | floor us | us / floor |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in arguments.models:
        sizes = Sizes(MODELS[model](), device, dtype)
        for case in cases(arguments, sizes):
            result = {"model": model, **measure(case, probe, arguments.calls)}
            results.append(result)
            seconds = result["median_seconds"]
            print(
                f"| {model} | {case.op} | {case.shape} | {1e6 * seconds:,.0f} "
                f"| {case.bytes / seconds / 1e9:.1f} | {case.flops / seconds / 1e9:.1f} "
                f"| {1e6 * result['floor_seconds']:,.1f} | {result['times_floor']:.1f} |",
                flush=True,
            )
    if arguments.json is not None:
        settings = {n: str(v) if isinstance(v, Path) else v for n, v in vars(arguments).items()}
        settings["threads"] = torch.get_num_threads()
        report = {"machine": describe_machine(), "versions": {"torch": torch.__version__}}
        report |= {"settings": settings, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
