"""One completion being generated: its tokens, its text, and why it ends. Host side only."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from glm53.batch import Recording, Trace
from glm53.prefix import Node
from glm53.sampling import SamplerState, SamplingParams
from glm53.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]
Logprobs = dict[int, float]

# Left context that a detokeniser needs to decode the first new token as it would the whole text.
_PROMPT_TAIL = 8


@dataclass(frozen=True, slots=True)
class Metrics:
    """ttft: seconds from adding the request to its first token (None: no token came);
    tokens_per_second: over the tokens after the first; preemptions: how often its pages were taken
    and its tokens recomputed; drafted: speculative tokens that steps verified; accepted: those of
    them after which the step emitted one more token (of drafts behind the end of a completion, and
    of one that is its end, this is not so): decode_steps + accepted tokens were emitted.
    cached_tokens: prompt tokens whose keys were shared with earlier requests, from either tier.

    decode_steps: steps that sampled for this completion; token_latency, step_latency: mean seconds
    between tokens and between such steps, which differ under speculation; accepted_at: how many
    drafts were accepted at each position of a step's drafts."""

    ttft: float | None = None
    tokens_per_second: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0
    token_latency: float | None = None
    step_latency: float | None = None
    accepted_at: tuple[int, ...] = ()

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a step, the sampled one included."""
        return (
            (self.accepted + self.decode_steps) / self.decode_steps if self.decode_steps else None
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished completion.

    token_ids: new tokens; the stop id that ended them is the last. text: their text without the
    stop id or stop string, unless include_stop. finish_reason "stop" (stop_reason: the id or the
    string), "length" (max_new_tokens, or the model's context), "cancelled", or "error" (error: the
    message). logprobs: one {id: log-probability} per new token, if asked for. prompt_logprobs: one
    per prompt token, None for the first. index: which of the `n` completions of the prompt. trace:
    with `record`, the decisions that made its log-probabilities, on the CPU: a row per token of
    prompt and completion but the last, which was never fed (fewer if its prompt was not computed).
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    metrics: Metrics = field(default_factory=Metrics)
    index: int = 0
    trace: Trace | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one completion; `completion` is set in the last one."""

    request_id: int
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[Logprobs, ...] | None = None
    completion: Completion | None = None


