"""GLM53: the public model. Owns network, tokenizer, cache and engine; the only file that wires."""

import json
import logging
import tempfile
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from glm53.batch import Trace
from glm53.chat import ChatCompletion, ChatDelta, ChatReply, ToolChoice
from glm53.checkpoint import load_transformer, resolve_folder, save_transformer
from glm53.config import GLM53Config
from glm53.engine import Engine
from glm53.model import Transformer
from glm53.options import EngineOptions
from glm53.prompts import Prompt, prompts_as_list, traces_of
from glm53.request import Completion, Delta
from glm53.sampling import SamplingParams
from glm53.tokenizer import Tokenizer, stop_token_ids

logger = logging.getLogger(__name__)

_SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class GLM53(nn.Module):
    """A GLM-5.x causal language model with its tokenizer and generation.

    Parameter names are transformers'. `model(input_ids)` is the plain differentiable forward;
    `generate`, `stream` and `score` run through the engine and its paged cache, which is allocated
    on first use. `model.to(...)`, as everything that converts the weights, lets go of the engine:
    the next call makes a new one, with an empty cache. A stream that is still open keeps the old
    one, and goes on with the new weights over keys of the old ones; from another device it fails.
    Copies and pickles of a model have no engine.
    """

    network: Transformer

    def __init__(
        self,
        network: Transformer,
        tokenizer: Tokenizer | None = None,
        *,
        generation_config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Wraps a network; `from_pretrained` is the usual way in. options: `EngineOptions`."""
        super().__init__()
        # Names stay transformers': the network is no child, its children are ours. One dict for
        # both, so that whoever replaces a module here replaces it there.
        self.__dict__["network"] = network
        self.__dict__["_modules"] = network._modules
        self.config: GLM53Config = network.config
        self.tokenizer = tokenizer
        self.generation_config = dict(generation_config or {})
        length = self.generation_config.get("max_length")
        if length is not None and length != 20:  # which transformers writes where nobody said one
            logger.warning("generation_config.json: max_length=%r is not supported", length)
        self._eos_ids = stop_token_ids(self.config, self.generation_config, tokenizer)
        self._options = EngineOptions(**options)
        self._options.check(self.config, self.dtype, mtp=self._has_mtp)
        self._engine: Engine | None = None
        self._progress = True  # show a bar while compiling
        self._source: Path | None = None

    @classmethod
    def from_pretrained(
        cls,
        path_or_hub_id: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        progress: bool = True,
        **options: Any,
    ) -> "GLM53":
        """Load a Hugging Face checkpoint folder (never touching the network), or a hub id.

        device: default "cuda" if there is one, else "cpu". dtype: of the weights, default the
        checkpoint's; FP8 weights are dequantised to it. progress: show a bar. options: sizes and
        switches of generation, see `EngineOptions`.

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
        # Before the weights are read: mistakes must not cost the minutes that this takes.
        stop_token_ids(config, generation_config, tokenizer)
        checked = EngineOptions(**options)
        mtp = config.mtp_layer is not None
        checked.check(config, torch_dtype, mtp=mtp)
        network = load_transformer(
            folder,
            config,
            device=device,
            dtype=torch_dtype,
            extra_bytes=checked.required_bytes(config, torch_dtype, device, mtp=mtp),
            progress=progress,
        )
        model = cls(network, tokenizer, generation_config=generation_config, **options)
        model._source, model._progress = folder, progress
        return model.eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint that transformers loads: config, weights in the model's dtype (no
        quantisation), generation_config.json, and the tokenizer: the files it was loaded with, or
        those that transformers writes. What cannot be written leaves what was there before."""
        with tempfile.TemporaryDirectory() as temporary:
            source = self._source
            if source is None and self.tokenizer is not None:
                source = Path(temporary)
                self.tokenizer.transformers_tokenizer.save_pretrained(temporary)
            files: dict[str, Path | str] = {}
            if source is not None:
                files |= {n: source / n for n in _SIDE_FILES if (source / n).is_file()}
            if self.generation_config:
                files["generation_config.json"] = json.dumps(self.generation_config, indent=2)
            save_transformer(self.network, self.config, folder, files=files)

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

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
            options = self._options
            cache = options.make_cache(self.network)
            self._engine = Engine(
                self.network,
                self.tokenizer,
                cache,
                eos_ids=self._eos_ids,
                generation_config=self.generation_config,
                max_batch_tokens=options.max_batch_tokens,
                max_running=min(options.max_running, options.max_batch_tokens),
                prefix_caching=options.prefix_caching,
                prefix_host_bytes=options.prefix_host_bytes or 0,
                batch_invariant=options.batch_invariant,
                compiled=options.compile_network(self.network, cache, progress=self._progress),
            )
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
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
        if "input_ids" in fields:
            raise ValueError("input_ids is called prompts here; the result is made of Completions")
        prompt_list, single = prompts_as_list(prompts, attention_mask)
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
                engine.advance()
        finally:  # after an interrupt, or an error of a step, nothing stays behind
            engine.cancel(*request_ids)
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
        prompt_list, single = prompts_as_list(prompt, None)
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
                    engine.advance()
                delta = arrived.popleft()
                unfinished -= delta.completion is not None
                yield delta
        finally:
            engine.cancel(request_id)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: str | None = None,
        clear_thinking: bool | None = None,
        allow_special: bool = False,
        params: SamplingParams | None = None,
        **fields: Any,
    ) -> ChatCompletion:
        """Reply to a conversation, by the checkpoint's own chat template.

        messages: mappings with `role` ("system", "user", "assistant", "tool") and `content`; an
        assistant's also with `reasoning_content` and `tool_calls`: `reply.message()` is one. tools:
        mappings in the usual function form; their JSON schemas give the arguments of a call their
        types. reasoning_effort, clear_thinking (drops the thoughts of earlier turns): None is the
        template's default. What is spelled like a control token in messages and tools stays text
        unless allow_special. Stop strings are looked for in the content only. n must be 1.

        tool_choice, by OpenAI's names: "auto"; "none", no call; "required", nothing but calls;
        {"type": "function", "function": {"name": ...}}, one call of that tool. Forced calls fit the
        schemas. With `json_schema`, `regex` or `grammar` the content does, and "auto" leaves the
        choice between content and calls. Either holds once the reasoning has ended, and the
        reasoning then ends with its tag.

        Raises ValueError for a conversation that the template refuses, and as `generate` does.
        """
        options = {"reasoning_effort": reasoning_effort, "clear_thinking": clear_thinking}
        for delta in self.stream_chat(
            messages,
            tools=tools,
            tool_choice=tool_choice,
            allow_special=allow_special,
            params=params,
            **options,
            **fields,
        ):
            if delta.completion is not None:
                return delta.completion
        raise AssertionError("a stream ends with its completion")

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        reasoning_effort: str | None = None,
        clear_thinking: bool | None = None,
        allow_special: bool = False,
        params: SamplingParams | None = None,
        **fields: Any,
    ) -> Generator[ChatDelta, None, None]:
        """`chat` as it comes: deltas of reasoning, content and complete tool calls; the last one
        carries the reply. Closing the iterator cancels the request."""
        if self.tokenizer is None:
            raise ValueError("chat: the model was loaded without a tokenizer")
        prompt_ids = self.tokenizer.encode_chat(
            messages,
            tools=tools,
            allow_special=allow_special,
            reasoning_effort=reasoning_effort,
            clear_thinking=clear_thinking,
        )
        engine = self.engine()
        params = engine.resolve(SamplingParams.override(params, **fields))
        if _count(params) != 1:
            raise ValueError(f"n={params.n}: a chat has one reply")
        reply = ChatReply(
            self.tokenizer, tools, prompt_ids, params, tool_choice, engine.check_grammar
        )
        return self._replies(engine, prompt_ids, engine.resolve(reply.params), reply)

    def _replies(
        self, engine: Engine, prompt_ids: list[int], params: SamplingParams, reply: ChatReply
    ) -> Generator[ChatDelta, None, None]:
        arrived: deque[Delta] = deque()
        request_id = engine.add(prompt_ids, params, on_delta=arrived.append)
        try:
            while True:
                while not arrived:
                    engine.advance()
                delta = reply.add(arrived.popleft())
                if reply.stop is not None:
                    engine.cancel(request_id)  # its last delta arrives, if it had not
                yield delta
                if delta.completion is not None:
                    return
        finally:
            engine.cancel(request_id)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        replay: Trace | Sequence[Trace | None] | None = None,
    ) -> Tensor | list[Tensor]:
        """Log-probability of every token of a prompt but its first, through the paged path.

        replay: decisions to take, a trace for a prompt, a list for a list (None: none); a row per
        token, or per token but the last, as the trace of a completion has for `prompt_token_ids +
        token_ids`. Such a prompt shares no pages with others.

        One fp32 tensor of length len - 1 on the CPU for a prompt, a list for a list. Raises
        ValueError for a prompt that cannot be run, ArithmeticError if its logits are not finite.
        """
        prompt_list, single = prompts_as_list(prompts, None)
        traces = traces_of(replay, None if single else len(prompt_list))
        engine = self.engine()
        # Nothing is generated: whatever the checkpoint's own defaults say of texts is no matter.
        params = engine.resolve(SamplingParams(prompt_logprobs=0, n=1, stop=(), bad_words=()))
        places = [() if single else (i,) for i in range(len(prompt_list))]
        results: list[list[Completion]] = [[] for _ in prompt_list]
        request_ids: list[int] = []
        try:
            for i, (prompt, trace) in enumerate(zip(prompt_list, traces, strict=True)):
                on_delta = _collector(results[i])
                try:
                    request_ids.append(
                        engine.add(
                            prompt, params, prompt_only=True, on_delta=on_delta, replay=trace
                        )
                    )
                except ValueError as error:
                    raise error if single else ValueError(f"prompts[{i}]: {error}") from None
            while not all(results):
                engine.advance()
        finally:
            engine.cancel(*request_ids)
        scores = [_scores(result[0], *where) for result, where in zip(results, places, strict=True)]
        return scores[0] if single else scores

    def export_prefix(self, prompt: Prompt, file: BinaryIO, *, mtp: bool | None = None) -> int:
        """Write a prompt's cache pages, for a model in another process; see Engine."""
        prompt_list, single = prompts_as_list(prompt, None)
        if not single:
            raise ValueError("export_prefix takes one prompt")
        return self.engine().export_prefix(prompt_list[0], file, mtp=mtp)

    def import_prefix(self, file: BinaryIO) -> int:
        """Read what `export_prefix` wrote; prompts that begin so are not computed again."""
        return self.engine().import_prefix(file)

    def _apply(self, fn, recurse=True):
        self._engine = None  # its cache is on the old device, in the old dtype
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}

    @property
    def _has_mtp(self) -> bool:
        return self.network.mtp_layer_idx is not None


def _count(params: SamplingParams) -> int:
    assert params.n is not None
    return params.n


def _collector(result: list[Completion]):
    def on_delta(delta: Delta) -> None:
        if delta.completion is not None:
            result.append(delta.completion)

    return on_delta


def _scores(completion: Completion, *index: int) -> Tensor:
    if completion.error is not None:
        name = f"prompts[{index[0]}]" if index else "the prompt"
        raise ArithmeticError(f"{name} could not be scored: {completion.error}")
    assert completion.prompt_logprobs is not None
    pairs = zip(completion.prompt_token_ids[1:], completion.prompt_logprobs[1:], strict=True)
    return torch.tensor([logprobs[i] for i, logprobs in pairs if logprobs], dtype=torch.float32)


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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return data
