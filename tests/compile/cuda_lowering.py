"""Inductor's lowering for a CUDA device, on a machine that has none.

Networks are of fake tensors on the device "cuda", which Dynamo traces like others. While Inductor
runs, what it asks of a device is answered here. All of it is private to torch: it is written for
the versions named below and refuses others, to be looked at again with each new one.
"""

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache
from glm53.config import GLM53Config
from glm53.model import Transformer

WRITTEN_FOR = ("2.11.0", "2.13.0")
if torch.__version__.split("+")[0] not in WRITTEN_FOR:
    raise AssertionError(f"written for torch {WRITTEN_FOR}, not {torch.__version__}: look again")

# An H200.
_CAPABILITY = (9, 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    gcnArchName="",  # asked for by builds without CUDA
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    L2_cache_size=50 << 20,
    total_memory=141 << 30,
)
_HINTS = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)


class _Driver:
    """Triton's idea of the device."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_device_interface(self):
        return torch.cuda


def _answer(value):
    return staticmethod(lambda *args, **kwargs: value)


@contextmanager
def cuda_device() -> Iterator[None]:
    """Within, Inductor finds a device to generate code for. What would run on it is off: padding
    of matrices is decided by a measurement, and constants are folded by computing them."""
    from triton.runtime import driver

    answers = [
        (torch.cuda, "get_device_properties", _PROPERTIES),
        (torch.cuda, "get_device_capability", _CAPABILITY),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "device_count", 1),
        (torch.cuda, "get_rng_state", torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", None),
        (DeviceProperties, "create", _HINTS),
        (CudaInterface, "get_device_properties", _PROPERTIES),
        (CudaInterface, "get_compute_capability", 90),
        (CudaInterface, "is_bf16_supported", True),
        (CudaInterface.Worker, "get_device_properties", _PROPERTIES),
    ]
    with ExitStack() as stack:
        for owner, name, value in answers:
            stack.enter_context(mock.patch.object(owner, name, _answer(value)))
        for module in ("torch.utils._triton", "torch._inductor.scheduler"):
            stack.enter_context(mock.patch(f"{module}.has_triton", lambda *args: True))
        stack.enter_context(
            torch._inductor.config.patch(shape_padding=False, joint_graph_constant_folding=False)
        )
        stack.enter_context(mock.patch.object(driver, "_active", _Driver()))
        yield


def _set_device_guard() -> None:
    """Operators on tensors of a device switch to it. A CPU build of torch knows no way to do that,
    not even for fake tensors: it gets the way for meta tensors, which is to do nothing."""
    if torch.version.cuda is not None:
        return  # FakeTensorMode takes care of it
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    assert registry[meta] is not None
    registry[cuda] = registry[meta]


def fake_tensors(*given: nn.Module | Tensor) -> list:
    """The same on the device: fake tensors, and modules with such parameters and buffers."""
    _set_device_guard()

    def like(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    with FakeTensorMode():
        for module in [m for item in given if isinstance(item, nn.Module) for m in item.modules()]:
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(like(parameter), requires_grad=False))
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, like(buffer))
        return [like(item) if isinstance(item, Tensor) else item for item in given]


def fake_decode(
    config: GLM53Config, rows: int, dtype: torch.dtype
) -> tuple[Transformer, Batch, KVCache]:
    """A network, a step of so many requests and a cache."""
    with torch.device("meta"):
        network = Transformer(config).to(dtype).eval()
    step = Batch.paged([([7], 20, [page]) for page in range(rows)], PAGE_SIZE)
    tensors = {name: value for name, value in vars(step).items() if isinstance(value, Tensor)}
    network, *fakes = fake_tensors(network, *tensors.values())
    with FakeTensorMode():
        cache = KVCache(config, rows, mtp=True, dtype=dtype, device="cuda")
    return network, dataclasses.replace(step, **dict(zip(tensors, fakes, strict=True))), cache
