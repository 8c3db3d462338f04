"""Checkpoint folders: safetensors index -> parameters, and back.

`folder` finds out what a folder holds and whether its files can be trusted; `names` maps names on
disk to parameters; `fit` compares sizes with memory; `fp8` turns block-scaled E4M3 into numbers;
`read` fills a model; `save` writes one. Only config.json, the index and *.safetensors are opened,
so nothing is ever unpickled.
"""

from glm53.checkpoint.fit import available_bytes, check_fits
from glm53.checkpoint.folder import CheckpointError, resolve_folder
from glm53.checkpoint.read import load_transformer
from glm53.checkpoint.save import save_transformer

__all__ = [
    "CheckpointError",
    "available_bytes",
    "check_fits",
    "load_transformer",
    "resolve_folder",
    "save_transformer",
]
