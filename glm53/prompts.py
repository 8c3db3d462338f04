"""What callers may give as prompts, as text or token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from glm53.batch import Trace

Prompt = str | Sequence[int] | Tensor

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def prompts_as_list(
    prompts: Prompt | Sequence[Prompt] | None, attention_mask: Tensor | None
) -> tuple[list[str | list[int]], bool]:
    """Prompts as text or ids, and whether there was only one, not in a list.

    ValueError for anything else.
    """
    if attention_mask is not None and not (isinstance(prompts, Tensor) and prompts.dim() == 2):
        raise ValueError("attention_mask goes with a tensor of token ids [B, S]")
    if isinstance(prompts, Tensor) and prompts.dim() == 2:
        mask_BS = torch.ones_like(prompts) if attention_mask is None else attention_mask
        if mask_BS.shape != prompts.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(mask_BS.shape)}, the ids {tuple(prompts.shape)}"
            )
        mask_BS = mask_BS.to(prompts.device).bool()
        rows = zip(prompts, mask_BS, strict=True)
        return [_text_or_ids(ids_S[mask_S]) for ids_S, mask_S in rows], False
    one = isinstance(prompts, str | bytes | bytearray | Mapping | Tensor)
    if one or not isinstance(prompts, Iterable):
        return [_text_or_ids(prompts)], True
    items = list(prompts)
    if items and all(_is_id(item) for item in items):
        return [_text_or_ids(items)], True
    return [_text_or_ids(item) for item in items], False


def _text_or_ids(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Tensor) and prompt.dim() == 1 and prompt.dtype in _ID_DTYPES:
        return prompt.tolist()
    if isinstance(prompt, list | tuple) and all(_is_id(i) for i in prompt):
        return [int(i) for i in prompt]
    raise ValueError(
        "a prompt must be text, a sequence of token ids or a 1-D tensor of integers, got "
        f"{prompt!r}"
    )


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool | Tensor)


def traces_of(
    replay: Trace | Sequence[Trace | None] | None, count: int | None
) -> list[Trace | None]:
    """One for each of `count` prompts; count None: for the only prompt. ValueError if they differ
    in number, or are no such thing."""
    if isinstance(replay, Trace | None):
        if replay is not None and count is not None:
            raise ValueError("replay: a list of prompts takes a list of traces, one for each")
        return [replay] * (1 if count is None else count)
    if not isinstance(replay, Sequence) or isinstance(replay, str):
        raise ValueError(f"replay={replay!r}: must be a Trace, or a list of them for a list")
    traces = list(replay)
    if count is None or len(traces) != count:
        wanted = "one prompt takes one trace" if count is None else f"there are {count} prompts"
        raise ValueError(f"replay has {len(traces)} traces; {wanted}")
    return traces
