"""What was compiled is found again: by the next process, and only as long as it is the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable
from torch._inductor.utils import fresh_cache

from glm53.compile import cacheable, inductor_cache
from glm53.compile.backend import Backend
from glm53.compile.cacheable import cache_options
from glm53.compile.rewrites import REWRITES, capturable, rewrite
from tests.compile.tracing import decode_graphs
from tests.tiny import tiny_config

ROOT = Path(__file__).parents[2]


def test_a_folder_for_every_device_and_config(tmp_path, monkeypatch):
    """Given for as long as it is needed; an error from inside says where it is."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cpu = torch.device("cpu")
    places = []
    for config in (tiny_config(), tiny_config(), tiny_config(vocab_size=132)):
        with inductor_cache(tmp_path / "new", config, cpu):
            places.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert places[0] == places[1] != places[2]
    assert all(Path(place).parent == tmp_path / "new" for place in places)
    with (
        pytest.raises(SyntaxError) as caught,
        inductor_cache(tmp_path / "new", tiny_config(), cpu),
    ):
        raise SyntaxError("half a file")
    assert places[0] in caught.value.__notes__[0]
    with inductor_cache(None, tiny_config(), cpu):
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def start(folder: Path) -> dict:
    command = [sys.executable, "-m", "tests.compile.compiled_start", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    graphs = first["fx_graphs"][0]
    assert graphs >= 7  # two pieces and a head, of one row and of any number, and index scores
    assert first["fx_graphs"] == first["aot_graphs"] == [graphs, 0, 0]
    assert second["fx_graphs"] == second["aot_graphs"] == [0, graphs, 0]
    for run in (first, second):
        compiled, eager = run["tokens"]
        assert compiled == eager and len(eager) == 8


@pytest.mark.parametrize("rows, capture", [(1, False), (16, True), (None, False)])
def test_no_piece_is_refused(rows, capture):
    """By AOTAutograd's cache, which takes a graph whole or not at all."""
    (graph,) = decode_graphs(tiny_config(), rows)
    rewrite(graph, REWRITES)
    if capture:
        capturable.rewrite(graph.graph)
    with pytest.raises(BypassAOTAutogradCache):
        check_cacheable(graph)
    with torch._inductor.config.patch(cache_options(graph)):
        check_cacheable(graph)


@torch.no_grad()
def test_code_of_a_rewrite_is_part_of_the_key():
    """A function in the graph is known to the caches by its name, and by our sources."""
    layer, x = nn.Linear(16, 5), torch.randn(1, 16)

    def compile_it() -> list[int]:
        torch._dynamo.reset()
        counters.clear()
        backend = Backend(("skinny_linear",))
        result = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)(x)
        torch.testing.assert_close(result, layer(x))
        assert backend.reports[0].count("glm53.compile.rewrites.skinny_linear.linear_by_rows") == 1
        return [
            counters[cache][f"{name}_{state}"]
            for cache, name in (("aot_autograd", "autograd_cache"), ("inductor", "fxgraph_cache"))
            for state in ("miss", "hit", "bypass")
        ]

    with fresh_cache():
        assert compile_it() == [1, 0, 0, 1, 0, 0]
        assert compile_it() == [0, 1, 0, 0, 1, 0]
        with mock.patch.object(cacheable, "sources_key", lambda: "of other sources"):
            assert compile_it() == [1, 0, 0, 1, 0, 0]
