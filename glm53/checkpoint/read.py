"""Fill a model from a checkpoint folder.

Everything that names, shapes and dtypes can tell is decided from the files' headers, before a
weight is read: which part of which parameter every tensor fills, and which scale belongs to which
FP8 weight, in whatever files the two are. Then one tensor at a time is read into its place.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from glm53.checkpoint.fit import check_fits
from glm53.checkpoint.folder import CheckpointError, Entry, open_shard, read_entries
from glm53.checkpoint.fp8 import dequantise, scale_shape
from glm53.checkpoint.names import (
    Place,
    disk_places,
    shared_indexer_layer,
    stacked_places,
    tied_names,
)
from glm53.config import GLM53Config
from glm53.model import Transformer

logger = logging.getLogger(__name__)

FP8 = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"  # of a `....weight`

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0"})
# Weights that are only ever used in fp32 and decide discrete choices: they are never narrowed to
# less than the file holds (transformers keeps the router fp32 always, weights_proj under fp16).
_NEVER_NARROWED = ("mlp.gate.weight", "indexer.weights_proj.weight")
_BIAS = "e_score_correction_bias"


def load_transformer(
    folder: str | Path,
    config: GLM53Config,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    extra_bytes: Mapping[str, int] | None = None,
    progress: bool = True,
) -> Transformer:
    """The network with the weights in `folder`, in `dtype` (None: the config's) on `device`.

    FP8 weights are dequantised in fp32 and rounded once to `dtype`. `e_score_correction_bias` is
    fp32 whatever `dtype` is; the router's weight and the indexer's `weights_proj` have at least
    the precision of the file. Indexer tensors of shared layers are ignored (one log line). The
    MTP layer is left out where the files hold nothing of it (one log line), as is the case after
    transformers has saved a checkpoint.

    Peak memory is the model plus one shard. `extra_bytes` (what for -> bytes) names what else will
    live on the device; all of it must fit before a weight is read. `progress` shows a bar.

    Raises:
        CheckpointError: damaged files; or everything that is missing, unexpected, mis-shaped or
            of the wrong dtype, every scale without weight and FP8 weight without scale, at once.
        MemoryError: model and `extra_bytes` do not fit the device.
        ValueError: `dtype` is none of bfloat16, float16, float32.
    """
    folder, device = Path(folder), torch.device(device)
    if dtype is None:
        dtype = getattr(torch, config.dtype)
    assert dtype is not None
    if dtype not in _DTYPES.values():
        raise ValueError(f"dtype={dtype}: must be torch.bfloat16, torch.float16 or torch.float32")
    entries = _drop_shared_indexers(read_entries(folder), config)
    narrow = [n for n, e in entries.items() if n.endswith(_BIAS) and e.dtype != "F32"]
    if narrow:
        logger.warning(
            "%d router biases (%s) are not stored in fp32: they were rounded, and choices of "
            "experts may differ from the original's",
            len(narrow),
            _BIAS,
        )
    with torch.device("meta"):
        model = Transformer(config, mtp=_has_mtp(entries, config))
    plan = _Plan.make(folder, model, config, entries)
    dtypes = _parameter_dtypes(model, dtype, plan)
    weights = sum(t.numel() * dtypes[name].itemsize for name, t in _tensors(model).items())
    buffer = max(entry.numel * (4 if entry.dtype == FP8 else 2) for entry in entries.values())
    check_fits({"weights": weights, "loading": buffer} | dict(extra_bytes or {}), device)
    plan.check_ties()

    state: dict[str, Tensor] = {}
    for name, tensor in model.named_parameters():
        state[name] = nn.Parameter(torch.empty(tensor.shape, dtype=dtypes[name], device=device))
    for name, tensor in model.named_buffers():
        state[name] = torch.empty(tensor.shape, dtype=dtypes[name], device=device)
    plan.fill(state, progress)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    return model


@dataclass
class _Plan:
    """What is read, and where it goes. `entries`: weights and scales alike, by name."""

    folder: Path
    entries: dict[str, Entry]
    block: tuple[int, int] | None
    places: dict[str, Place] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    @classmethod
    def make(
        cls, folder: Path, model: Transformer, config: GLM53Config, entries: dict[str, Entry]
    ) -> "_Plan":
        quantization = config.quantization_config
        block = None if quantization is None else quantization.weight_block_size
        plan = cls(folder, entries, block)
        expected, stacked = disk_places(model), stacked_places(model)
        ties = tied_names(config, mtp=model.mtp_layer_idx is not None)
        problems = []
        for name, entry in entries.items():
            if name.endswith(SCALE_SUFFIX):
                problems += plan._scale_problems(name)
                continue
            if name in ties:
                plan.ties[name] = ties[name]
                place = expected[ties[name]]
            elif name in expected or name in stacked:
                place = plan.places[name] = expected.get(name) or stacked[name]
                if place.parameter in entries and name != place.parameter:
                    problems.append(f"given twice: {name}, also part of {place.parameter}")
            else:
                problems.append(f"unexpected: {name} {list(entry.shape)}")
                continue
            problems += plan._weight_problems(name, place)
        for name, place in expected.items():
            if name not in entries and place.parameter not in entries:
                problems.append(f"missing: {name} {list(place.shape)}")
        if problems:
            lines = "\n  ".join(problems)
            raise CheckpointError(f"{folder}: tensors do not fit config.json:\n  {lines}")
        return plan

    def _weight_problems(self, name: str, place: Place) -> list[str]:
        entry = self.entries[name]
        problems = []
        if entry.shape != place.shape:
            shapes = f"is {list(entry.shape)}, must be {list(place.shape)}"
            problems.append(f"mis-shaped: {name} {shapes}")
        if entry.dtype == FP8:
            if name + SCALE_SUFFIX not in self.entries:
                problems.append(f"FP8 without scale: {name} needs {name + SCALE_SUFFIX}")
            elif len(entry.shape) != 2:
                problems.append(f"FP8 but not a matrix: {name} {list(entry.shape)}")
            elif self.block is None:
                problems.append(f"FP8 without quantization_config in config.json: {name}")
        elif entry.dtype not in _DTYPES:
            problems.append(f"dtype that cannot be read: {name} is {entry.dtype}")
        return problems

    def _scale_problems(self, name: str) -> list[str]:
        entry = self.entries[name]
        weight = self.entries.get(name.removesuffix(SCALE_SUFFIX))
        if weight is None:
            return [f"scale without weight: {name}"]
        if weight.dtype != FP8:
            return [f"scale without FP8 weight: {name}, whose weight is {weight.dtype}"]
        if entry.dtype not in _SCALE_DTYPES:
            return [f"dtype that cannot be read: {name} is {entry.dtype}"]
        if self.block is not None and len(weight.shape) == 2:
            shape = scale_shape(weight.shape, self.block)
            if entry.shape != shape:
                shapes = f"is {list(entry.shape)}, must be {list(shape)}"
                return [f"mis-shaped: {name} {shapes}, weight_block_size {list(self.block)}"]
        return []

    def check_ties(self) -> None:
        """Tensors that the model shares must be equal to what they are shared with."""
        differ = [
            f"{name} differs from {target}"
            for name, target in self.ties.items()
            if not torch.equal(self._read_fp32(name), self._read_fp32(target))
        ]
        if differ:
            raise CheckpointError(
                f"{self.folder}: the network has one embedding and one head, shared with its MTP "
                f"layer, and tied where tie_word_embeddings is true: {'; '.join(differ)}"
            )

    def _read_fp32(self, name: str) -> Tensor:
        with open_shard(self.entries[name].file) as shard:
            values: Tensor = shard.get_tensor(name)
        if self.entries[name].dtype != FP8:
            return values.float()
        out = torch.empty(values.shape)
        scales = self._scales([name])
        self._store(values, scales[name], out)
        return out

    def fill(self, state: dict[str, Tensor], progress: bool) -> None:
        """Read every tensor into its part of `state`, file by file, in the order of the file."""
        by_file: dict[Path, list[str]] = {}
        for name in self.places:
            by_file.setdefault(self.entries[name].file, []).append(name)
        # Scales in another file than their weight: few and small, fetched first, so that no weight
        # has to wait in memory for a later file.
        apart = [
            name
            for name in self.places
            if self.entries[name].dtype == FP8
            and self.entries[name + SCALE_SUFFIX].file != self.entries[name].file
        ]
        scales = self._scales(apart)
        sizes = {name: _nbytes(self.entries[name]) for name in self.places}
        total, done = sum(sizes.values()), 0
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="Loading", disable=not progress
        ) as bar:
            for file, names in by_file.items():
                with open_shard(file) as shard:
                    for name in names:
                        place = self.places[name]
                        scale = scales.pop(name, None)
                        if scale is None and self.entries[name].dtype == FP8:
                            scale = shard.get_tensor(name + SCALE_SUFFIX)
                        out = state[place.parameter].detach()[place.index]
                        self._store(shard.get_tensor(name), scale, out)
                        done += 1
                        bar.set_postfix(tensors=f"{done}/{len(sizes)}", refresh=False)
                        bar.update(sizes[name])
        assert not scales, f"scales never used: {sorted(scales)}"

    def _store(self, values: Tensor, scale: Tensor | None, out: Tensor) -> None:
        if scale is None:
            out.copy_(values)
        else:
            assert self.block is not None
            dequantise(values.to(out.device), scale.to(out.device), self.block, out)

    def _scales(self, weights: list[str]) -> dict[str, Tensor]:
        """Weight name -> its scale. Cloned: a tensor may be a view of the whole mapped file."""
        by_file: dict[Path, list[str]] = {}
        for name in weights:
            by_file.setdefault(self.entries[name + SCALE_SUFFIX].file, []).append(name)
        scales: dict[str, Tensor] = {}
        for file, names in by_file.items():
            with open_shard(file) as shard:
                scales |= {name: shard.get_tensor(name + SCALE_SUFFIX).clone() for name in names}
        return scales


def _tensors(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _nbytes(entry: Entry) -> int:
    return entry.numel * (1 if entry.dtype == FP8 else _DTYPES[entry.dtype].itemsize)


def _parameter_dtypes(
    model: Transformer, dtype: torch.dtype, plan: _Plan
) -> dict[str, torch.dtype]:
    """dtype for parameters, except for those kept wider; fp32 for buffers."""
    dtypes = dict.fromkeys(dict(model.named_parameters()), dtype)
    for name in dtypes:
        if name.endswith(_NEVER_NARROWED):
            stored = _DTYPES.get(plan.entries[name].dtype, torch.float32)
            dtypes[name] = torch.promote_types(dtype, stored)
    return dtypes | dict.fromkeys(dict(model.named_buffers()), torch.float32)


def _drop_shared_indexers(entries: dict[str, Entry], config: GLM53Config) -> dict[str, Entry]:
    """Some exporters write an indexer for every layer; those of shared layers are never used."""
    layers = {name: shared_indexer_layer(name, config) for name in entries}
    dropped = sorted({layer for layer in layers.values() if layer is not None})
    if dropped:
        count = sum(layer is not None for layer in layers.values())
        logger.info(
            "ignored %d indexer tensors of layers that share an earlier selection: %s",
            count,
            ", ".join(map(str, dropped)),
        )
    return {name: entry for name, entry in entries.items() if layers[name] is None}


def _has_mtp(entries: dict[str, Entry], config: GLM53Config) -> bool:
    layer = config.mtp_layer
    if layer is None:
        return False
    if any(name.startswith(f"model.layers.{layer}.") for name in entries):
        return True
    logger.info("the files hold no tensor of the MTP layer %d: loaded without it", layer)
    return False
