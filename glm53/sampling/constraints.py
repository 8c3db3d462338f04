"""Structured output: which ids may come next so that a completion follows a grammar.

llguidance (the extra `structured`) compiles grammars and computes the sets of ids. It is imported
where the first grammar is compiled.
"""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from glm53.sampling.params import SamplingParams

# One space, or a new line with its indentation: more is a model that cannot find an end.
_WHITESPACE = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
_NUM_COMPILED = 64


class ConstraintError(RuntimeError):
    """A grammar grew too complex to go on."""


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
        """Go on by one accepted token."""
        taken = self._matcher.try_consume_tokens([token_id])
        assert taken or token_id in self._stop_ids, f"id {token_id} is not in the grammar"

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
                return None
        bias = bytearray(matcher.compute_logit_bias())
        if matcher.is_error():
            raise ConstraintError(f"the grammar cannot go on: {matcher.get_error()}")
        allowed_W = torch.frombuffer(bias, dtype=torch.uint8)[: self._vocab_size] != 0
        allowed_W[self._eos_ids] = False
        if matcher.is_accepting():
            allowed_W[self._stop_ids] = True
        return allowed_W


class ConstraintCompiler:
    """Grammars for one tokenizer."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """tokenizer_json: the text of a tokenizer.json. vocab_size: of the logits, which may have
        more ids than the tokenizer. eos_ids: the checkpoint's.

        ImportError: llguidance is not installed. ValueError: it cannot read this tokenizer.
        """
        try:
            import llguidance
        except ImportError as error:
            raise ImportError(
                "json_schema, regex, grammar and forced tool calls need llguidance: "
                "pip install 'glm53[structured]'"
            ) from error
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer_json, n_vocab=vocab_size, eos_token=self._eos_ids
            )
        except ValueError as error:
            raise ValueError(f"llguidance cannot use this tokenizer: {error}") from error
        self._new_matcher = llguidance.LLMatcher
        self._compiled = functools.lru_cache(_NUM_COMPILED)(self._compile)

    def start(self, params: SamplingParams) -> Constraint | None:
        """The start of the grammar that `params` (resolved) ask for, None if they do not.

        ValueError: it is no grammar, naming the field; or nothing could end the completion.
        """
        constraint = constraint_of(params)
        if constraint is None:
            return None
        name, lark = constraint
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_ids)}
        if not stop_ids:
            raise ValueError(f"{name}: ignore_eos leaves no id to end with; give stop_token_ids")
        matcher = self._compiled(name, lark).deep_copy()
        return Constraint(matcher, self._vocab_size, self._eos_ids, sorted(stop_ids))

    def _compile(self, name: str, lark: str) -> Any:
        matcher = self._new_matcher(self._tokenizer, lark, log_level=0)
        if matcher.is_error():
            message = matcher.get_error()
            if name == "json_schema":  # what follows repeats the schema
                message = message.split("\n")[0]
            raise ValueError(f"{name}: {message.strip()}")
        return matcher
