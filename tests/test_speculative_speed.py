"""Speculation pays: the figures that the script that compares it with plain decoding measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import glm53

SCRIPTS = Path(__file__).parents[1] / "scripts"
NAMES = ("bench_speculative.py", "bench_generate.py")


def _figures(file: Path) -> dict:
    """Of 3 drafts a step, batch 1, on the embedded model. CPU time: other programs do not count."""
    script = next(path for name in NAMES if (path := SCRIPTS / name).is_file())
    arguments = "--k 3 --batch 1 --rounds 3 --max-new-tokens 64 --dtype float32 --clock cpu"
    command = [sys.executable, str(script), *arguments.split(), "--threads", "1"]
    paths = {"PYTHONPATH": str(Path(glm53.__file__).parents[1])}
    subprocess.run([*command, "--json", str(file)], env=os.environ | paths, check=True)
    plain, drafting = json.loads(file.read_text())["results"]
    assert (plain["k"], plain["drafted"], drafting["k"]) == (0, 0, 3)
    return drafting


@pytest.mark.slow
def test_speculation_pays(tmp_path):
    """At batch 1, where the embedded model's steps are bound by overhead. One retry: caches that
    other programs share with this one make steps slower at random."""
    for attempt in range(2):
        figures = _figures(tmp_path / f"figures {attempt}.json")
        assert figures["drafted"] > figures["accepted"] > 0
        if figures["ratio"] >= 0.9 and figures["speedup"] > 1.2:
            break
    assert figures["ratio"] >= 0.9
    assert figures["speedup"] > 1.2
