"""Chat templates: a checkpoint's own Jinja source, rendered in a sandbox.

Rendering gives what transformers' `apply_chat_template` gives for the same source. It also says
which control tokens of the rendered text the template wrote and which ones only came with the
strings it was given, so that what a user typed need not become a control token.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import ext, nodes, sandbox

_THINK, _END_THINK = "<think>", "</think>"
# Plane 15, private use: no text has a reason to contain it, and no case folding or stripping
# changes it. Characters that do occur are passed over.
_FIRST_PRIVATE = 0xF0000


class ControlToken(NamedTuple):
    """Where a rendered text spells a control token; typed: it came with the inputs."""

    start: int
    end: int
    typed: bool


class ChatTemplate:
    """One template, compiled.

    It runs in Jinja's immutable sandbox: it sees plain JSON values only, and reaches neither
    attributes of Python objects nor files or other templates.

    Raises:
        ValueError: `source` is not valid Jinja; with Jinja's message.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        """Of the source in UTF-8: tells apart the templates of two copies of a checkpoint."""
        self._template = _compiled(source)

    def render(self, inputs: Mapping[str, Any], constants: Mapping[str, Any]) -> str:
        """The rendered text.

        inputs: from `chat_inputs`; constants: further variables (names of special tokens).

        Raises:
            ValueError: the template raised an error; with its message.
        """
        try:
            return self._template.render({**constants, **inputs})
        except Exception as error:  # whatever the checkpoint's code comes across
            raise ValueError(f"chat template: {error}") from error

    def render_with_origin(
        self, inputs: Mapping[str, Any], constants: Mapping[str, Any], tokens: Iterable[str]
    ) -> tuple[str, list[ControlToken]]:
        """The same text, and every spelling of one of `tokens` in it, from left to right.

        The template is rendered a second time, with one character of each token (`<`) replaced in
        all inputs, one for one, by a character that occurs nowhere else. Put back, that must give
        the same text; and a token that was not the same before had been typed, also where the
        template joined it from several strings.

        A template is expected to look for tags in one place: it splits the content of an assistant
        message without `reasoning_content` at `</think>`. There the tags that it splits at are left
        as they are.

        Raises:
            ValueError: as `render`; or the origin cannot be told, because the template looks for
                such characters elsewhere.
        """
        text = self.render(inputs, constants)
        spellings = sorted(filter(str.strip, tokens), key=len, reverse=True)
        found = list(re.finditer("|".join(map(re.escape, spellings)), text)) if spellings else []
        if not found:
            return text, []
        given = json.dumps([inputs, constants], ensure_ascii=False, default=str)
        stand_ins = _stand_ins(spellings, used=text + self.source + given)
        restore = str.maketrans({new: old for old, new in stand_ins.items()})
        for every_end in (False, True):
            disguised = self.render(_disguised(inputs, stand_ins, every_end), constants)
            for new in stand_ins.values():  # of a template that asks for JSON in ASCII
                disguised = disguised.replace(_escaped(new), new)
            if disguised.translate(restore) == text:
                return text, [
                    ControlToken(*m.span(), typed=disguised[m.start() : m.end()] != m.group())
                    for m in found
                ]
        raise ValueError(
            "chat template: it looks for text that is spelled like control tokens, so that typed "
            "ones cannot be told from its own; allow_special=True encodes both alike"
        )


def chat_inputs(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Variables of a rendering, as copies that hold nothing but plain JSON values.

    Keys of a message whose value is None count as absent, and so do variables that are None.
    Arguments of a tool call may be a mapping, as templates want it, or the JSON text of an object,
    as some servers send it.

    Raises:
        ValueError: with the path of what is wrong.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages={messages!r}: must be a non-empty list of mappings")
    plain = _plain(list(messages), "messages")
    for i, message in enumerate(plain):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}]={message!r}: must be a mapping with a role")
        plain[i] = message = {k: v for k, v in message.items() if v is not None}
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list):
            raise ValueError(f"messages[{i}].tool_calls={calls!r}: must be a list")
        for j, call in enumerate(calls):
            _parse_arguments(call, f"messages[{i}].tool_calls[{j}]")
    if isinstance(tools, str | Mapping):
        raise ValueError(f"tools={tools!r}: must be a list of mappings")
    given = {key: value for key, value in variables.items() if value is not None}
    inputs = {
        "documents": None,
        **_plain(given, "variables"),
        "messages": plain,
        "tools": _plain(list(tools), "tools") if tools else None,
    }
    for i, tool in enumerate(inputs["tools"] or ()):
        if not isinstance(tool, dict):
            raise ValueError(f"tools[{i}]={tool!r}: must be a mapping")
    return inputs


def _parse_arguments(call: Any, where: str) -> None:
    if not isinstance(call, dict):
        raise ValueError(f"{where}={call!r}: must be a mapping")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return
    text = function["arguments"]
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.arguments={text!r}: must be a mapping, or a JSON object as text")
    function["arguments"] = arguments


def _plain(value: Any, where: str) -> Any:
    """A copy of JSON types proper: methods of subclasses are nothing for a template to reach."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} must be a string")
        return {str.__str__(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(f"{where}={value!r}: must be a JSON value, not {type(value).__name__}")


def _stand_ins(spellings: Iterable[str], used: str) -> dict[str, str]:
    """For one character of each spelling, a character that is not in `used` in any form."""
    # Not a letter, where there is a choice: templates compare words (roles), hardly brackets.
    marks = {
        next((c for c in spelling if not c.isalnum() and not c.isspace()), spelling.strip()[0])
        for spelling in spellings
    }
    candidates = map(chr, itertools.count(_FIRST_PRIVATE))
    free = (c for c in candidates if c not in used and _escaped(c) not in used)
    return dict(zip(sorted(marks), free, strict=False))


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]


def _disguised(inputs: Mapping[str, Any], stand_ins: dict[str, str], every_end: bool) -> Any:
    """`inputs` with characters replaced in all strings, except in tags to be split at."""
    table = str.maketrans(stand_ins)

    def content(text: str) -> str:
        spans = _split_tags(text, every_end)
        replaced = text.translate(table)
        for start, end in spans:
            replaced = replaced[:start] + text[start:end] + replaced[end:]
        return replaced

    changed = _map_strings(inputs, lambda text: text.translate(table))
    for message, given in zip(changed["messages"], inputs["messages"], strict=True):
        reasoned = isinstance(given.get("reasoning_content"), str)
        if given["role"] == "assistant" and "content" in given and not reasoned:
            message["content"] = _map_strings(given["content"], content)
    return changed


def _split_tags(text: str, every_end: bool) -> list[tuple[int, int]]:
    """Spans of the first `</think>` (or of every one), and of each `<think>` before it."""
    ends = [m.span() for m in re.finditer(re.escape(_END_THINK), text)]
    if not ends:
        return []
    starts = [m.span() for m in re.finditer(re.escape(_THINK), text[: ends[0][0]])]
    return [*starts, *(ends if every_end else ends[:1])]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    # A function in place of the class: its attributes are none of a template's business.
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template cannot be read: {error}") from error


class _Generation(ext.Extension):
    """`{% generation %}` marks for trainers what a model wrote: here only its body counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; templates are written for json.dumps."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
