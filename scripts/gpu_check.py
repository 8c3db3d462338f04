#!/usr/bin/env python3
"""Check on a GPU what tests without one cannot: CUDA numerics, Triton kernels, captured graphs.

One line per check, PASS or FAIL. Exit codes: 0 all passed, 1 something failed, 2 no CUDA device or
wrong arguments. Run from a checkout, with `triton` installed.
"""

import argparse
import importlib
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # inputs of the checks are those of the tests

LENGTHS = (5, 6, 7, 20, 33, 700)
REQUESTS = (1, 2, 3, 7)
STEPS = 3
BUCKETS = (2, 8)
PROMPTS = ["def read_lines(path):\n", "import os\n" * 9, "class A:\n    def f(self, x):\n"]

Check = tuple[str, Callable[[], str]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", help="checkpoint folder (default: the embedded one)")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:1, ...")
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="checks with this in their name")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        print(f"gpu_check: {device}: there is no CUDA device", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    folder = arguments.model or str(ROOT / "glm53" / "data" / "nano")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    checks = all_checks(folder, device, dtypes)
    return report(check for check in checks if arguments.only in check[0])


def report(checks) -> int:
    """Runs checks and prints a line for each; 1 if one failed."""
    failed = 0
    for name, check in checks:
        start = time.perf_counter()
        try:
            line = f"PASS {name}: {check()}"
        except Exception as error:  # whatever goes wrong on a GPU is a finding, not an end
            failed += 1
            line = f"FAIL {name}: {type(error).__name__}: {str(error).strip()[:2000]}"
        print(f"{line} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{failed} checks failed" if failed else "all checks passed")
    return min(failed, 1)


def all_checks(folder: str, device, dtypes: list) -> Iterator[Check]:
    for dtype in dtypes:
        yield f"Triton kernels, {dtype}", lambda dtype=dtype: kernels(device, dtype)
    for (name, make), dtype in itertools.product(networks(folder).items(), dtypes):
        yield from network_checks(f"{name}, {dtype}", make, device, dtype)
    for dtype in dtypes:
        yield f"tokens, {dtype}", lambda dtype=dtype: tokens(folder, device, dtype)


def networks(folder: str) -> dict[str, Callable]:
    """Functions of (device, dtype) that make a network; the same weights every time."""
    from glm53 import GLM53
    from glm53.model import Transformer
    from tests.tiny import randomise, tiny_config

    def embedded(device, dtype):
        model = GLM53.from_pretrained(folder, device=str(device), dtype=dtype, progress=False)
        return model.network

    def random(device, dtype):
        return randomise(Transformer(tiny_config())).to(device, dtype).eval()

    return {"random weights": random, Path(folder).name: embedded}


def make_cache(network, num_pages: int = 96):
    from glm53.cache import KVCache

    mtp = network.mtp_layer_idx is not None
    with torch.inference_mode(False):  # it is used again after a step
        return KVCache(
            network.config, num_pages, mtp=mtp, dtype=network.dtype, device=network.device
        )


class Case:
    """A network, forms of it that compute the same, and two caches; captured uses the second."""

    def __init__(self, network, compiled, captured) -> None:
        self.network, self.compiled, self.captured = network, compiled, captured
        self.caches = make_cache(network), make_cache(network)
        self.warm = False


def network_checks(label: str, make: Callable, device, dtype) -> Iterator[Check]:
    """The checks of one network; those after the first two need what the second compiled."""
    from glm53.compile import CompileConfig, CompiledNetwork

    network = make(device, dtype)
    yield f"eager equals the CPU, {label}", lambda: eager_equals_cpu(network, make("cpu", dtype))
    configs = (CompileConfig(buckets=BUCKETS, cuda_graphs=on) for on in (False, True))
    case = Case(network, *(CompiledNetwork(network, config) for config in configs))
    yield f"warm-up, {label}", lambda: warm_up(case)
    yield f"compiled equals eager, {label}", lambda: same_steps(case, case.network, case.compiled)
    yield (
        f"captured equals compiled, {label}",
        lambda: same_steps(case, case.compiled, case.captured),
    )
    yield f"weights updated in place, {label}", lambda: weight_update(case, assign=False)
    yield f"weights assigned anew, {label}", lambda: weight_update(case, assign=True)
    yield f"graphs captured, {label}", lambda: graph_memory(case)
    yield f"time of a step, {label}", lambda: timings(case)


def _tensors(cache) -> list:
    return [tensor for layer in cache.layers for tensor in layer if tensor is not None]


def _step(device, length: int, requests: int, rows: int = 1):
    """Decode rows of requests of different lengths, on pages that no two of them share."""
    from glm53.batch import Batch
    from glm53.cache import PAGE_SIZE

    pages = torch.randperm(12 * requests).tolist()
    return Batch.paged(
        [
            (
                torch.randint(8, 131, (rows,)).tolist(),
                max(0, length - 3 * i),
                pages[12 * i : 12 * (i + 1)],
            )
            for i in range(requests)
        ],
        PAGE_SIZE,
        device,
    )


def _errors(got, expected) -> list[float]:
    """Of each row, relative to the largest value of all."""
    difference = (got.float() - expected.float().to(got.device)).abs().amax(-1)
    return (difference / expected.float().abs().max().to(got.device)).nan_to_num(nan=1e9).tolist()


def _verdict(errors: list[float], dtype) -> str:
    """A decision at a near tie may fall the other way in some rows; most must agree."""
    tolerance = 2e-3 if dtype == torch.float32 else 6e-2
    wrong = sum(error > tolerance for error in errors)
    detail = (
        f"{len(errors)} rows, median error {statistics.median(errors):.1e}, largest "
        f"{max(errors):.1e}, {wrong} over {tolerance}"
    )
    assert wrong <= 0.02 * len(errors), detail
    return detail


def eager_equals_cpu(network, on_cpu) -> str:
    """Prompts and decode rows, deciding as the CPU decided."""
    from glm53.batch import TENSORS, Trace

    errors = []
    with torch.inference_mode():
        for length, rows in ((0, 40), (700, 3), (33, 1)):
            torch.manual_seed(length)
            caches = [make_cache(net, 36) for net in (on_cpu, network)]
            for a, b in zip(*map(_tensors, caches), strict=True):
                b.copy_(a.normal_())
            record, step = Trace(), _step("cpu", length, 3, rows)
            expected = on_cpu.model(step, caches[0], record)
            moved = replace(
                step, **{name: getattr(step, name).to(network.device) for name in TENSORS}
            )
            replay = Trace(
                *(
                    {layer: decided.to(network.device) for layer, decided in kind.items()}
                    for kind in (record.selections, record.experts)
                )
            )
            errors += _errors(network.model(moved, caches[1], replay=replay), expected)
    return _verdict(errors, network.dtype)


def warm_up(case: Case) -> str:
    if case.warm:
        return "done before"
    lines, cache = [], case.caches[1]
    for tensor in _tensors(cache):
        tensor.fill_(torch.nan)
    with torch.inference_mode():
        for form in (case.compiled, case.captured):
            start = time.perf_counter()
            graphs = len(list(form.warm_up(cache)))
            lines.append(f"{graphs} graphs in {time.perf_counter() - start:.0f} s")
    case.warm = True
    assert all(tensor.isnan().all() for tensor in _tensors(cache)), "padding wrote to the cache"
    return "; captured: ".join(lines)


def same_steps(case: Case, reference, other, lengths=LENGTHS, requests=REQUESTS) -> str:
    """Hidden states, logits and drafts of several steps, and the caches afterwards."""
    warm_up(case)  # as with --only
    errors, chosen, caches = [], [], case.caches
    drafts = case.network.mtp_layer_idx is not None
    never = torch.compiler.set_stance("fail_on_recompile")
    with torch.inference_mode(), never:
        for length, count in itertools.product(lengths, requests):
            torch.manual_seed(length)
            for a, b in zip(*map(_tensors, caches), strict=True):
                b.copy_(a.normal_())
            first = _step(case.network.device, length, count)
            for i in range(STEPS):
                step = first.advance(i)
                hidden = [f.model(step, c) for f, c in zip((reference, other), caches, strict=True)]
                logits = [f.lm_head(h) for f, h in zip((reference, other), hidden, strict=True)]
                errors += _errors(hidden[1], hidden[0]) + _errors(logits[1], logits[0])
                chosen += (logits[0].argmax(-1) == logits[1].argmax(-1)).tolist()
                if drafts:
                    errors += _same_drafts(reference, other, step, hidden[0], caches)
            for a, b in zip(*map(_tensors, caches), strict=True):
                errors += [max(_errors(b, a))]
    agreement = sum(chosen) / len(chosen)
    assert agreement >= 0.95, f"only {agreement:.1%} of the greedy tokens agree"
    return f"{_verdict(errors, case.network.dtype)}, {agreement:.1%} of the greedy tokens agree"


def _same_drafts(reference, other, step, hidden_TD, caches) -> list[float]:
    """Two draft steps, the second with the selection of the first."""
    ids, results = step.input_ids.flip(0), []
    for form, cache in zip((reference, other), caches, strict=True):
        drafted, selection = form.draft(ids, hidden_TD, step, cache)
        again, _ = form.draft(ids, drafted, step, cache, selection)
        results.append((drafted, again))
    return [e for pair in zip(*results, strict=True) for e in _errors(pair[1], pair[0])]


def weight_update(case: Case, *, assign: bool) -> str:
    """What was captured sees new weights, in their old memory or in memory of their own."""
    network = case.network
    saved = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    counted = sum(r.captures for r in case.captured.captures.reports.values())
    try:
        with torch.no_grad():
            scaled = {name: 1.25 * tensor for name, tensor in saved.items()}
            network.load_state_dict(scaled, assign=assign)
        detail = same_steps(case, network, case.captured, lengths=(20,), requests=(1, 3))
    finally:
        with torch.no_grad():
            network.load_state_dict(saved)
    again = sum(r.captures for r in case.captured.captures.reports.values()) - counted
    assert (again > 0) or not assign, "weights moved, and nothing was captured again"
    return f"{detail}; {again} pieces captured again"


def graph_memory(case: Case) -> str:
    warm_up(case)
    captures = case.captured.captures
    assert all(report.captured for report in captures.reports.values()), captures.summary()
    assert captures.recorder.pool_bytes() <= captures.max_bytes, captures.summary()
    return captures.summary()


def timings(case: Case, rounds: int = 20) -> str:
    """Median time of a decode step, as a ratio to eager."""
    forms = {"eager": case.network, "compiled": case.compiled, "captured": case.captured}
    warm_up(case)
    lines, cache = [], case.caches[1]
    synchronize = torch.cuda.synchronize if case.network.device.type == "cuda" else lambda: None
    with torch.inference_mode():
        for tensor in _tensors(cache):
            tensor.normal_()
        for requests in (1, 7):
            step, seconds = _step(case.network.device, 700, requests), {name: [] for name in forms}
            for _ in range(rounds):  # interleaved
                for name, form in forms.items():
                    synchronize()
                    start = time.perf_counter()
                    form.model(step, cache)
                    synchronize()
                    seconds[name].append(time.perf_counter() - start)
            medians = {name: statistics.median(times) for name, times in seconds.items()}
            lines.append(
                f"batch {requests}: eager {1e3 * medians['eager']:.2f} ms, compiled "
                f"{medians['compiled'] / medians['eager']:.2f} of it, captured "
                f"{medians['captured'] / medians['eager']:.2f}"
            )
    return "; ".join(lines)


def kernels(device, dtype) -> str:
    """Every fused operator against its reference on the CPU, what it writes included."""
    from tests import fused_cases as cases

    torch.manual_seed(0)
    worst = 0.0
    for sizes in (cases.ODD, cases.GLM53):
        calls = {
            "norm_rope_cache": [
                (cases.norm_rope_cache_args(5, sizes, dtype, dtype, index=index, padding=2), n)
                for index in (True, False)
                for n in ((1e-5, 1e-6, True, False), (1e-5, 1e-6, False, True))
            ],
            "index_query": [
                (cases.index_query_args(3, sizes, dtype, index=index), (0.37, True, False))
                for index in (True, False)
            ],
            "embed_eh_norm": [(cases.embed_eh_norm_args(3, sizes, dtype), (1e-5,))],
            "all_reduce_add_rms_norm": [(cases.add_rms_norm_args(3, sizes, dtype), (1e-5, None))],
        }
        for name, arguments in calls.items():
            reference = getattr(importlib.import_module(f"glm53.ops.{name}"), f"{name}_ref")
            for tensors, numbers in arguments:
                ours = [None if x is None else x.to(device, copy=True) for x in tensors]
                expected = reference(*tensors, *numbers)
                got = getattr(torch.ops.glm53, name)(*ours, *numbers)
                if isinstance(got, torch.Tensor):
                    expected, got = [expected], [got]
                pairs = [*zip(got, expected, strict=True), *zip(ours, tensors, strict=True)]
                for a, b in pairs:
                    if b is not None:
                        unit = dtype if b.is_floating_point() else None
                        error = cases.error(a.cpu(), b, unit)
                        assert error <= (32 if dtype == torch.float32 else 2), (name, error)
                        worst = max(worst, error)
    return f"largest error {worst:.1f} ulp"


def tokens(folder: str, device, dtype) -> str:
    """Greedy completions of the whole library: eager, compiled, captured."""
    from glm53 import GLM53
    from glm53.compile import CompileConfig

    settings = {
        "eager": False,
        "compiled": CompileConfig(buckets=BUCKETS, cuda_graphs=False),
        "captured": CompileConfig(buckets=BUCKETS),
    }
    found = {}
    for name, setting in settings.items():
        model = GLM53.from_pretrained(
            folder,
            device=str(device),
            dtype=dtype,
            kv_cache_tokens=4096,
            progress=False,
            compile=setting,
        )
        for drafts in (0, 3):
            completions = model.generate(
                PROMPTS, max_new_tokens=32, temperature=0, speculative_tokens=drafts
            )
            found[name, drafts] = [c.token_ids for c in completions]
    for drafts in (0, 3):
        assert found["captured", drafts] == found["compiled", drafts], "captured: other tokens"
    same = sum(a == b for a, b in zip(found["compiled", 0], found["eager", 0], strict=True))
    assert same >= len(PROMPTS) - 1, f"compiled: {same} completions of {len(PROMPTS)} are eager's"
    return f"captured as compiled; {same} of {len(PROMPTS)} completions as eager"


if __name__ == "__main__":
    sys.exit(main())