class Request:
    """State of one completion between steps.

    `tokens` is prompt and output; `num_computed` of them have their keys in `pages`.
    """

    def __init__(
        self,
        request_id: int,
        index: int,
        prompt_ids: Sequence[int],
        sampler: SamplerState,
        *,
        eos_ids: frozenset[int],
        tokenizer: Tokenizer | None,
        max_tokens: int,
        prompt_only: bool = False,
        on_delta: Callable[[Delta], None] | None = None,
        replay: Trace | None = None,
    ) -> None:
        """max_tokens: limit of prompt and output together, the model's or the caller's.
        prompt_only: ends, as "length", when the prompt is computed. replay: decisions to take,
        a row per prompt token."""
        self.request_id = request_id
        self.index = index
        self.tokens = list(prompt_ids)
        self.prompt_length = self._num_told = len(self.tokens)  # told: in a delta
        self.sampler = sampler
        self.params: SamplingParams = sampler.params
        self.max_tokens = max_tokens
        self.prompt_only = prompt_only
        self.on_delta = on_delta
        self.replay = replay
        self._recording = Recording() if self.params.record else None
        self.num_computed = 0
        self.pages: list[int] = []
        self.drafts: list[int] = []  # to be verified by the next step
        # Nodes of the first pages, in the order of `pages`; None: its pages must not be shared.
        self.prefix_path: list[Node] | None = []
        self.num_cached = 0  # prompt tokens found in the prefix tree when it was admitted first
        self._drafted = self._decode_steps = 0
        self._accepted_at: list[int] = []
        self.preemptions = 0
        self.prompt_logprobs: list[Logprobs | None] = [None]
        self._logprobs: list[Logprobs] = []
        self._text: list[str] = []
        self._stop_ids = frozenset(self.params.stop_token_ids or ())
        if not self.params.ignore_eos:
            self._stop_ids |= eos_ids
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_tail=self.tokens[-_PROMPT_TAIL:]
            )
        include_stop = bool(self.params.include_stop)
        self._stop_strings = StopStrings(tuple(self.params.stop or ()), include_stop)
        self._added_at = time.perf_counter()
        self._first_at = self._last_at = None

    @property
    def num_remaining(self) -> int:
        """Tokens whose keys are not in the cache yet; 1 for a request that decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def speculates(self) -> bool:
        """Does the MTP layer run over this request's rows: not if only their scores are wanted."""
        is_score = self.prompt_only and self.wants_prompt_logprobs
        return bool(self.params.speculative_tokens) and not is_score

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def records(self) -> bool:
        return self._recording is not None

    @property
    def computes_every_row(self) -> bool:
        """Must it not start from pages that other requests computed."""
        return self.wants_prompt_logprobs or self.records or self.replay is not None

    def record(self, trace: Trace, first_row: int, count: int) -> None:
        """Keep the decisions of `count` rows of a step, the first at position `num_computed`.

        Rows that a preemption made to be computed again keep their first decisions: those that the
        tokens and log-probabilities come from.
        """
        if self._recording is not None:
            known = self._recording.num_rows - self.num_computed
            assert known >= 0
            if known < count:
                self._recording.append(trace, slice(first_row + known, first_row + count))

    def count_step(self, drafted: int) -> None:
        """Count a step that sampled, with the drafts it verified."""
        self._decode_steps += 1
        self._drafted += drafted
        self._accepted_at += [0] * (drafted - len(self._accepted_at))

    def count_accepted(self, position: int) -> None:
        """Count a draft, by its position among the step's, that another token follows."""
        self._accepted_at[position] += 1

    def accept(self, token_id: int, logprobs: Logprobs | None) -> Delta:
        """Add a sampled token; the delta says whether it was the last.

        SamplingError: the grammar cannot go on by it; it has not been added then.
        """
        self.sampler.append(token_id)
        self._last_at = time.perf_counter()
        self._first_at = self._first_at or self._last_at
        self.tokens.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if token_id in self._stop_ids:
            return self._finish("stop", token_id)
        text, stop = self._show(self._detokenizer.push([token_id]) if self._detokenizer else "")
        if stop is not None:
            return self._finish("stop", stop, text)
        if len(self.tokens) >= self.max_tokens:
            return self._finish("length", None, text)
        return self._delta(text)

    def finish(self, reason: FinishReason, error: str | None = None) -> Delta:
        """End the request for a reason that is not a token."""
        return self._finish(reason, None, error=error)

    def fail(self, error: str) -> Delta:
        """End the request because `accept` raised: with the tokens it has, and their text as far as
        that can be decoded."""
        try:
            return self.finish("error", error)
        except Exception:  # the detokeniser, which may be what raised first
            self._detokenizer = None
            return self.finish("error", error)

    def _show(self, text: str) -> tuple[str, str | None]:
        # A stop string that lies before min_new_tokens does not stop, so it is not looked for.
        if self.sampler.output_length < (self.params.min_new_tokens or 0):
            return text, None
        return self._stop_strings.push(text)

    def _finish(
        self,
        reason: FinishReason,
        stop_reason: int | str | None,
        text: str = "",
        error: str | None = None,
    ) -> Delta:
        if not isinstance(stop_reason, str):
            tail, stop = self._show(self._detokenizer.finish() if self._detokenizer else "")
            text += tail + self._stop_strings.flush()
            if stop is not None and reason == "length":
                reason, stop_reason = "stop", stop
        if isinstance(stop_reason, int) and self.params.include_stop and self._tokenizer:
            text += self._tokenizer.decode([stop_reason])
        delta = self._delta(text)
        completion = Completion(
            prompt_token_ids=tuple(self.tokens[: self.prompt_length]),
            token_ids=tuple(self.tokens[self.prompt_length :]),
            text="".join(self._text),
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs) if self.wants_prompt_logprobs else None,
            metrics=self._metrics(),
            index=self.index,
            trace=self._recording and self._recording.trace(len(self.tokens) - 1),
        )
        return replace(delta, completion=completion)

    def _delta(self, text: str) -> Delta:
        new_ids = tuple(self.tokens[self._num_told :])
        self._num_told = len(self.tokens)
        self._text.append(text)
        asked = self.params.logprobs is not None
        logprobs = tuple(self._logprobs[len(self._logprobs) - len(new_ids) :]) if asked else None
        return Delta(self.request_id, self.index, new_ids, text, logprobs)

    def _metrics(self) -> Metrics:
        ttft = per_second = per_token = per_step = None
        if self._first_at is not None and self._last_at is not None:
            ttft = self._first_at - self._added_at
            seconds = self._last_at - self._first_at
            later = len(self.tokens) - self.prompt_length - 1
            if later and seconds:
                per_second, per_token = later / seconds, seconds / later
                per_step = seconds / max(1, self._decode_steps - 1)
        return Metrics(
            ttft=ttft,
            tokens_per_second=per_second,
            preemptions=self.preemptions,
            cached_tokens=self.num_cached,
            drafted=self._drafted,
            accepted=sum(self._accepted_at),
            decode_steps=self._decode_steps,
            token_latency=per_token,
            step_latency=per_step,
            accepted_at=tuple(self._accepted_at),
        )
