#!/usr/bin/env python3
"""What compiling costs: by depth of the network (--layers), and at the start of a model (--model).

--layers 14 78: the decoder of one row, of GLM-5.3's schedule of layers with small dims, for each
depth in a process of its own and with empty caches. Columns: pieces and how many of them are
distinct, then seconds of Dynamo (until it has the graph), of rewrites and split, and of Inductor,
whose own start is paid before.

--model FOLDER: `from_pretrained(FOLDER)` and `engine()`, then the first token, each in a process of
its own: eager, compiled with an empty `compile_cache`, compiled with what that run left there.
Columns: seconds of each part; graphs (pieces, and the index scores) that Inductor compiled; those
that its cache had; and of these the ones that AOTAutograd did not trace again, having them as well.

Times are given as wall / CPU: the latter, of all threads and of compilers that were called, means
something on a machine that others use, too. Importing torch is not counted.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
from bench_report import describe_machine
from make_medium import medium_config

from glm53 import GLM53, GLM53Config
from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork, backend
from glm53.model import Transformer

PROMPT_TOKENS = 12


@dataclass(frozen=True)
class Seconds:
    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)

    def __str__(self) -> str:
        return f"{self.wall:.1f} / {self.cpu:.1f}"


def now() -> Seconds:
    """CPU: of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime)


def schedule_config(layers: int) -> GLM53Config:
    """GLM-5.3's schedule, with small dims."""
    return medium_config(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        q_lora_rank=48,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_topk=16,
        index_n_heads=8,
        index_head_dim=16,
        max_position_embeddings=1024,
    )


class TimedBackend:
    """The backend, and when it was entered, when left, and how long it was in Inductor."""

    def __init__(self, inner: backend.Backend) -> None:
        self.inner = inner
        self.inductor = self.entered = self.left = Seconds()

    def __call__(self, graph, example_inputs: list, **options) -> Callable:
        inductor = backend._compile

        def timed(*arguments, **keywords) -> Callable:
            start = now()
            compiled = inductor(*arguments, **keywords)
            self.inductor += now() - start
            return compiled

        self.inductor, self.entered = Seconds(), now()
        with mock.patch.object(backend, "_compile", timed):
            function = self.inner(graph, example_inputs, **options)
        self.left = now()
        return function


@torch.inference_mode()
def compile_decoder(layers: int, threads: int) -> dict:
    """The decoder of one row."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    network = Transformer(schedule_config(layers)).to(torch.bfloat16).eval()
    cache = KVCache(network.config, 1, mtp=False, dtype=torch.bfloat16)
    compiled = CompiledNetwork(network, CompileConfig(buckets=(1,)))
    compiled.backend = timed = TimedBackend(compiled.backend)
    row = Batch.paged([([7], 10, [0])], PAGE_SIZE)  # so short that the indexer scores nothing
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        # Imports, precompiled headers, what the compiler can do: once in a process.
        compiled.lm_head(torch.zeros(1, network.config.hidden_size, dtype=torch.bfloat16))
        start = now()
        compiled.model(row, cache)
        end = now()
    report = timed.inner.reports[-1]
    return {
        "layers": layers,
        "pieces": len(report.pieces),
        "distinct": len(report.graphs),
        "dynamo": asdict(timed.entered - start),
        "rewrites and split": asdict(timed.left - timed.entered - timed.inductor),
        "inductor": asdict(timed.inductor),
        "all": asdict(end - start),
    }


def start_model(
    folder: str, buckets: tuple[int, ...] | None, cache: str | None, threads: int
) -> dict:
    """cache: of the compiled model; None: eager."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(threads)
    compile_with = CompileConfig() if buckets is None else CompileConfig(buckets=buckets)
    begin = now()
    model = GLM53.from_pretrained(
        folder,
        compile=False if cache is None else compile_with,
        compile_cache=cache,
        progress=False,
    )
    loaded = now()
    model.engine()
    ready = now()
    model.generate(torch.arange(PROMPT_TOKENS), max_new_tokens=1)
    done = now()
    return {
        "load": asdict(loaded - begin),
        "engine": asdict(ready - loaded),
        "start": asdict(ready - begin),
        "first token": asdict(done - ready),
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "cached": counters["inductor"]["fxgraph_cache_hit"],
        "not traced again": counters["aot_autograd"]["autograd_cache_hit"],
    }


def in_new_process(function: Callable[..., dict], *arguments) -> dict:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def print_rows(rows: list[dict]) -> None:
    """Markdown; values that are times are Seconds as dicts."""
    print(f"| {' | '.join(rows[0])} |")
    print("|" + " --- |" * len(rows[0]))
    for row in rows:
        cells = (Seconds(**v) if isinstance(v, dict) else v for v in row.values())
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[], help="depths of the network")
    parser.add_argument("--model", metavar="FOLDER", help="checkpoint folder")
    parser.add_argument("--buckets", type=int, nargs="+", help="of --model, else the default")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    if not arguments.layers and arguments.model is None:
        parser.error("nothing to do: give --layers or --model")
    if min((*arguments.layers, *(arguments.buckets or ()), arguments.threads)) < 1:
        parser.error("layers, buckets and threads must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    threads = arguments.threads
    layers, starts = [], []
    if arguments.layers:
        layers = [in_new_process(compile_decoder, n, threads) for n in arguments.layers]
        print_rows(layers)
    if arguments.model is not None:
        buckets = None if arguments.buckets is None else tuple(arguments.buckets)
        with tempfile.TemporaryDirectory() as folder:
            for name, cache in (("eager", None), ("cold", folder), ("warm", folder)):
                figures = in_new_process(start_model, arguments.model, buckets, cache, threads)
                starts.append({"run": name} | figures)
        print_rows(starts)
    if arguments.json is not None:
        settings = {n: str(v) if isinstance(v, Path) else v for n, v in vars(arguments).items()}
        report = {"machine": describe_machine(), "versions": {"torch": torch.__version__}}
        report |= {"settings": settings, "layers": layers, "starts": starts}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
