"""Write a model as a Hugging Face checkpoint."""

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from glm53.checkpoint.folder import INDEX_NAME, SINGLE_NAME
from glm53.checkpoint.names import Place, disk_places
from glm53.config import GLM53Config
from glm53.model import Transformer

_TEMPORARY = ".saving-"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@torch.no_grad()
def save_transformer(
    model: Transformer,
    config: GLM53Config,
    folder: str | Path,
    max_shard_size: int = 5_000_000_000,
    *,
    files: Mapping[str, Path | str] | None = None,
) -> None:
    """Write config.json and safetensors shards (with their index, if several) into `folder`.

    Tensors have the names, and experts the per-expert form, of published checkpoints, in the dtypes
    that the model holds; config.json says that dtype and has no quantization_config. Shards hold
    at most `max_shard_size` bytes of tensors, or a single tensor. files: further files, by name, as
    a path to copy or as their text.

    Everything is first written into a hidden subfolder. Only then does it replace a checkpoint
    that is already there, config.json last: an interrupted save leaves the old checkpoint, or a
    folder without config.json, which nothing loads. Files of other names are not touched, but for
    hidden subfolders of saves that were killed.

    Raises:
        ValueError: max_shard_size below 1, or a model without data (on meta).
        OSError: the folder cannot be written.
    """
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size={max_shard_size}: must be a positive number of bytes")
    if model.device.type == "meta":
        raise ValueError("the model is on meta: there is no data to save")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(_TEMPORARY + "*"):
        shutil.rmtree(stale)
    config = dataclasses.replace(
        config,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization_config=None,
        num_nextn_predict_layers=int(model.mtp_layer_idx is not None),
    )
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    shards = _split(disk_places(model), state, max_shard_size)
    shard_files = {_shard_name(i, len(shards)): shard for i, shard in enumerate(shards)}
    with tempfile.TemporaryDirectory(dir=folder, prefix=_TEMPORARY) as temporary:
        new, weight_map, total = Path(temporary), {}, 0
        for file, places in shard_files.items():
            tensors = {name: _part(state, place) for name, place in places.items()}
            save_file(tensors, new / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        names = list(shard_files)
        if len(shard_files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(new / INDEX_NAME, index)
            names.append(INDEX_NAME)
        for name, content in (files or {}).items():
            if isinstance(content, Path):
                shutil.copyfile(content, new / name)
            else:
                (new / name).write_text(content, encoding="utf-8")
            names.append(name)
        _write_json(new / "config.json", config.to_dict())
        _replace(new, folder, [*names, "config.json"])


def _split(
    places: dict[str, Place], state: dict[str, Tensor], max_shard_size: int
) -> list[dict[str, Place]]:
    """Consecutive names, as many in a shard as fit."""
    shards: list[dict[str, Place]] = [{}]
    size = 0
    for name, place in places.items():
        nbytes = state[place.parameter][place.index].nbytes
        if shards[-1] and size + nbytes > max_shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = place
        size += nbytes
    return shards


def _shard_name(i: int, count: int) -> str:
    return SINGLE_NAME if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _part(state: dict[str, Tensor], place: Place) -> Tensor:
    return state[place.parameter].detach()[place.index].cpu().contiguous()


def _write_json(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _replace(new: Path, folder: Path, names: list[str]) -> None:
    """Move the files in; between the first and the last step nothing can load the folder."""
    old = [p for p in folder.iterdir() if p.name in (SINGLE_NAME, INDEX_NAME)]
    old += [p for p in folder.iterdir() if _SHARD.fullmatch(p.name)]
    for path in (folder / "config.json", *old):
        path.unlink(missing_ok=True)
    for name in names:
        (new / name).replace(folder / name)
