"""Requests, tokenizers and tiny models for the tests of generation, and plain loops as oracles."""

from collections import Counter
from collections.abc import Sequence

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from glm53 import GLM53, SamplingParams
from glm53.engine import Engine
from glm53.model import Transformer
from glm53.request import Request
from glm53.sampling import SamplerState
from glm53.tokenizer import Tokenizer
from tests.tiny import randomise, tiny_config

MERGED = ["Dx", "EN"]  # ids 256 and 257
END, USER = 258, 259


def _byte_spellings() -> list[str]:
    """How byte-level vocabularies spell the 256 bytes: printable ones as themselves."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Token id = byte, then the merged ones, then two special tokens; END is the eos token."""
    vocab = {spelling: i for i, spelling in enumerate([*_byte_spellings(), *MERGED])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("D", "x"), ("E", "N")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|user|>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>"))


def make_request(
    prompt_ids: Sequence[int],
    *,
    request_id: int = 0,
    eos_ids: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 300,
    prompt_only: bool = False,
    limit: int = 10**6,
    **fields,
) -> Request:
    """A request without an engine."""
    params = SamplingParams(**fields).resolve({})
    assert params.max_new_tokens is not None
    wanted = len(prompt_ids) + (0 if prompt_only else params.max_new_tokens)
    return Request(
        request_id,
        0,
        prompt_ids,
        SamplerState(params, prompt_ids=prompt_ids, stop_ids=eos_ids, vocab_size=vocab_size),
        eos_ids=frozenset(eos_ids),
        tokenizer=tokenizer,
        max_tokens=min(wanted, limit),
        prompt_only=prompt_only,
    )


def tiny_model(seed: int = 0, *, overrides: dict | None = None, **arguments) -> GLM53:
    """A random fp32 model; overrides: config fields, arguments: of GLM53."""
    network = Transformer(tiny_config(**(overrides or {})))
    return GLM53(randomise(network, seed), **({"kv_cache_tokens": 64 * 16} | arguments)).eval()


def with_engine(model: GLM53, **arguments) -> GLM53:
    """The same weights behind an engine and a cache of their own."""
    return GLM53(model.network, model.tokenizer, **({"kv_cache_tokens": 64 * 16} | arguments))


def prompts_of(*lengths: int, seed: int = 0, vocab_size: int = 131) -> list[list[int]]:
    """Random ids that are no stop ids of the tiny config."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(8, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


@torch.no_grad()
def logits_of(model: GLM53, ids: Sequence[int]) -> Tensor:
    """[S, W] of one sequence, uncached."""
    logits = model(torch.tensor([list(ids)]))
    assert isinstance(logits, Tensor)
    return logits[0]


def greedy(model: GLM53, prompt: Sequence[int], count: int, stop_ids=()) -> list[int]:
    """The naive loop: the whole sequence again for every token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] not in stop_ids):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def audit(engine: Engine) -> None:
    """References of every page: one for each running request that has it, one for the tree."""
    scheduler, pool = engine.scheduler, engine.pool
    held = Counter(page for request in scheduler.running for page in request.pages)
    held.update(scheduler.prefix.pages() if scheduler.prefix else ())
    assert not any(request.pages for request in scheduler.waiting)
    for request in scheduler.running:
        assert len(request.pages) == len(set(request.pages))
    assert [pool._references[page] for page in range(pool.num_pages)] == [
        held[page] for page in range(pool.num_pages)
    ]
    assert pool.num_free == pool.num_pages - len(held)


def assert_idle(engine: Engine) -> None:
    """Nothing unfinished, and every page free or held by the prefix tree alone."""
    audit(engine)
    assert engine.num_unfinished == 0
    cached = len(engine.scheduler.prefix or ())
    assert engine.pool.num_free + cached == engine.pool.num_pages
