#!/usr/bin/env python3
"""Time of decoding and of prompts, against transformers and llama.cpp on the same weights.

    scripts/make_medium.py MEDIUM
    scripts/bench_generate.py --model MEDIUM --compare transformers --json figures.json

Every round measures, in turn, read bandwidth and GEMM rate of the machine, then each
implementation, in a process of its own. Printed are medians over the rounds (and their range), the
median ratio within a round, and the distance to the floor: the larger of bytes that must be read /
bandwidth and FLOPs / GEMM rate (scripts/roofline.py). docs/performance.md explains the method.

Prompts are random ids. Decoding is greedy, and tokens that are not those of transformers are an
error in float32; in less, rounding decides between near ties, and only computations that have
nothing in common are refused. Speculative decoding is measured by bench_speculative.py.

Exit codes: 0 done, 1 something cannot be measured or the tokens differ, 2 wrong arguments.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench_peers import CHUNK, OURS, PEERS, Remote, Settings, common_tokens
from bench_report import describe_machine, import_pyplot, plot, summarise, tables

ALL_NEW = 32  # room for warm-up steps and for requests that are ahead of others


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--compare", nargs="+", default=[], choices=[n for n in PEERS if n != OURS])
    parser.add_argument("--llama-bench", metavar="BINARY", help="for --compare llama.cpp")
    parser.add_argument("--gguf", metavar="FILE", help="the same weights, for llama-bench")
    parser.add_argument(
        "--contexts", type=int, nargs="*", default=[512, 2048, 8192], help="decode, batch 1"
    )
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16], help="decode")
    parser.add_argument("--batch-context", type=int, default=512, help="of --batches")
    parser.add_argument(
        "--prefill", type=int, nargs="*", default=[512, 2048, 8192], help="prompt lengths"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decode steps per round")
    parser.add_argument(
        "--case-seconds", type=float, default=300, help="a case begins no round later than that"
    )
    parser.add_argument("--compile", action="store_true", help="compile this library's steps")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, help="CPU threads of each (default: the cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="decode time against context")
    arguments = parser.parse_args()
    lengths = [*arguments.contexts, *arguments.batches, *arguments.prefill]
    numbers = (arguments.rounds, arguments.steps, arguments.batch_context, *lengths)
    if min(numbers) < 1 or (arguments.threads is not None and arguments.threads < 1):
        parser.error("rounds, steps, threads, contexts, batches and lengths must be at least 1")
    if not lengths:
        parser.error("nothing to measure: --contexts, --batches and --prefill are empty")
    if arguments.plot is not None and not arguments.contexts:
        parser.error("--plot draws --contexts, and there are none")
    llama = (arguments.llama_bench, arguments.gguf)
    if "llama.cpp" in arguments.compare and None in llama:
        parser.error("--compare llama.cpp needs --llama-bench and --gguf")
    return arguments


class Benchmark:
    """The implementations, this library first, and the machine they run on."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        from roofline import Probe

        from glm53 import GLM53Config

        self.arguments = arguments
        self.config = GLM53Config.from_pretrained(arguments.model)
        self.dtype = arguments.dtype or self.config.dtype
        threads = arguments.threads or torch.get_num_threads()
        torch.set_num_threads(threads)
        torch_dtype = getattr(torch, self.dtype)
        self.itemsizes = {
            "itemsize": torch_dtype.itemsize,
            "cache_itemsize": 2 if torch_dtype == torch.bfloat16 else 4,
        }
        self.decode_cases = [(1, context) for context in sorted(arguments.contexts)]
        self.decode_cases += [(n, arguments.batch_context) for n in sorted(arguments.batches)]
        settings = Settings(
            model=str(arguments.model),
            device=arguments.device,
            dtype=self.dtype,
            threads=threads,
            compile=arguments.compile,
            cache_tokens=self._cache_tokens(),
            llama_bench=arguments.llama_bench,
            gguf=arguments.gguf,
        )
        self.settings = asdict(settings)
        self.probe = Probe(torch.device(arguments.device), torch_dtype)
        self.names = [OURS, *dict.fromkeys(arguments.compare)]
        self.peers = [Remote(name, settings) for name in self.names]
        self.versions: dict[str, str] = {}
        for peer in self.peers:
            self.versions |= peer.call("versions")
        self.random = random.Random(0)

    def _cache_tokens(self) -> int:
        """Of the largest case; ValueError if a request of it is longer than the model allows."""
        new = self.arguments.rounds * self.arguments.steps + ALL_NEW
        longest = max([context + new for _, context in self.decode_cases] + self.arguments.prefill)
        limit = self.config.max_position_embeddings
        if longest > limit:
            raise ValueError(f"a case has up to {longest} tokens, the model's limit is {limit}")
        page = 64  # what a request takes is rounded up
        sizes = [n * (context + n + new + page) for n, context in self.decode_cases]
        return max([*sizes, *(length + page for length in self.arguments.prefill)])

    def _prompts(self, count: int, length: int) -> list[list[int]]:
        words = range(self.config.vocab_size)
        return [self.random.choices(words, k=length) for _ in range(count)]

    def _rounds(self, measure, cost) -> list[dict]:
        """measure(peer): its times in one round."""
        rounds = []
        begin = time.perf_counter()
        for _ in range(self.arguments.rounds):
            machine = self.probe.measure()
            seconds = {peer.name: measure(peer) for peer in self.peers}
            rounds.append({**asdict(machine), "floor_seconds": cost.floor_seconds(machine)})
            rounds[-1]["seconds"] = seconds
            shown = ", ".join(f"{n} {1e3 * sorted(t)[len(t) // 2]:.1f}" for n, t in seconds.items())
            print(f"  {machine.bytes_per_second / 1e9:.1f} GB/s; ms: {shown}", file=sys.stderr)
            if time.perf_counter() - begin > self.arguments.case_seconds:
                break
        return rounds

    def _case(self, kind: str, batch: int, context: int, cost, rounds, tokens) -> dict:
        case = {"kind": kind, "batch": batch, "context": context, "cost": asdict(cost)}
        case["rounds"] = rounds
        case["summary"] = summarise(case)
        case["peak_bytes"] = {peer.name: peer.call("peak_bytes") for peer in self.peers}
        case["equal_tokens"] = {
            name: common_tokens(tokens[OURS], theirs)
            for name, theirs in tokens.items()
            if name != OURS and theirs is not None
        }
        return case

    def decode(self, batch: int, context: int) -> dict:
        from roofline import decode_cost

        steps = self.arguments.steps
        print(f"decode, batch {batch}, context {context}", file=sys.stderr)
        prompts = self._prompts(batch, context)
        # A single row reads what it is routed to; several may share experts.
        experts = float(self.config.num_experts_per_tok)
        if batch > 1:
            experts = self.peers[0].call("experts_read", prompts)
        cost = decode_cost(self.config, context, batch, experts_read=experts, **self.itemsizes)
        for peer in self.peers:
            peer.call("start", prompts, self.arguments.rounds * steps)
        rounds = self._rounds(lambda peer: peer.call("decode", steps), cost)
        tokens = {peer.name: peer.call("finish") for peer in self.peers}
        return self._case("decode", batch, context, cost, rounds, tokens)

    def prefill(self, length: int) -> dict:
        from roofline import prefill_cost

        print(f"prefill, {length} tokens", file=sys.stderr)
        (prompt,) = self._prompts(1, length)
        cost = prefill_cost(self.config, length, CHUNK, **self.itemsizes)
        tokens: dict[str, list[list[int]] | None] = {}

        def measure(peer: Remote) -> list[float]:
            seconds, token = peer.call("prefill", prompt)
            tokens[peer.name] = None if token is None else [[token]]
            return [seconds]

        return self._case("prefill", 1, length, cost, self._rounds(measure, cost), tokens)

    def run(self) -> dict:
        report: dict = {
            "implementations": self.names,
            "machine": describe_machine(),
            "versions": self.versions,
            "settings": {**self.settings, "rounds": self.arguments.rounds}
            | {"steps": self.arguments.steps, "chunk": CHUNK},
            # Of making the implementations; what follows is of each case.
            "load_peak_bytes": {peer.name: peer.call("peak_bytes") for peer in self.peers},
            "cases": [],
        }
        for batch, context in self.decode_cases:
            report["cases"].append(self.decode(batch, context))
        lengths = sorted(self.arguments.prefill)
        if lengths:  # the first prompt prepares kernels, and chooses transformers' way
            (warm_up,) = self._prompts(1, min(4 * CHUNK, lengths[-1]))
            for peer in self.peers:
                peer.call("prefill", warm_up)
        for length in lengths:
            report["cases"].append(self.prefill(length))
        self._check_tokens(report["cases"])
        return report

    def _check_tokens(self, cases: list[dict]) -> None:
        """ValueError if the implementations have not computed the same."""
        counts: dict[str, list[tuple[int, int]]] = {}
        for case in cases:
            for name, equal in case["equal_tokens"].items():
                counts.setdefault(name, []).append(equal)
        for name, equal in counts.items():
            same, compared = map(sum, zip(*equal, strict=True))
            remark = f"{name}: {same} of {compared} greedy tokens are ours, up to the first other"
            if same == 0 or (same < compared and self.dtype == "float32"):
                raise ValueError(remark)
            print(f"{remark} ({self.dtype})", file=sys.stderr)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def main() -> int:
    arguments = parse_arguments()
    try:
        if arguments.plot is not None:
            import_pyplot()
        benchmark = Benchmark(arguments)
        try:
            report = benchmark.run()
        finally:
            benchmark.close()
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(tables(report))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.plot is not None:
        plot(report, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
