"""scripts/bench_speculative.py: figures of one small run, and what it refuses."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_speculative.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_speculative_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(script, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_speculative.py", *arguments])
        code = script.main()
        return code, *capsys.readouterr()

    return call


def test_figures_belong_together(call, tmp_path):
    """Two batches of two prompts, k = 2."""
    file = tmp_path / "figures.json"
    arguments = "--k 2 --batch 2 --max-new-tokens 14 --rounds 1 --dtype float32 --clock cpu".split()
    code, out, err = call(*arguments, "--json", str(file))
    assert (code, err) == (0, "")
    report = json.loads(file.read_text())
    assert report["settings"]["max_new_tokens"] == 14
    plain, drafting = report["results"]
    assert (plain["k"], plain["speedup"], plain["step_cost"], plain["ratio"]) == (0, 1, 1, 1)
    assert plain["drafted"] == 0 and plain["tokens_per_step"] == 1
    assert drafting["drafted"] > drafting["accepted"] > 0
    # Of 4 x 14 tokens 4 come with the prompts, and each step gives one besides the accepted ones.
    steps = 4 * 13 - drafting["accepted"]
    assert drafting["tokens_per_step"] == pytest.approx(4 * 13 / steps)
    assert sum(drafting["acceptance"]) * steps == pytest.approx(drafting["accepted"])
    assert drafting["acceptance"][0] >= drafting["acceptance"][1]
    assert drafting["speedup"] == pytest.approx(
        drafting["tokens_per_second"] / plain["tokens_per_second"]
    )
    assert drafting["step_cost"] == pytest.approx(drafting["step_seconds"] / plain["step_seconds"])
    assert drafting["ratio"] == pytest.approx(
        drafting["speedup"] * drafting["step_cost"] / drafting["tokens_per_step"]
    )
    assert len(out.splitlines()) == 3 and out.split()[:2] == ["k", "tokens/s"]


def test_tokens_that_differ_are_an_error(call, script, monkeypatch):
    real = script.run_once

    def tampered(model, prompts, params, clock):
        result = real(model, prompts, params, clock)
        if params.speculative_tokens:
            result.token_ids[0] = result.token_ids[0][:-1]
        return result

    monkeypatch.setattr(script, "run_once", tampered)
    arguments = "--k 1 --max-new-tokens 4 --rounds 1 --dtype float32 --prompt x".split()
    code, out, err = call(*arguments)
    assert code == 1 and out == "" and "k=1: the tokens are not those" in err


@pytest.mark.parametrize("arguments", [["--k", "0"], ["--rounds", "0"], ["--batch", "0"]])
def test_wrong_arguments(call, arguments):
    with pytest.raises(SystemExit) as stop:
        call(*arguments)
    assert stop.value.code == 2


def test_a_missing_model(call):
    code, _, err = call("--model", "/nonexistent/folder")
    assert code == 1 and err.startswith("error: ")
