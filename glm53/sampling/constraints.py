"""Structured output: which ids may come next so that a completion follows a grammar.

llguidance (the extra `structured`) compiles grammars and computes the sets of ids. It is imported
where the first grammar is compiled.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from glm53.sampling.params import SamplingParams

# One space, or a new line with its indentation: more is a model that cannot find an end.
_WHITESPACE = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
_NUM_COMPILED = 64
_NUM_CHECKED = 4096
_MESSAGE_LENGTH = 200


class ConstraintError(RuntimeError):
    """A completion cannot go on in its grammar, which grew too complex or has not got its token."""


def constraint_of(params: SamplingParams) -> tuple[str, str] | None:
    """The field of `params` that constrains the output, and what it asks for as a Lark grammar."""
    if params.json_schema is not None:
        assert isinstance(params.json_schema, str), "SamplingParams keeps JSON text"
        schema = json.loads(params.json_schema)
        guidance = schema.get("x-guidance", {})
        if isinstance(guidance, dict):
            schema["x-guidance"] = _WHITESPACE | guidance
        return "json_schema", f"start: %json {json.dumps(schema)}"
    if params.regex is not None:
        # Lark ends a regular expression at a slash; in a group, an empty one is no comment.
        escaped = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", params.regex, flags=re.DOTALL)
        return "regex", f"start: /(?:{escaped})/"
    if params.grammar is not None:
        return "grammar", params.grammar
    return None


class Constraint:
    """Where one completion stands in its grammar. Only accepted tokens advance it."""

    def __init__(
        self, matcher: Any, vocab_size: int, eos_ids: Sequence[int], stop_ids: Sequence[int]
    ) -> None:
        """eos_ids: what the matcher takes for an end; stop_ids: what ends this completion."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._stop_ids = list(stop_ids)

    def append(self, token_id: int) -> None:
        """Go on by one accepted token; nothing comes after a stop id.

        ConstraintError: it is not in the grammar, or a limit of the grammar's compiler is reached.
        """
        if token_id in self._stop_ids or self._matcher.try_consume_tokens([token_id]):
            return
        if self._matcher.is_error():
            raise _cannot_go_on(self._matcher)
        raise ConstraintError(f"id {token_id} is not in the grammar")

    def allowed(self, extra: Sequence[int] = ()) -> Tensor | None:
        """bool [W] on the CPU: ids that may come next, after `extra`. None: `extra` leaves the
        grammar, so that whatever comes next will be thrown away.

        Stop ids are allowed where the grammar may end, and where it must they alone are.
        ConstraintError: a limit of the grammar's compiler is reached.
        """
        matcher = self._matcher
        if extra:
            # A copy, since rolling back costs more (6 ms after 24,000 tokens, where this takes 1)
            # and an error would stay.
            matcher = matcher.deep_copy()
            if matcher.try_consume_tokens(list(extra)) < len(extra):
                if matcher.is_error():
                    raise _cannot_go_on(matcher)
                return None
        bias = bytearray(matcher.compute_logit_bias())
        if matcher.is_error():
            raise _cannot_go_on(matcher)
        allowed_W = torch.frombuffer(bias, dtype=torch.uint8)[: self._vocab_size] != 0
        allowed_W[self._eos_ids] = False
        # Also those that the grammar has as text: a stop id always ends something whole.
        allowed_W[self._stop_ids] = matcher.is_accepting()
        return allowed_W


def _cannot_go_on(matcher: Any) -> ConstraintError:
    return ConstraintError(f"the grammar cannot go on: {_reason(matcher)}")


def _reason(matcher: Any) -> str:
    """What is wrong, in one line: llguidance adds its state, the grammar, its place in a text that
    is not the caller's."""
    first, *others = matcher.get_error().splitlines()
    if first == "NoExtensionBias":
        return "no text fits it"
    first = re.sub(r"^at \d+\(\d+\): ", "", first).removeprefix("failed to compile JSON schema: ")
    if len(first) > _MESSAGE_LENGTH:
        first = f"{first[:_MESSAGE_LENGTH]} ..."
    return " ".join([first, *[line for line in others if line.startswith("error: ")]])


