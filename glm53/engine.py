"""The engine: one step schedules rows, runs the network over them, samples, and delivers.

Everything that generates stands on it: `generate`, `stream`, `score`. It owns the page tensors.
"""

import functools
import itertools
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from glm53.batch import Batch
from glm53.cache import PAGE_SIZE, KVCache, PagePool
from glm53.model import Transformer
from glm53.request import Completion, Delta, Request
from glm53.sampling import (
    Sample,
    SamplerState,
    SamplingError,
    SamplingParams,
    sample,
    token_logprobs,
    unusable_rows,
)
from glm53.scheduler import Chunk, Scheduler
from glm53.tokenizer import Tokenizer

# Prompt rows times vocabulary would be gigabytes at once.
_LOGIT_ROWS = 128


@dataclass
class EngineStats:
    """Counted since the engine was made. rows: tokens computed; max_rows: most rows of a step."""

    steps: int = 0
    rows: int = 0
    max_rows: int = 0
    preemptions: int = 0


class Engine:
    """Continuous batching over one network and one cache.

    Not for concurrent use: a second thread that calls in during a call gets a RuntimeError.
    Requests may be added between steps, and by an `on_delta` callback during one.
    """

    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer | None,
        cache: KVCache,
        *,
        eos_ids: frozenset[int],
        generation_config: dict,
        max_batch_tokens: int,
        max_running: int,
    ) -> None:
        """eos_ids: end a completion unless ignore_eos. generation_config: defaults of sampling
        parameters. max_batch_tokens: rows of a step; max_running: requests that run at once."""
        self._network = network
        self._tokenizer = tokenizer
        self._cache = cache
        self._eos_ids = eos_ids
        self._generation_config = generation_config
        self.pool = PagePool(cache.num_pages)
        self.scheduler = Scheduler(
            self.pool, max_batch_tokens=max_batch_tokens, max_running=max_running
        )
        self.stats = EngineStats()
        self._next_id = itertools.count()
        self._lock = threading.RLock()
        self._stepping = False
        self._undelivered: deque[tuple[Request, Delta]] = deque()

    @property
    def num_unfinished(self) -> int:
        """Completions that wait or run."""
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with every default filled in; ValueError where this model cannot follow them."""
        encode = None
        if self._tokenizer is not None:
            encode = functools.partial(self._tokenizer.encode, allow_special=False)
        params = params.resolve(self._generation_config, encode)
        params.check_vocabulary(self._network.config.vocab_size)
        if params.speculative_tokens:
            raise ValueError("speculative_tokens: speculative decoding is not available yet")
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: the model was loaded without a tokenizer; use stop_token_ids")
        return params

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt_only: bool = False,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> int:
        """Queue a prompt (text, or token ids); returns the request id.

        Its `params.n` completions are deltas with the same id and different `index`. on_delta: is
        called with each of them, besides `step` returning them. prompt_only: no token is
        generated, for `prompt_logprobs`.

        ValueError: an empty prompt, an id outside the vocabulary, a prompt that leaves no room
        below max_position_embeddings, or one that the whole cache cannot hold.
        """
        with self._exclusive():
            config = self._network.config
            params = self.resolve(params or SamplingParams())
            prompt_ids = self._prompt_ids(prompt)
            limit = config.max_position_embeddings
            if len(prompt_ids) + (not prompt_only) > limit:
                raise ValueError(
                    f"the prompt has {len(prompt_ids)} tokens; the model's limit "
                    f"(max_position_embeddings), of prompt and completion, is {limit}"
                )
            assert params.max_new_tokens is not None and params.n is not None
            wanted = len(prompt_ids) + (0 if prompt_only else params.max_new_tokens)
            request_id = next(self._next_id)
            for index in range(params.n):
                sampler = SamplerState(
                    params,
                    prompt_ids=prompt_ids,
                    stop_ids=sorted(self._eos_ids),
                    vocab_size=config.vocab_size,
                    device=self._network.device,
                    index=index,
                )
                request = Request(
                    request_id,
                    index,
                    prompt_ids,
                    sampler,
                    eos_ids=self._eos_ids,
                    tokenizer=self._tokenizer,
                    max_tokens=min(wanted, limit),
                    prompt_only=prompt_only,
                    on_delta=on_delta,
                )
                self.scheduler.add(request)
            return request_id

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Compute one batch of rows; what came of it. Empty when nothing is unfinished."""
        with self._exclusive():
            if self._stepping:
                raise RuntimeError("step() was called from an on_delta callback of a step")
            self._stepping = True
            try:
                return self._step()
            finally:
                self._stepping = False

    def cancel(self, request_id: int) -> list[Delta]:
        """End a request's unfinished completions; their last deltas. Unknown ids: nothing."""
        with self._exclusive():
            cancelled = [r for r in self.scheduler if r.request_id == request_id]
            return self._deliver([(r, r.finish("cancelled")) for r in cancelled])

    def run(self) -> dict[int, list[Completion]]:
        """Step until nothing is left: completions by request id."""
        finished: dict[int, list[Completion]] = {}
        while self.num_unfinished:
            for delta in self.step():
                if delta.completion is not None:
                    finished.setdefault(delta.request_id, []).append(delta.completion)
        return finished

    def _step(self) -> list[Delta]:
        chunks = self.scheduler.schedule()
        self.stats.preemptions = self.scheduler.num_preemptions
        if not chunks:
            return self._deliver([])
        batch = Batch.paged(
            [(_next_tokens(c), c.request.num_computed, c.request.pages) for c in chunks],
            PAGE_SIZE,
            self._network.device,
        )
        hidden_TD = self._network.model(batch, self._cache)
        rows = batch.input_ids.numel()
        self.stats.steps += 1
        self.stats.rows += rows
        self.stats.max_rows = max(self.stats.max_rows, rows)

        outcomes: dict[Request, Sample | SamplingError] = {}
        sampling: list[tuple[Request, int]] = []
        first_row = 0
        for chunk in chunks:
            request = chunk.request
            rows_TD = hidden_TD[first_row : first_row + chunk.count]
            first_row += chunk.count
            error = self._prompt_logprobs(request, rows_TD)
            if error is not None:
                outcomes[request] = error
            elif chunk.count == request.num_remaining and not request.prompt_only:
                sampling.append((request, first_row - 1))
        outcomes |= self._sample(hidden_TD, sampling)

        # Until here a step that raises has changed no request, and the next one repeats it.
        news: list[tuple[Request, Delta]] = []
        for chunk in chunks:
            request = chunk.request
            outcome = outcomes.get(request)
            if isinstance(outcome, SamplingError):
                news.append((request, request.finish("error", str(outcome))))
            elif outcome is not None:
                news.append((request, request.accept(outcome.token_id, outcome.logprobs)))
            elif request.prompt_only and chunk.count == request.num_remaining:
                news.append((request, request.finish("length")))
            request.num_computed += chunk.count
        return self._deliver(news)

    def _sample(
        self, hidden_TD: Tensor, sampling: list[tuple[Request, int]]
    ) -> dict[Request, Sample | SamplingError]:
        """The next token of every request in `sampling`, given with its row of hidden_TD."""
        if not sampling:
            return {}
        logits_TW = self._network.lm_head(hidden_TD[[row for _, row in sampling]])
        samples = sample(logits_TW, [request.sampler.row() for request, _ in sampling])
        return {request: s for (request, _), s in zip(sampling, samples, strict=True)}

    def _deliver(self, news: list[tuple[Request, Delta]]) -> list[Delta]:
        # Ended requests give back their pages before any listener hears of them.
        for request, delta in news:
            if delta.completion is not None:
                self.scheduler.remove(request)
        # A queue: a listener that cancels requests, or raises, neither reorders nor loses deltas.
        self._undelivered += news
        while self._undelivered:
            request, delta = self._undelivered.popleft()
            if request.on_delta is not None:
                request.on_delta(delta)
        return [delta for _, delta in news]

    def _prompt_logprobs(self, request: Request, rows_TD: Tensor) -> SamplingError | None:
        """Record those of a prompt chunk; what is wrong with its logits, if anything."""
        done = len(request.prompt_logprobs)
        first = max(request.num_computed, done - 1)  # a recomputed chunk may be recorded already
        last = min(request.num_computed + rows_TD.shape[0], request.prompt_length - 1)
        if not request.wants_prompt_logprobs or first >= last:
            return None
        rows_TD = rows_TD[first - request.num_computed : last - request.num_computed]
        next_ids_T = torch.tensor(request.tokens[first + 1 : last + 1], device=rows_TD.device)
        for part_TD, part_T in zip(
            rows_TD.split(_LOGIT_ROWS), next_ids_T.split(_LOGIT_ROWS), strict=True
        ):
            logits_TW = self._network.lm_head(part_TD)
            error = next((e for e in unusable_rows(logits_TW) if e is not None), None)
            if error is not None:
                return SamplingError(f"prompt_logprobs: {error}")
            request.prompt_logprobs += token_logprobs(
                logits_TW, part_T, request.params.prompt_logprobs or 0
            )
        return None

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError("the model was loaded without a tokenizer; give token ids")
            prompt_ids = self._tokenizer.encode(prompt)
        else:
            try:
                prompt_ids = [operator.index(i) for i in prompt]
            except TypeError as error:
                raise ValueError(f"the prompt must be text or token ids: {error}") from None
        vocab_size = self._network.config.vocab_size
        outside = next((i for i in prompt_ids if not 0 <= i < vocab_size), None)
        if not prompt_ids:
            raise ValueError("the prompt is empty: it must have at least one token")
        if outside is not None:
            raise ValueError(f"the prompt has the id {outside}, outside 0..{vocab_size - 1}")
        return prompt_ids

    @contextmanager
    def _exclusive(self):
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("an engine belongs to one thread: another one is using it")
        try:
            yield
        finally:
            self._lock.release()


def _next_tokens(chunk: Chunk) -> list[int]:
    start = chunk.request.num_computed
    return chunk.request.tokens[start : start + chunk.count]
