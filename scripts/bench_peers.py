"""The implementations that bench_generate.py compares, behind one interface, each in a process.

Interface, times in seconds:

start(prompts, num_new)  compute the prompts, not timed; num_new: how many tokens will be decoded
decode(steps)            time of each step; a step decodes one token for every prompt
finish()                 greedy tokens of every prompt, as far as they were decoded
prefill(prompt)          time from a prompt to its first token, and that token
peak_bytes()             largest resident size since the last call (on CUDA: allocated memory)

Decoding is greedy: what is compared must compute the same. A process of its own gives every
implementation its own peak memory; only one of them is at work at any time.
"""

import json
import multiprocessing
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OURS = "glm53"
CHUNK = 512  # rows of a prompt computed at once
ROUTED_POSITIONS = 64
WARM_UP_STEPS = 2
ATTENTION = ("eager", "sdpa")


@dataclass(frozen=True)
class Settings:
    """cache_tokens: of the largest case, prompts and new tokens."""

    model: str
    device: str
    dtype: str
    threads: int
    compile: bool
    cache_tokens: int
    llama_bench: str | None = None
    gguf: str | None = None


def _start_torch(settings: Settings):
    import torch

    torch.set_num_threads(settings.threads)
    return torch


def _peak_bytes(device: str) -> int | None:
    """Resident size of this process at its peak (VmHWM), which starts anew. None: not Linux."""
    if device.startswith("cuda"):
        import torch

        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    if sys.platform != "linux":
        return None
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) * 1024


