"""One reply of a GLM-5.x model, split while it is written: reasoning, content, tool calls.

    reasoning</think>content<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...

The tags are tokens of their own. Matched by id, they cannot be confused with the same characters
spelled out in other tokens, which are text. What is between them is decoded run by run.

The result does not depend on how the ids, or the text, were cut: tags are found first, and each
step of the state machine looks at a tag or at the whole run of text before it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from glm53.parsing.arguments import typed_arguments

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
_TAGS = (_THINK, _END_THINK, _CALL, _END_CALL, _KEY, _END_KEY, _VALUE, _END_VALUE)

# Left context that a detokeniser needs to decode the first new token as it would the whole text.
_PROMPT_TAIL = 8
# Text after `<tool_call>` that is longer than any name is not a call: it need not wait for a tag.
_LONGEST_NAME = 256


class _Detokenizer(Protocol):
    def push(self, ids: Iterable[int]) -> str: ...
    def finish(self) -> str: ...


class _Tokenizer(Protocol):
    special_ids: frozenset[int]

    def token_to_id(self, token: str) -> int | None: ...
    def detokenizer(self, prompt_tail: Sequence[int] = ()) -> _Detokenizer: ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. arguments: typed by the tool's schema; raw: as the model wrote it, with its
    tags. `name` is as written too: whether there is such a tool is for the caller to see."""

    name: str
    arguments: dict[str, Any]
    raw: str


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What one chunk added. A call comes as a whole, with the chunk that completes it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole reply. content: all that is neither reasoning nor a complete call, not stripped."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The reply as a message of the conversation that goes on."""
        message: dict[str, Any] = {
            "role": "assistant",
            "reasoning_content": self.reasoning,
            "content": self.content,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


@dataclass(slots=True)
class _OpenCall:
    """A call being read. phase: what the text that comes is part of; "gap" is the space before a
    value, "end" the space before a further key or the end of the call."""

    phase: Literal["name", "key", "gap", "value", "end"] = "name"
    raw: list[str] = field(default_factory=lambda: [_CALL])
    name: str = ""
    key: list[str] = field(default_factory=list)
    value: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)

    def add_text(self, text: str) -> bool:
        """False: with this text it is no call."""
        self.raw.append(text)
        match self.phase:
            case "name":
                self.name += text
                return len(self.name.split()) <= 1 and len(self.name) <= _LONGEST_NAME
            case "key":
                self.key.append(text)
            case "value":
                self.value.append(text)
            case "gap" | "end":
                return not text.strip()
        return True

    def add_tag(self, tag: str) -> bool:
        """False: with this tag it is no call."""
        match self.phase, tag:
            case "value", _ if tag != _END_VALUE:
                self.value.append(tag)
            case ("name" | "end", "<arg_key>") if self.name.strip():
                self.phase, self.key = "key", []
            case "key", "</arg_key>":
                self.phase = "gap"
            case "gap", "<arg_value>":
                self.phase, self.value = "value", []
            case "value", _:
                self.phase = "end"
                self.arguments["".join(self.key).strip()] = "".join(self.value)
            case _:
                return False
        self.raw.append(tag)
        return True


