"""Damaged files, foreign files and indexes: an error naming the file, never other weights."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import glm53.checkpoint.read as read
from glm53.checkpoint import CheckpointError
from tests.test_checkpoint import load
from tests.test_checkpoint_faults import BLOCK, error_of, make_small
from tests.tiny import (
    disk_tensors,
    write_checkpoint,
    write_config,
    write_shards,
)

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> tuple[Path, bytes, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("small")
    config, model = make_small()
    write_checkpoint(folder, model, config, fp8=True, block=BLOCK)
    path = folder / "model.safetensors"
    return path, path.read_bytes(), load(folder).state_dict()


def header_size(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_truncated_anywhere(small_file):
    path, data, _ = small_file
    header, size = header_size(data), len(data)
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, size - 1}
    cuts |= set(range(0, header, 401)) | set(range(header, size, size // 40))
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        assert str(path) in error_of(path.parent), cut
    path.write_bytes(data + b"\0")
    assert str(path) in error_of(path.parent)


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80, 0xFF])
def test_flipped_bytes_of_the_header(small_file, mask):
    """An error, or (a flip in padding or metadata) exactly the same weights."""
    path, data, state = small_file
    harmless = 0
    for at in [*range(8), *range(8, header_size(data), 23)]:
        damaged = bytearray(data)
        damaged[at] ^= mask
        path.write_bytes(damaged)
        try:
            loaded = load(path.parent).state_dict()
        except CheckpointError as error:
            assert str(path.parent) in str(error)
            continue
        harmless += 1
        assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items()), at
    assert harmless <= 3


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60, b"{}" * 40])
def test_not_a_safetensors_file(tmp_path, content):
    config, model = make_small()
    write_checkpoint(tmp_path, model, config, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(content)
    assert f"{shard}: not a readable safetensors file" in error_of(tmp_path)


def test_shard_cut_off_after_the_headers_were_read(tmp_path, monkeypatch):
    config, model = make_small()
    write_checkpoint(tmp_path, model, config, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    entries = read.read_entries(tmp_path)
    shard.write_bytes(shard.read_bytes()[:-1])
    monkeypatch.setattr(read, "read_entries", lambda folder: entries)
    assert str(shard) in error_of(tmp_path)


def edit_index(folder: Path, **changes) -> None:
    index = json.loads((folder / INDEX).read_text())
    weight_map = {n: changes.get(n, f) for n, f in index["weight_map"].items()}
    new = {n: f for n, f in changes.items() if n not in weight_map}
    weight_map = {n: f for n, f in (weight_map | new).items() if f is not None}
    (folder / INDEX).write_text(json.dumps(index | {"weight_map": weight_map}))


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/model.safetensors",
        "..\\outside.safetensors",
        "C:outside.safetensors",
        "..",
        "",
        "model.safetensors\0",
        "pytorch_model.bin",
        7,
        ["model.safetensors"],
    ],
)
def test_index_naming_something_else_than_a_file_of_the_folder(tmp_path, name):
    config, model = make_small()
    folder = tmp_path / "model"
    write_checkpoint(folder, model, config, shards=2)
    save_file({"lm_head.weight": torch.ones(131, 60)}, tmp_path / "outside.safetensors")
    edit_index(folder, **{"lm_head.weight": name})
    message = error_of(folder)
    assert INDEX in message and repr(name) in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"weight_map": {"a": "model.safetensors"}',
        "[]",
        "null",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        "[" * 100_000,
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        b"\xff\xfe{",
    ],
)
def test_index_that_is_no_index(tmp_path, text):
    config, model = make_small()
    write_checkpoint(tmp_path, model, config, shards=2)
    (tmp_path / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert INDEX in error_of(tmp_path)


def test_missing_shards_are_all_named(tmp_path):
    config, model = make_small()
    write_checkpoint(tmp_path, model, config, shards=4)
    names = [f"model-0000{i}-of-00004.safetensors" for i in (2, 4)]
    for name in names:
        (tmp_path / name).unlink()
    assert all(name in error_of(tmp_path) for name in names)


def test_index_and_shards_disagree(tmp_path):
    config, model = make_small()
    write_checkpoint(tmp_path, model, config, shards=2)
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    in_first = list(load_file(tmp_path / first))
    moved, unlisted = in_first[0], in_first[1]
    edit_index(tmp_path, **{moved: second, unlisted: None, "ghost": first})
    lines = {line.strip() for line in error_of(tmp_path).splitlines()[1:]}
    assert lines == {
        f"{first} holds {moved}, but the index places it in {second}",
        f"{first} holds {unlisted}, but the index does not list it",
        f"the index places {moved} in {second}, which lacks it",
        f"the index places ghost in {first}, which lacks it",
    }


def test_tensor_in_two_shards(tmp_path):
    config, model = make_small()
    write_checkpoint(tmp_path, model, config, shards=2)
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    name = next(iter(load_file(first)))
    save_file(load_file(second) | {name: torch.ones(3)}, second)
    message = error_of(tmp_path)
    assert f"{second.name} holds {name}, but the index places it in {first.name}" in message


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path):
    config, model = make_small()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    write_checkpoint(blobs, model, config, shards=2)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"blob{i}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{i}")
    assert load(snapshot).state_dict().keys() == model.state_dict().keys()


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_pickles_are_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, _ = make_small()
    write_config(tmp_path, config)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    message = error_of(tmp_path)
    assert "pytorch_model.bin" in message and "pickle" in message
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    assert "model.safetensors: not a readable safetensors file" in error_of(tmp_path)
    assert not Path("exploded").exists()


def test_folders_without_a_usable_checkpoint(tmp_path):
    config, model = make_small()
    write_config(tmp_path, config)
    assert "no safetensors checkpoint" in error_of(tmp_path)
    write_checkpoint(tmp_path, model, config, shards=2)
    index = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).unlink()
    assert f"neither model.safetensors nor {INDEX}" in error_of(tmp_path)
    (tmp_path / INDEX).write_text(index)
    write_shards(tmp_path, disk_tensors(model))
    assert "stale" in error_of(tmp_path)
    (tmp_path / INDEX).unlink()
    load(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    assert "no tensors" in error_of(tmp_path)


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors", "awq", "mxfp4"])
def test_other_quantised_forms_are_refused_before_a_weight_is_opened(tmp_path, method):
    config, _ = make_small()
    write_config(tmp_path, config)
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=method):
        load(tmp_path)
