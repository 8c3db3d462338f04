"""The project's own files agree with each other."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONSTRAINTS = ["constraints.txt", "constraints-2.11.txt"]


def _pins(name: str) -> dict[str, str]:
    """Canonical package name -> pinned version."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"{name}: {requirement} is not a pin"
        assert "+" not in specifier.version, f"{name}: {requirement} names one build"
        pins[canonicalize_name(requirement.name)] = specifier.version
    assert len(pins) == len(requirements), f"{name} pins a package twice"
    return pins


def _declared() -> list[Requirement]:
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for group in [project["dependencies"], *extras] for line in group]


def _files() -> list[Path]:
    """Every file of the repository: tracked, or new and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listing.split("\0") if name]
    assert paths
    return [path for path in paths if path.is_file()]


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_dependency_has_a_fitting_pin(name):
    pins = _pins(name)
    for requirement in _declared():
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{name} does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{name}: {requirement} but {version}"


def test_constraints_differ_only_where_the_gpu_image_does():
    first, second = (_pins(name) for name in CONSTRAINTS)
    different = {name for name in first | second if first.get(name) != second.get(name)}
    assert different == {"torch", "triton", "numpy"}


def test_commands_of_the_readme_are_targets():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w.-]*):(?!=)", makefile, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(phony.split()) == targets
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"(?:^|`|\$ )make ([a-z][\w.-]*\w)", readme, re.MULTILINE))
    assert {"demo", "test"} <= commands <= targets


def test_package_data_covers_every_data_file():
    package = ROOT / "glm53"
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["glm53"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    data = {path for path in _files() if path.is_relative_to(package / "data")}
    assert data <= shipped


def test_no_file_names_a_folder_of_the_machine_it_was_written_on():
    folder = re.compile(rb"(?<![\w.])/" + rb"work/[\w.]")
    found = [str(p.relative_to(ROOT)) for p in _files() if folder.search(p.read_bytes())]
    assert not found


def test_no_file_is_too_big_to_clone():
    assert not [path.name for path in _files() if path.stat().st_size > 16 << 20]
