"""What one step computes: the forward, sampled tokens, prompt log-probabilities, drafts.

Nothing here changes a request, but for prompt log-probabilities and the pages reserved for drafts:
a step that raises can be repeated. What its results come to is the engine's business.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glm53 import tiles
from glm53.batch import Batch, Trace, block_table
from glm53.cache import PAGE_SIZE, KVCache
from glm53.compile import CompiledNetwork
from glm53.model import Transformer
from glm53.request import Request
from glm53.sampling import Sample, SamplingError, sample, token_logprobs, unusable_rows
from glm53.scheduler import Chunk
from glm53.speculative import num_accepted, propose

# Prompt rows times vocabulary would be gigabytes at once.
_LOGIT_ROWS = 128


@dataclass(frozen=True)
class StepResult:
    """Of the chunks of one step.

    first_rows: of each chunk; outcomes: for requests that sampled, their accepted drafts and one
    more token, and for those that cannot go on the error; drafts: for the next step; record: the
    decisions of every row, if a request records.
    """

    num_rows: int
    first_rows: list[int]
    outcomes: dict[Request, list[Sample] | SamplingError]
    drafts: dict[Request, list[int]]
    record: Trace | None


class Runner:
    """Runs the network: eagerly, compiled, or in fixed tiles (`batch_invariant`)."""

    def __init__(
        self,
        network: Transformer,
        cache: KVCache,
        *,
        batch_invariant: bool,
        compiled: CompiledNetwork | None,
    ) -> None:
        assert not (batch_invariant and compiled is not None)
        self._network = network
        self.compiled = compiled
        self._forward = network if compiled is None else compiled
        self._cache = cache
        self._batch_invariant = batch_invariant

    def run(self, chunks: list[Chunk], reserve: Callable[[Request, int], int]) -> StepResult:
        """reserve: `Scheduler.reserve`, for the pages of drafts."""
        batch = Batch.paged(
            [(c.token_ids, c.request.num_computed, c.request.pages) for c in chunks],
            PAGE_SIZE,
            self._network.device,
        )
        record = Trace() if any(c.request.records for c in chunks) else None
        hidden_TD = self._hidden_states(batch, record, self._replay(chunks))
        outcomes: dict[Request, list[Sample] | SamplingError] = {}
        sampling: list[tuple[Chunk, int]] = []
        ends = list(itertools.accumulate(len(c.token_ids) for c in chunks))
        first_rows = [0, *ends[:-1]]
        for chunk, first_row in zip(chunks, first_rows, strict=True):
            request = chunk.request
            error = self._prompt_logprobs(request, hidden_TD[first_row : first_row + chunk.count])
            if error is not None:
                outcomes[request] = error
            elif chunk.count == request.num_remaining and not request.prompt_only:
                sampling.append((chunk, first_row + chunk.count - 1))
        outcomes |= self._sample(hidden_TD, sampling)
        drafts = self._draft(chunks, first_rows, batch, hidden_TD, reserve, outcomes)
        return StepResult(ends[-1], first_rows, outcomes, drafts, record)

    def _hidden_states(self, batch: Batch, record: Trace | None, replay: Trace | None) -> Tensor:
        if self._batch_invariant:
            return tiles.hidden_states(self._network, self._cache, batch, record, replay)
        return self._forward.model(batch, self._cache, record, replay)

    def _logits(self, hidden_TD: Tensor, positions: Sequence[int]) -> Tensor:
        """Of rows at these positions of their requests."""
        if self._batch_invariant:
            return tiles.logits(self._network, hidden_TD, positions)
        return self._forward.lm_head(hidden_TD)

    def _replay(self, chunks: list[Chunk]) -> Trace | None:
        """What the rows of a step replay; rows of other requests are free."""
        if all(chunk.request.replay is None for chunk in chunks):
            return None
        parts = [
            chunk.request.replay.select(
                slice(chunk.request.num_computed, chunk.request.num_computed + chunk.count)
            )
            if chunk.request.replay is not None
            else Trace()
            for chunk in chunks
        ]
        return Trace.cat(parts, [len(chunk.token_ids) for chunk in chunks])

    def _sample(
        self, hidden_TD: Tensor, sampling: list[tuple[Chunk, int]]
    ) -> dict[Request, list[Sample] | SamplingError]:
        """What each request in `sampling` (given with the row of its last token) goes on with:
        its accepted drafts, then one more token."""
        if not sampling:
            return {}
        rows = [row + i for chunk, row in sampling for i in range(1 + len(chunk.drafts))]
        positions = [
            chunk.request.num_computed + chunk.count - 1 + i
            for chunk, _ in sampling
            for i in range(1 + len(chunk.drafts))
        ]
        logits_TW = self._logits(hidden_TD[rows], positions)
        samples = sample(
            logits_TW,
            [
                chunk.request.sampler.row(chunk.drafts[:i])
                for chunk, _ in sampling
                for i in range(1 + len(chunk.drafts))
            ],
        )
        outcomes: dict[Request, list[Sample] | SamplingError] = {}
        for chunk, _ in sampling:
            own = samples[: 1 + len(chunk.drafts)]
            samples = samples[len(own) :]
            # A row after the first rejected draft stands for nothing, broken or not. A row broken
            # after accepted drafts is left to the next step, which begins with it: these drafts
            # may have ended the request.
            ids = [-1 if isinstance(s, SamplingError) else s.token_id for s in own]
            kept = own[: 1 + num_accepted(ids, chunk.drafts)]
            outcomes[chunk.request] = (
                own[0]
                if isinstance(own[0], SamplingError)
                else [s for s in kept if isinstance(s, Sample)]
            )
        return outcomes

    def _draft(
        self,
        chunks: list[Chunk],
        first_rows: list[int],
        batch: Batch,
        hidden_TD: Tensor,
        reserve: Callable[[Request, int], int],
        outcomes: dict[Request, list[Sample] | SamplingError],
    ) -> dict[Request, list[int]]:
        """Drafts for the next step; runs the MTP layer over every row whose token stands."""
        rows: list[int] = []
        next_ids: list[int] = []
        drafting: list[Request] = []
        last_rows: list[int] = []
        num_drafts: list[int] = []
        for chunk, first_row in zip(chunks, first_rows, strict=True):
            request, outcome = chunk.request, outcomes.get(chunk.request)
            if not request.speculates or isinstance(outcome, SamplingError):
                continue
            start = request.num_computed + 1
            known = request.tokens[start : start + chunk.count]
            new = [s.token_id for s in outcome or ()]
            next_ids += [*known, *new]
            rows += range(first_row, first_row + len(known) + len(new))
            if outcome is None:
                continue
            length = len(request.tokens) + len(new)
            # The step that verifies k drafts emits up to k + 1 tokens.
            asked = request.params.speculative_tokens or 0
            wanted = min(asked, request.max_tokens - length - 1)
            held = reserve(request, length + max(0, wanted))
            wanted = min(wanted, held - length)
            if wanted > 0:
                drafting.append(request)
                last_rows.append(len(rows) - 1)
                num_drafts.append(wanted)
        if not rows:
            return {}
        device = hidden_TD.device
        rows_R = torch.tensor(rows, device=device)
        # The pages reserved just now are not in the table of the target's forward.
        table_BP = block_table([chunk.request.pages for chunk in chunks], device)
        proposed = propose(
            self._forward,
            self._cache,
            replace(batch, block_table=table_BP).select(rows_R),
            hidden_TD[rows_R],
            torch.tensor(next_ids, device=device),
            last_rows,
            num_drafts,
        )
        return dict(zip(drafting, proposed, strict=True))

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
            start = len(request.prompt_logprobs) - 1
            positions = range(start, start + len(part_T))
            logits_TW = self._logits(part_TD, positions)
            error = next((e for e in unusable_rows(logits_TW) if e is not None), None)
            if error is not None:
                return SamplingError(f"prompt_logprobs: {error}")
            request.prompt_logprobs += token_logprobs(
                logits_TW, part_T, request.params.prompt_logprobs or 0
            )
        return None
