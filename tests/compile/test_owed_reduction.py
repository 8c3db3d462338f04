"""Norms that reduce what their blocks owe: one operator each, counted on the real schedule and run.

The counts are of the code that is generated, times how often a piece runs, and of calls.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompileConfig, CompiledNetwork
from glm53.compile.config import ALL_REWRITES
from glm53.compile.passes import PASSES
from glm53.model import Transformer
from tests.compile.fake_group import fake_group
from tests.compile.lowering import generated_code
from tests.compile.owed import owe
from tests.compile.test_split import schedule
from tests.tiny import randomise, tiny_config

ROOT = Path(__file__).parents[2]
FUSED = "glm53.all_reduce_add_rms_norm.default("
REDUCED = "_c10d_functional.all_reduce"


def counted(codes: list[str], pieces: list[int], text: str) -> int:
    times = Counter(pieces)
    assert sorted(times) == list(range(len(codes)))
    return sum(times[number] * code.count(text) for number, code in enumerate(codes))


@torch.inference_mode()
def test_every_reduction_of_78_layers_is_fused():
    with fake_group() as group:
        count(group)


def count(group: str) -> None:
    layers = 78
    config = tiny_config(
        num_hidden_layers=layers,
        indexer_types=schedule(layers),
        mlp_layer_types=("dense",) * 3 + ("sparse",) * (layers - 3),
    )
    network = randomise(Transformer(config)).eval()
    owe(network, group)
    compiled = CompiledNetwork(network, CompileConfig(buckets=(4,), rewrites=PASSES))
    cache = KVCache(config, 4, mtp=True, dtype=torch.float32)
    step = Batch.paged([([7], 20, [page]) for page in range(4)], PAGE_SIZE)
    torch._dynamo.reset()

    codes = generated_code(compiled.model, step, cache)
    (report,) = compiled.backend.reports
    assert len(report.pieces) == 22
    assert len(codes) == 5
    # One for either block of each layer; none before the first, where only the embedding is.
    assert counted(codes, report.pieces, FUSED) == 156
    assert counted(codes, report.pieces, REDUCED) == 0

    hidden = torch.zeros(4, config.hidden_size)
    codes = generated_code(compiled.draft, step.input_ids, hidden, step, cache)
    report = compiled.backend.reports[-1]
    assert len(report.pieces) == 2
    assert counted(codes, report.pieces, FUSED) == 2
    assert counted(codes, report.pieces, REDUCED) == 0


def test_two_ranks(tmp_path):
    """Each computes a part of every block of 3 layers: together what one rank does."""
    module = "tests.compile.owed_rank"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(tmp_path / "store"), *ALL_REWRITES],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache{rank}"),
            },
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    for out, _ in outputs:
        report = json.loads(out.splitlines()[-1])
        assert report["error"] < 2e-5
        assert report["calls"] == [6, 6]  # the collective is called by the operator
