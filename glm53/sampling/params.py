"""What a caller may ask of generation: names, defaults, validation."""

import dataclasses
import difflib
import functools
import json
import logging
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor

logger = logging.getLogger(__name__)

GREEDY_BELOW = 1e-5

# (ids of prompt and output so far, fp32 logits [W] of the next token) -> logits [W]
LogitsProcessor = Callable[[list[int], Tensor], Tensor]

# Used where neither the caller nor generation_config.json says anything. The fields that are
# absent (allowed_token_ids, seed, logprobs, prompt_logprobs, json_schema, regex, grammar) stay
# None: no restriction, no seed, no log-probabilities. speculative_tokens depends on the
# checkpoint: the engine fills it in.
LIBRARY_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 256,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "bad_words": (),
    "stop": (),
    "stop_token_ids": (),
    "include_stop": False,
    "ignore_eos": False,
    "n": 1,
    "logprobs_mode": "raw",
    "logits_processors": (),
    "record": False,
}

_NO_BEAMS = "beam search is not supported; n draws several samples"
_OTHER_SPELLINGS = {
    "do_sample": "use temperature: temperature=0 is greedy, temperature > 0 samples",
    "num_return_sequences": "use n",
    "best_of": "use n, and choose by the sum of logprobs",
    "max_tokens": "use max_new_tokens",
    "max_completion_tokens": "use max_new_tokens",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "min_tokens": "use min_new_tokens",
    "min_length": "use min_new_tokens, which does not count the prompt",
    "eos_token_id": "use stop_token_ids",
    "stop_strings": "use stop",
    "include_stop_str_in_output": "use include_stop",
    "bad_words_ids": "use bad_words, which takes ids and text",
    "suppress_tokens": "use bad_words=[[id], ...]",
    "sequence_bias": "use logit_bias, for single ids",
    "output_scores": "use logprobs=N with logprobs_mode='processed'",
    "output_logits": "use logprobs=N",
    "top_logprobs": "use logprobs=N",
    "num_speculative_tokens": "use speculative_tokens",
    "num_assistant_tokens": "use speculative_tokens",
    "generator": "use seed",
    "logits_processor": "use logits_processors, functions of (ids, logits) of one row",
    "guided_json": "use json_schema",
    "guided_regex": "use regex",
    "guided_grammar": "use grammar",
    "structured_outputs": "use json_schema, regex or grammar",
    "response_format": "use json_schema",
    "num_beams": _NO_BEAMS,
    "num_beam_groups": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
}

