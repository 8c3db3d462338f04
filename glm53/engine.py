"""The engine: one step schedules rows, runs the network over them, samples, and delivers.

Everything that generates stands on it: `generate`, `stream`, `score`. It owns the page tensors.
"""

import functools
import itertools
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

import torch

from glm53.batch import Batch, Trace
from glm53.cache import KVCache, PagePool
from glm53.compile import CompiledNetwork
from glm53.host_pages import HostPages
from glm53.model import Transformer
from glm53.request import Completion, Delta, Request
from glm53.runner import Runner, StepResult
from glm53.sampling import (
    Constraint,
    ConstraintCompiler,
    SamplerState,
    SamplingError,
    SamplingParams,
    constraint_of,
)
from glm53.scheduler import Chunk, Scheduler
from glm53.tiles import conditions
from glm53.tokenizer import Tokenizer
from glm53.transfer import check_file, export_pages, import_pages
from glm53.weights import WeightSnapshot, weight_fingerprint

logger = logging.getLogger(__name__)

_DEFAULT_DRAFTS = 5  # the recipe of GLM-5.2 and 5.3


@dataclass
class EngineStats:
    """Counted since the engine was made. rows: tokens computed; max_rows: most rows of a step;
    drafted, accepted: speculative tokens; prompt_tokens, cached_tokens: of admitted requests, and
    those of them found in the prefix tree; evictions: pages that the tree gave back.

    Of the host tier of prefixes: host_cached_tokens, those of cached_tokens found there;
    pages_to_host, pages_from_host, bytes_to_host, bytes_from_host: moved, also for requests that
    were preempted; host_evictions: pages that it forgot to make room.

    Of a host-backed cache, hot_hits, hot_misses: latent rows that selections found in the hot set,
    and that had to be fetched into it. A row counts once for every index group and tile: the rows
    of a forward, or a run of them whose selections fit the hot set together. fetched_bytes: what
    was copied, over all layers."""

    steps: int = 0
    rows: int = 0
    max_rows: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evictions: int = 0
    hot_hits: int = 0
    hot_misses: int = 0
    fetched_bytes: int = 0
    host_cached_tokens: int = 0
    pages_to_host: int = 0
    pages_from_host: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    host_evictions: int = 0