class Ours:
    """This library, through its engine: scheduling and sampling are part of a step."""

    def __init__(self, settings: Settings) -> None:
        torch = _start_torch(settings)
        from glm53 import GLM53, SamplingParams

        options: dict = dict(
            device=settings.device,
            dtype=settings.dtype,
            kv_cache_tokens=settings.cache_tokens,
            max_batch_tokens=CHUNK,
            prefix_caching=False,  # a later round would find the prompts of the first
            compile=settings.compile,
            progress=False,
        )
        self.device = settings.device
        self.synchronise = torch.cuda.synchronize if "cuda" in settings.device else lambda: None
        self.model = GLM53.from_pretrained(settings.model, **options)
        self.engine = self.model.engine()
        self.greedy = SamplingParams(temperature=0, ignore_eos=True, speculative_tokens=0)
        self.tokens: dict[int, list[int]] = {}

    def versions(self) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__}

    def _add(self, prompt: list[int], num_new: int) -> int:
        from glm53 import SamplingParams

        params = SamplingParams.override(self.greedy, max_new_tokens=num_new)
        request_id = self.engine.add(prompt, params)
        self.tokens[request_id] = []
        return request_id

    def _step(self) -> int:
        """How many requests got a token."""
        deltas = self.engine.step()
        for delta in deltas:
            if delta.completion is not None and delta.completion.error is not None:
                raise ValueError(delta.completion.error)
            self.tokens[delta.request_id] += delta.token_ids
        return len(deltas)

    def start(self, prompts: list[list[int]], num_new: int) -> None:
        # The first requests decode while the last prompts are computed.
        ahead = sum(-(-len(prompt) // CHUNK) + 1 for prompt in prompts)
        for prompt in prompts:
            self._add(prompt, WARM_UP_STEPS + num_new + ahead)
        while not all(request.num_remaining == 1 for request in self.engine.scheduler):
            self._step()
        self.decode(WARM_UP_STEPS)

    def decode(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            self.synchronise()
            start = time.perf_counter()
            count = self._step()
            self.synchronise()
            times.append(time.perf_counter() - start)
            assert count == len(self.tokens), "a step left a request out"
        return times

    def finish(self) -> list[list[int]]:
        self.engine.cancel(*self.tokens)
        tokens, self.tokens = list(self.tokens.values()), {}
        return tokens

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        self.synchronise()
        start = time.perf_counter()
        request_id = self._add(prompt, 1)
        while not self.tokens[request_id]:
            self._step()
        self.synchronise()
        seconds = time.perf_counter() - start
        (token,) = self.tokens.pop(request_id)
        return seconds, token

    def experts_read(self, prompts: list[list[int]]) -> float:
        """Distinct experts that a row of each prompt is routed to in a MoE layer: the mean over
        layers and over the last positions of the prompts."""
        import torch

        from glm53 import Trace

        ids = torch.tensor([p[-ROUTED_POSITIONS:] for p in prompts], device=self.device)
        trace = Trace()
        with torch.inference_mode():
            self.model(ids, logits_to_keep=1, record=trace)
        counts = [
            len(set(chosen[:, s].flatten().tolist()))
            for chosen in (e.view(*ids.shape, -1) for e in trace.experts.values())
            for s in range(ids.shape[1])
        ]
        return sum(counts) / len(counts) if counts else 0.0

    def peak_bytes(self) -> int | None:
        return _peak_bytes(self.device)


class Transformers:
    """transformers' model with its own cache, in the fastest way that the warm-up finds: eager or
    sdpa attention, implementation of the experts, prompts in chunks or at once."""

    def __init__(self, settings: Settings) -> None:
        torch = _start_torch(settings)
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.device = settings.device
        self.synchronise = torch.cuda.synchronize if "cuda" in settings.device else lambda: None
        dtype = getattr(torch, settings.dtype)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype)
        self.model = model.to(settings.device).eval()
        # The grouped GEMM, its default, refuses rows that are no multiple of 16 bytes.
        config = self.model.config
        rows = (config.hidden_size, config.moe_intermediate_size)
        grouped = all(size * dtype.itemsize % 16 == 0 for size in rows)
        self.experts = ["grouped_mm"] * grouped + ["eager", "batched_mm"]
        self.prefill_way: tuple[str, int] | None = None

    def versions(self) -> dict[str, str]:
        import transformers

        return {"transformers": transformers.__version__}

    def _forward(self, ids, cache):
        """Greedy next token [B, 1] of each row's last position."""
        import torch

        with torch.inference_mode():
            out = self.model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1, keepdim=True)

    def _prompt(self, prompts: list[list[int]], chunk: int):
        import torch
        from transformers import DynamicCache

        ids = torch.tensor(prompts, device=self.device)
        cache = DynamicCache(config=self.model.config)
        for part in ids.split(chunk, dim=1):
            token = self._forward(part, cache)
        return token, cache

    def start(self, prompts: list[list[int]], num_new: int) -> None:
        self._use("sdpa", self.experts[0])
        self.token, self.cache = self._prompt(prompts, CHUNK)
        self.tokens = [self.token]
        attention, _ = self._fastest([(a, self.experts[0]) for a in ATTENTION])
        self._use(*self._fastest([(attention, experts) for experts in self.experts]))

    def _use(self, attention: str, experts: str) -> None:
        self.model.set_attn_implementation(attention)
        self.model.set_experts_implementation(experts)

    def _fastest(self, ways: list[tuple[str, str]]) -> tuple[str, str]:
        times = {}
        for way in ways:
            self._use(*way)
            times[way] = self.decode(WARM_UP_STEPS)[-1]
        return min(times, key=times.__getitem__)

    def decode(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            self.synchronise()
            start = time.perf_counter()
            self.token = self._forward(self.token, self.cache)
            self.tokens.append(self.token)
            self.synchronise()
            times.append(time.perf_counter() - start)
        return times

    def finish(self) -> list[list[int]]:
        import torch

        tokens = torch.cat(self.tokens, dim=1).tolist()
        del self.token, self.tokens, self.cache
        return tokens

    def prefill(self, prompt: list[int]) -> tuple[float, int]:
        if self.prefill_way is None:  # the warm-up
            ways = [(a, chunk) for a in ATTENTION for chunk in {CHUNK, len(prompt)}]
            times = {way: self._timed_prefill(prompt, *way)[0] for way in ways}
            attention, chunk = min(times, key=times.__getitem__)
            self.prefill_way = attention, CHUNK if chunk == CHUNK else sys.maxsize
        return self._timed_prefill(prompt, *self.prefill_way)

    def _timed_prefill(self, prompt: list[int], attention: str, chunk: int) -> tuple[float, int]:
        self._use(attention, self.experts[0])  # batched_mm copies weights for every row
        self.synchronise()
        start = time.perf_counter()
        token = int(self._prompt([prompt], min(chunk, len(prompt)))[0])
        return time.perf_counter() - start, token

    def peak_bytes(self) -> int | None:
        return _peak_bytes(self.device)


class LlamaCpp:
    """llama-bench on a GGUF of the same weights. It makes up its own tokens and keeps them.

    It has no batch of requests: a batch is measured as that many rows of one request, which reads
    one context instead of several.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.llama_bench is not None and settings.gguf is not None
        self.command = [settings.llama_bench, "-m", settings.gguf, "-o", "json", "-r", "1"]
        self.command += ["-t", str(settings.threads), "-ub", str(CHUNK)]
        self.flash: dict[int, str] = {}  # by length of the prompt, what was faster

    def versions(self) -> dict[str, str]:
        report = self._run("-p", "1", "-n", "0")
        return {"llama.cpp": f"{report['build_number']} ({report['build_commit']})"}

    def _run(self, *arguments: str) -> dict:
        process = subprocess.Popen(
            [*self.command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        out, err = process.communicate()
        if process.returncode:
            raise ValueError(f"llama-bench failed: {err.strip()[-500:]}")
        (report,) = json.loads(out)
        return report

    def start(self, prompts: list[list[int]], num_new: int) -> None:
        self.context, self.batch = len(prompts[0]), len(prompts)

    def decode(self, steps: int) -> list[float]:
        depth = ("-d", str(self.context))
        if self.batch == 1:
            report = self._run("-p", "0", "-n", str(steps), *depth)
            return [report["avg_ns"] / 1e9 / steps] * steps
        return [self._run("-p", str(self.batch), "-n", "0", *depth)["avg_ns"] / 1e9]

    def finish(self) -> None:
        return None

    def prefill(self, prompt: list[int]) -> tuple[float, None]:
        def seconds(flash: str) -> float:
            report = self._run("-p", str(len(prompt)), "-n", "0", "-fa", flash)
            return report["avg_ns"] / 1e9

        if len(prompt) not in self.flash:
            self.flash[len(prompt)] = min(("on", "off"), key=seconds)
        return seconds(self.flash[len(prompt)]), None

    def peak_bytes(self) -> int | None:
        """Of all its runs so far."""
        if sys.platform != "linux":
            return None
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


PEERS = {OURS: Ours, "transformers": Transformers, "llama.cpp": LlamaCpp}


def _serve(connection, name: str, settings: Settings) -> None:
    """The child: makes the implementation, then answers one call after the other. An error, that
    of making it included, is the answer to a call, for the parent to raise."""
    peer, failed = None, None
    try:
        peer = PEERS[name](settings)
    except Exception as error:
        failed = f"{name}: {type(error).__name__}: {error}"
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            result = None if failed else getattr(peer, method)(*arguments)
            connection.send((failed, result))
        except Exception as error:
            connection.send((f"{name}: {type(error).__name__}: {error}", None))


class Remote:
    """An implementation in a child process."""

    def __init__(self, name: str, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, name, settings), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments):
        """ChildProcessError: what went wrong there."""
        try:
            self._connection.send((method, arguments))
            error, result = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise ChildProcessError(
                f"{self.name}: the process ended with {self._process.exitcode} in {method} "
                "(-9: most likely out of memory)"
            ) from None
        if error is not None:
            raise ChildProcessError(error)
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()  # after an interrupt it may be in the middle of minutes of work
        self._process.join()


def common_tokens(
    first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]
) -> tuple[int, int]:
    """How many tokens are equal before the first that differs, and how many could be."""
    same = compared = 0
    for a, b in zip(first, second, strict=True):
        length = min(len(a), len(b))
        differ = (i for i in range(length) if a[i] != b[i])
        same += next(differ, length)
        compared += length
    return same, compared
