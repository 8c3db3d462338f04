"""Figures of the exported embedded model, measured on held-out files from its FP8 weights."""

import lzma
import math
from collections.abc import Iterator
from pathlib import Path

import nano_files as files
import nano_model as net
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from glm53 import GLM53

WINDOW, STRIDE, DRAFTS = 1024, 512, 3
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 256, 96


def windows(ids: list[int]) -> Iterator[tuple[Tensor, int]]:
    """(ids `[1, <= WINDOW + 1]`, how many of its last tokens are counted); each token once."""
    counted = 1
    while counted < len(ids):
        stop = min(len(ids), max(counted + STRIDE, WINDOW + 1))
        yield torch.tensor([ids[max(0, stop - WINDOW - 1) : stop]]), stop - counted
        counted = stop


def consecutive(right: Tensor) -> Tensor:
    """`right` `[DRAFTS, rows]` -> number of leading right drafts of every row."""
    return right.long().cumprod(0).sum(0)


@torch.no_grad()
def drafted(model: net.NanoModel, hidden: Tensor, ids: Tensor) -> Tensor:
    """Greedy drafts `[DRAFTS, rows]`; entry (j, t) stands for token t + 2 + j, given those before.

    `ids` `[1, S]`; rows are the first S - DRAFTS.
    """
    rows = ids.shape[1] - DRAFTS
    following = [ids[:, 1 + j : 1 + j + rows] for j in range(DRAFTS)]
    index = net.IndexState(None, sparse=True)
    states = model.draft_hidden(hidden[:, :rows], following, index)
    return torch.cat([model.lm_head(state).argmax(-1) for state in states])


@torch.no_grad()
def text_figures(
    model: net.NanoModel, tokenizer: Tokenizer, held: dict[str, str]
) -> dict[str, float]:
    """Losses with sparse and dense attention, and drafts given the file's own tokens."""
    nats, tokens, leading, rows = {True: 0.0, False: 0.0}, 0, 0, 0
    end = tokenizer.token_to_id("<|endoftext|>")
    for text in tqdm(held.values(), desc="held-out files", unit="file"):
        for ids, counted in windows([end, *tokenizer.encode(text).ids]):
            for sparse in (False, True):
                index = net.IndexState(None, sparse)
                hidden = model.hidden(ids[:, :-1], index, torch.float32)
                logits = model.lm_head(hidden)[0]
                loss = F.cross_entropy(logits[-counted:], ids[0, -counted:], reduction="sum")
                nats[sparse] += loss.item()
            tokens += counted
            given = ids[:, :-1]
            if given.shape[1] > DRAFTS + 1:
                drafts, choice = drafted(model, hidden, given), logits.argmax(-1)
                wanted = [choice[1 + j : 1 + j + drafts.shape[1]] for j in range(DRAFTS)]
                right = consecutive(drafts == torch.stack(wanted))
                leading, rows = leading + right.sum().item(), rows + len(right)
    archive = "".join(held.values()).encode()
    size = len(archive)
    xz = len(lzma.compress(archive, preset=9)) * 8 / size
    sparse_bits, dense_bits = (nats[kind] / math.log(2) / size for kind in (True, False))
    return {
        "held-out bytes": size,
        "held-out tokens": tokens,
        "bits/byte, sparse attention": sparse_bits,
        "bits/byte, dense attention": dense_bits,
        "bits/byte, xz -9": xz,
        "fewer bits than xz, %": 100 * (1 - sparse_bits / xz),
        f"sparse minus dense loss at S = {WINDOW}, %": 100 * (nats[True] / nats[False] - 1),
        f"right drafts of {DRAFTS} a row, text": leading / rows,
    }


@torch.no_grad()
def generation_figures(
    model: net.NanoModel, tokenizer: Tokenizer, held: dict[str, str], folder: Path
) -> dict[str, float]:
    """Right drafts a step over greedy continuations that the library makes of held-out files."""
    library = GLM53.from_pretrained(folder, dtype=torch.float32, progress=False)
    prompts = [tokenizer.encode(text).ids for text in held.values()]
    prompts = [ids[-PROMPT_TOKENS - 64 : -64] for ids in prompts if len(ids) > 2 * PROMPT_TOKENS]
    prompts = prompts[:PROMPTS]
    replies = library.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    steps, leading = 0, 0
    for prompt, reply in zip(prompts, replies, strict=True):
        ids = torch.tensor([[*prompt, *reply.token_ids]])
        hidden = model.hidden(ids, net.IndexState(None, sparse=True), torch.float32)
        drafts = drafted(model, hidden, ids)
        wanted = [ids[0, 2 + j : 2 + j + drafts.shape[1]] for j in range(DRAFTS)]
        width = min(len(row) for row in wanted)
        right = consecutive(drafts[:, :width] == torch.stack([row[:width] for row in wanted]))
        row = len(prompt) - 1
        while row < width:
            accepted = int(right[row])
            steps, leading, row = steps + 1, leading + accepted, row + accepted + 1
    return {f"right drafts of {DRAFTS} a step, greedy generation": leading / steps}


def evaluate(folder: Path) -> dict[str, float]:
    model = net.NanoModel()
    model.load_state_dict(files.load_exported(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _, held = files.corpus()
    figures = text_figures(model, tokenizer, held)
    figures |= generation_figures(model, tokenizer, held, folder)
    return figures | {"folder bytes": sum(path.stat().st_size for path in folder.iterdir())}
