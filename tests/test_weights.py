"""The fingerprint of weights, against Python integers; and what it costs."""

import hashlib
import itertools
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from glm53 import weights
from glm53.model import Transformer
from glm53.weights import weight_fingerprint
from tests.tiny import randomise, tiny_config

MASK = 2**64 - 1


def _network(dtype=torch.float32) -> Transformer:
    return randomise(Transformer(tiny_config())).to(dtype)


def _odd_weight(i: int) -> int:
    """In signed 64-bit arithmetic."""

    def signed(x: int) -> int:
        return (x & MASK) - (1 << 64 if x & 1 << 63 else 0)

    mixed = signed((i + 1) * 0x9E3779B97F4A7C15)
    mixed = signed((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9)
    return signed(mixed ^ mixed >> 32) | 1


def _expected(network: Transformer, piece: int) -> str:
    """Loops over the bytes; pieces are whole rows, or parts of a row."""
    digest = hashlib.sha256(json.dumps(network.config.to_dict(), sort_keys=True).encode())
    for name, tensor in itertools.chain(network.named_parameters(), network.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        size, width = tensor.itemsize, tensor.shape[-1]
        matrix = width * (tensor.shape[-2] if tensor.dim() > 1 else 1)
        rows = matrix if tensor.dim() == 1 else max(1, piece // width) * width
        for start in range(0, tensor.numel(), matrix):
            for first in range(start, start + matrix, rows):
                last = min(first + rows, start + matrix)
                for begin in range(first, last, piece):
                    total = 0
                    for i in range(begin, min(begin + piece, last)):
                        value = data[i * size : (i + 1) * size]
                        number = int.from_bytes(value, "little", signed=True)
                        total += number * _odd_weight(i - begin)
                    digest.update((total & MASK).to_bytes(8, "little"))
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [50, 1000])
def test_it_is_the_sum_that_is_stated(monkeypatch, dtype, piece):
    monkeypatch.setattr(weights, "_PIECE", piece)
    network = _network(dtype)
    assert weight_fingerprint(network) == _expected(network, piece)


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float64)),
    ],
)
def test_the_last_bit_of_any_value_counts(dtype):
    network = _network(dtype)
    before = weight_fingerprint(network)
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    for tensor in itertools.chain(network.parameters(), network.buffers()):
        at = int(torch.randint(tensor.numel(), (1,), generator=generator))
        for changed in (torch.nextafter, lambda x, _: -x):
            value = tensor.view(-1)[at].clone()
            tensor.view(-1)[at] = changed(value, torch.full_like(value, torch.inf))
            assert weight_fingerprint(network) != before
            tensor.view(-1)[at] = value
    assert weight_fingerprint(network) == before
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state[name])


@torch.no_grad()
def test_where_a_value_is_counts_and_how_it_is_stored_does_not():
    network = _network()
    before = weight_fingerprint(network)
    o_proj = network.model.layers[0].self_attn.o_proj
    weight = o_proj.weight
    o_proj.weight = torch.nn.Parameter(weight.t().contiguous().t())
    assert not o_proj.weight.is_contiguous() and weight_fingerprint(network) == before
    o_proj.weight = torch.nn.Parameter(weight.flip(0))
    assert weight_fingerprint(network) != before
    o_proj.weight = torch.nn.Parameter(weight.flip(1))
    assert weight_fingerprint(network) != before


@torch.no_grad()
def test_no_copy_of_a_weight_is_made(monkeypatch):
    piece, sizes = 1000, []
    monkeypatch.setattr(weights, "_PIECE", piece)

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.untyped_storage().nbytes())
            return out

    network = _network()
    own = {tensor.untyped_storage().nbytes() for tensor in network.parameters()}
    own |= {tensor.untyped_storage().nbytes() for tensor in network.buffers()}
    with Recording():
        weight_fingerprint(network)
    assert max(own) > 8 * piece
    assert max(size for size in sizes if size not in own) <= 8 * piece
