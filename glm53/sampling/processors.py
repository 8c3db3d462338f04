"""From the model's logits to the distribution that is sampled, row by row of a mixed batch.

Order: allowed ids, bad words, stop ids before `min_new_tokens`, logit bias, `logits_processors`,
the grammar, repetition penalty, frequency and presence penalty; then, where the row is not greedy,
temperature, min_p, top-k, top-p. The grammar comes after the caller's functions, which cannot undo
it. Each step touches only the rows that ask for it. Shapes: T rows, W vocabulary; R the rows
of the batch that one step works on.
"""

import collections
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from glm53.sampling.constraints import Constraint, ConstraintError
from glm53.sampling.params import GREEDY_BELOW, LogitsProcessor, SamplingParams

Filled = TypeVar("Filled")

NEG_INF = float("-inf")
# Nearly every nucleus lies within this many tokens; a row whose nucleus does not is sorted whole.
# Sorting 8 rows of 154880 takes 106 ms where their topk takes 2 (one CPU core, float32).
NUCLEUS_CANDIDATES = 1024


class SamplingError(RuntimeError):
    """No token can be sampled for one row; the message says why."""


class SamplerState:
    """What sampling has to know of one request: its parameters and what it has seen.

    `params` are resolved. `stop_ids` are the ids that end this request, its checkpoint's
    included, whether or not `ignore_eos`: none of them is sampled before `min_new_tokens`.
    `index` numbers the `n` completions of one prompt, which draw different numbers. `constraint`
    is this completion's own.
    `append` costs the same at any length; tensors live on `device`, the device of the logits.

    A row's random numbers are a function of (seed, index, position in the output, token id) and
    of nothing else. So they depend neither on the rest of the batch, nor on preemption, nor on
    how many draft positions are verified at once: a verify row for position p draws what plain
    decoding draws at p.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: Sequence[int],
        stop_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
        index: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self.params = params
        self.vocab_size = vocab_size
        self.device = device
        self.output_length = 0
        self.min_new_tokens = _filled(params.min_new_tokens)
        self.temperature = _filled(params.temperature)
        self.top_k = _filled(params.top_k)
        self.top_p = _filled(params.top_p)
        self.min_p = _filled(params.min_p)
        self.repetition_penalty = _filled(params.repetition_penalty)
        self.presence_penalty = _filled(params.presence_penalty)
        self.frequency_penalty = _filled(params.frequency_penalty)
        self.greedy = self.temperature < GREEDY_BELOW
        if not 0 < self.top_k < vocab_size:
            self.top_k = 0
        seed = params.seed
        source = os.urandom(16) if seed is None else seed.to_bytes(16, "little")
        self._noise_source = source + index.to_bytes(4, "little")

        self.allowed_ids = self._ids(params.allowed_token_ids)
        # Stop ids beyond the vocabulary (a tokenizer may have some) cannot be sampled anyway.
        stops = {i for i in (*stop_ids, *(params.stop_token_ids or ())) if i < vocab_size}
        self.stop_ids = self._ids(sorted(stops) if self.min_new_tokens else None)
        biases = dict(params.logit_bias or ())
        self.bias_ids = self._ids(list(biases) or None)
        self.bias_values = torch.tensor(list(biases.values()), device=device)

        self._bad_last_ids: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
        for word in params.bad_words or ():
            assert not isinstance(word, str), "SamplingParams.resolve turns text into ids"
            self._bad_last_ids[tuple(word[:-1])].append(word[-1])
        self.banned_ids = self._ids(self._bad_last_ids.pop((), None))
        self._bad_lengths = sorted({len(prefix) for prefix in self._bad_last_ids})
        longest = self._bad_lengths[-1] if self._bad_lengths else 0
        self.has_bad_sequences = bool(self._bad_lengths)
        self._tail = collections.deque(prompt_ids, maxlen=longest)

        self.processors = _filled(params.logits_processors)
        # Only these functions want to know all of it.
        self._token_ids = list(prompt_ids) if self.processors else None
        self.constraint = constraint

        self.seen_W = self.counts_W = None
        if self.repetition_penalty != 1:
            self.seen_W = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen_W[torch.tensor(list(prompt_ids), dtype=torch.int64, device=device)] = True
        if self.presence_penalty or self.frequency_penalty:
            self.counts_W = torch.zeros(vocab_size, device=device)

    def append(self, token_id: int) -> None:
        """Count one accepted output token.

        SamplingError: its grammar cannot go on by it; nothing has been counted then.
        """
        assert 0 <= token_id < self.vocab_size, token_id
        if self.constraint is not None:
            try:
                self.constraint.append(token_id)
            except ConstraintError as error:
                raise SamplingError(str(error)) from error
        self.output_length += 1
        self._tail.append(token_id)
        if self._token_ids is not None:
            self._token_ids.append(token_id)
        if self.seen_W is not None:
            self.seen_W[token_id] = True
        if self.counts_W is not None:
            self.counts_W[token_id] += 1

    def row(self, extra: Sequence[int] = ()) -> "Row":
        """The row that samples the next token; with `extra`, the one after those drafts.

        It reads this state when it is used: use it before the next `append`.
        """
        return Row(self, tuple(extra))

    def bad_ids(self, extra: tuple[int, ...]) -> list[int]:
        """The ids that would complete a bad word of several ids after the tail and `extra`."""
        context = (*self._tail, *extra)
        found: list[int] = []
        for length in self._bad_lengths:
            if length <= len(context):
                found += self._bad_last_ids.get(context[len(context) - length :], ())
        return found

    def token_ids(self, extra: tuple[int, ...]) -> list[int]:
        """A new list of the ids of prompt, output and `extra`; only with `processors`."""
        assert self._token_ids is not None
        return [*self._token_ids, *extra]

    def noise_key(self, position: int) -> int:
        digest = hashlib.blake2b(self._noise_source + position.to_bytes(8, "little"), digest_size=8)
        return int.from_bytes(digest.digest(), "little", signed=True)

    def _ids(self, ids: Sequence[int] | None) -> Tensor | None:
        if ids is None:
            return None
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits: a request, and drafts that count as output for this row only."""

    state: SamplerState
    extra: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A "no draft" sentinel of -1 would count as the last id of the vocabulary.
        assert all(0 <= i < self.state.vocab_size for i in self.extra), self.extra

    @property
    def position(self) -> int:
        """How many output tokens come before the one this row samples."""
        return self.state.output_length + len(self.extra)


