"""Buffers that keep the arguments of one bucket in one place, step after step."""

from dataclasses import replace

import torch
from torch import Tensor

from glm53.batch import TENSORS, Batch, Selection


class StaticInputs:
    """Copies of arguments, by name; the next step's overwrite them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def hold(self, name: str, tensor: Tensor) -> Tensor:
        """The buffer of this name, with the values of `tensor`; of the shape it has first."""
        if name not in self._buffers:
            with torch.inference_mode(False):  # it outlives the step
                self._buffers[name] = torch.empty_like(tensor)
        assert self._buffers[name].shape == tensor.shape, name
        return self._buffers[name].copy_(tensor)

    def batch(self, batch: Batch) -> Batch:
        """A padded batch."""
        return replace(batch, **{name: self.hold(name, getattr(batch, name)) for name in TENSORS})

    def selection(self, selection: Selection) -> Selection:
        """A padded selection."""
        return Selection(
            self.hold("logical", selection.logical),
            self.hold("physical", selection.physical),
            self.hold("counts", selection.counts),
        )
