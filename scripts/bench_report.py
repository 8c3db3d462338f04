"""What bench_generate.py has measured, as medians, as Markdown tables and as a plot.

Every figure comes from rounds in which all implementations ran in turn, and ratios are taken
within a round: on a machine that others use, too, only these mean something.
"""

import os
import platform
import statistics
from pathlib import Path

from bench_peers import OURS


def describe_machine() -> dict[str, str | int | None]:
    names = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summarise(case: dict) -> dict:
    """Of one case's rounds, by implementation: seconds (of a step or a prompt), ratio (its time
    over ours), distance (its time over the floor), each as median, min and max over the rounds."""
    names = list(case["rounds"][0]["seconds"])
    seconds = {
        name: [statistics.median(r["seconds"][name]) for r in case["rounds"]] for name in names
    }
    floors = [r["floor_seconds"] for r in case["rounds"]]
    return {
        name: {
            "seconds": spread(seconds[name]),
            "ratio": spread([t / o for t, o in zip(seconds[name], seconds[OURS], strict=True)]),
            "distance": spread([t / f for t, f in zip(seconds[name], floors, strict=True)]),
        }
        for name in names
    }


def _cell(values: dict[str, float], factor: float, digits: int) -> str:
    median, low, high = (f"{factor * values[k]:,.{digits}f}" for k in ("median", "min", "max"))
    return f"{median} ({low}-{high})"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _peaks(case: dict, names: list[str]) -> str:
    peaks = [case["peak_bytes"][name] for name in names]
    return " / ".join("-" if peak is None else f"{peak / 1e9:.2f}" for peak in peaks)


def tables(report: dict) -> str:
    """Markdown: decoding, then prompts."""
    names = report["implementations"]
    peers = names[1:]
    ratios = [f"{peer} / {OURS}" for peer in peers]
    lines: list[str] = []
    for kind, unit in (("decode", "ms/token step"), ("prefill", "tokens/s")):
        cases = [case for case in report["cases"] if case["kind"] == kind]
        if not cases:
            continue
        head = [f"{kind}, {unit}", *names, *ratios, "read GB/s", "GFLOP/s", "floor ms"]
        head += [f"{name} / floor" for name in names]
        head += ["first token s"] * (kind == "prefill") + [f"peak GB {' / '.join(names)}"]
        rows = []
        for case in cases:
            summary = case["summary"]
            median_of = {
                key: statistics.median(r[key] for r in case["rounds"])
                for key in ("bytes_per_second", "flops_per_second", "floor_seconds")
            }
            if kind == "decode":
                row = [f"batch {case['batch']}, context {case['context']:,}"]
                row += [_cell(summary[name]["seconds"], 1e3, 1) for name in names]
            else:
                row = [f"{case['context']:,} tokens"]
                for name in names:
                    times = summary[name]["seconds"]
                    rates = {"median": times["median"], "min": times["max"], "max": times["min"]}
                    rates = {k: case["context"] / v for k, v in rates.items()}
                    row.append(_cell(rates, 1, 0))
            row += [f"{summary[peer]['ratio']['median']:.2f}" for peer in peers]
            row += [
                f"{median_of['bytes_per_second'] / 1e9:.1f}",
                f"{median_of['flops_per_second'] / 1e9:.0f}",
                f"{1e3 * median_of['floor_seconds']:.1f}",
            ]
            row += [f"{summary[name]['distance']['median']:.1f}" for name in names]
            if kind == "prefill":
                row.append(" / ".join(f"{summary[n]['seconds']['median']:.2f}" for n in names))
            row.append(_peaks(case, names))
            rows.append(row)
        lines += [*_table(head, rows), ""]
    return "\n".join(lines)


def import_pyplot():
    """ValueError, before anything is measured, where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'glm53[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(report: dict, file: Path) -> None:
    """Decode time at batch 1 against context length; bars span the rounds."""
    pyplot = import_pyplot()
    cases = [c for c in report["cases"] if c["kind"] == "decode" and c["batch"] == 1]
    contexts = [case["context"] for case in cases]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in report["implementations"]:
        times = [case["summary"][name]["seconds"] for case in cases]
        medians = [1e3 * t["median"] for t in times]
        below = [1e3 * (t["median"] - t["min"]) for t in times]
        above = [1e3 * (t["max"] - t["median"]) for t in times]
        axes.errorbar(contexts, medians, yerr=[below, above], marker="o", capsize=3, label=name)
    floors = [1e3 * statistics.median(r["floor_seconds"] for r in c["rounds"]) for c in cases]
    axes.plot(contexts, floors, linestyle="--", color="grey", label="floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("ms per token, batch 1")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