class ChatParser:
    """Splits one reply as it comes.

    Reasoning ends at `</think>`, or where a tool call begins. A repeated `<think>` in reasoning
    and a stray `</think>` in content are dropped; no other text ever is. `<think>` opens reasoning
    again only before any content. Other tags that are out of place are text, and so is a call that
    breaks the format or never ends. Inside a value only `</arg_value>` is a tag.

    Args:
        tokenizer: finds the tags by their ids; without one, `push_text` finds them in text. A tag
            that the tokenizer has no id for is found in text too.
        tools: mappings in the usual function form, for the types of arguments.
        prompt: the prompt's ids, or its text. The reply begins in reasoning if the prompt has left
            `<think>` open: in ids, after the last special token (a role); in text, at its end.

    Raises:
        ValueError: a tool without a name.
    """

    def __init__(
        self,
        tokenizer: _Tokenizer | None = None,
        tools: Iterable[Mapping[str, Any]] | None = None,
        prompt: Sequence[int] | str = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._schemas = dict(map(_name_and_schema, tools or ()))
        found = {tag: tokenizer.token_to_id(tag) if tokenizer else None for tag in _TAGS}
        self._tag_of_id = {token_id: tag for tag, token_id in found.items() if token_id is not None}
        self._text_tags = tuple(tag for tag, token_id in found.items() if token_id is None)
        self._detokenizer = None
        if tokenizer is not None and not isinstance(prompt, str):
            self._detokenizer = tokenizer.detokenizer(prompt[-_PROMPT_TAIL:])
        elif tokenizer is not None:
            self._detokenizer = tokenizer.detokenizer()
        self._held = ""
        self._in_reasoning = self._left_open(prompt)
        self._has_content = False
        self._call: _OpenCall | None = None
        self._finished = False
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[ToolCall] = []
        self._reported = (0, 0, 0)

    def push(self, ids: Iterable[int]) -> ParsedDelta:
        """Add new ids (without the one that ended the reply, if it is to give no text)."""
        assert self._detokenizer is not None and self._tokenizer is not None, "no tokenizer"
        assert not self._finished, "ids pushed after the end"
        for token_id in ids:
            tag = self._tag_of_id.get(token_id)
            if tag is None:
                self._find_tags(self._detokenizer.push([token_id]))
            else:
                self._flush()
                self._add_tag(tag)
                self._detokenizer = self._tokenizer.detokenizer([token_id])
        return self._delta()

    def push_text(self, text: str) -> ParsedDelta:
        """Add new text, where there is no tokenizer."""
        assert self._tokenizer is None, "a parser with a tokenizer takes ids"
        assert not self._finished, "text pushed after the end"
        self._find_tags(text)
        return self._delta()

    def finish(self, stopped: bool = False) -> ParsedDelta:
        """End the reply: whatever is still held back.

        stopped: the model ended it itself. Then a call that lacks only its closing tag counts,
        if it has arguments or names a tool. Any other unfinished call is content, as text.
        """
        self._flush()
        self._finished = True
        call = self._call
        if call is not None:
            named = call.phase == "name" and call.name.strip() in self._schemas
            if stopped and (named or call.phase == "end"):
                self._complete(call)
            else:
                self._call, self._in_reasoning = None, False
                self._add_text("".join(call.raw))
        return self._delta()

    @property
    def in_reasoning(self) -> bool:
        """Whether text that comes next is reasoning."""
        return self._in_reasoning

    @property
    def parsed(self) -> Parsed:
        """All that was delivered so far."""
        return Parsed("".join(self._reasoning), "".join(self._content), tuple(self._tool_calls))

    def _left_open(self, prompt: Sequence[int] | str) -> bool:
        if isinstance(prompt, str):
            return prompt.rstrip().endswith(_THINK)
        special_ids = self._tokenizer.special_ids if self._tokenizer else frozenset()
        for token_id in reversed(prompt):
            tag = self._tag_of_id.get(token_id)
            if tag in (_THINK, _END_THINK) or token_id in special_ids:
                return tag == _THINK
        return False

    def _find_tags(self, text: str) -> None:
        """Pass on the text and the tags of `_text_tags` in it; hold back what may begin one."""
        text = self._held + text
        while found := [(text.find(tag), tag) for tag in self._text_tags if tag in text]:
            start, tag = min(found)
            self._add_text(text[:start])
            self._add_tag(tag)
            text = text[start + len(tag) :]
        start = text.rfind("<")
        if start < 0 or not any(tag.startswith(text[start:]) for tag in self._text_tags):
            start = len(text)
        self._add_text(text[:start])
        self._held = text[start:]

    def _flush(self) -> None:
        """Everything before this point is complete."""
        if self._detokenizer is not None:
            self._find_tags(self._detokenizer.finish())
        held, self._held = self._held, ""
        self._add_text(held)

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._call is not None:
            if not self._call.add_text(text):
                self._abandon()
        elif self._in_reasoning:
            self._reasoning.append(text)
        else:
            self._content.append(text)
            self._has_content = self._has_content or bool(text.strip())

    def _add_tag(self, tag: str) -> None:
        call = self._call
        if call is not None:
            if tag == _END_CALL and call.phase in ("name", "end") and call.name.strip():
                call.raw.append(tag)
                self._complete(call)
            elif not call.add_tag(tag):
                self._abandon()
                self._add_tag(tag)
        elif tag == _CALL:
            self._call = _OpenCall()
        elif tag == _END_THINK:
            self._in_reasoning = False
        elif tag == _THINK and not self._has_content and not self._tool_calls:
            self._in_reasoning = True
        else:
            self._add_text(tag)

    def _abandon(self) -> None:
        """What looked like a call is text, where it began."""
        assert self._call is not None
        raw, self._call = "".join(self._call.raw), None
        self._add_text(raw)

    def _complete(self, call: _OpenCall) -> None:
        name = call.name.strip()
        arguments = typed_arguments(call.arguments, self._schemas.get(name))
        self._tool_calls.append(ToolCall(name, arguments, "".join(call.raw)))
        self._call, self._in_reasoning = None, False

    def _delta(self) -> ParsedDelta:
        reasoning, content, calls = self._reported
        self._reported = (len(self._reasoning), len(self._content), len(self._tool_calls))
        return ParsedDelta(
            "".join(self._reasoning[reasoning:]),
            "".join(self._content[content:]),
            tuple(self._tool_calls[calls:]),
        )


def _name_and_schema(tool: Mapping[str, Any]) -> tuple[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"tools: {tool!r} has no name")
    return function["name"], function.get("parameters")
