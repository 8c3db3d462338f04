"""CUDA graphs of the pieces of a static bucket; breaks run eagerly between their replays.

What a graph recorded are launches on addresses. So whatever a piece reads or writes stays where it
is: batch tensors are copied into buffers of the bucket (`static_inputs.py`), weights and caches
never move, what an earlier piece made lies in the graphs' memory pool, and what a break made is
copied into a buffer of the piece that follows. Inputs that moved nevertheless (weights assigned
anew, another cache) are noticed by their address, and the piece is captured again. No number that
changes between steps reaches a piece: it would be frozen, and counts as an input that moved.

One pool serves all graphs, as no two of them run at once. Capture the largest bucket first, then
the smaller ones fit into what it left. Outputs are the next replay's to overwrite.
"""

import contextlib
import gc
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from glm53.compile.capturable import operators

logger = logging.getLogger(__name__)

# The first run of a kernel may load, tune or allocate it; a capture must not.
WARM_UPS = 2
# Of the memory that is free before the first capture.
MEMORY_SHARE = 0.5


class Recorder(Protocol):
    """What capturing needs of a device."""

    def free_bytes(self) -> int:
        """Free memory of the device."""
        ...

    def pool_bytes(self) -> int:
        """Memory held by the pool of all recorded graphs."""
        ...

    def warm_up(self, function: Callable, inputs: Sequence) -> None:
        """Run it, with the stream that records."""
        ...

    def record(self, function: Callable, inputs: Sequence) -> tuple[Callable[[], None], Any]:
        """A replay of `function(*inputs)`, and its outputs, which a replay computes."""
        ...

    def release(self) -> None:
        """Wait for what runs, before graphs are dropped, and free what nobody holds."""
        ...


