"""Whether what is about to be allocated fits the device."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def check_fits(required_bytes: Mapping[str, int], device: torch.device | str) -> None:
    """Compare the sum of `required_bytes` (what it is for -> bytes) with the device's free memory.

    Raises:
        MemoryError: more is required than available, with every number.
        ValueError: see `available_bytes`.
    """
    available, required = available_bytes(device), sum(required_bytes.values())
    if required > available:
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in required_bytes.items())
        raise MemoryError(
            f"{_gib(required)} needed on {device} ({parts}), {_gib(available)} available"
        )


def available_bytes(device: torch.device | str) -> int:
    """Bytes that can still be allocated on `device`.

    CPU: available memory, or what the container's limit leaves if that is less. CUDA: free memory,
    and what PyTorch holds unused.

    Raises:
        ValueError: a CUDA device that is not there, or another kind of device, whose memory this
            library cannot ask for.
    """
    device = torch.device(device)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device={str(device)!r}: this PyTorch sees {count} CUDA devices")
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        raise ValueError(f"device={str(device)!r}: must be a cpu or cuda device")
    container = _container_bytes()
    return _system_bytes() if container is None else min(_system_bytes(), container)


def _system_bytes() -> int:
    if _MEMINFO.is_file():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Not Linux: free pages, or all of them where the free ones are not told.
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int | None:
    """What a cgroup v2 limit leaves; its file pages are not counted, they can be dropped."""
    limit, used, stat = (_CGROUP / f"memory.{n}" for n in ("max", "current", "stat"))
    if not limit.is_file() or limit.read_text().strip() == "max":
        return None
    parts = dict(line.split() for line in stat.read_text().splitlines())
    cached = int(parts["inactive_file"]) + int(parts["active_file"])
    return max(0, int(limit.read_text()) - int(used.read_text()) + cached)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
