"""scripts/bench_generate.py: one small comparison end to end, its figures, and what it refuses."""

import json
import statistics
import sys
from pathlib import Path

import pytest

from glm53 import GLM53Config
from tests.test_make_medium import TINY

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import bench_generate
import bench_peers
import bench_report
import make_medium
import roofline

NAMES = ["glm53", "transformers", "llama.cpp"]
# Answers as llama-bench does: 3 ms a token, and 1 ms for every token of context.
LLAMA_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
count = int(given["-p"]) + int(given["-n"])
ns = count * 3e6 + int(given.get("-d", 0)) * 1e6
assert given["-m"].endswith("weights.gguf") and given["-t"] == "1" and given["-o"] == "json"
print(json.dumps([dict(avg_ns=ns, build_commit="abc", build_number=7, n_prompt=int(given["-p"]))]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    make_medium.write(folder / "model", make_medium.medium_config(**TINY), 0)
    (folder / "llama-bench").write_text(LLAMA_BENCH.format(python=sys.executable))
    (folder / "llama-bench").chmod(0o755)
    return folder


def call(*arguments) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bench_generate.py", *map(str, arguments)])
        patch.setattr(roofline, "BANDWIDTH_BYTES", 1 << 22)
        patch.setattr(roofline, "GEMM_DIM", 128)
        return bench_generate.main()


class Fake:
    """Stands in for `Remote`: the real implementation, in this process, which has imported torch
    and transformers already."""

    token_shift = 0

    def __init__(self, name, settings):
        self.name = name
        self.peer = bench_peers.PEERS[name](settings)

    def call(self, method, *arguments):
        result = getattr(self.peer, method)(*arguments)
        if method == "finish" and self.name == "transformers":
            return [[*ids[:2], *(i + self.token_shift for i in ids[2:])] for ids in result]
        return result

    def close(self):
        pass


@pytest.fixture(scope="module")
def outcome(folder):
    """One run of everything: exit code, JSON."""
    file = folder / "figures.json"
    sizes = "--contexts 40 11 --batches 3 --batch-context 20 --prefill 30 --rounds 1 --steps 2"
    peers = ["transformers", "llama.cpp", "--llama-bench", folder / "llama-bench"]
    peers += ["--gguf", folder / "weights.gguf"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_generate, "Remote", Fake)
        code = call(
            *("--model", folder / "model", *sizes.split(), "--threads", 1, "--json", file),
            *("--compare", *peers),
        )
    return code, json.loads(file.read_text())


def test_cases_and_rounds(outcome):
    code, report = outcome
    assert code == 0 and report["implementations"] == NAMES
    shapes = [(case["kind"], case["batch"], case["context"]) for case in report["cases"]]
    assert shapes == [("decode", 1, 11), ("decode", 1, 40), ("decode", 3, 20), ("prefill", 1, 30)]
    assert report["machine"]["python"] and report["versions"]["llama.cpp"] == "7 (abc)"
    assert {"torch", "transformers"} <= set(report["versions"])
    for case in report["cases"]:
        (one_round,) = case["rounds"]
        assert set(one_round["seconds"]) == set(NAMES)
        assert len(one_round["seconds"]["glm53"]) == (2 if case["kind"] == "decode" else 1)
        for name in NAMES:
            assert all(0 < seconds < 60 for seconds in one_round["seconds"][name])


def test_all_implementations_computed_the_same_tokens(outcome):
    """The first token, warm-up steps and two timed ones of each request. 11 tokens of context
    are more than index_topk, so every one of them depends on the indexer's choice."""
    for case in outcome[1]["cases"]:
        assert list(case["equal_tokens"]) == ["transformers"]
        same, compared = case["equal_tokens"]["transformers"]
        assert same == compared
        assert compared == 1 if case["kind"] == "prefill" else compared >= 5 * case["batch"]


def test_the_floor_is_that_of_the_case(outcome, folder):
    config = GLM53Config.from_pretrained(folder / "model")
    sizes = dict(itemsize=4, cache_itemsize=4)
    for case in outcome[1]["cases"]:
        if case["kind"] == "prefill":
            expected = roofline.prefill_cost(config, 30, 512, **sizes)
        elif case["batch"] == 1:
            expected = roofline.decode_cost(config, case["context"], 1, experts_read=3, **sizes)
        else:
            one, all_six = (
                roofline.decode_cost(config, 20, 3, experts_read=e, **sizes) for e in (3, 6)
            )
            assert one.weight_bytes < case["cost"]["weight_bytes"] < all_six.weight_bytes
            continue
        assert case["cost"] == pytest.approx(vars(expected))
        (one_round,) = case["rounds"]
        machine = roofline.Machine(one_round["bytes_per_second"], one_round["flops_per_second"])
        assert one_round["floor_seconds"] == pytest.approx(expected.floor_seconds(machine))


def test_llama_bench_is_asked_for_the_same(outcome):
    decode_11, decode_40, batch_3, prefill = outcome[1]["cases"]
    for case, expected in (
        (decode_11, [(2 * 3 + 11) / 2e3] * 2),
        (decode_40, [(2 * 3 + 40) / 2e3] * 2),
        (batch_3, [(3 * 3 + 20) / 1e3]),
        (prefill, [30 * 3 / 1e3]),
    ):
        assert case["rounds"][0]["seconds"]["llama.cpp"] == pytest.approx(expected)


def test_each_implementation_has_a_process(folder, capsys):
    """And its own peak memory: llama-bench's stand-in is a few megabytes, torch is hundreds."""
    file = folder / "processes.json"
    sizes = "--contexts 11 --batches --prefill --rounds 1 --steps 1 --threads 1".split()
    peer = ["llama.cpp", "--llama-bench", folder / "llama-bench", "--gguf", "weights.gguf"]
    assert call("--model", folder / "model", *sizes, "--compare", *peer, "--json", file) == 0
    report = json.loads(file.read_text())
    (case,) = report["cases"]
    assert case["equal_tokens"] == {}
    if sys.platform == "linux":
        for peaks in (case["peak_bytes"], report["load_peak_bytes"]):
            assert 1e6 < peaks["llama.cpp"] < 1e8 < peaks["glm53"] < 1e10


def test_what_a_process_cannot_do_is_raised_here(folder):
    settings = bench_peers.Settings("x", "cpu", "float32", 1, False, 64, "/nonexistent", "x.gguf")
    remote = bench_peers.Remote("llama.cpp", settings)
    with pytest.raises(ChildProcessError, match=r"llama\.cpp: FileNotFoundError"):
        remote.call("versions")
    with pytest.raises(ChildProcessError, match="AttributeError"):
        remote.call("nothing")
    remote._process.kill()
    with pytest.raises(ChildProcessError, match="ended with -9 in finish"):
        remote.call("finish")
    remote.close()


def test_ratios_are_taken_within_a_round():
    rounds = [
        {"seconds": {"glm53": [1, 2, 9], "x": [6]}, "floor_seconds": 1},
        {"seconds": {"glm53": [4], "x": [4, 4]}, "floor_seconds": 1},
        {"seconds": {"glm53": [8], "x": [16]}, "floor_seconds": 8},
    ]
    summary = bench_report.summarise({"rounds": rounds})
    assert summary["glm53"]["seconds"] == {"median": 4, "min": 2, "max": 8}
    assert summary["x"]["ratio"] == {"median": 2, "min": 1, "max": 3}
    assert summary["glm53"]["distance"] == {"median": 2, "min": 1, "max": 4}
    assert summary["glm53"]["ratio"]["max"] == 1


def test_tables_can_be_pasted(outcome):
    decode, prefill = bench_report.tables(outcome[1]).strip().split("\n\n")
    for table, rows in ((decode, 3), (prefill, 1)):
        lines = table.splitlines()
        assert len(lines) == 2 + rows
        assert len({line.count("|") for line in lines}) == 1, (
            "every row has the columns of the head"
        )
        assert all(line.startswith("| ") and line.endswith(" |") for line in lines)
    case = outcome[1]["cases"][1]
    cells = [cell.strip() for cell in decode.splitlines()[3].split("|")[1:-1]]
    assert cells[0] == "batch 1, context 40"
    ours = statistics.median(case["rounds"][0]["seconds"]["glm53"])
    assert cells[1].startswith(f"{1e3 * ours:.1f} (")
    theirs = statistics.median(case["rounds"][0]["seconds"]["transformers"])
    assert cells[4] == f"{theirs / ours:.2f}"


def test_plot(outcome, tmp_path):
    pytest.importorskip("matplotlib")
    bench_report.plot(outcome[1], tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_measuring(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code = call("--model", folder / "model", "--plot", "x.png")
    assert code == 1 and "glm53[plot]" in capsys.readouterr().err


def test_other_tokens_are_an_error_in_float32(folder, monkeypatch, capsys):
    monkeypatch.setattr(bench_generate, "Remote", Fake)
    monkeypatch.setattr(Fake, "token_shift", 1)
    arguments = "--contexts 12 --batches --prefill --rounds 1 --steps 1 --threads 1".split()
    model = ("--model", folder / "model", "--compare", "transformers")
    assert call(*model, *arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and "2 of " in err and "greedy tokens are ours" in err
    assert call(*model, *arguments, "--dtype", "bfloat16") == 0


def test_compile_is_passed_on(folder, monkeypatch):
    from glm53 import GLM53

    def load(path, *, compile, **options):
        raise ValueError(f"compile={compile}")

    monkeypatch.setattr(GLM53, "from_pretrained", load)
    for wanted in (True, False):
        settings = bench_peers.Settings(str(folder / "model"), "cpu", "float32", 1, wanted, 64)
        with pytest.raises(ValueError, match=f"compile={wanted}"):
            bench_peers.Ours(settings)


@pytest.mark.parametrize(
    "arguments",
    [
        "--rounds 0",
        "--contexts 0",
        "--threads 0",
        "--contexts --batches --prefill",
        "--contexts --plot x.png",
        "--compare llama.cpp",
        "--compare vllm",
    ],
)
def test_wrong_arguments(arguments):
    with pytest.raises(SystemExit) as stop:
        call("--model", "x", *arguments.split())
    assert stop.value.code == 2


def test_what_cannot_be_measured(folder, capsys):
    assert call("--model", folder / "nothing") == 1
    assert call("--model", folder / "model", "--contexts", 500) == 1
    assert "the model's limit is 512" in capsys.readouterr().err


def test_common_tokens():
    assert bench_peers.common_tokens([[1, 2, 3], [4, 5]], [[1, 2, 9, 9], [7, 5]]) == (2, 5)
