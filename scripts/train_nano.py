"""Train, export and measure the embedded model (glm53/data/nano).

    python scripts/train_nano.py                    # everything, resumes where it stopped
    python scripts/train_nano.py --export-only      # write the folder from the last checkpoint
    python scripts/train_nano.py --evaluate-only    # figures of the exported folder

The schedule follows the wall clock (`--minutes`): a dense part, then the indexers learn the
attention distribution (KL), then attention is restricted to what they select.
"""

import argparse
import ctypes
import json
import logging
import math
import os
import time
from pathlib import Path

import nano_files as files
import nano_model as net
import numpy as np
import torch
import torch.nn.functional as F
from nano_evaluate import evaluate
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

logger = logging.getLogger("nano")
TOKENS, MICRO_BATCHES, LOOKAHEAD = 2048, 4, 4
WARM_UP, DECAY, INDEX_START, SPARSE_START = 0.01, 0.55, 0.65, 0.82
MUON_LR, EMBED_LR, ADAM_LR, INDEX_LR = 4e-3, 3e-3, 2e-3, 1e-3
WEIGHT_DECAY, MTP_WEIGHT, BIAS_STEP = 0.05, 0.3, 1e-3
SAVE_SECONDS = 180


def keep_freed_memory() -> None:
    """glibc unmaps large activations when freed; faulting them in again costs a tenth of a step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, top_pad, mmap_threshold = -1, -2, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
        libc.mallopt(top_pad, 1 << 28)


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan et al., 2024) on `[n, rows, columns]`."""
    x = update.bfloat16()
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.transpose(1, 2)
    x = x / (x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if flip else x


class Optimiser:
    """Muon for the layers' matrices; AdamW for embedding, head, norms, routers and indexers."""

    def __init__(self, model: net.NanoModel):
        self.model, self.step_count, self.index_steps = model, 0, 0
        self.parameters = dict(model.named_parameters())
        self.state: dict[str, Tensor] = {}
        self.matrices: dict[tuple[int, ...], list[str]] = {}
        self.vectors = []
        for name, p in self.parameters.items():
            matrix = p.dim() >= 2 and "layers" in name
            if matrix and "indexer" not in name and "gate.weight" not in name:
                self.matrices.setdefault(tuple(p.shape), []).append(name)
            else:
                self.vectors.append(name)
                self.state[f"v/{name}"] = torch.zeros_like(p)
            self.state[f"m/{name}"] = torch.zeros_like(p)
        self.main = [p for n, p in self.parameters.items() if "indexer" not in n]
        self.index = [p for n, p in self.parameters.items() if "indexer" in n]

    @torch.no_grad()
    def step(self, scale: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.main, 1.0)
        self.step_count += 1
        for names in self.matrices.values():
            self.muon(names, MUON_LR * scale)
        for name in self.vectors:
            if "indexer" not in name:
                self.adam(name, (EMBED_LR if "embed" in name else ADAM_LR) * scale, self.step_count)
        for p in self.main:
            p.grad = None
        for moe in self.model.moe_layers():
            bias = moe.gate.e_score_correction_bias
            bias += BIAS_STEP * min(1.0, 2 * scale) * torch.sign(moe.load.mean() - moe.load)
            moe.load.zero_()
        return float(norm)

    @torch.no_grad()
    def step_index(self, scale: float) -> None:
        """Indexers step after every micro-batch: their time is short, their rows are many."""
        torch.nn.utils.clip_grad_norm_(self.index, 1.0)
        self.index_steps += 1
        for name in self.vectors:
            if "indexer" in name:
                self.adam(name, INDEX_LR * scale, self.index_steps)
        for p in self.index:
            p.grad = None

    def muon(self, names: list[str], rate: float) -> None:
        updates = []
        for name in names:
            grad, moment = self.parameters[name].grad, self.state[f"m/{name}"]
            if grad is None:
                grad = torch.zeros_like(moment)
            moment.lerp_(grad, 0.05)
            updates.append(grad.lerp(moment, 0.95))
        shape = updates[0].shape
        flat = torch.stack(updates).view(-1, *shape[-2:])
        moved = orthogonalise(flat).float() * 0.2 * math.sqrt(max(shape[-2:]))
        for name, update in zip(names, moved.view(-1, *shape), strict=True):
            p = self.parameters[name]
            p.mul_(1 - rate * WEIGHT_DECAY).sub_(update, alpha=rate)

    def adam(self, name: str, rate: float, count: int) -> None:
        p, first, second = self.parameters[name], self.state[f"m/{name}"], self.state[f"v/{name}"]
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        first.lerp_(grad, 0.1)
        second.mul_(0.97).addcmul_(grad, grad, value=0.03)
        root = (second / (1 - 0.97**count)).sqrt_().add_(1e-10)
        p.addcdiv_(first, root, value=-rate / (1 - 0.9**count))


class Windows:
    """Windows of a token stream at low-discrepancy offsets: even coverage, resumable by a count."""

    def __init__(self, streams: tuple[np.ndarray, np.ndarray]):
        self.streams, self.counts = streams, [0, 0]

    def take(self, stream: int, batch: int, length: int) -> Tensor:
        ids, rows = self.streams[stream], []
        for _ in range(batch):
            self.counts[stream] += 1
            fraction = (self.counts[stream] * 0.6180339887498949) % 1.0
            start = int(fraction * (len(ids) - length - LOOKAHEAD))
            rows.append(ids[start : start + length + LOOKAHEAD].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


def micro_losses(
    model: net.NanoModel, tokens: Tensor, progress: float, draft_steps: int
) -> dict[str, Tensor]:
    length = tokens.shape[1] - LOOKAHEAD
    rows = None
    if progress >= INDEX_START:
        rows = torch.randperm(length)[: length // 16].sort().values
    index = net.IndexState(rows, sparse=progress >= SPARSE_START)
    hidden = model.hidden(tokens[:, :length], index, torch.bfloat16)
    head = model.lm_head.weight

    def cross_entropy(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return net.LinearCrossEntropy.apply(states.flatten(0, 1), head, targets.flatten())

    loss, choice = cross_entropy(hidden, tokens[:, 1 : length + 1])
    out = {"lm": loss}
    if draft_steps:
        # Drafts are judged against the model's own choice, so late training chases that choice.
        wanted = tokens[:, 1:].clone()
        if progress >= INDEX_START:
            wanted[:, :length] = choice.view(-1, length)
        following = [tokens[:, 1 + j : 1 + j + length] for j in range(draft_steps)]
        drafts = model.draft_hidden(hidden, following, index)
        losses = [
            cross_entropy(draft, wanted[:, 1 + j : 1 + j + length])[0]
            for j, draft in enumerate(drafts)
        ]
        out["mtp"] = torch.stack(losses).mean()
    if index.losses:
        out["kl"] = torch.stack(index.losses).sum()
    return out


def schedule(progress: float) -> tuple[float, float]:
    """(learning-rate factor, indexer's factor) at a fraction of the run."""
    main = min(1.0, progress / WARM_UP)
    if progress > DECAY:
        main = max(0.03, (1 - progress) / (1 - DECAY))
    index = min(1.0, max(0.05, (progress - INDEX_START) / 0.02), max(0.05, (1 - progress) / 0.2))
    return main, index


def plan(progress: float, micro: int, step: int) -> tuple[int, int, int]:
    """(stream, length, draft passes) of a micro-batch."""
    number = step * MICRO_BATCHES + micro
    tests = number % 10 < (3 if progress < DECAY else 1)
    if progress < 0.4:
        length = 512 if number % 4 else 1024
    elif progress < SPARSE_START:
        length = (512, 1024, 512, 2048)[number % 4]
    else:
        length = 2048 if number % 8 == 5 else 1024
    passes = 1 if progress < 0.4 else 2 if progress < SPARSE_START else 3
    return int(tests), length, passes if number % 3 == 0 else 0


class Run:
    """A training run in a folder: resumes from its last checkpoint."""

    def __init__(self, folder: Path, seed: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        torch.manual_seed(seed)
        self.train_texts, self.held_texts = files.corpus()
        path = folder / "tokenizer.json"
        if not path.exists():
            logger.info("training the tokenizer on %d files", len(self.train_texts))
            files.train_tokenizer(self.train_texts).save(str(path), pretty=False)
        self.tokenizer = Tokenizer.from_file(str(path))
        self.model = net.NanoModel()
        self.optimiser = Optimiser(self.model)
        self.elapsed, self.step, self.counts = 0.0, 0, [0, 0]
        self.restore()

    def restore(self) -> None:
        path = self.folder / "state.safetensors"
        if not path.exists():
            return
        tensors = load_file(path)
        self.model.load_state_dict(
            {n.removeprefix("p/"): t for n, t in tensors.items() if n.startswith("p/")}
        )
        for name, tensor in self.optimiser.state.items():
            tensor.copy_(tensors[name])
        facts = json.loads((self.folder / "state.json").read_text())
        self.elapsed, self.step, self.counts = facts["elapsed"], facts["step"], facts["counts"]
        self.optimiser.step_count = facts["step"]
        self.optimiser.index_steps = facts["index_steps"]

    def save(self) -> None:
        tensors = {f"p/{n}": t for n, t in self.model.state_dict().items()}
        partial = self.folder / "partial"
        save_file(tensors | self.optimiser.state, partial)
        facts = {"elapsed": self.elapsed, "step": self.step, "counts": self.counts}
        facts["index_steps"] = self.optimiser.index_steps
        os.replace(partial, self.folder / "state.safetensors")
        partial.write_text(json.dumps(facts))
        os.replace(partial, self.folder / "state.json")

    def streams(self) -> tuple[np.ndarray, np.ndarray]:
        paths = [self.folder / "library.npy", self.folder / "tests.npy"]
        if not all(path.exists() for path in paths):
            logger.info("encoding the corpus")
            pair = files.token_streams(self.tokenizer, self.train_texts)
            for path, ids in zip(paths, pair, strict=True):
                np.save(path, ids)
        library, tests = (np.load(path) for path in paths)
        logger.info("%d library tokens, %d test tokens", len(library), len(tests))
        return library, tests

    def held_out_slice(self) -> tuple[Tensor, int]:
        """Windows `[8, 513]` from held-out files and the bytes of what they predict."""
        rows, size = [], 0
        for text in list(self.held_texts.values())[::3]:
            ids = self.tokenizer.encode(text).ids[:513]
            if len(ids) == 513:
                rows.append(ids)
                size += len(self.tokenizer.decode(ids[1:], skip_special_tokens=False).encode())
        return torch.tensor(rows), size

    def train(self, minutes: float) -> None:
        windows = Windows(self.streams())
        windows.counts = self.counts
        held, held_bytes = self.held_out_slice()
        total, start, saved = minutes * 60, time.monotonic() - self.elapsed, self.elapsed
        bar = tqdm(total=int(total), initial=int(self.elapsed), unit="s", mininterval=10)
        while self.elapsed < total:
            begun = time.monotonic()
            progress, sums = self.elapsed / total, {}
            rate, index_rate = schedule(progress)
            for micro in range(MICRO_BATCHES):
                stream, length, passes = plan(progress, micro, self.step)
                tokens = windows.take(stream, TOKENS // length, length)
                losses = micro_losses(self.model, tokens, progress, passes)
                weights = {"lm": 1.0, "mtp": MTP_WEIGHT, "kl": MICRO_BATCHES}
                (sum(weights[n] * v for n, v in losses.items()) / MICRO_BATCHES).backward()
                if "kl" in losses:
                    self.optimiser.step_index(index_rate)
                for name, value in losses.items():
                    sums.setdefault(name, []).append(value.item())
            sums["norm"] = [self.optimiser.step(rate)]
            if not all(math.isfinite(v) for values in sums.values() for v in values):
                raise ValueError(f"step {self.step}: not finite: {sums}")
            self.step += 1
            self.elapsed = time.monotonic() - start
            speed = TOKENS * MICRO_BATCHES / (time.monotonic() - begun)
            bar.n = min(int(self.elapsed), bar.total)
            shown = {n: f"{sum(v) / len(v):.3f}" for n, v in sums.items()}
            bar.set_postfix(shown | {"tok/s": f"{speed:.0f}"}, refresh=False)
            bar.refresh() if self.step % 10 == 0 else None
            if self.step % 50 == 0:
                nats = self.slice_loss(held)
                bits = nats * held[:, 1:].numel() / math.log(2) / held_bytes
                logger.info(
                    "step %d %.1f min %s tok/s %.0f held-out slice %.3f nats, %.3f bits/byte",
                    self.step,
                    self.elapsed / 60,
                    shown,
                    speed,
                    nats,
                    bits,
                )
            if self.elapsed - saved > SAVE_SECONDS:
                self.save()
                saved = self.elapsed
        bar.close()
        self.save()

    @torch.no_grad()
    def slice_loss(self, held: Tensor) -> float:
        total = 0.0
        for rows in held.split(4):
            hidden = self.model.hidden(rows[:, :-1], net.IndexState(None, False), torch.bfloat16)
            logits = self.model.lm_head(hidden).flatten(0, 1).float()
            total += F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum").item()
        for moe in self.model.moe_layers():
            moe.load.zero_()
        return total / held[:, 1:].numel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=112.0, help="length of the whole run")
    parser.add_argument("--run", type=Path, default=Path(__file__).parents[1] / "runs" / "nano")
    parser.add_argument("--folder", type=Path, default=files.FOLDER, help="where to export")
    parser.add_argument("--export-only", action="store_true")
    parser.add_argument("--evaluate-only", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    keep_freed_memory()
    if not args.evaluate_only:
        run = Run(args.run)
        if not args.export_only:
            run.train(args.minutes)
        size = files.export(run.model.state_dict(), run.tokenizer, args.folder)
        logger.info("step %d exported: %s, %d bytes", run.step, args.folder, size)
    if not args.export_only:
        for name, value in evaluate(args.folder).items():
            print(
                f"{name:48} {value:12,.3f}"
                if isinstance(value, float)
                else f"{name:48} {value:12,}"
            )


if __name__ == "__main__":
    main()
