"""Graphs without a GPU: what was recorded is run again, on the memory that it was recorded on.

As with CUDA graphs, recording computes nothing, a replay reads and writes addresses (not what the
names stand for by now), numbers are those of the recording, and outputs of one network graph may be
overwritten by the replay of another.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from glm53.compile.capture import Captures

PIECE_BYTES = 1000


def _tensors(values) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(10**6))


class FakeRecorder:
    """log: "warm up", "record" and "replay", in order. fail_at: that recording has no memory."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.fail_at = fail_at
        self.log: list[str] = []
        self.owner = ""  # the network graph whose piece is recorded
        self.recordings = 0
        self._outputs: dict[str, list[Tensor]] = {}

    def free_bytes(self) -> int:
        return 1 << 20

    def pool_bytes(self) -> int:
        return PIECE_BYTES * self.recordings

    def warm_up(self, function: Callable, inputs: Sequence) -> None:
        self.log.append("warm up")
        function(*inputs)

    def record(self, function: Callable, inputs: Sequence) -> tuple[Callable[[], None], object]:
        if self.recordings + 1 == self.fail_at:
            raise torch.OutOfMemoryError("out of the memory that this test has\nand more")
        self.recordings += 1
        self.log.append("record")
        before = [x.clone() for x in _tensors(inputs)]
        outputs = function(*inputs)
        for x, value in zip(_tensors(inputs), before, strict=True):
            x.detach().copy_(value)
        owner, given = self.owner, {_storage(x) for x in _tensors(inputs)}
        made = [x for x in _tensors(outputs) if _storage(x) not in given]
        _spoil(made)
        self._outputs.setdefault(owner, []).extend(made)
        frozen = [x.detach() if isinstance(x, Tensor) else x for x in inputs]

        def replay() -> None:
            self.log.append("replay")
            for other, tensors in self._outputs.items():
                if other != owner:
                    _spoil(tensors)
            results = function(*frozen)
            for out, result in zip(_tensors(outputs), _tensors(results), strict=True):
                if _storage(out) not in given:
                    out.copy_(result)

        return replay, outputs

    def release(self) -> None:
        pass


class FakeCaptures(Captures):
    """With a fake recorder, told whose piece it records."""

    recorder: FakeRecorder

    def __init__(self, fail_at: int | None = None, max_bytes: int | None = None) -> None:
        super().__init__(FakeRecorder(fail_at), max_bytes)

    def capture(self, recording, piece, inputs) -> bool:
        self.recorder.owner = recording.name
        return super().capture(recording, piece, inputs)
