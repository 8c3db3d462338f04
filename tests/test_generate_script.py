"""scripts/generate.py: prompts from three sources, streaming, statistics, errors, interruption."""

import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "generate.py"
PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def call(script, monkeypatch, capsys):
    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = script.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


GREEDY = ("--max-new-tokens", "12", "--temperature", "0")


def test_three_sources_and_streaming_give_the_same_text(call, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    results = [
        call("--prompt", PROMPT, *GREEDY),
        call("--prompt", PROMPT, "--stream", *GREEDY),
        call("--prompt-file", str(tmp_path / "prompt.txt"), *GREEDY),
        call(*GREEDY, stdin=PROMPT.encode()),
        call("--prompt", "-", *GREEDY, stdin=PROMPT.encode()),
    ]
    assert {code for code, _, _ in results} == {0}
    texts = {out for _, out, _ in results}
    assert len(texts) == 1
    assert len(texts.pop().strip()) > 10


def test_stats_go_to_standard_error(call):
    code, out, err = call("--prompt", PROMPT, "--stats", "--ignore-eos", *GREEDY)
    assert code == 0
    assert re.search(r"new 12 tokens, finish reason length, first token after \d+\.\d+ s", err)
    assert re.search(r"\d+\.\d tokens/s", err)
    assert "tokens/s" not in out


def test_sampling_flags_reach_the_sampler(call):
    sampled = ("--prompt", PROMPT, "--max-new-tokens", "12", "--temperature", "1.5", "--seed")
    assert call(*sampled, "1")[1] == call(*sampled, "1")[1]
    assert call(*sampled, "1")[1] != call(*sampled, "2")[1]
    assert call(*sampled, "3", "--top-k", "1")[1] == call("--prompt", PROMPT, *GREEDY)[1]


def test_stop_cuts_the_text(call):
    _, whole, _ = call("--prompt", PROMPT, *GREEDY)
    stop = whole.strip()[3:6]
    _, cut, _ = call("--prompt", PROMPT, "--stop", stop, *GREEDY)
    assert cut.rstrip("\n") == whole[: whole.index(stop)].rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "a", "--top-p", "2"), "top_p"),
        (("--prompt", "a", "--model", "./no/such/folder"), "no/such/folder"),
        (("--prompt-file", "no-such-file.txt"), "no-such-file.txt"),
        (("--prompt", "a " * 3000), "max_position_embeddings"),
        (("--prompt", "a", "--kv-cache-tokens", "1"), "kv_cache_tokens"),
        (("--prompt", "a", "--device", "nonsense"), "nonsense"),
        (("--prompt", "a", "--device", "cuda:63"), "device='cuda:63'"),
        (("--prompt", os.fsdecode(b"caf\xe9")), "not valid Unicode"),
    ],
)
def test_an_error_is_one_readable_line(call, arguments, says):
    code, out, err = call(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert says in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_a_damaged_model_is_named(call, tmp_path):
    (tmp_path / "config.json").write_text("{")
    code, _, err = call("--prompt", "a", "--model", str(tmp_path))
    assert code == 1
    assert "config.json" in err


def test_wrong_usage_exits_with_2(call):
    for arguments in (("--max-new-tokens", "many"), ("--prompt", "a", "--prompt-file", "b")):
        with pytest.raises(SystemExit) as exit_info:
            call(*arguments)
        assert exit_info.value.code == 2


def _start(*arguments):
    command = [sys.executable, str(SCRIPT), "--prompt", PROMPT, "--ignore-eos", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # Tests that run in the background inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_ctrl_c_ends_cleanly():
    process = _start("--stream", "--max-new-tokens", "1500")
    assert process.stdout.read(8)  # it is generating
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_closed_pipe_ends_cleanly():
    process = _start("--stream", "--max-new-tokens", "1500")
    assert process.stdout.read(8)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 0
