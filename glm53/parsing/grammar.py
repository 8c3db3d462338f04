"""What a constrained reply may look like, as a grammar: the inverse of `glm53.parsing.reply`.

Whatever such a grammar allows, `ChatParser` reads back as one thought, then content or complete
calls with arguments that fit their schemas. The language is Lark in llguidance's dialect: `<[17]>`
is the token with that id, which no text is, `%json {...}` is JSON that fits a schema, `%lark {...}`
a grammar in a grammar, `&` and `~` are and and not of regular expressions.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from glm53.parsing.arguments import TYPES, fits_type, resolve_reference

# Say nothing about which values are valid. `format` is an annotation unless both sides agree.
_ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly format $comment $schema $id "
    "$defs definitions x-guidance".split()
)
_OF_STRINGS = frozenset(["type", "pattern", "minLength", "maxLength"])
_ANY_TEXT = "(?s:.*)"
# What might be JSON that is not a string: where such a value is allowed too, it would become one.
_MAYBE_JSON = r"[ \t\n\r]*(?:(?:-?[0-9][0-9.eE+-]*|true|false|null)[ \t\n\r]*|[\[{](?s:.*))"
# Of a size that every reader of JSON takes: 1e999 is none of Python's numbers.
_NUMBER = r"/-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?/"
_LIMITS = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
# As the chat template writes values that are not strings.
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Tokenizer(Protocol):
    def token_to_id(self, token: str) -> int | None: ...


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _are_keys(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(key, str) for key in value)


def _has_keys(value: Any) -> bool:
    return isinstance(value, Mapping) and _are_keys(list(value))


# What is read here of a schema, and not only handed on.
_KEYWORDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "type": (f"one or a list of {', '.join(TYPES)}", _is_type),
    "enum": ("a list that is not empty", _is_list),
    "anyOf": ("a list that is not empty", _is_list),
    "allOf": ("a list that is not empty", _is_list),
    "$ref": ("a text", lambda value: isinstance(value, str)),
    "pattern": ("a text", lambda value: isinstance(value, str)),
    "minLength": ("an integer >= 0", _is_count),
    "maxLength": ("an integer >= 0", _is_count),
    "properties": ("a mapping from names to schemas", _has_keys),
    "required": ("a list of names", _are_keys),
    "$defs": ("a mapping from names to schemas", _has_keys),
    "definitions": ("a mapping from names to schemas", _has_keys),
}


def _check_keywords(where: str, schema: Mapping[str, Any]) -> None:
    for keyword, (allowed, is_allowed) in _KEYWORDS.items():
        if keyword in schema and not is_allowed(schema[keyword]):
            raise ValueError(f"{where}: {keyword}={schema[keyword]!r:.80}: allowed is {allowed}")


def reply_grammar(
    tokenizer: _Tokenizer,
    *,
    in_reasoning: bool,
    content: str | None = None,
    tools: Iterable[Mapping[str, Any]] = (),
    several_calls: bool = True,
    check: Callable[[str], None] | None = None,
) -> str:
    """Grammar of one reply: what is left of the reasoning, then content or calls.

    in_reasoning: the prompt has left `<think>` open. content: grammar of the content, None where
    there may only be calls. tools: in the usual function form; may be called in place of content,
    more than once if `several_calls`. Required arguments are there, others may be, no others are;
    in the order of the schema. check: is called with a grammar for each argument's value alone, and
    raises ValueError where that cannot be followed.

    ValueError, naming tool and argument: a name or a schema that this format cannot express, or
    that `check` refuses. Also where the tokenizer lacks one of the tags.
    """
    tools = list(tools)
    rules = _Rules(tokenizer, check)
    replies = [] if content is None else ["content"]
    if tools:
        replies.append("call+" if several_calls else "call")
        rules.add_calls(tools)
    assert replies, "neither content nor calls"
    if content is not None:
        rules.lines.append(f"content: %lark {{\n{content}\n}}")
    reply = " | ".join(replies)
    if in_reasoning:
        rules.lines.append(f"REASONING: /{_ANY_TEXT}/")
        reply = f"REASONING {rules.tag('</think>')} ({reply})"
    return "\n".join([f"start: {reply}", *rules.lines])


@dataclass(slots=True)
class _Rules:
    tokenizer: _Tokenizer
    check: Callable[[str], None] | None
    lines: list[str] = field(default_factory=list)

    def tag(self, tag: str) -> str:
        token_id = self.tokenizer.token_to_id(tag)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {tag}, which a constrained reply needs")
        return f"<[{token_id}]>"

    def add_calls(self, tools: Sequence[Mapping[str, Any]]) -> None:
        names = " | ".join(f"call_{i}" for i in range(len(tools)))
        self.lines.append(f"call: {self.tag('<tool_call>')} ({names}) {self.tag('</tool_call>')}")
        for i, tool in enumerate(tools):
            function = tool.get("function", tool)
            self._add_call(f"{i}", function["name"], function.get("parameters"))

    def _add_call(self, label: str, name: str, schema: Any) -> None:
        _check_word(f"tools: the name {name!r}", name)
        where = f"tools: parameters of {name}"
        properties, required = _properties(where, schema)
        parts = [_json(name)]
        for j, (key, value_schema) in enumerate(properties.items()):
            _check_word(f"{where}: the key {key!r}", key, words=False)
            rule = f"{label}_{j}"
            parts.append(f"argument_{rule}" if key in required else f"argument_{rule}?")
            values = _Values(f"{where}: {key}", schema).add(value_schema).rules(rule)
            self._check_value(f"{where}: {key}", rule, values)
            self.lines.append(
                f"argument_{rule}: {self.tag('<arg_key>')} {_json(key)} "
                f"{self.tag('</arg_key>')} {self.tag('<arg_value>')} value_{rule} "
                f"{self.tag('</arg_value>')}"
            )
            self.lines += values
        self.lines.append(f"call_{label}: {' '.join(parts)}")

    def _check_value(self, where: str, rule: str, values: list[str]) -> None:
        if self.check is not None:
            try:
                self.check("\n".join([f"start: value_{rule}", *values]))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


class _Values:
    """Alternatives for one value: texts, patterns of text, and schemas of JSON."""

    def __init__(self, where: str, root: Any) -> None:
        self._where, self._root = where, root
        self._choices: list[str] = []
        self._texts: list[str] = []
        self._schemas: list[dict[str, Any]] = []
        self._numbers: list[str] = []

    def add(self, schema: Any, seen: tuple[str, ...] = ()) -> "_Values":
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError(f"{self._where}: {schema!r:.80} is not a schema of a value")
        _check_keywords(self._where, schema)
        said = set(schema) - _ANNOTATIONS
        reference, members = schema.get("$ref"), schema.get("anyOf", schema.get("allOf"))
        if said == {"$ref"} and isinstance(reference, str) and reference not in seen:
            self.add(resolve_reference(reference, self._root), (*seen, reference))
        elif said == {"anyOf"} or (said == {"allOf"} and len(members) == 1):
            for member in members:
                self.add(member, seen)
        elif said & {"enum", "const"}:
            self._add_choices(schema, said)
        elif said:
            self._add_types(schema, said)
        else:
            self._texts.append(f"/{_ANY_TEXT}/")
        return self

    def rules(self, label: str) -> list[str]:
        lines, names = [], [_json(text) for text in self._choices]
        for i, text in enumerate(self._texts):
            # Read by its tokens the tag would be text; but not every reader has tokens.
            text += rf" & ~/{_ANY_TEXT}<\/arg_value>{_ANY_TEXT}/"
            if self._schemas or self._numbers:
                text += f" & ~/{_MAYBE_JSON}/"
            names.append(f"TEXT_{label}_{i}")
            lines.append(f"{names[-1]}: {text}")
        names += self._numbers
        names += [f"%json {json.dumps(schema)}" for schema in self._schemas]
        return [f"value_{label}: {' | '.join(names)}", *lines]

    def _add_choices(self, schema: Mapping[str, Any], said: set[str]) -> None:
        choices = schema.get("enum", [schema.get("const")])
        if not (said <= {"type", "enum"} or said <= {"type", "const"}):
            raise self._refused(said)
        types = schema.get("type")
        names = types if isinstance(types, list) else [types]
        fitting = [c for c in choices if types is None or any(fits_type(c, n) for n in names)]
        if not fitting:
            raise ValueError(f"{self._where}: no value of the enum has the type")
        self._choices += [c if isinstance(c, str) else _json(c) for c in fitting]

    def _add_types(self, schema: Mapping[str, Any], said: set[str]) -> None:
        types = schema.get("type")
        if types is None and "properties" in said:
            types = "object"
        if types is None and said & {"items", "prefixItems"}:
            types = "array"
        names = types if isinstance(types, list) else [types]
        others = [name for name in names if name != "string"]
        if types is None or (not others and said - _OF_STRINGS):
            raise self._refused(said - _OF_STRINGS or said)
        if "string" in names:
            self._texts.append(" & ".join(f"/{part}/" for part in self._patterns(schema)))
        if "number" in others and not said & _LIMITS:
            self._numbers.append(_NUMBER)
            others.remove("number")
        if others:
            kept = {key: schema[key] for key in schema if key not in _OF_STRINGS}
            kept |= {k: self._root[k] for k in ("$defs", "definitions") if k in self._root}
            kept["type"] = others[0] if len(others) == 1 else others
            guidance = schema.get("x-guidance", {})
            kept["x-guidance"] = _JSON_FORM | (guidance if isinstance(guidance, dict) else {})
            self._schemas.append(kept)

    def _patterns(self, schema: Mapping[str, Any]) -> list[str]:
        """Regular expressions that a text must match as a whole, all of them."""
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        patterns = [_ANY_TEXT if (low, high) == (0, "") else f"(?s:.{{{low},{high}}})"]
        pattern = schema.get("pattern")
        if pattern is not None:
            starts, ends = pattern.startswith("^"), _ends_with_anchor(pattern)
            body = pattern[starts : len(pattern) - ends]
            body = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", body, flags=re.DOTALL)
            before, after = ("" if bound else _ANY_TEXT for bound in (starts, ends))
            patterns.append(f"{before}(?:{body}){after}")
        return patterns

    def _refused(self, keywords: Iterable[str]) -> ValueError:
        return ValueError(
            f"{self._where}: a forced call cannot follow {', '.join(sorted(keywords))} here"
        )


def _properties(where: str, schema: Any) -> tuple[dict[str, Any], set[str]]:
    """The arguments of a tool by name, and which of them are required."""
    if schema is None:
        return {}, set()
    if isinstance(schema, Mapping) and set(schema) - _ANNOTATIONS == {"$ref"}:
        _check_keywords(where, schema)
        schema = resolve_reference(schema["$ref"], schema)
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f"{where}: must be the schema of an object")
    _check_keywords(where, schema)
    unknown = set(schema) - _ANNOTATIONS
    unknown -= {"type", "properties", "required", "additionalProperties"}
    if unknown:
        raise ValueError(f"{where}: a forced call cannot follow {', '.join(sorted(unknown))} here")
    properties = dict(schema.get("properties", {}))
    required: list[str] = schema.get("required", [])
    for key in required:
        properties.setdefault(key, schema.get("additionalProperties", True))
    return properties, set(required)


def _check_word(what: str, text: str, words: bool = True) -> None:
    """Names lose white space around them, and a name with any in it is none."""
    if not text or text != text.strip() or (words and len(text.split()) != 1):
        raise ValueError(f"{what} cannot be written in a call")


def _ends_with_anchor(pattern: str) -> bool:
    body = pattern.removesuffix("$")
    return body != pattern and (len(body) - len(body.rstrip("\\"))) % 2 == 0


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
