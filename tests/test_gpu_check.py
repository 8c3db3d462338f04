"""scripts/gpu_check.py: without a GPU, and its checks with a CPU in the place of one."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from glm53.compile import CompileConfig, CompiledNetwork, backend
from tests.chats import NANO
from tests.compile.fake_graphs import FakeCaptures

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import gpu_check

CPU = torch.device("cpu")


def call(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    return gpu_check.main()


def test_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert call(monkeypatch) == 2
    out, err = capsys.readouterr()
    assert not out and err == "gpu_check: cuda: there is no CUDA device\n"


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["--dtypes", "int8"], 2)])
def test_arguments(monkeypatch, arguments, code):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments)
    assert stop.value.code == code


def test_a_failure_is_reported_and_the_others_run(capsys):
    def fails():
        raise AssertionError("3 rows")

    assert gpu_check.report([("a", fails), ("b", lambda: "fine")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL a: AssertionError: 3 rows")
    assert lines[1].startswith("PASS b: fine") and lines[2] == "1 checks failed"
    assert gpu_check.report([("b", lambda: "fine")]) == 0


@pytest.fixture(scope="module")
def case():
    """A captured form on the CPU, with graphs that are none and without Inductor; tracing a
    compiled form as well would take as long again."""
    torch._dynamo.reset()
    network = gpu_check.networks(str(NANO))["random weights"](CPU, torch.float32)
    config = CompileConfig(buckets=(8,), rewrites=("inline_conversion",))
    captured = CompiledNetwork(network, config, FakeCaptures())
    case = gpu_check.Case(network, captured, captured)
    with mock.patch.object(backend, "_compile", lambda piece, inputs, options: piece.forward):
        gpu_check.warm_up(case)
    return case


def test_checks_of_a_network(case):
    sizes = dict(lengths=(7, 700), requests=(1, 7))
    assert "0 over" in gpu_check.same_steps(case, case.network, case.captured, **sizes)
    assert "; 0 pieces captured again" in gpu_check.weight_update(case, assign=False)
    assert "; 0 pieces" not in gpu_check.weight_update(case, assign=True)
    assert "4 of 4 graphs" in gpu_check.graph_memory(case)
    assert "captured" in gpu_check.timings(case, rounds=1)


def test_a_difference_is_found(case):
    other = mock.Mock(wraps=case.captured)
    other.model = lambda batch, cache: 1.1 * case.captured.model(batch, cache)
    with pytest.raises(AssertionError, match="rows"):
        gpu_check.same_steps(case, case.network, other, lengths=(7,), requests=(1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_equals_itself(dtype):
    for make in gpu_check.networks(str(NANO)).values():
        network = make(CPU, dtype)
        assert "0 over" in gpu_check.eager_equals_cpu(network, network)


def test_the_list_of_checks():
    """Every check is made and named once, and none runs by being listed."""
    with (
        mock.patch.object(gpu_check, "networks", return_value={"x": mock.Mock()}),
        mock.patch.object(gpu_check, "make_cache"),
        mock.patch("glm53.compile.CompiledNetwork"),
    ):
        names = [name for name, _ in gpu_check.all_checks("x", CPU, [torch.float32])]
    assert len(names) == len(set(names)) == 10