class _PlainText:
    """A tokenizer for llguidance in which no text, however spelled, is an added token.

    Where only one text can follow, llguidance allows the one id that its tokenizer begins it with:
    of a tokenizer.json's own reading that is the id of `<think>` for a text that spells the tag,
    which the grammar then refuses. Names of added tokens stay those of the Lark dialect.
    """

    bos_token_id = None

    def __init__(
        self, named: Any, added_ids: Iterable[int], encode: Callable[[str], Sequence[int]]
    ) -> None:
        """named: the LLTokenizer of a tokenizer.json; encode: looks for no added token."""
        ids = range(named.vocab_size)
        self.tokens = [named.decode_bytes([i]) for i in ids]
        self.special_token_ids = sorted({*added_ids, *filter(named.is_special_token, ids)})
        self.eos_token_id = named.eos_token
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


class ConstraintCompiler:
    """Grammars for one tokenizer."""

    def __init__(
        self,
        tokenizer_json: str,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        eos_ids: Iterable[int],
    ) -> None:
        """tokenizer_json: the text of a tokenizer.json. encode: text -> ids, none of which is an
        added token's. vocab_size: of the logits, which may have more ids than the tokenizer.
        eos_ids: the checkpoint's.

        ImportError: llguidance is not installed. ValueError: it cannot read this tokenizer.
        """
        try:
            import llguidance
        except ImportError as error:
            raise ImportError(
                "json_schema, regex, grammar and forced tool calls need llguidance, the extra "
                "`structured`: pip install 'llguidance>=1.9', or in a checkout of this library "
                "pip install '.[structured]' -c constraints.txt"
            ) from error
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        try:
            named = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=self._eos_ids
            )
            added_ids = [
                token["id"] for token in json.loads(tokenizer_json).get("added_tokens", ())
            ]
            plain = llguidance.TokenizerWrapper(_PlainText(named, added_ids, encode))
            self._tokenizer = llguidance.LLTokenizer(
                plain, n_vocab=vocab_size, eos_token=self._eos_ids
            )
        except ValueError as error:
            raise ValueError(f"llguidance cannot use this tokenizer: {error}") from error
        self._new_matcher = llguidance.LLMatcher
        self._compiled = functools.lru_cache(_NUM_COMPILED)(self._compile)
        self._checked = functools.lru_cache(_NUM_CHECKED)(self._check)

    def start(self, params: SamplingParams) -> Constraint | None:
        """The start of the grammar that `params` (resolved) ask for, None if they do not.

        ValueError: it is no grammar, or no text fits it, naming the field; or nothing could end the
        completion.
        """
        constraint = constraint_of(params)
        if constraint is None:
            return None
        name, lark = constraint
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_ids)}
        if not stop_ids:
            raise ValueError(f"{name}: ignore_eos leaves no id to end with; give stop_token_ids")
        try:
            matcher = self._compiled(lark).deep_copy()
            # Copies share what was built of the automaton: one that reached its limit wore it out.
            probe = matcher.deep_copy()
            probe.compute_logit_bias()
            if probe.is_error():
                self._compiled.cache_clear()
                matcher = self._compiled(lark).deep_copy()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return Constraint(matcher, self._vocab_size, self._eos_ids, sorted(stop_ids))

    def check(self, lark: str) -> None:
        """ValueError, in one line, if this is no grammar or no text fits it."""
        self._checked(lark)

    def _check(self, lark: str) -> None:
        self._compile(lark)

    def _compile(self, lark: str) -> Any:
        matcher = self._new_matcher(self._tokenizer, lark, log_level=0)
        if not matcher.is_error():
            # That nothing fits comes out with the first mask only, and that what must come has no
            # end with the first token.
            first = matcher.deep_copy()
            mask = first.compute_logit_bias()
            if sum(map(bool, mask)) == 1:
                first.try_consume_tokens([next(i for i, allowed in enumerate(mask) if allowed)])
            if not first.is_error():
                return matcher
            matcher = first
        raise ValueError(_reason(matcher))