def process_logits(
    logits_TW: Tensor, rows: Sequence[Row], failed: dict[int, SamplingError] | None = None
) -> Tensor:
    """fp32 `[T, W]` logits of the distributions sampled; dropped ids are -inf.

    Greedy rows end after the penalties. `logits_TW` (any float dtype) is not written; the result
    may be `logits_TW` itself when no row asks for anything. A row whose caller's function or
    grammar fails is NaN, and why goes into `failed`; without it, SamplingError is raised.
    """
    assert logits_TW.shape[0] == len(rows), (logits_TW.shape, len(rows))
    x_TW = logits_TW.float()
    if x_TW is logits_TW and any(_changes_logits(row.state) for row in rows):
        x_TW = x_TW.clone()
    for i, (x_W, row) in enumerate(zip(x_TW, rows, strict=True)):
        try:
            _constrain(x_W, row)
        except SamplingError as error:
            if failed is None:
                raise
            failed[i] = error
            x_W.fill_(math.nan)
    _apply(x_TW, rows, lambda s: s.seen_W is not None, _repetition_penalty)
    _apply(x_TW, rows, lambda s: s.counts_W is not None, _count_penalties)
    _apply(x_TW, rows, lambda s: not s.greedy and s.temperature != 1, _temperature)
    _apply(x_TW, rows, lambda s: not s.greedy and s.min_p > 0, _min_p)
    _apply(x_TW, rows, lambda s: not s.greedy and s.top_k > 0, _top_k)
    _apply(x_TW, rows, lambda s: not s.greedy and s.top_p < 1, _top_p)
    return x_TW


def _changes_logits(s: SamplerState) -> bool:
    constrained = s.allowed_ids, s.stop_ids, s.bias_ids, s.banned_ids, s.seen_W, s.counts_W
    shaped = s.temperature != 1 or s.min_p > 0 or s.top_k > 0 or s.top_p < 1
    return (
        s.has_bad_sequences
        or bool(s.processors)
        or s.constraint is not None
        or any(t is not None for t in constrained)
        or (shaped and not s.greedy)
    )


def _constrain(x_W: Tensor, row: Row) -> None:
    state = row.state
    if state.allowed_ids is not None:
        kept = x_W[state.allowed_ids]
        x_W.fill_(NEG_INF)
        x_W[state.allowed_ids] = kept
    if state.banned_ids is not None:
        x_W[state.banned_ids] = NEG_INF
    if bad := state.bad_ids(row.extra):
        x_W[bad] = NEG_INF
    if state.stop_ids is not None and row.position < state.min_new_tokens:
        x_W[state.stop_ids] = NEG_INF
    if state.bias_ids is not None:
        x_W[state.bias_ids] += state.bias_values
    for processor in state.processors:
        x_W.copy_(_processed(processor, state.token_ids(row.extra), x_W))
    if state.constraint is not None:
        try:
            allowed_W = state.constraint.allowed(row.extra)
        except ConstraintError as error:
            raise SamplingError(str(error)) from error
        if allowed_W is not None:
            x_W.masked_fill_(~allowed_W.to(x_W.device), NEG_INF)


