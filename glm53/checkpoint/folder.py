"""A checkpoint folder: where it is, which files it consists of, which tensors they hold."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Top-level files only, and nothing that could be executed or unpickled.
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")
_HUB_SUBFOLDERS = ("*/*",)


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or does not fit its config.json. Names everything wrong."""


class Entry(NamedTuple):
    """One tensor on disk. dtype: safetensors' name of it, such as BF16 or F8_E4M3."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def resolve_folder(path_or_hub_id: str | os.PathLike[str]) -> Path:
    """The local folder of a checkpoint; a Hugging Face id (`owner/name`) is downloaded first.

    An existing folder never touches the network, and neither does anything that looks like a path:
    a Path, a name that is no `owner/name`, or one whose first part is a folder here. Downloads are
    restricted to json, jinja, safetensors and tokenizer files.

    Raises:
        FileNotFoundError: no such folder, or the hub has no such repository (or cannot be reached).
        NotADirectoryError: a file.
    """
    path, name = Path(path_or_hub_id).expanduser(), str(path_or_hub_id)
    if name and path.is_dir():  # Path("") would be the current folder
        return path
    if path.is_file():
        raise NotADirectoryError(f"{str(path)!r} is a file: give the checkpoint's folder")
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(
            f"{name!r}: no such folder (a Hugging Face id would have the form owner/name)"
        )
    parent = name.split("/")[0]
    if Path(parent).is_dir():
        raise FileNotFoundError(
            f"{name!r}: no such folder. It is read as a path because the folder {parent!r} exists"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_SUBFOLDERS)
            )
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{name!r}: no folder of that name, and the Hugging Face hub gave none: {error}"
        ) from error


@contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """A safetensors file, on CPU; whatever is wrong with it is a CheckpointError naming it."""
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the checkpoint, from the headers of its files; no tensor data is read.

    Raises:
        CheckpointError: no safetensors checkpoint, a bad index, missing or damaged files, or an
            index and shards that disagree (all disagreements in one error).
    """
    weight_map = _weight_map(folder)
    files = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder}: {INDEX_NAME} names missing files: {', '.join(missing)}")
    entries: dict[str, Entry] = {}
    problems = []
    for file in files:
        path = folder / file
        with open_shard(path) as shard:
            for name in shard.offset_keys():
                place = file if weight_map is None else weight_map.get(name)
                if place != file:
                    where = "does not list it" if place is None else f"places it in {place}"
                    problems.append(f"{file} holds {name}, but the index {where}")
                    continue
                view = shard.get_slice(name)
                entries[name] = Entry(path, view.get_dtype(), tuple(view.get_shape()))
    for name, file in (weight_map or {}).items():
        if name not in entries:
            problems.append(f"the index places {name} in {file}, which lacks it")
    if problems:
        raise CheckpointError(f"{folder}: index and shards disagree:\n  " + "\n  ".join(problems))
    if not entries:
        raise CheckpointError(f"{folder}: the checkpoint holds no tensors")
    return entries


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name by the index; None for a single file without an index."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.exists():
        if single.is_file():
            return None
        _refuse(folder)
    weight_map = _parse_index(index)
    if single.exists() and SINGLE_NAME not in weight_map.values():
        raise CheckpointError(
            f"{folder}: both {SINGLE_NAME} and {INDEX_NAME} are there and the index does not use "
            "the former: remove whichever is stale"
        )
    return weight_map


def _refuse(folder: Path) -> None:
    files = sorted(p.name for p in folder.iterdir())
    if any(name.endswith(".safetensors") for name in files):
        raise CheckpointError(
            f"{folder}: safetensors files, but neither {SINGLE_NAME} nor {INDEX_NAME}"
        )
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickles:
        raise CheckpointError(
            f"{folder}: only {', '.join(pickles)}: pickled weights can run code when opened and "
            "are never read; convert them to safetensors"
        )
    raise CheckpointError(f"{folder}: no safetensors checkpoint ({SINGLE_NAME} or {INDEX_NAME})")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"given twice: {', '.join(twice)}")
    return dict(pairs)


def _parse_index(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a valid index: {error}") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map of tensor names to file names")
    for name, file in weight_map.items():
        # The name alone is checked: in the hub's cache every file is a link to a blob elsewhere.
        if not isinstance(file, str) or re.search(r"[/\\:\x00]", file):
            raise CheckpointError(
                f"{path}: {name} is placed in {file!r}, not a file of this folder"
            )
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name} is placed in {file!r}, not a safetensors file")
    return weight_map
