"""Names on disk <-> places in parameters.

Files hold the routed experts one by one and by projection; the model stacks them. Every other name
is the same on both sides. The table is a bijection: the places of all names tile every parameter
and buffer, without gap or overlap.
"""

import re
from typing import NamedTuple

from torch import Tensor

from glm53.config import GLM53Config
from glm53.model import Transformer

_GATE_UP = ".mlp.experts.gate_up_proj"
_DOWN = ".mlp.experts.down_proj"
_INDEXER = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.")


class Place(NamedTuple):
    """A part of a parameter (or buffer): `parameter[index]`, and the shape of that part."""

    parameter: str
    index: tuple[int | slice, ...]
    shape: tuple[int, ...]


def disk_places(model: Transformer) -> dict[str, Place]:
    """Name on disk -> the part of the model it fills, in the model's order. Works on meta."""
    places: dict[str, Place] = {}
    for name, tensor in _state(model).items():
        prefix = name.rpartition(".")[0]
        if name.endswith(_GATE_UP):
            experts, rows, columns = tensor.shape
            half, shape = rows // 2, (rows // 2, columns)
            for e in range(experts):
                gate, up = f"{prefix}.{e}.gate_proj.weight", f"{prefix}.{e}.up_proj.weight"
                places[gate] = Place(name, (e, slice(0, half)), shape)
                places[up] = Place(name, (e, slice(half, rows)), shape)
        elif name.endswith(_DOWN):
            for e in range(tensor.shape[0]):
                disk = f"{prefix}.{e}.down_proj.weight"
                places[disk] = Place(name, (e,), tuple(tensor.shape[1:]))
        else:
            places[name] = Place(name, (), tuple(tensor.shape))
    return places


def stacked_places(model: Transformer) -> dict[str, Place]:
    """The experts as the model has them: transformers' `save_original_format=False` writes them."""
    return {
        name: Place(name, (), tuple(tensor.shape))
        for name, tensor in _state(model).items()
        if name.endswith((_GATE_UP, _DOWN))
    }


def tied_names(config: GLM53Config, mtp: bool) -> dict[str, str]:
    """Names that a file may hold although the model has no parameter of its own for them.

    The network has one embedding and one head, which its MTP layer shares; a tied model has one
    matrix for both. Such a tensor must equal the one it is tied to.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    names = {}
    if config.tie_word_embeddings:
        names[head] = head = embedding
    if mtp:
        layer = f"model.layers.{config.num_hidden_layers}"
        names[f"{layer}.embed_tokens.weight"] = embedding
        names[f"{layer}.shared_head.head.weight"] = head
    return names


def shared_indexer_layer(name: str, config: GLM53Config) -> int | None:
    """The layer, if `name` is an indexer tensor of a layer that uses an earlier layer's."""
    match = _INDEXER.match(name)
    layer = int(match[1]) if match else config.num_hidden_layers
    shared = layer < config.num_hidden_layers and not config.is_full(layer)
    return layer if shared else None


def _state(model: Transformer) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())
