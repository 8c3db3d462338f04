"""scripts/bench_compile.py: the time of each part of a compilation, by depth, and of a start."""

import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from glm53.compile import backend
from tests.chats import NANO

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench_compile


def call(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_compile.py", *map(str, arguments)])
    return bench_compile.main()


@pytest.fixture
def in_this_process(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(bench_compile, "in_new_process", lambda f, *arguments: f(*arguments))


def test_pieces_and_parts_by_depth(monkeypatch, in_this_process, tmp_path, capsys):
    """With a compiler that only spends time; layers 0, 1, 2 and 6 are full."""
    compiled = []

    def compile_piece(piece, inputs, options):
        time.sleep(0.2)
        compiled.append(piece)
        return piece.forward

    file = tmp_path / "compile.json"
    with mock.patch.object(backend, "_compile", compile_piece):
        assert call(monkeypatch, "--layers", 6, 10, "--json", file) == 0
    report = json.loads(file.read_text())
    first, second = report["layers"]
    assert (first["layers"], first["pieces"]) == (6, 4)
    assert (second["layers"], second["pieces"]) == (10, 5)
    # The head is one more, before each decoder.
    assert len(compiled) == first["distinct"] + 1 + second["distinct"] + 1
    for row in (first, second):
        parts = [row[name] for name in ("dynamo", "rewrites and split", "inductor")]
        assert all(part["wall"] > 0 and part["cpu"] >= 0 for part in parts)
        slept = 0.2 * row["distinct"]
        assert slept <= row["inductor"]["wall"] and row["inductor"]["cpu"] < slept
        assert sum(part["wall"] for part in parts) <= row["all"]["wall"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert report["starts"] == []


def test_what_a_process_spends_counts_its_children():
    start = bench_compile.now()
    command = [sys.executable, "-c", "sum(range(10_000_000))"]
    subprocess.run(command, check=True)
    spent = bench_compile.now() - start
    assert 0.05 < spent.cpu and spent.wall > 0.05


@pytest.mark.slow
def test_starts(monkeypatch, tmp_path, capsys):
    """Really compiled, in processes of their own: the second start compiles nothing."""
    file = tmp_path / "compile.json"
    assert call(monkeypatch, "--model", NANO, "--buckets", 1, "--json", file) == 0
    eager, cold, warm = json.loads(file.read_text())["starts"]
    assert [row["run"] for row in (eager, cold, warm)] == ["eager", "cold", "warm"]
    assert eager["compiled"] == 0 < cold["compiled"]
    assert warm["compiled"] == 0 and cold["cached"] == 0
    assert warm["cached"] == warm["not traced again"] == cold["compiled"]
    assert warm["engine"]["cpu"] < 0.5 * cold["engine"]["cpu"]
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    "arguments", [[], ["--layers", 0], ["--layers", 4, "--threads", 0], ["--layers", "x"]]
)
def test_wrong_arguments(monkeypatch, arguments):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments)
    assert stop.value.code == 2
