"""Where Inductor keeps the code it generates."""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from glm53.config import GLM53Config

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def inductor_cache(
    folder: str | Path | None, config: GLM53Config, device: torch.device
) -> Iterator[None]:
    """Keeps what is compiled within under `folder`, apart for every torch version, device and
    model configuration; None: where Inductor keeps it by default."""
    if folder is None:
        yield
        return
    name = platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    key = f"{torch.__version__} {device.type} {name} {config!r}"
    place = Path(folder) / hashlib.sha256(key.encode()).hexdigest()[:16]
    place.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = str(place)
    try:
        yield
    except Exception as error:
        error.add_note(f"Compiled code is kept in {place}: delete that if it may be damaged.")
        raise
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