def _processed(processor: LogitsProcessor, token_ids: list[int], x_W: Tensor) -> Tensor:
    try:
        # A copy: the row changes after this, and the function may keep what it was given.
        y_W = processor(token_ids, x_W.clone())
    except Exception as error:
        raise SamplingError(f"logits_processors: {type(error).__name__}: {error}") from error
    if not isinstance(y_W, Tensor) or y_W.shape != x_W.shape:
        got = f"shape {list(y_W.shape)}" if isinstance(y_W, Tensor) else type(y_W).__name__
        raise SamplingError(f"logits_processors: got {got}, not logits [{len(x_W)}]")
    return y_W


def _apply(
    x_TW: Tensor,
    rows: Sequence[Row],
    asks: Callable[[SamplerState], bool],
    step: Callable[[Tensor, list[Row]], Tensor],
) -> None:
    chosen = [i for i, row in enumerate(rows) if asks(row.state)]
    if len(chosen) == len(rows) > 0:
        x_TW.copy_(step(x_TW, list(rows)))
    elif chosen:
        index_R = torch.tensor(chosen, device=x_TW.device)
        x_TW[index_R] = step(x_TW[index_R], [rows[i] for i in chosen])


def _repetition_penalty(x_RW: Tensor, rows: list[Row]) -> Tensor:
    seen_RW = torch.stack([_filled(row.state.seen_W) for row in rows])
    for seen_W, row in zip(seen_RW, rows, strict=True):
        if row.extra:
            seen_W[list(row.extra)] = True
    penalty_R1 = _column(x_RW, [row.state.repetition_penalty for row in rows])
    penalised_RW = torch.where(x_RW > 0, x_RW / penalty_R1, x_RW * penalty_R1)
    return torch.where(seen_RW, penalised_RW, x_RW)


def _count_penalties(x_RW: Tensor, rows: list[Row]) -> Tensor:
    counts_RW = torch.stack([_filled(row.state.counts_W) for row in rows])
    for counts_W, row in zip(counts_RW, rows, strict=True):
        for token_id in row.extra:
            counts_W[token_id] += 1
    frequency_R1 = _column(x_RW, [row.state.frequency_penalty for row in rows])
    presence_R1 = _column(x_RW, [row.state.presence_penalty for row in rows])
    return x_RW - frequency_R1 * counts_RW - presence_R1 * (counts_RW > 0)


def _temperature(x_RW: Tensor, rows: list[Row]) -> Tensor:
    return x_RW / _column(x_RW, [row.state.temperature for row in rows])


def _min_p(x_RW: Tensor, rows: list[Row]) -> Tensor:
    # p < min_p * p_max, without the softmax.
    bound_R1 = x_RW.amax(-1, keepdim=True) + _column(x_RW, [r.state.min_p for r in rows]).log()
    return x_RW.masked_fill(x_RW < bound_R1, NEG_INF)


def _top_k(x_RW: Tensor, rows: list[Row]) -> Tensor:
    ks = [row.state.top_k for row in rows]
    kth_R1 = x_RW.topk(max(ks), dim=-1).values.gather(1, _column(x_RW, ks, torch.int64) - 1)
    return x_RW.masked_fill(x_RW < kth_R1, NEG_INF)


def _top_p(x_RW: Tensor, rows: list[Row]) -> Tensor:
    """The smallest set of likeliest ids whose probabilities reach top_p; ties: lower id first."""
    top_p_R1 = _column(x_RW, [row.state.top_p for row in rows], torch.float64)
    candidates = min(NUCLEUS_CANDIDATES, x_RW.shape[1])
    size_R1, last_R1 = _nucleus(x_RW, top_p_R1, candidates)
    if candidates < x_RW.shape[1]:
        wide_R = (size_R1 == candidates).squeeze(1)
        if wide_R.any():
            size_R1[wide_R], last_R1[wide_R] = _nucleus(
                x_RW[wide_R], top_p_R1[wide_R], x_RW.shape[1]
            )
    above_RW = x_RW > last_R1
    tied_RW = x_RW == last_R1
    tied_kept_RW = tied_RW & (tied_RW.cumsum(-1) <= size_R1 - above_RW.sum(-1, keepdim=True))
    return x_RW.masked_fill(~(above_RW | tied_kept_RW), NEG_INF)


def _nucleus(x_RW: Tensor, top_p_R1: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Number of ids in the nucleus, at most `candidates`, and the logit of the last of them."""
    sorted_RM = x_RW.topk(candidates, dim=-1).values
    peak_R1 = sorted_RM[:, :1]
    total_R1 = (x_RW - peak_R1).exp().sum(-1, keepdim=True, dtype=torch.float64)
    p_RM = (sorted_RM - peak_R1).exp() / total_R1
    before_RM = p_RM.cumsum(-1) - p_RM
    size_R1 = (before_RM < top_p_R1).sum(-1, keepdim=True).clamp(min=1)
    return size_R1, sorted_RM.gather(1, size_R1 - 1)


def _column(x_RW: Tensor, values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=x_RW.device).unsqueeze(1)


def _filled(value: Filled | None) -> Filled:
    assert value is not None, "SamplerState takes resolved parameters"
    return value