class Engine:
    """Continuous batching over one network and one cache.

    Not for concurrent use: a second thread that calls in during a call gets a RuntimeError.
    Requests may be added and cancelled at any time by the thread that steps: between steps, and
    during one by an `on_delta` callback, a module hook or a signal handler.

    Every delta arrives once. Those of a request with `on_delta` go there, whoever steps; those of
    all others wait for the next `step`, also when `generate`, `stream`, `score` or `chat` computed
    them. An `on_delta` that raises ends the call that was stepping, and loses nothing of others.
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
        prefix_caching: bool = True,
        prefix_host_bytes: int = 0,
        batch_invariant: bool = False,
        compiled: CompiledNetwork | None = None,
    ) -> None:
        """eos_ids: end a completion unless ignore_eos. generation_config: defaults of sampling
        parameters. max_batch_tokens: rows of a step; max_running: requests that run at once.
        prefix_caching: share full pages between requests that begin alike; prefix_host_bytes: host
        memory for those that the cache has no room for. batch_invariant: logits of a request are
        the same bits in any batch and chunking, see `glm53.tiles`. compiled: computes what
        `network` computes."""
        self._network = network
        self._tokenizer = tokenizer
        self._cache = cache
        self._eos_ids = eos_ids
        self._generation_config = generation_config
        self.pool = PagePool(cache.num_pages)
        self._host = HostPages(cache, prefix_host_bytes) if prefix_host_bytes else None
        self.scheduler = Scheduler(
            self.pool,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            prefix_caching=prefix_caching,
            host=self._host,
        )
        self._runner = Runner(network, cache, batch_invariant=batch_invariant, compiled=compiled)
        self._batch_invariant = batch_invariant
        self._weights = WeightSnapshot(network)  # that the shared pages were computed with
        self._compiler: ConstraintCompiler | None = None  # made with the first grammar
        self._fingerprint: str | None = None  # of these weights, once it was needed
        self.stats = EngineStats()
        self._next_id = itertools.count()
        self._lock = threading.RLock()
        self._depth = 0  # calls under way: more than one where hooks and listeners call in
        self._cancelled: deque[int] = deque()  # ids, to be ended when no step is under way
        self._for_listeners: deque[tuple[Request, Delta]] = deque()
        self._for_step: deque[Delta] = deque()

    @property
    def num_unfinished(self) -> int:
        """Completions that wait or run, or whose last delta has not been fetched by `step`."""
        last = sum(delta.completion is not None for delta in self._for_step)
        return len(self.scheduler.running) + len(self.scheduler.waiting) + last

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with every default filled in; ValueError where this model cannot follow them."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: must be a SamplingParams")
        if params.n is None:  # what a call returns depends on it: that is no file's business
            params = replace(params, n=1)
        encode = None
        if self._tokenizer is not None:
            encode = functools.partial(self._tokenizer.encode, allow_special=False)
        params = params.resolve(self._generation_config, encode)
        params.check_vocabulary(self._network.config.vocab_size)
        has_mtp = self._network.mtp_layer_idx is not None
        if params.speculative_tokens is None:
            params = replace(params, speculative_tokens=_DEFAULT_DRAFTS if has_mtp else 0)
        if params.speculative_tokens and not has_mtp:
            raise ValueError(
                f"speculative_tokens={params.speculative_tokens}: this checkpoint has no MTP layer "
                "to draft with; 0 is all that is possible"
            )
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: the model was loaded without a tokenizer; use stop_token_ids")
        self._constraint(params)
        return params

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """The start of the grammar that these parameters ask for; see ConstraintCompiler."""
        asked = constraint_of(params)
        if asked is None:
            return None
        if self._tokenizer is None:
            raise ValueError(f"{asked[0]}: the model was loaded without a tokenizer")
        return self._grammars(self._tokenizer).start(params)

    def check_grammar(self, lark: str) -> None:
        """ValueError, in one line, if this is no grammar or no text fits it."""
        assert self._tokenizer is not None
        self._grammars(self._tokenizer).check(lark)

    def _grammars(self, tokenizer: Tokenizer) -> ConstraintCompiler:
        if self._compiler is None:
            encode = functools.partial(tokenizer.encode, allow_special=False)
            vocab_size = self._network.config.vocab_size
            self._compiler = ConstraintCompiler(
                tokenizer.to_json(), encode, vocab_size, self._eos_ids
            )
        return self._compiler

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt_only: bool = False,
        on_delta: Callable[[Delta], None] | None = None,
        replay: Trace | None = None,
    ) -> int:
        """Queue a prompt (text, or token ids); returns the request id.

        Its `params.n` completions are deltas with the same id and different `index`. on_delta: is
        called with each of them; without it `step` returns them. prompt_only: no token is
        generated, for `prompt_logprobs`. replay, with prompt_only: decisions to take for the
        prompt's tokens, all or all but the last.

        ValueError: text that is not valid Unicode, an empty prompt, an id outside the vocabulary, a
        prompt that leaves no room below max_position_embeddings, or one that the whole cache
        cannot hold; a replay that does not fit the prompt.
        """
        with self._exclusive():
            config = self._network.config
            params = self.resolve(SamplingParams() if params is None else params)
            prompt_ids = self._prompt_ids(prompt)
            limit = config.max_position_embeddings
            if len(prompt_ids) + (not prompt_only) > limit:
                raise ValueError(
                    f"the prompt has {len(prompt_ids)} tokens; the model's limit "
                    f"(max_position_embeddings), of prompt and completion, is {limit}"
                )
            assert params.max_new_tokens is not None and params.n is not None
            wanted = len(prompt_ids) + (0 if prompt_only else params.max_new_tokens)
            if replay is not None:
                replay = self._fitted(replay, prompt_ids, prompt_only)
            request_id = next(self._next_id)
            for index in range(params.n):
                sampler = SamplerState(
                    params,
                    prompt_ids=prompt_ids,
                    stop_ids=sorted(self._eos_ids),
                    vocab_size=config.vocab_size,
                    device=self._network.device,
                    index=index,
                    constraint=self._constraint(params),
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
                    replay=replay,
                )
                self.scheduler.add(request)
            return request_id

    def step(self) -> list[Delta]:
        """Compute one batch of rows; what came of it, for requests without `on_delta`.

        Also what earlier calls computed for these requests, first. Empty when nothing is
        unfinished, and when all that is has a listener.
        """
        self.advance()
        return self._fetch()

    def advance(self) -> None:
        """`step` that leaves the deltas of requests without `on_delta` to the next `step`."""
        self._advance()

    def cancel(self, *request_ids: int) -> list[Delta]:
        """End the unfinished completions of some requests; their deltas that nobody has had yet.

        Unknown ids: nothing. Within a step (an `on_delta` callback, a hook) the requests end with
        that step: nothing is returned, their last deltas arrive as all others do.
        """
        with self._exclusive():
            self._cancelled += request_ids
            if self._depth == 1:
                self._deliver()
                return self._fetch(frozenset(request_ids))
            return []

    def run(self) -> dict[int, list[Completion]]:
        """Step until nothing is left: completions by request id, also of those with a listener.

        After an error nothing that had no listener is lost: the next `run` or `step` has it.
        """
        deltas: list[Delta] = []
        while self.scheduler.running or self.scheduler.waiting:
            deltas += [delta for request, delta in self._advance() if request.on_delta is not None]
        finished: dict[int, list[Completion]] = {}
        for delta in [*deltas, *self._fetch()]:
            if delta.completion is not None:
                finished.setdefault(delta.request_id, []).append(delta.completion)
        return finished

    def export_prefix(
        self, prompt: str | Sequence[int], file: BinaryIO, *, mtp: bool | None = None
    ) -> int:
        """Write the cache pages that a prompt fills, for `import_prefix` of an engine elsewhere
        with the same weights; computes what is missing. Returns how many tokens they hold.

        file: binary and blocking, a pipe will do. The first call after the weights were loaded or
        changed reads all of them once, see `weight_fingerprint`. mtp: pages for requests that
        speculate, which others cannot use, nor the other way round; default: if the checkpoint has
        an MTP layer.

        ValueError: no prefix caching, no MTP layer, a prompt that `add` refuses, or a file that
        does not take bytes.
        """
        check_file(file, "write")
        has_mtp = self._network.mtp_layer_idx is not None
        mtp = has_mtp if mtp is None else mtp
        if mtp and not has_mtp:
            raise ValueError("mtp=True: this checkpoint has no MTP layer")
        self._check_prefix_caching()
        tokens, ended = self._prompt_ids(prompt), deque[Delta]()
        # Nothing is generated; one draft is what makes the MTP layer run.
        params = SamplingParams(n=1, stop=(), bad_words=(), speculative_tokens=int(mtp))
        request_id = self.add(tokens, params, prompt_only=True, on_delta=ended.append)
        try:
            while not ended:
                self.advance()
        finally:
            self.cancel(request_id)
        with self._exclusive(), torch.inference_mode():
            self._drop_stale_prefixes()
            return export_pages(
                file,
                self.scheduler,
                self._cache,
                self._weights_id(),
                self._conditions(),
                tokens,
                mtp=mtp,
            )

    @torch.inference_mode()
    def import_prefix(self, file: BinaryIO) -> int:
        """Read one prefix that `export_prefix` wrote, as if a request had just computed it.

        Returns how many tokens it holds. The pages enter together, when all have been checked; old
        ones are evicted as for a request. file: binary and blocking, read up to the prefix's end.
        Until that has arrived the engine does nothing else: read a slow stream into memory first.

        ValueError, naming what is wrong: no prefix caching; a damaged stream, or one from other
        weights, another layout or dtype, or with more pages than the cache; with batch_invariant
        also one from an engine without it, or whose results have other bits (device, threads,
        version of torch). MemoryError: running requests leave no room.
        """
        check_file(file, "read")
        self._check_prefix_caching()
        with self._exclusive():
            if self._depth > 1:
                raise RuntimeError("import_prefix within a call of the engine")
            self._drop_stale_prefixes()
            vocab_size = self._network.config.vocab_size
            try:
                return import_pages(
                    file,
                    self.scheduler,
                    self._cache,
                    self._weights_id(),
                    self._conditions(),
                    vocab_size=vocab_size,
                )
            finally:
                self._count_pages()

    def _check_prefix_caching(self) -> None:
        if self.scheduler.prefix is None:
            raise ValueError("prefix_caching=False: there is nothing to export from or import to")

    def _weights_id(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = weight_fingerprint(self._network)
        return self._fingerprint

    def _conditions(self) -> dict[str, str | int] | None:
        return conditions(self._network.device) if self._batch_invariant else None

    @torch.inference_mode()
    def _advance(self) -> list[tuple[Request, Delta]]:
        with self._exclusive():
            if self._depth > 1:
                raise RuntimeError(
                    "a step within a call of the engine, by an on_delta callback or a module hook"
                )
            news: list[tuple[Request, Delta]] = []
            try:
                self._step(news)
            finally:  # an interrupt must not lose what was accepted before it
                self._count_pages()
                self._post(news)
            self._deliver()
            return news

    def _fetch(self, request_ids: frozenset[int] | None = None) -> list[Delta]:
        """Take the deltas that wait for `step`; of some requests only, if ids are given."""
        with self._exclusive():
            waiting, self._for_step = self._for_step, deque()
            wanted: list[Delta] = []
            for delta in waiting:
                if request_ids is None or delta.request_id in request_ids:
                    wanted.append(delta)
                else:
                    self._for_step.append(delta)
            return wanted

    def _step(self, news: list[tuple[Request, Delta]]) -> None:
        # One that is admitted now, also in place of a preempted one, may start from shared pages.
        if self.scheduler.waiting:
            self._drop_stale_prefixes()
        chunks = self.scheduler.schedule()
        if not chunks:
            return
        result = self._runner.run(chunks, self.scheduler.reserve)
        self.stats.steps += 1
        self.stats.rows += result.num_rows
        self.stats.max_rows = max(self.stats.max_rows, result.num_rows)
        traffic = self._cache.hot_traffic
        self.stats.hot_hits, self.stats.hot_misses, self.stats.fetched_bytes = traffic

        # Until here a step that raises has changed no request, and the next one repeats it. From
        # here what raises ends the request that it belongs to, and no other.
        for chunk, first_row in zip(chunks, result.first_rows, strict=True):
            request = chunk.request
            try:
                self._accept(chunk, first_row, result, news)
            except SamplingError as error:
                news.append((request, request.fail(str(error))))
            except Exception as error:
                logger.exception("request %d ends with an error", request.request_id)
                news.append((request, request.fail(f"{type(error).__name__}: {error}")))
            else:
                self.scheduler.share(request)

    def _fitted(self, replay: Trace, prompt_ids: list[int], prompt_only: bool) -> Trace:
        """A row for every token of the prompt, on the network's device; ValueError if it cannot."""
        if not isinstance(replay, Trace):
            raise ValueError(f"replay={replay!r}: must be a Trace")
        if not prompt_only:
            raise ValueError("replay: only the tokens of a prompt are replayed (prompt_only)")
        length = len(prompt_ids)
        if replay.num_rows not in (length, length - 1):
            raise ValueError(
                f"replay has {replay.num_rows} rows; it must have one for each of the {length} "
                "tokens, or for all but the last"
            )
        replay = Trace.cat([replay], [length]).to(self._network.device)
        ids_1S = torch.tensor([prompt_ids], device=self._network.device)
        replay.check(Batch.uncached(ids_1S, None), self._network.config)
        return replay

    def drop_prefixes(self) -> None:
        """Forget the shared pages: their keys are those of earlier weights.

        Happens by itself after a parameter or buffer was written in place, replaced or given other
        `.data`. It must be called after writes that no version counter sees: through
        `parameter.data` (`parameter.data.copy_(...)`) and other tensors of the same memory, by
        optimizers with `fused=True`, and to inference tensors (weights that were loaded or made
        inside `torch.inference_mode()`). The next export or import then reads the weights anew.
        """
        with self._exclusive():
            self._weights, self._fingerprint = WeightSnapshot(self._network), None
            self.scheduler.drop_prefixes()

    def _count_pages(self) -> None:
        for name, value in self.scheduler.counters().items():
            setattr(self.stats, name, value)
        if self._host is not None:
            self.stats.bytes_to_host = self._host.bytes_saved
            self.stats.bytes_from_host = self._host.bytes_loaded

    def _drop_stale_prefixes(self) -> None:
        """Keys computed with other weights are no prefix of anything."""
        if not self._weights.matches(self._network):
            self.drop_prefixes()

    def _accept(
        self, chunk: Chunk, first_row: int, result: StepResult, news: list[tuple[Request, Delta]]
    ) -> None:
        """Give a request what a step computed for it; its deltas go into `news` one by one, so that
        those before an error stay. SamplingError: its outcome, or its grammar's."""
        request, outcome = chunk.request, result.outcomes.get(chunk.request)
        samples = outcome if isinstance(outcome, list) else []
        num_rows = chunk.count + max(0, len(samples) - 1)
        if result.record is not None:
            request.record(result.record, first_row, num_rows)
        request.num_computed += num_rows
        request.drafts = result.drafts.get(request, [])
        if isinstance(outcome, SamplingError):
            raise outcome
        if samples:
            request.count_step(len(chunk.drafts))
            self.stats.drafted += len(chunk.drafts)
        for i, sampled in enumerate(samples):
            if i:  # before the token: the completion that comes with the last one counts it
                request.count_accepted(i - 1)
                self.stats.accepted += 1
            news.append((request, request.accept(sampled.token_id, sampled.logprobs)))
            if news[-1][1].completion is not None:
                break  # a stop among the accepted drafts: what follows it was never asked for
        if request.prompt_only and request.num_remaining == 0:
            news.append((request, request.finish("length")))

    def _post(self, news: list[tuple[Request, Delta]]) -> None:
        # Ended requests give back their pages before any listener hears of them.
        for request, delta in news:
            if delta.completion is not None:
                self.scheduler.remove(request)
        self._for_step += [delta for request, delta in news if request.on_delta is None]
        self._for_listeners += [item for item in news if item[0].on_delta is not None]

    def _end_cancelled(self) -> None:
        while self._cancelled:
            request_id = self._cancelled.popleft()
            ended = [r for r in self.scheduler if r.request_id == request_id]
            self._post([(request, request.finish("cancelled")) for request in ended])

    def _deliver(self) -> None:
        """Call the listeners: what one cancels is told in its turn, after what came before."""
        self._end_cancelled()
        while self._for_listeners:
            request, delta = self._for_listeners[0]
            assert request.on_delta is not None
            try:
                request.on_delta(delta)
            finally:  # only now: an interrupt before the call must not lose it
                self._for_listeners.popleft()
            self._end_cancelled()

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
        self._depth += 1
        try:
            yield
        finally:
            if self._depth == 1:  # what was cancelled during a step that raised, or an `add`
                self._end_cancelled()
            self._depth -= 1
            self._lock.release()
