"""One token for each row of logits, and the log-probabilities asked for.

Shapes: T rows, W vocabulary, N the largest number of log-probabilities asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm53.sampling.processors import Row, SamplingError, process_logits

# Rows times vocabulary worked on at once where fp32 or fp64 copies of a row are needed.
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Sample:
    """A token id and, where asked for, {id: log-probability}, likeliest first."""

    token_id: int
    logprobs: dict[int, float] | None = None


def sample(logits_TW: Tensor, rows: Sequence[Row]) -> list[Sample | SamplingError]:
    """A token for every row of `logits_TW` (any float dtype, not written).

    A row whose logits hold NaN or +inf, in which no id is left, or whose caller's function or
    grammar fails, gives a `SamplingError` (as a value); the others are as without it. Greedy: the
    highest processed logit, ties to the lowest id. Random: argmax of p / Exp(1).
    Log-probabilities: of the sampled id and the top `logprobs` of the raw or the processed row;
    ids of probability 0 are left out.
    """
    failed: dict[int, SamplingError] = {}
    processed_TW = process_logits(logits_TW, rows, failed)
    unusable = zip(unusable_rows(logits_TW), unusable_rows(processed_TW), rows, strict=True)
    errors = [
        SamplingError(raw)
        if raw is not None
        else failed.get(i)
        or (None if kept is None else SamplingError(f"after processing: {kept}{_grammar(row)}"))
        for i, (raw, kept, row) in enumerate(unusable)
    ]
    ids_T = processed_TW.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if errors[i] is None and not row.state.greedy]
    for part in _parts(drawn, processed_TW.shape[1]):
        keys = [rows[i].state.noise_key(rows[i].position) for i in part]
        ids_T[part] = _draw(processed_TW[part], keys)

    logprobs: list[dict[int, float] | None] = [None] * len(rows)
    for mode, source_TW in ("raw", logits_TW), ("processed", processed_TW):
        asked = [
            i
            for i, row in enumerate(rows)
            if errors[i] is None
            and row.state.params.logprobs is not None
            and row.state.params.logprobs_mode == mode
        ]
        for part in _parts(asked, logits_TW.shape[1]):
            top_ns = [rows[i].state.params.logprobs or 0 for i in part]
            found = _logprobs(source_TW[part], ids_T[part], top_ns)
            for i, row_logprobs in zip(part, found, strict=True):
                logprobs[i] = row_logprobs
    return [
        error or Sample(token_id, row_logprobs)
        for error, token_id, row_logprobs in zip(errors, ids_T.tolist(), logprobs, strict=True)
    ]


def token_logprobs(logits_TW: Tensor, next_ids_T: Tensor, top_n: int) -> list[dict[int, float]]:
    """{id: log-probability} of `next_ids_T` and the top `top_n` of each row, likeliest first.

    In fp32 from raw logits of any float dtype, a bounded number of rows at a time.
    """
    found: list[dict[int, float]] = []
    for part in _parts(list(range(len(next_ids_T))), logits_TW.shape[1]):
        span = slice(part[0], part[-1] + 1)
        found += _logprobs(logits_TW[span], next_ids_T[span], [top_n] * len(part))
    return found


def unusable_rows(logits_TW: Tensor) -> list[str | None]:
    """For each row what makes it no distribution: NaN, +inf, every logit -inf; else None."""
    return [
        "a logit is NaN"
        if math.isnan(peak)
        else "a logit is +inf"
        if peak == math.inf
        else "every logit is -inf: no token is left"
        if peak == -math.inf
        else None
        for peak in logits_TW.amax(-1).tolist()
    ]


def _grammar(row: Row) -> str:
    return "" if row.state.constraint is None else " of those that continue or end the grammar"


def _parts(indices: list[int], vocab_size: int) -> list[list[int]]:
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [indices[i : i + size] for i in range(0, len(indices), size)]


def _draw(logits_TW: Tensor, keys: Sequence[int]) -> Tensor:
    key_T1 = torch.tensor(keys, dtype=torch.int64, device=logits_TW.device).unsqueeze(1)
    return (logits_TW.softmax(-1) / exponential_noise(key_T1, logits_TW.shape[1])).argmax(-1)


def exponential_noise(key_T1: Tensor, vocab_size: int) -> Tensor:
    """fp64 `[T, W]` draws from Exp(1), each a function of its row's int64 key and its id.

    SplitMix64 (Steele, Lea and Flood 2014) at counter id + 1, made where the logits are: a
    generator's stream would be drawn on the host and copied (3 ms a row at W = 154880 on one CPU
    core, where this takes 1.2), and would differ between devices.
    """
    counter_W = torch.arange(1, vocab_size + 1, device=key_T1.device)
    z_TW = key_T1 + counter_W * _signed(0x9E3779B97F4A7C15)
    # In place: a step is bound by memory, and new tensors double its time.
    shifted_TW = torch.empty_like(z_TW)
    z_TW ^= _shift_right(z_TW, 30, shifted_TW)
    z_TW *= _signed(0xBF58476D1CE4E5B9)
    z_TW ^= _shift_right(z_TW, 27, shifted_TW)
    z_TW *= _signed(0x94D049BB133111EB)
    z_TW ^= _shift_right(z_TW, 31, shifted_TW)
    # 52 bits and a half: exact in fp64 and strictly inside (0, 1), so never 0 or inf.
    u_TW = _shift_right(z_TW, 12, shifted_TW).double().add_(0.5).mul_(2.0**-52)
    return u_TW.log_().neg_()


def _shift_right(z: Tensor, bits: int, out: Tensor) -> Tensor:
    # torch's shift of int64 repeats the sign.
    torch.bitwise_right_shift(z, bits, out=out)
    return out.bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _logprobs(logits_TW: Tensor, ids_T: Tensor, top_ns: Sequence[int]) -> list[dict[int, float]]:
    x_TW = logits_TW.float()
    logprobs_TW = x_TW.log_softmax(-1)
    own = logprobs_TW.gather(1, ids_T.to(x_TW.device).unsqueeze(1)).squeeze(1).tolist()
    top_ids_TN = _ranked_ids(x_TW, min(max(top_ns), x_TW.shape[1]))
    top_TN = logprobs_TW.gather(1, top_ids_TN).tolist()
    found = []
    for own_id, own_logprob, ids, values, top_n in zip(
        ids_T.tolist(), own, top_ids_TN.tolist(), top_TN, top_ns, strict=True
    ):
        ranked = zip(ids[:top_n], values[:top_n], strict=True)
        row = {i: value for i, value in ranked if value != -math.inf}
        row.setdefault(own_id, own_logprob)
        found.append(row)
    return found


def _ranked_ids(x_TW: Tensor, top_n: int) -> Tensor:
    """Ids of the `top_n` highest fp32 logits, highest first, ties: lower id first.

    Tensor.topk breaks ties by chance, so it is given distinct keys: the logit's bits as an
    integer of the same order, then the id.
    """
    bits_TW = (x_TW + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    order_TW = torch.where(bits_TW < 0, bits_TW ^ 0x7FFFFFFF, bits_TW).long()
    last_id = x_TW.shape[1] - 1
    reversed_ids_W = torch.arange(last_id, -1, -1, device=x_TW.device)
    keys_TN = ((order_TW << 32) + reversed_ids_W).topk(top_n, dim=-1).values
    return last_id - (keys_TN & 0xFFFFFFFF)