# generation_config.json's name -> ours, where they differ.
_CONFIG_NAMES = {"bad_words_ids": "bad_words", "stop_strings": "stop", "num_return_sequences": "n"}
_CONFIG_FIELDS = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
)
# Keys of generation_config.json that would change what is sampled and that we do not implement,
# with the values that change nothing.
_CONFIG_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "sequence_bias": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled; immutable, hashable, every sequence copied to a tuple.

    None means: the checkpoint's `generation_config.json`, then `LIBRARY_DEFAULTS`. Names are
    transformers' where it has one, else vLLM's. An unknown name or a value out of range raises
    `ValueError` naming the field and what is allowed.

    - `max_new_tokens` >= 1 (default 256), `min_new_tokens` >= 0: until then no stop id is sampled.
    - `temperature` >= 0; 0 (below 1e-5) is greedy, ties to the lowest id.
    - `top_k`: 0 or -1 is off; ties with the k-th are kept. `top_p` in (0, 1]. `min_p` in [0, 1]:
      drops what is less likely than `min_p` times the likeliest, after temperature.
    - `repetition_penalty` > 0, over prompt and output. `presence_penalty` and
      `frequency_penalty` in [-2, 2], over the output only.
    - `logit_bias`: {id: finite number to add}; kept as (id, number) pairs in order of id.
    - `bad_words`: texts or id sequences. An id sequence is never completed, counting the end of
      the prompt; a text stands for its ids at the start of a text and after a space (`resolve`).
    - `allowed_token_ids`: nothing else is sampled.
    - `stop`: one text or several, which end the output wherever they come, and are cut off it;
      `stop_token_ids`: in addition to the checkpoint's; `include_stop` keeps the stop text in the
      output; `ignore_eos`: the checkpoint's own ids do not stop.
    - `seed`: 0 to 2**64 - 1; None is not reproducible. `n`: completions of one prompt.
    - `logprobs`, `prompt_logprobs`: the top N of every new / prompt token, 0 for only the token
      itself, None for none. `logprobs_mode`: "raw" is the model's distribution; "processed" is the
      one sampled from, after every step (greedy rows: before temperature, which they do not use).
    - `speculative_tokens`: drafts per step, 0 to 8; default 5 if the checkpoint has an MTP
      layer, else 0.
    - `logits_processors`: functions of (list of the ids of prompt and output so far, fp32 logits
      [W]) that return logits [W], one after the other, after `logit_bias` and before the
      penalties. They are called for every row, also for those that verify a draft, and must
      depend on nothing but their arguments. One that raises, or returns anything else, ends its
      completion alone, with finish_reason "error".
    - `json_schema` (a mapping, or its text; kept as text), `regex` (the whole output matches) or
      `grammar` (Lark in llguidance's dialect, with a rule `start`): at most one; needs the extra
      `structured`. Stop ids, `stop_token_ids` among them, are allowed where the grammar may end and
      nowhere else; where it must end nothing else is. So a text that a stop id ended (finish_reason
      "stop" and an id as stop_reason) is whole, and its beginning otherwise: `stop` cuts within the
      grammar too, and `max_new_tokens` anywhere. Text that is spelled like a control token is
      written in ordinary tokens. What is left of the logits is sampled as ever; where `bad_words`
      or the like leave nothing, or a limit of llguidance is reached, the completion ends with
      finish_reason "error". In a chat it holds for the content, after the reasoning.
    - `record`: keep every row's selections and routed experts, `Completion.trace`. Takes
      4 * index_topk bytes per full layer and 8 * num_experts_per_tok per MoE layer and token.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    speculative_tokens: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    record: bool | None = None

    # Only here does an unknown keyword pass through our hands before the generated __init__
    # turns it into a TypeError.
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        _refuse_unknown(kwargs)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))
        low, high = self.min_new_tokens, self.max_new_tokens
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_new_tokens={low} is above max_new_tokens={high}")
        constraints = [
            n for n in ("json_schema", "regex", "grammar") if getattr(self, n) is not None
        ]
        if len(constraints) > 1:
            raise ValueError(f"{' and '.join(constraints)}: give one of them")

    @classmethod
    def override(cls, params: "SamplingParams | None" = None, **fields: Any) -> "SamplingParams":
        """`params` (or nothing asked) with single fields replaced; what `generate(**fields)` does.

        Raises ValueError for an unknown name, naming ours where it is another library's.
        """
        _refuse_unknown(fields)
        if params is None:
            return cls(**fields)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: allowed is a SamplingParams or None")
        return dataclasses.replace(params, **fields)

    def resolve(
        self,
        generation_config: Mapping[str, Any],
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> "SamplingParams":
        """Every None replaced: first from `generation_config.json`, then from the library.

        `do_sample: false` there is temperature 0 for a caller who gives no temperature; its
        `eos_token_id` is the engine's business. `encode` (text -> ids, no special tokens added)
        turns the texts in `bad_words` into ids: each as written and with a space before it.

        Raises ValueError for a bad value in the file, naming it, and for text without `encode`.
        """
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        filled = LIBRARY_DEFAULTS | _from_config(generation_config)
        filled |= {name: value for name, value in given.items() if value is not None}
        filled["bad_words"] = _bad_word_ids(filled["bad_words"], encode)
        return SamplingParams(**filled)

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError where a field names an id that the model does not have."""
        ids = {
            "logit_bias": dict(self.logit_bias or ()),
            "bad_words": [i for w in self.bad_words or () if not isinstance(w, str) for i in w],
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids or (),
        }
        for name, values in ids.items():
            for value in values:
                if value >= vocab_size:
                    raise ValueError(f"{name}: id {value} is outside 0..{vocab_size - 1}")


def _refuse_unknown(fields: Iterable[str]) -> None:
    known = {f.name for f in dataclasses.fields(SamplingParams)}
    for name in fields:
        if name in known:
            continue
        if name in _OTHER_SPELLINGS:
            raise ValueError(f"{name} is not a sampling parameter here: {_OTHER_SPELLINGS[name]}")
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"unknown sampling parameter {name}: {hint}allowed are {', '.join(sorted(known))}"
        )


def _from_config(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    config = {k: v for k, v in generation_config.items() if v is not None}
    for name, neutral in _CONFIG_UNSUPPORTED.items():
        if name in config and config[name] not in neutral:
            _warn_unsupported(name, repr(config[name]))
    fields = {name: config[name] for name in _CONFIG_FIELDS if name in config}
    fields |= {ours: config[theirs] for theirs, ours in _CONFIG_NAMES.items() if theirs in config}
    if config.get("do_sample") is False:
        fields["temperature"] = 0.0
    try:
        checked = SamplingParams(**fields)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return {name: getattr(checked, name) for name in fields}


@functools.cache
def _warn_unsupported(name: str, value: str) -> None:
    logger.warning("generation_config.json: %s=%s is not supported and ignored", name, value)


def _bad_word_ids(
    words: Sequence[str | Sequence[int]], encode: Callable[[str], Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    # A dict, because the two forms of a word have the same ids under some tokenizers.
    ids: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            ids[tuple(word)] = None
            continue
        if encode is None:
            raise ValueError(f"bad_words: {word!r} is text and there is no tokenizer; give ids")
        bare = word.lstrip(" ")
        for form in (bare, " " + bare) if bare else (word,):
            form_ids = tuple(encode(form))
            if not form_ids:
                raise ValueError(f"bad_words: {word!r} has no ids in this tokenizer")
            ids[form_ids] = None
    return tuple(ids)


# --- one check per field: (name, value) -> the value as it is kept ---


def _fail(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name}={value!r}: allowed is {allowed}")


def _int_from(low: int, high: int | None = None) -> Callable[[str, Any], int]:
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"

    def check(name: str, value: Any) -> int:
        try:
            number = low - 1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            raise _fail(name, value, allowed) from None
        if number < low or (high is not None and number > high):
            raise _fail(name, value, allowed)
        return number

    return check


def _float_where(allowed: str, test: Callable[[float], bool]) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise _fail(name, value, allowed)
        number = float(value)
        if not math.isfinite(number) or not test(number):
            raise _fail(name, value, allowed)
        return number

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fail(name, value, "True or False")
    return value


def _mode(name: str, value: Any) -> str:
    if value not in ("raw", "processed"):
        raise _fail(name, value, "'raw' or 'processed'")
    return value


_token_id = _int_from(0)
_bias = _float_where("a finite number", lambda x: True)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _fail(name, value, "a sequence of token ids")
    return tuple(_token_id(name, i) for i in value)


def _some_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value)
    if not ids:
        raise _fail(name, value, "at least one token id")
    return ids


def _words(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _fail(name, value, "a sequence of texts and id sequences")
    words = tuple(w if isinstance(w, str) else _some_ids(name, w) for w in value)
    if "" in words:
        raise _fail(name, value, "texts that are not empty")
    return words


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise _fail(name, value, "a text or a sequence of texts")
    texts = tuple(texts)
    if not all(isinstance(t, str) and t for t in texts):
        raise _fail(name, value, "texts that are not empty")
    return texts


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable):
        raise _fail(name, value, "a mapping from token id to number")
    biases = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _fail(name, value, "a mapping from token id to number")
        biases.append((_token_id(name, pair[0]), _bias(name, pair[1])))
    if len({i for i, _ in biases}) != len(biases):
        raise _fail(name, value, "one number for each token id")
    return tuple(sorted(biases))


def _functions(name: str, value: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(value, Iterable) or not all(map(callable, functions := tuple(value))):
        raise _fail(name, value, "a sequence of functions")
    return functions


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _fail(name, value, "a text that is not empty")
    return value


def _schema(name: str, value: Any) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        is_object = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise _fail(name, value, "a JSON schema: a mapping, or the text of a JSON object")
    return text


_penalty = _float_where("a number from -2 to 2", lambda x: -2 <= x <= 2)
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": _int_from(1),
    "min_new_tokens": _int_from(0),
    "temperature": _float_where("a finite number >= 0 (0 is greedy)", lambda x: x >= 0),
    "top_k": _int_from(-1),
    "top_p": _float_where("a number above 0, up to 1 (1 is off)", lambda x: 0 < x <= 1),
    "min_p": _float_where("a number from 0 (off) to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": _float_where("a finite number above 0 (1 is off)", lambda x: x > 0),
    "presence_penalty": _penalty,
    "frequency_penalty": _penalty,
    "logit_bias": _biases,
    "bad_words": _words,
    "allowed_token_ids": _some_ids,
    "stop": _texts,
    "stop_token_ids": _ids,
    "include_stop": _flag,
    "ignore_eos": _flag,
    "seed": _int_from(0, 2**64 - 1),
    "n": _int_from(1),
    "logprobs": _int_from(0),
    "prompt_logprobs": _int_from(0),
    "logprobs_mode": _mode,
    "speculative_tokens": _int_from(0, 8),
    "logits_processors": _functions,
    "json_schema": _schema,
    "regex": _text,
    "grammar": _text,
    "record": _flag,
}
