"""Speculative decoding with the MTP layer: propose drafts, verify them. Pure tensor functions.

Positions. The target computes rows at positions p and hands over its post-final-norm hidden
states. Draft step 0 runs the MTP layer over all of these rows, each with the embedding of the
token at p + 1: it fills the layer's own cache and, at a request's last row, predicts the token at
p + 2. Step j >= 1 has one row per request, at position p + j: the hidden state is the MTP layer's
own post-norm output of the step before, the token the draft just made. When the config shares
the index (`index_share_for_mtp_iteration`) these rows use the selection of their step-0 row and
write no index key; the next target step rewrites every position that was accepted.

Verification. Drafts are greedy, that is one-hot. Rejection sampling accepts a draft d with
probability p(d) and otherwise draws from p without d (Leviathan et al. 2023, Chen et al. 2023).
Drawing s from p and comparing s with d does exactly that: s == d has probability p(d), and an s
that differs is distributed as p without d. Since s is what plain decoding would have drawn at
that position (`glm53.sampling`), output and log-probabilities are those of plain decoding, also
under a seed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm53.batch import Batch
from glm53.cache import KVCache
from glm53.compile import CompiledNetwork
from glm53.model import Transformer


def num_accepted(sampled_ids: Sequence[int], draft_ids: Sequence[int]) -> int:
    """Leading drafts that equal what was sampled at their position.

    sampled_ids: one more than drafts; the one after the last accepted draft is emitted too.
    """
    assert len(sampled_ids) == len(draft_ids) + 1
    for i, draft in enumerate(draft_ids):
        if sampled_ids[i] != draft:
            return i
    return len(draft_ids)


def propose(
    network: Transformer | CompiledNetwork,
    cache: KVCache,
    batch: Batch,
    hidden_TD: Tensor,
    next_ids_T: Tensor,
    last_rows: Sequence[int],
    num_drafts: Sequence[int],
) -> list[list[int]]:
    """Greedy drafts of some requests, and the MTP layer's cache of every row.

    batch, hidden_TD: rows of the target step whose tokens stand (rejected ones left out), with
    their post-norm hidden states; next_ids_T [T]: the token after each row. For request i,
    last_rows[i] is its last row and num_drafts[i] >= 1 how many drafts it wants; their positions
    have pages. Other rows only fill the cache.
    """
    hidden_TD, selection = network.draft(next_ids_T, hidden_TD, batch, cache)
    if not last_rows:
        return []
    drafts: list[list[int]] = [[] for _ in last_rows]
    # Rows of requests that still draft; longest first, so that those that stop are a suffix.
    order = sorted(range(len(last_rows)), key=lambda i: -num_drafts[i])
    rows_R = torch.tensor([last_rows[i] for i in order], device=hidden_TD.device)
    first, hidden_RD = batch.select(rows_R), hidden_TD[rows_R]
    shared = None
    if network.config.index_share_for_mtp_iteration:
        shared = selection.select(rows_R)
    ids_R = network.lm_head(hidden_RD).argmax(-1)
    _append(drafts, order, ids_R)
    for step in range(1, num_drafts[order[0]]):
        keep = slice(0, sum(wanted > step for wanted in num_drafts))
        kept = None if shared is None else shared.select(keep)
        rows = first.select(keep).advance(step)
        hidden_RD, _ = network.draft(ids_R[keep], hidden_RD[keep], rows, cache, kept)
        ids_R = network.lm_head(hidden_RD).argmax(-1)
        _append(drafts, order, ids_R)
    return drafts


def _append(drafts: list[list[int]], order: list[int], ids_R: Tensor) -> None:
    for i, token in zip(order, ids_R.tolist(), strict=False):  # those that stopped are a suffix
        drafts[i].append(token)
