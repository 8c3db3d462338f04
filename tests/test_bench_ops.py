"""scripts/bench_ops.py: every operator is timed, with the bytes and FLOPs of the call."""

import argparse
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from glm53.ops.index_select import index_select_ref
from tests.tiny import tiny_config

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench_ops
import roofline


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(bench_ops, "MODELS", {"medium": tiny_config, "glm-5.3": tiny_config})
    monkeypatch.setattr(bench_ops, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(roofline, "BANDWIDTH_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "GEMM_DIM", 64)


def call(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["bench_ops.py", *map(str, arguments)])
    return bench_ops.main()


def cases(rows: int, context: int, dtype=torch.float32) -> dict[str, bench_ops.Case]:
    sizes = bench_ops.Sizes(tiny_config(), torch.device("cpu"), dtype)
    arguments = argparse.Namespace(rows=[rows], contexts=[context], ops=bench_ops.OPS)
    return {f"{c.op} {c.shape}": c for c in bench_ops.cases(arguments, sizes)}


def test_every_operator_at_both_models(monkeypatch, tmp_path, capsys):
    file = tmp_path / "ops.json"
    sizes = "--models medium glm-5.3 --rows 3 --contexts 70 --calls 2".split()
    assert call(monkeypatch, *sizes, "--dtype", "float32", "--json", file) == 0
    report = json.loads(file.read_text())
    results = report["results"]
    assert {(r["model"], r["op"]) for r in results} == set(
        itertools.product(("medium", "glm-5.3"), bench_ops.OPS)
    )
    for result in results:
        assert len(result["seconds"]) == 2 and result["times_floor"] > 0
        floor = max(
            result["bytes"] / result["bytes_per_second"],
            result["flops"] / result["flops_per_second"],
        )
        assert result["floor_seconds"] == pytest.approx(floor)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(results) and len({line.count("|") for line in lines}) == 1


def test_calls_do_what_they_say():
    """The results of the first call of each, by shape; nothing is out of range, and successive
    calls read other memory."""
    for name, case in cases(rows=3, context=70).items():
        first, second = next(case.calls)(), next(case.calls)()
        if case.op == "linear":
            assert first.shape[0] == 3 and not torch.equal(first, second), name
        elif case.op == "routed_experts":
            assert first.shape == (3, 60) and not torch.equal(first, second)
        elif case.op == "index_select":
            assert first.shape == (3, 7) and (first >= 0).all() and not torch.equal(first, second)
        elif case.op == "logical_to_physical":
            assert (first[1] == 7).all() and not torch.equal(first[0], second[0])
        elif case.op == "sparse_mla":
            assert first[0].shape == (3, 3, 20) and not torch.equal(first[0], second[0])
        else:
            assert first is None


def test_bytes_and_flops_by_hand():
    """3 heads, latent 20, rope 6; index 18 x 14, top 7; experts 60 x 22, 3 of 6."""
    by_op = {case.op: case for case in cases(rows=1, context=70).values()}
    mla = by_op["sparse_mla"]
    assert mla.bytes == 4 * (7 * 26 + 3 * (26 + 20)) and mla.flops == 2 * 7 * 3 * (26 + 20)
    index = by_op["index_select"]
    assert index.bytes == 4 * (70 * 14 + 7) and index.flops == 2 * 70 * 18 * 15
    experts = by_op["routed_experts"]
    assert experts.bytes == 4 * (3 * 3 * 60 * 22 + 2 * 60) and experts.flops == 2 * 9 * 60 * 22
    head = by_op["linear"]  # the last one
    assert head.shape.startswith("lm_head 131 x 60") and head.bytes == 4 * (131 * 61 + 60)
    assert by_op["cache_write"].bytes == 2 * 26 * 4
    # Where everything is selected nothing is scored.
    (index,) = (c for c in cases(rows=1, context=7).values() if c.op == "index_select")
    assert index.flops == 0 and index.bytes == 4 * 7


def test_pages_are_those_of_distinct_requests():
    sizes = bench_ops.Sizes(tiny_config(), torch.device("cpu"), torch.float32)
    pool, tables = bench_ops.paged_pool(sizes, rows=2, context=130, dim=14)
    pages = torch.stack(tables)
    assert pages.shape[1:] == (2, 3) and pool.nbytes >= 1 << 16
    assert pages.flatten().sort().values.tolist() == list(range(pool.shape[0] // 64))
    lengths, request = torch.full((2,), 130), torch.arange(2)
    q, weights = torch.randn(2, 18, 14), torch.randn(2, 18)
    logical = index_select_ref(q, weights, pool, tables[0], request, lengths, 7, 64, 64)
    assert (logical >= 0).all() and (logical < 130).all()


@pytest.mark.parametrize(
    "arguments", [["--rows", "0"], ["--contexts", "0"], ["--models", "x"], ["--threads", "0"]]
)
def test_wrong_arguments(monkeypatch, arguments):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments)
    assert stop.value.code == 2


def test_shapes_of_glm53():
    """Of the published model: a layer's q_b_proj is 16384 x 2048, its experts 6144 x 2048."""
    config = bench_ops.glm53_config()
    assert config.num_attention_heads * config.qk_head_dim == 16384
    full, sparse = (roofline.layer_parameters(config, i) for i in (0, 3))
    assert sparse.expert == 37_748_736
    # Of layer 0: attention 165.0M, indexer 9.37M, dense MLP 226.5M.
    assert round(full.matrices / 1e6, 1) == round(165.02 + 9.37 + 226.49, 1)
