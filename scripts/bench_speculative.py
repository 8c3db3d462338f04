#!/usr/bin/env python3
"""Tokens per second of plain and of speculative decoding, measured in turn in one process.

Every round runs plain decoding and then each number of drafts on the same prompts; the figures are
medians over the rounds. Columns:

k            drafts per step (0: plain decoding)
tokens/s     new tokens over the time of the whole call, prompts included
speedup      tokens/s over those of plain decoding
tokens/step  new tokens of a request per step that decodes
step cost    median time of a step that decodes, over that of plain decoding
ratio        speedup / (tokens/step / step cost): 1 when nothing but steps costs time
acceptance   share of steps whose 1st, 2nd, ... draft was accepted

Decoding is greedy unless --temperature says otherwise; tokens that are not those of plain decoding
are an error in float32, and a remark in less, where rounding decides between near ties. Where other
programs use the same processor, --clock cpu measures the time of this one alone.

Exit codes: 0 done, 1 the model or a prompt cannot be used, or the tokens differ, 2 wrong arguments.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file."""\n',
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self):\n",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n",
)


@dataclass
class Round:
    """One call of generate. step_seconds: of the steps in which no prompt was computed."""

    seconds: float
    step_seconds: list[float]
    token_ids: list[tuple[int, ...]]
    drafted: int
    accepted: int
    decode_steps: int
    accepted_at: list[int]


@dataclass
class Result:
    """Medians over the rounds of one number of drafts. Times in seconds."""

    k: int
    tokens_per_second: float
    speedup: float
    tokens_per_step: float
    step_seconds: float
    step_cost: float
    ratio: float
    drafted: int
    accepted: int
    acceptance: list[float]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="checkpoint folder or hub id (default: the embedded one)")
    parser.add_argument("--prompt", action="append", help="may be repeated (default: four of code)")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="DRAFTS")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once, default 1")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--device")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of this process")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    for name in ("batch", "max_new_tokens", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(arguments.k) < 1:
        parser.error("--k: plain decoding (0) is always measured; give numbers from 1 on")
    return arguments


def added(counts: Iterable[Iterable[int]]) -> list[int]:
    """Sums by position; the shorter ones have nothing to add at the end."""
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0)]


def run_once(model, prompts, params, clock) -> Round:
    """The prompts as one batch. Steps are timed from outside, as `generate` makes them."""
    import torch

    engine = model.engine()
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    steps, completions = [], []
    wait()
    start = clock()
    ids = [engine.add(prompt, params) for prompt in prompts]
    while engine.num_unfinished:
        decoding = all(r.num_remaining == 1 for r in engine.scheduler)
        before = clock()
        deltas = engine.step()
        wait()
        after = clock()
        if decoding:
            steps.append(after - before)
        completions += [d.completion for d in deltas if d.completion is not None]
    seconds = clock() - start
    errors = [c.error for c in completions if c.error is not None]
    if errors:
        raise ValueError(errors[0])
    assert len(completions) == len(ids)
    metrics = [c.metrics for c in completions]
    return Round(
        seconds=seconds,
        step_seconds=steps,
        token_ids=sorted((*c.prompt_token_ids, -1, *c.token_ids) for c in completions),
        drafted=sum(m.drafted for m in metrics),
        accepted=sum(m.accepted for m in metrics),
        # The step that ends a prompt has nothing to verify yet.
        decode_steps=sum(m.decode_steps - 1 for m in metrics),
        accepted_at=added(m.accepted_at for m in metrics),
    )


