"""GLM53: the public model. Owns network, tokenizer, cache and engine; the only file that wires."""

import json
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glm53.batch import Trace
from glm53.cache import PAGE_SIZE, KVCache, bytes_per_token
from glm53.checkpoint import (
    available_bytes,
    load_transformer,
    resolve_folder,
    save_transformer,
)
from glm53.config import GLM53Config
from glm53.engine import Engine
from glm53.model import Transformer
from glm53.request import Completion, Delta
from glm53.sampling import SamplingParams
from glm53.tokenizer import Tokenizer, stop_token_ids

Prompt = str | Sequence[int] | Tensor

_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Without a size from the caller the cache holds so many contexts of the model's full length,
# if that fits into this share of the free memory.
_DEFAULT_CONTEXTS = 16
_DEFAULT_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.9}


class GLM53(nn.Module):
    """A GLM-5.x causal language model with its tokenizer and generation.

    Parameter names are transformers'. `model(input_ids)` is the plain differentiable forward;
    `generate`, `stream` and `score` run through the engine and its paged cache, which is allocated
    on first use. `model.to(...)` drops the engine, and with it whatever was still being generated.
    """

    network: Transformer

    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        generation_config: dict[str, Any] | None = None,
        kv_cache_dtype: torch.dtype | None = None,
        kv_cache_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        max_batch_tokens: int = 1024,
        max_running: int = 64,
    ) -> None:
        """Wraps a network; `from_pretrained` is the usual way in, and documents the arguments."""
        super().__init__()
        # The network's children are registered here, itself not: names stay transformers'.
        self.__dict__["network"] = network
        self.model = network.model
        self.lm_head = network.lm_head
        self.config: GLM53Config = network.config
        self.tokenizer = tokenizer
        self.generation_config = dict(generation_config or {})
        self._eos_ids = stop_token_ids(self.config, self.generation_config, tokenizer)
        self._kv_cache_dtype = kv_cache_dtype or _default_cache_dtype(self.dtype)
        self._kv_cache_tokens = _cache_tokens(
            self.config, self._kv_cache_dtype, self._has_mtp, kv_cache_tokens, kv_cache_bytes
        )
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens={max_batch_tokens}: must be at least 1")
        self._max_batch_tokens = max_batch_tokens
        self._max_running = min(max_running, max_batch_tokens)
        self._engine: Engine | None = None
        self._source: Path | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        kv_cache_dtype: torch.dtype | None = None,
        kv_cache_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        max_batch_tokens: int = 1024,
        max_running: int = 64,
        progress: bool = True,
    ) -> "GLM53":
        """Load a Hugging Face checkpoint folder (never touching the network), or a hub id.

        device: default "cuda" if there is one, else "cpu". dtype: of the weights, default the
        checkpoint's; FP8 weights are dequantised to it. kv_cache_dtype: bfloat16 or float32,
        default bfloat16 for a bfloat16 model, else float32. kv_cache_tokens, kv_cache_bytes: size
        of the cache (at most one of them), rounded down to pages of 64 tokens; default 16 full
        contexts, at most a quarter of the free memory of a CPU or 90% of a GPU's.
        max_batch_tokens: rows of one step; max_running: completions that run at once. progress:
        show a bar.

        Raises ValueError for a configuration or checkpoint that this library cannot compute
        faithfully, naming what is wrong, and MemoryError with the numbers if model and cache do
        not fit.
        """
        folder = resolve_folder(path_or_hub_id)
        config = GLM53Config.from_pretrained(folder)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch_dtype = _torch_dtype(dtype or config.dtype)
        generation_config = _read_json(folder / "generation_config.json")
        has_tokenizer = (folder / "tokenizer.json").is_file()
        tokenizer = Tokenizer.from_pretrained(folder) if has_tokenizer else None
        cache_dtype = kv_cache_dtype or _default_cache_dtype(torch_dtype)
        mtp = config.mtp_layer is not None
        tokens = _cache_tokens(config, cache_dtype, mtp, kv_cache_tokens, kv_cache_bytes)
        cache_bytes = (tokens or PAGE_SIZE) * bytes_per_token(config, cache_dtype, mtp=mtp)
        network = load_transformer(
            folder,
            config,
            device=device,
            dtype=torch_dtype,
            extra_bytes={"cache": cache_bytes},
            progress=progress,
        )
        model = cls(
            network,
            tokenizer,
            generation_config=generation_config,
            kv_cache_dtype=cache_dtype,
            kv_cache_tokens=tokens,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
        )
        model._source = folder
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that transformers loads: config, weights in the model's dtype (no
        quantisation), and the tokenizer files and generation_config.json it was loaded with."""
        folder = Path(folder)
        save_transformer(self.network, self.config, folder)
        if self._source is None or self._source.resolve() == folder.resolve():
            return
        for name in _SIDE_FILES:
            if (self._source / name).is_file():
                shutil.copyfile(self._source / name, folder / name)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        *,
        record: Trace | None = None,
        replay: Trace | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, S, vocab], or (loss, logits) with labels; see `Transformer.forward`."""
        return self.network(
            input_ids, attention_mask, labels, logits_to_keep, record=record, replay=replay
        )

    def engine(self) -> Engine:
        """The model's engine, made with its cache on first use. All calls share it."""
        if self._engine is None:
            tokens = self._kv_cache_tokens or self._default_cache_tokens()
            cache = KVCache(
                self.config,
                tokens // PAGE_SIZE,
                mtp=self._has_mtp,
                dtype=self._kv_cache_dtype,
                device=self.device,
            )
            self._engine = Engine(
                self.network,
                self.tokenizer,
                cache,
                eos_ids=self._eos_ids,
                generation_config=self.generation_config,
                max_batch_tokens=self._max_batch_tokens,
                max_running=self._max_running,
            )
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        attention_mask: Tensor | None = None,
        **fields: Any,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Complete one prompt (text, ids, 1-D tensor) or a list that mixes them.

        A tensor [B, S], with an attention_mask [B, S] where it is padded, is a list of B prompts.
        fields: single SamplingParams fields, which win over `params`. One prompt gives one
        Completion, a list gives a list; with n > 1 there is a list of n Completions in place of
        each one.

        A single prompt that cannot be run raises ValueError. In a list it fails alone, with
        finish_reason "error", and so does a completion whose logits turn NaN.
        """
        prompt_list, single = _prompt_list(prompts, attention_mask)
        engine = self.engine()
        params = engine.resolve(SamplingParams.override(params, **fields))
        results: list[list[Completion]] = [[] for _ in prompt_list]
        request_ids: list[int] = []
        try:
            for prompt, result in zip(prompt_list, results, strict=True):
                try:
                    request_ids.append(engine.add(prompt, params, on_delta=_collector(result)))
                except ValueError as error:
                    if single:
                        raise
                    result += [
                        Completion((), (), "", "error", error=str(error), index=index)
                        for index in range(_count(params))
                    ]
            while any(len(result) < _count(params) for result in results):
                engine.step()
        finally:  # after an interrupt, or an error of a step, nothing stays behind
            for request_id in request_ids:
                engine.cancel(request_id)
        for result in results:
            result.sort(key=lambda completion: completion.index)
        if _count(params) > 1:
            return results[0] if single else results
        completions = [result[0] for result in results]
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any
    ) -> Generator[Delta, None, None]:
        """Deltas of one prompt as they come; the last of each completion carries it.

        Closing the iterator (leaving its loop) cancels the request. Streams of one model advance
        together, whichever is asked.
        """
        prompt_list, single = _prompt_list(prompt, None)
        if not single:
            raise ValueError("stream takes one prompt; open a stream for each")
        engine = self.engine()
        params = engine.resolve(SamplingParams.override(params, **fields))
        return self._deltas(engine, prompt_list[0], params)

    def _deltas(
        self, engine: Engine, prompt: str | list[int], params: SamplingParams
    ) -> Generator[Delta, None, None]:
        arrived: deque[Delta] = deque()
        request_id = engine.add(prompt, params, on_delta=arrived.append)
        try:
            unfinished = _count(params)
            while unfinished:
                while not arrived:
                    engine.step()
                delta = arrived.popleft()
                unfinished -= delta.completion is not None
                yield delta
        finally:
            engine.cancel(request_id)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> Tensor | list[Tensor]:
        """Log-probability of every token of a prompt but its first, through the paged path.

        One fp32 tensor of length len - 1 on the CPU for a prompt, a list for a list. Raises
        ValueError for a prompt that cannot be run, ArithmeticError if its logits are not finite.
        """
        prompt_list, single = _prompt_list(prompts, None)
        engine = self.engine()
        params = engine.resolve(SamplingParams(prompt_logprobs=0, n=1))
        results: list[list[Completion]] = [[] for _ in prompt_list]
        request_ids: list[int] = []
        try:
            for prompt, result in zip(prompt_list, results, strict=True):
                request_ids.append(
                    engine.add(prompt, params, prompt_only=True, on_delta=_collector(result))
                )
            while not all(results):
                engine.step()
        finally:
            for request_id in request_ids:
                engine.cancel(request_id)
        scores = [_scores(result[0]) for result in results]
        return scores[0] if single else scores

    def _apply(self, fn, recurse=True):
        self._engine = None  # its cache is on the old device, in the old dtype
        return super()._apply(fn, recurse)

    @property
    def _has_mtp(self) -> bool:
        return self.network.mtp_layer_idx is not None

    def _default_cache_tokens(self) -> int:
        token_bytes = bytes_per_token(self.config, self._kv_cache_dtype, mtp=self._has_mtp)
        share = _DEFAULT_MEMORY_SHARE.get(self.device.type, 0.25)
        fitting = int(share * available_bytes(self.device)) // token_bytes
        tokens = min(_DEFAULT_CONTEXTS * self.config.max_position_embeddings, fitting)
        if tokens < PAGE_SIZE:
            raise MemoryError(
                f"a cache page needs {PAGE_SIZE * token_bytes} bytes, {self.device} has "
                f"{available_bytes(self.device)} free"
            )
        return tokens


def _count(params: SamplingParams) -> int:
    assert params.n is not None
    return params.n


def _collector(result: list[Completion]):
    def on_delta(delta: Delta) -> None:
        if delta.completion is not None:
            result.append(delta.completion)

    return on_delta


def _scores(completion: Completion) -> Tensor:
    if completion.error is not None:
        raise ArithmeticError(f"a prompt could not be scored: {completion.error}")
    assert completion.prompt_logprobs is not None
    pairs = zip(completion.prompt_token_ids[1:], completion.prompt_logprobs[1:], strict=True)
    return torch.tensor([logprobs[i] for i, logprobs in pairs if logprobs], dtype=torch.float32)


def _default_cache_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _cache_tokens(
    config: GLM53Config, dtype: torch.dtype, mtp: bool, tokens: int | None, num_bytes: int | None
) -> int | None:
    """Tokens of the cache that the caller asked for, whole pages; None without a wish."""
    if tokens is not None and num_bytes is not None:
        raise ValueError("give kv_cache_tokens or kv_cache_bytes, not both")
    name, asked = "kv_cache_tokens", tokens
    if num_bytes is not None:
        name, asked = "kv_cache_bytes", num_bytes // bytes_per_token(config, dtype, mtp=mtp)
    if asked is None:
        return None
    if asked < PAGE_SIZE:
        raise ValueError(
            f"{name}={tokens if num_bytes is None else num_bytes}: holds {asked} tokens, a page "
            f"has {PAGE_SIZE}"
        )
    return asked // PAGE_SIZE * PAGE_SIZE


def _torch_dtype(name: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype={name!r}: must be bfloat16, float16 or float32")
    return dtype


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return data


def _prompt_list(
    prompts: Prompt | Sequence[Prompt], attention_mask: Tensor | None
) -> tuple[list[str | list[int]], bool]:
    """Prompts as text or ids, and whether there was only one, not in a list."""
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
    if isinstance(prompts, str | Tensor) or not isinstance(prompts, Iterable):
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
