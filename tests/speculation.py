"""For the tests of speculative decoding: models whose drafts are sometimes right, drafts chosen by
the test, poison for rows that nothing may read, and drafts of the independent oracle."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from glm53 import GLM53, Completion
from glm53.cache import PAGE_SIZE
from glm53.engine import Engine
from glm53.request import Request
from glm53.scheduler import pages_for
from tests.engines import audit, tiny_model
from tests.reference import Reference


@torch.no_grad()
def agreeing_model(seed: int = 0, *, overrides: dict | None = None, **arguments) -> GLM53:
    """A random model, part of whose drafts are right.

    Embeddings outweigh what the layers add to the stream, so that the next token is nearly a
    function of the token before. The MTP layer applies about the same function: it takes the
    embedding as it is, a little of the hidden state, and norms like the target.
    """
    model, strength = tiny_model(seed, overrides=overrides, **arguments), 10.0
    decoder, width = model.network.model, model.config.hidden_size
    decoder.embed_tokens.weight.mul_(strength / 0.15)
    if model.config.mtp_layer is not None:
        layer = decoder.layers[-1]
        layer.enorm.weight.fill_(strength)
        layer.eh_proj.weight[:, :width] = torch.eye(width)
        layer.eh_proj.weight[:, width:].mul_(0.2)
        layer.shared_head.norm.weight.copy_(decoder.norm.weight)
    return model


def ids_of(completions: Sequence[Completion]) -> list[list[int]]:
    assert all(c.error is None for c in completions)
    return [list(c.token_ids) for c in completions]


def sequences_of(completions: Sequence[Completion]) -> list[list[int]]:
    """Prompt and output of each, for `force_drafts`."""
    return [[*c.prompt_token_ids, *c.token_ids] for c in completions]


def assert_mixed(completions: Sequence[Completion]) -> None:
    """Drafts were made, some accepted and some rejected; and they account for every token."""
    drafted = sum(c.metrics.drafted for c in completions)
    accepted = sum(c.metrics.accepted for c in completions)
    assert drafted > accepted > 0, (drafted, accepted)
    for completion in completions:
        metrics = completion.metrics
        assert metrics.decode_steps + metrics.accepted == len(completion.token_ids)


def poison_everything(engine: Engine) -> None:
    for tensor in _cache_tensors(engine):
        tensor.fill_(math.nan)


def poison_stale(engine: Engine) -> int:
    """NaN into every row beyond what the running requests have computed; how many held numbers.

    Main and MTP layers, latents and index keys.
    """
    slots = [
        request.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
        for request in engine.scheduler.running
        for p in range(request.num_computed, len(request.pages) * PAGE_SIZE)
    ]
    stale = 0
    for tensor in _cache_tensors(engine):
        stale += int(tensor[slots].isfinite().all(-1).sum())
        tensor[slots] = math.nan
    return stale


def _cache_tensors(engine: Engine) -> list[Tensor]:
    return [t for layer in engine._cache.layers for t in layer if isinstance(t, Tensor)]


def check_counts(engine: Engine) -> None:
    """Between two steps: what requests hold is what was emitted, plus room for their drafts."""
    audit(engine)
    for request in engine.scheduler.running:
        length = len(request.tokens)
        if request.num_computed >= request.prompt_length:
            assert request.num_computed == length - 1
        assert len(request.pages) >= pages_for(request.num_computed)
        assert len(request.pages) <= pages_for(length + (request.params.speculative_tokens or 0))
        assert len(request.pages) >= pages_for(length + len(request.drafts)) or not request.drafts
        assert length + len(request.drafts) < request.max_tokens
        assert request.sampler.output_length == length - request.prompt_length
    assert not any(request.drafts for request in engine.scheduler.waiting)


def force_drafts(
    engine: Engine,
    sequences: dict[int, Sequence[int]] | list[list[int]],
    pattern: Sequence[int] = (0, 2, 1, 3),
    vocab_size: int = 131,
) -> None:
    """Replace the drafts that `engine` makes: of a request's i-th drafts the first pattern[i] (it
    repeats) continue `sequences[request_id]` (prompt and output), the others are wrong.

    Of a list of sequences, it is the first that begins with what the request holds; drafts of
    requests that none begins with stay what they are. The MTP layer runs as ever, so its cache
    holds the rows of its own drafts.
    """
    real = engine._runner._draft
    counts: dict[Request, itertools.cycle] = {}

    def draft(*arguments):
        outcomes, drafts = arguments[-1], real(*arguments)
        for request, own in drafts.items():
            tokens = [*request.tokens, *(s.token_id for s in outcomes[request])]
            if isinstance(sequences, dict):
                sequence = sequences[request.request_id]
            else:
                length = len(tokens)
                sequence = next((s for s in sequences if s[:length] == tokens), None)
            if sequence is None:
                continue
            following = sequence[len(tokens) : len(tokens) + len(own)]
            right = next(counts.setdefault(request, itertools.cycle(pattern)))
            drafts[request] = [
                token if i < right else (token + 1) % vocab_size
                for i, token in enumerate(following)
            ]
            assert len(drafts[request]) == len(own)
        return drafts

    engine._runner._draft = draft


def oracle_drafts(oracle: Reference, tokens: Sequence[int], count: int) -> list[int]:
    """What `count` draft steps after `tokens` (prompt and output so far) should draft.

    From the tokens alone: whole forwards, nothing cached, nothing of earlier steps.
    """
    config, tokens = oracle.config, list(tokens)
    layer = config.mtp_layer
    assert layer is not None
    next_ids, hidden_SD = tokens[1:], oracle(tokens[:-1]).hidden
    outcome = oracle.draft(next_ids, hidden_SD)
    chosen = outcome.selections[layer]
    drafts = [int(outcome.logits[-1].argmax())]
    for step in range(1, count):
        next_ids = [*next_ids, drafts[-1]]
        hidden_SD = torch.cat([hidden_SD, outcome.hidden[-1:]])
        shared = [*chosen, *[chosen[-1]] * step]
        given = shared if config.index_share_for_mtp_iteration else None
        outcome = oracle.draft(next_ids, hidden_SD, given)
        drafts.append(int(outcome.logits[-1].argmax()))
    return drafts
