"""Which weights a network has: still the same ones, and those of another process?"""

import hashlib
import itertools
import json
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from glm53.model import Transformer

_PIECE = 1 << 20  # values that are summed at once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightSnapshot:
    """The parameters and buffers that a network had, to tell whether one was written or replaced.

    Identities and version counters, no values: it costs a microsecond or two a tensor. Memory of
    another tensor may get the address of one that is gone, and Python its id, so tensors and
    storages are known by weak references; nothing that was replaced is kept alive. Not seen are
    writes that no version counter counts: through `.data`, by optimizers with `fused=True`, and to
    inference tensors, which have no counter.
    """

    def __init__(self, network: nn.Module) -> None:
        self._tensors = [_Seen(tensor) for tensor in _tensors(network)]

    def matches(self, network: nn.Module) -> bool:
        """Are these the tensors that the network has now, as they were."""
        pairs = itertools.zip_longest(self._tensors, _tensors(network))
        return all(seen is not None and seen.matches(tensor) for seen, tensor in pairs)


def _tensors(network: nn.Module) -> list[Tensor]:
    """Those of `parameters()` and `buffers()`, in less time; a tied one more than once."""
    found: list[Tensor | None] = []
    modules: list[nn.Module | None] = [network]
    while modules:
        module = modules.pop()
        if module is not None:
            modules += module._modules.values()
            found += module._parameters.values()
            found += module._buffers.values()
    return [tensor for tensor in found if tensor is not None]


class _Seen:
    """One tensor, where it lay, and its version."""

    __slots__ = ("_address", "_storage", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # Where modules are converted by swapping tensors, weak references to them are forbidden,
        # and the other storage tells.
        swapping = torch.__future__.get_swap_module_params_on_conversion()
        self._tensor = None if swapping else weakref.ref(tensor)
        self._storage = weakref.ref(tensor.untyped_storage())
        self._address, self._version = tensor.data_ptr(), _version(tensor)

    def matches(self, tensor: Tensor | None) -> bool:
        return (
            tensor is not None
            and (self._tensor is None or self._tensor() is tensor)
            and self._storage() is tensor.untyped_storage()
            and self._address == tensor.data_ptr()
            and self._version == _version(tensor)
        )


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@torch.inference_mode()
def weight_fingerprint(network: Transformer) -> str:
    """SHA-256, in hexadecimal, by which two processes tell if they have the same weights.

    Of the configuration; of name, dtype and shape of every parameter and buffer; and of sums over
    all their values. Any one value that differs makes another fingerprint; several, unless their
    differences cancel in a sum modulo 2^64 with arbitrary weights. It finds mistakes, not malice.
    The same on every device. One pass over the weights where they are, in pieces, with 30 MB of
    memory; a CPU thread sums about 10^9 values a second.
    """
    digest = hashlib.sha256(json.dumps(network.config.to_dict(), sort_keys=True).encode())
    weights: dict[torch.device, Tensor] = {}
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.device not in weights:
            weights[tensor.device] = _odd_weights(_PIECE, tensor.device)
        sums = [_weighted_sum(piece, weights[tensor.device]) for piece in _pieces(tensor.detach())]
        if sums:
            digest.update(torch.stack(sums).cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """1-D parts of at most _PIECE elements, whatever the strides; only a part is ever copied."""
    if tensor.dim() > 2:
        for part in tensor:
            yield from _pieces(part)
    elif tensor.dim() == 2:
        width = max(1, tensor.shape[1])
        for rows in tensor.split(max(1, _PIECE // width)):
            yield from rows.reshape(-1).split(_PIECE)
    else:
        yield from tensor.reshape(-1).split(_PIECE)


def _weighted_sum(piece: Tensor, weights: Tensor) -> Tensor:
    """Scalar int64: of the values' bits as integers. An odd factor loses no bit modulo 2^64."""
    integers = piece.view(_INTEGERS[piece.itemsize]).to(torch.int64)
    return (integers * weights[: len(piece)]).sum()


def _odd_weights(count: int, device: torch.device) -> Tensor:
    """int64 [count]: well mixed, and the same everywhere; products wrap around."""
    mixed = torch.arange(1, count + 1, device=device) * -7046029254386353131
    mixed ^= mixed >> 29
    mixed *= -4658895280553007687
    mixed ^= mixed >> 32
    return mixed | 1