def summarise(k: int, rounds: list[Round], plain: "Result | None", num_tokens: int) -> Result:
    first = rounds[0]
    per_second = statistics.median(num_tokens / r.seconds for r in rounds)
    step_seconds = statistics.median(s for r in rounds for s in r.step_seconds)
    tokens_per_step = 1 + first.accepted / max(1, first.decode_steps)
    speedup = per_second / plain.tokens_per_second if plain else 1.0
    step_cost = step_seconds / plain.step_seconds if plain else 1.0
    return Result(
        k=k,
        tokens_per_second=per_second,
        speedup=speedup,
        tokens_per_step=tokens_per_step,
        step_seconds=step_seconds,
        step_cost=step_cost,
        ratio=speedup / (tokens_per_step / step_cost),
        drafted=first.drafted,
        accepted=first.accepted,
        acceptance=[count / max(1, first.decode_steps) for count in first.accepted_at],
    )


def measure(arguments: argparse.Namespace) -> list[Result]:
    import torch

    import glm53

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    folder = arguments.model or Path(glm53.__file__).parent / "data" / "nano"
    # Prefixes that later rounds find would make them cheaper than the first.
    model = glm53.GLM53.from_pretrained(
        folder,
        device=arguments.device,
        dtype=arguments.dtype,
        prefix_caching=False,
        progress=sys.stderr.isatty(),
    )
    clock = CLOCKS[arguments.clock]
    if arguments.clock == "cpu" and model.device.type != "cpu":
        raise ValueError(f"--clock cpu does not see the time of {model.device}")
    given = arguments.prompt or list(PROMPTS)
    prompts = [given[i % len(given)] for i in range(max(arguments.batch, len(given)))]
    batches = [prompts[i : i + arguments.batch] for i in range(0, len(prompts), arguments.batch)]

    def one_round(k: int) -> Round:
        params = glm53.SamplingParams(
            temperature=arguments.temperature,
            seed=0,
            max_new_tokens=arguments.max_new_tokens,
            ignore_eos=True,
            speculative_tokens=k,
        )
        return joined([run_once(model, batch, params, clock) for batch in batches])

    settings = [0, *arguments.k]
    for k in settings:  # first uses allocate
        one_round(k)
    rounds: dict[int, list[Round]] = {k: [] for k in settings}
    for _ in range(arguments.rounds):
        for k in settings:
            rounds[k].append(one_round(k))
    for k in arguments.k:
        if rounds[k][0].token_ids != rounds[0][0].token_ids:
            remark = f"k={k}: the tokens are not those of plain decoding"
            if model.dtype == torch.float32:
                raise ValueError(remark)
            print(f"{remark} (weights in {model.dtype})", file=sys.stderr)
    num_tokens = len(prompts) * arguments.max_new_tokens
    plain = summarise(0, rounds[0], None, num_tokens)
    return [plain, *(summarise(k, rounds[k], plain, num_tokens) for k in arguments.k)]


def joined(parts: list[Round]) -> Round:
    """Batches that ran one after the other, as one."""
    return Round(
        seconds=sum(p.seconds for p in parts),
        step_seconds=[s for p in parts for s in p.step_seconds],
        token_ids=[ids for p in parts for ids in p.token_ids],
        drafted=sum(p.drafted for p in parts),
        accepted=sum(p.accepted for p in parts),
        decode_steps=sum(p.decode_steps for p in parts),
        accepted_at=added(p.accepted_at for p in parts),
    )


def print_table(results: list[Result]) -> None:
    print(" k  tokens/s  speedup  tokens/step  ms/step  step cost  ratio  acceptance")
    for r in results:
        acceptance = " ".join(f"{share:.2f}" for share in r.acceptance)
        print(
            f"{r.k:2d}  {r.tokens_per_second:8.1f}  {r.speedup:7.2f}  {r.tokens_per_step:11.2f}  "
            f"{1000 * r.step_seconds:7.1f}  {r.step_cost:9.2f}  {r.ratio:5.2f}  {acceptance}"
        )


def main() -> int:
    arguments = parse_arguments()
    try:
        results = measure(arguments)
    except (ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_table(results)
    if arguments.json is not None:
        settings = {n: str(v) if isinstance(v, Path) else v for n, v in vars(arguments).items()}
        report = {"settings": settings, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