class CUDARecorder:
    """CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        with warnings.catch_warnings(action="ignore"):  # that it is empty
            # A pool that no graph uses any more cannot be used again.
            self._keeps_pool, _ = self.record(lambda: None, ())

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot(self._pool, include_traces=False)
        # By the pool again: of a pool without segments, all segments may be listed.
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] == self._pool)

    def warm_up(self, function: Callable, inputs: Sequence) -> None:
        current = torch.cuda.current_stream(self._device)
        # Not by events: one recorded inside a capture cannot be waited for outside.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function(*inputs)
        current.wait_stream(self._stream)

    def record(self, function: Callable, inputs: Sequence) -> tuple[Callable[[], None], Any]:
        assert not torch.cuda.is_current_stream_capturing(), "a capture inside a capture"
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what warming up left to the other stream
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may go on allocating.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = function(*inputs)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of a capture that is invalid by now
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, outputs

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


@dataclass
class CaptureReport:
    """What capturing the graph of one entry and bucket came to.

    captured: its pieces that are replayed; captures: how many were recorded, again after inputs
    moved included; bytes: what the pool grew by; seconds: spent; host: the operators that
    forbid it; dropped: memory was short.
    """

    captured: int = 0
    captures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    host: set[str] = field(default_factory=set)
    dropped: bool = False


class Captures:
    """The captured graphs of a network: their pool, its bound, and what became of each."""

    def __init__(self, recorder: Recorder, max_bytes: int | None = None) -> None:
        """max_bytes: of the pool; None: MEMORY_SHARE of what is free."""
        self.recorder = recorder
        self.max_bytes = (
            int(MEMORY_SHARE * recorder.free_bytes()) if max_bytes is None else max_bytes
        )
        self.reports: dict[str, CaptureReport] = {}
        self._full = False
        self._capturing = False

    def recording(self, name: str) -> "Recording":
        """For the graph of an entry and bucket of this name."""
        self.reports[name] = CaptureReport()
        return Recording(self, name, self.reports[name])

    def summary(self) -> str:
        """One line: what is captured, in how much memory, and what is not, and why."""
        captured = {name: r for name, r in self.reports.items() if r.captured}
        pieces = sum(r.captured for r in captured.values())
        line = (
            f"CUDA graphs: {pieces} pieces of {len(captured)} of {len(self.reports)} graphs in "
            f"{self.recorder.pool_bytes()} bytes (at most {self.max_bytes})"
        )
        short = [name for name, r in self.reports.items() if not r.captured and not r.host]
        host = [f"{n} ({', '.join(sorted(r.host))})" for n, r in self.reports.items() if r.host]
        line += f"; no memory for {', '.join(short)}" if short else ""
        return line + (f"; need the host: {', '.join(host)}" if host else "")

    def capture(self, recording: "Recording", piece: "_Piece", inputs: tuple) -> bool:
        """Record a piece; False if there is no memory, and then for no other piece of its graph."""
        report = recording.report
        if self._full and not report.captures:
            recording.drop()
            return False
        assert not self._capturing, "a capture inside a capture"
        if not report.captures:
            gc.collect()  # once for a graph: it takes longer than a capture
        before, start = self.recorder.pool_bytes(), time.perf_counter()
        self._capturing = True
        try:
            self.recorder.warm_up(piece.function, inputs)
            piece.record(self.recorder, inputs)
        except torch.OutOfMemoryError as error:
            self._give_up(recording, str(error).split("\n")[0])
            return False
        finally:
            self._capturing = False
        after = self.recorder.pool_bytes()
        report.captures += 1
        report.captured = sum(p.replay is not None for p in recording.pieces)
        report.bytes += after - before
        report.seconds += time.perf_counter() - start
        if after > self.max_bytes:
            self._give_up(recording, "more than the bound")
            return False
        return True

    def _give_up(self, recording: "Recording", reason: str) -> None:
        pool = self.recorder.pool_bytes()
        logger.warning(
            "no memory to capture %s as CUDA graphs: their pool has %d bytes of at most %d, the "
            "device has %d bytes free (%s). It runs without, as does what is not captured yet",
            recording.name,
            pool,
            self.max_bytes,
            self.recorder.free_bytes(),
            reason,
        )
        self._full = True
        recording.drop()


class Recording:
    """The pieces and breaks of one graph, in the order they are called."""

    def __init__(self, captures: Captures, name: str, report: CaptureReport) -> None:
        self.captures = captures
        self.name = name
        self.report = report
        self.pieces: list[_Piece] = []
        self._breaks: list[_Break] = []

    @property
    def on(self) -> bool:
        """Are its pieces captured and replayed."""
        return not self.report.host and not self.report.dropped

    def inspect(self, piece: fx.GraphModule, inputs: Sequence) -> None:
        """One piece that needs the host keeps the whole graph from being captured."""
        self.report.host |= operators(piece, inputs)[1]

    def piece(self, function: Callable) -> Callable:
        """The function, captured with the inputs of its first call and replayed from then on."""
        self.pieces.append(_Piece(self, function))
        return self.pieces[-1]

    def eager(self, function: Callable) -> Callable:
        """A break: called every time, its result, one tensor, always in the same place."""
        self._breaks.append(_Break(self, function))
        return self._breaks[-1]

    def restart(self, piece: "_Piece") -> None:
        """Forget a piece whose inputs moved, and with it those that follow: they read what it
        makes, or reuse its memory."""
        first = self.pieces.index(piece)
        logger.warning(
            "CUDA graphs of %s, piece %d: inputs moved, captured again", self.name, first
        )
        self.captures.recorder.release()
        for later in self.pieces[first:]:
            later.clear()

    def drop(self) -> None:
        """Forget the graphs. What they computed stays valid as long as somebody has it."""
        self.report.dropped, self.report.captured = True, 0
        self.captures.recorder.release()
        for part in (*self.pieces, *self._breaks):
            part.clear()
        self.captures.recorder.release()


class _Piece:
    def __init__(self, recording: Recording, function: Callable) -> None:
        self.recording = recording
        self.function = function
        self.clear()

    def clear(self) -> None:
        self.replay: Callable[[], None] | None = None
        self.outputs: Any = None
        self._addresses: tuple = ()

    def record(self, recorder: Recorder, inputs: tuple) -> None:
        self.replay, self.outputs = recorder.record(self.function, inputs)
        self._addresses = _addresses(inputs)

    def __call__(self, *inputs):
        recording = self.recording
        if not recording.on:
            return self.function(*inputs)
        if self.replay is not None and _addresses(inputs) != self._addresses:
            recording.restart(self)
        if self.replay is None and not recording.captures.capture(recording, self, inputs):
            return self.function(*inputs)
        assert self.replay is not None
        self.replay()
        return self.outputs


class _Break:
    def __init__(self, recording: Recording, function: Callable) -> None:
        self.recording = recording
        self.function = function
        self.clear()

    def clear(self) -> None:
        self._result: Tensor | None = None

    def __call__(self, *inputs):
        result = self.function(*inputs)
        if not self.recording.on:
            return result
        if self._result is None:
            with torch.inference_mode(False):  # it outlives the step
                self._result = torch.empty_like(result)
        return self._result.copy_(result)


def _addresses(inputs: tuple) -> tuple:
    return tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in inputs)
