"""Who may import whom, what `import glm53` costs, and how long a file may be."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "glm53"
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def _run(code: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds glm53 in cwd first."""
    env = os.environ | {"PYTHONPATH": str(cwd), "COLUMNS": "200"}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def _lint(cwd: Path) -> subprocess.CompletedProcess[str]:
    return _run(LINT_IMPORTS, "--config", str(ROOT / "pyproject.toml"), "--no-cache", cwd=cwd)


def _distributed_imports(source: str) -> list[int]:
    """Lines that reach torch.distributed, whether imported or through the attribute."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = any(alias.name.startswith("torch.distributed") for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                found = module.startswith("torch.distributed") or (
                    module == "torch" and any(alias.name == "distributed" for alias in names)
                )
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                found = True
            case _:
                found = False
        if found:
            lines.append(node.lineno)
    return lines


def test_the_package_keeps_its_contracts():
    result = _lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "module, source",
    [
        ("model", "def f():\n    import transformers"),
        ("model", "from . import engine"),
        ("api", "from transformers import AutoTokenizer"),
        ("scheduler", "from glm53 import speculative"),
        ("ops/mla", "from ..config import GLM53Config"),
        ("utils", ""),
    ],
    ids=["lazy-transformers", "upwards", "not-tokenizer", "siblings", "ops-config", "unlisted"],
)
def test_a_broken_contract_is_found(tmp_path, module, source):
    names = ["api", "config", "engine", "model", "ops/__init__", "scheduler", "speculative"]
    files = dict.fromkeys(["__init__", *names], "")
    files["tokenizer"] = "def load():\n    import transformers"
    for name, text in files.items():
        path = tmp_path / "glm53" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    clean = _lint(tmp_path)
    assert clean.returncode == 0, clean.stdout + clean.stderr

    (tmp_path / "glm53" / f"{module}.py").write_text(source)
    broken = _lint(tmp_path)
    assert broken.returncode == 1, broken.stdout + broken.stderr
    assert module.replace("/", ".") in broken.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed as dist",
        "def f():\n    from torch.distributed.tensor import DTensor",
        "from torch import distributed",
        "import torch\ntorch.distributed.get_rank()",
    ],
)
def test_torch_distributed_is_recognised(source):
    assert _distributed_imports(source)
    assert not _distributed_imports("import torch\nfrom torch import nn\nx = torch.ones(1)")


def test_network_and_operators_know_no_ranks():
    sources = [PACKAGE / "model.py", *(PACKAGE / "model").rglob("*.py")]
    sources += (PACKAGE / "ops").rglob("*.py")
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sources
        if path.exists() and (lines := _distributed_imports(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_import_is_light():
    """transformers costs seconds and triton needs a compiler: both wait until they are needed."""
    result = _run(
        "import sys, glm53; print(glm53.__file__);"
        "heavy = {'transformers', 'triton', 'torchao', 'lm_eval', 'llguidance'};"
        "print(sorted(heavy & set(sys.modules)))",
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(PACKAGE / "__init__.py"), "[]"]


def test_files_stay_readable():
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert {path: n for path, n in lengths.items() if n > 600} == {}
