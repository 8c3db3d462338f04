"""What a grammar of calls allows, the parser reads back, with arguments that fit their schemas."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.parsing import ChatParser, reply_grammar
from tests.chats import TOOLS, nano
from tests.structured import TAGS, compiler, is_valid, start, token_id, walk

DEFS = {
    "colour": {"enum": ["red", "blue"]},
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["x"],
        "additionalProperties": False,
    },
}
TEXTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2, "maxLength": 5, "format": "uri"},
    {"type": "string", "pattern": "^[a-c]+/"},
    {"type": "string", "pattern": "[^0-9]$", "description": "d"},
    {"type": "string", "enum": ["5", "true", "a <b>", "</arg_value>", ""]},
    {"enum": ['é\n"q"', "\N{MUSICAL SYMBOL G CLEF}"]},
    {"$ref": "#/$defs/colour"},
    {},
]
OTHERS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "number", "minimum": -2.5, "maximum": 1000},
    {"type": "boolean"},
    {"type": "null"},
    {"const": 7},
    {"type": "integer", "enum": ["1", 1, 2, None]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    {"items": {"$ref": "#/$defs/point"}, "maxItems": 2},
    {"$ref": "#/$defs/point"},
    {"allOf": [{"$ref": "#/$defs/point"}], "title": "p"},
]
UNIONS: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    {"type": ["string", "integer"], "minLength": 1},
    {"anyOf": [{"type": "string", "minLength": 3}, {"type": "integer", "maximum": 10}]},
    {"anyOf": [{"type": "string"}, {"type": "number"}, {"$ref": "#/$defs/point"}]},
    {"type": ["boolean", "null"]},
    {"enum": ["a", 1, None, True, 2.5]},
]


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def assert_calls(tools: list[dict[str, Any]], grammar: str, seed: int, **reply) -> int:
    """Walk through the grammar: complete calls and nothing else; how many."""
    ids = walk(start(grammar=grammar), seed)
    if ids is None:
        return 0
    parser = ChatParser(nano(), tools, [token_id("<think>")] if reply.get("thinks") else [])
    parser.push(ids[:-1])
    parser.finish(stopped=False)
    parsed, schemas = parser.parsed, {t["function"]["name"]: t["function"] for t in tools}
    assert parsed.content == "" and parsed.tool_calls
    for found in parsed.tool_calls:
        schema = schemas[found.name].get("parameters") or {}
        strict = {"additionalProperties": False, "properties": {}} | schema
        assert is_valid(found.arguments, strict | {"type": "object"}), (found, schema)
        assert found.raw.startswith(f"<tool_call>{found.name}")
    return len(parsed.tool_calls)


VALUES = TEXTS + OTHERS + UNIONS


@pytest.mark.parametrize("index", range(len(VALUES)))
def test_one_argument(index):
    schema = VALUES[index]
    parameters = {"type": "object", "properties": {"k": schema}, "required": ["k"], "$defs": DEFS}
    tools = [tool("f", parameters)]
    grammar = reply_grammar(nano(), in_reasoning=False, tools=tools, several_calls=False)
    ended = [assert_calls(tools, grammar, seed) for seed in range(12)]
    assert set(ended) <= {0, 1} and sum(ended) >= 10


@pytest.mark.parametrize(
    "schema, refused, fine",
    [
        (UNIONS[2], ["123", " 1e3", "12", "ab"], ["12a", "-12", "7", "abc"]),
        (UNIONS[0], ["true", "5", "{}"], ["null", "nulls", "abc", ""]),
        ({"type": ["string", "array"], "maxItems": 0}, ["[1]", "[", " [2] "], ["[]", "a["]),
        ({"type": "string"}, ["a</arg_value>b"], ["5", "</arg_key>", "<arg_value>", ""]),
    ],
)
def test_a_text_that_would_be_read_as_something_else(schema, refused, fine):
    """Text stands where it surely stays text, or is JSON that fits."""
    parameters = {"properties": {"k": schema}, "required": ["k"], "$defs": DEFS}
    grammar = reply_grammar(nano(), in_reasoning=False, tools=[tool("f", parameters)])
    before, after = nano().encode("<tool_call>f<arg_key>k</arg_key><arg_value>"), token_id(TAGS[-1])
    for text in [*refused, *fine]:
        typed = nano().encode(text, allow_special=False)
        allowed_W = start(grammar=grammar).allowed([*before, *typed])
        assert bool(allowed_W is not None and allowed_W[after]) == (text in fine), text


KEYS = st.lists(st.sampled_from(["a", "bé", "a b", "<think>", "q?"]), unique=True, max_size=4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_random_tools(data):
    tools = []
    for name in data.draw(
        st.lists(st.sampled_from(["f", "ff", "g-1", "ü.x"]), min_size=1, unique=True)
    ):
        keys = data.draw(KEYS)
        properties = {key: data.draw(st.sampled_from(VALUES)) for key in keys}
        required = [key for key in keys if data.draw(st.booleans())]
        schema = {"type": "object", "properties": properties, "required": required, "$defs": DEFS}
        tools.append(tool(name, data.draw(st.sampled_from([schema, None, {}])) if keys else {}))
    grammar = reply_grammar(nano(), in_reasoning=data.draw(st.booleans()), tools=tools)
    thinks = grammar.startswith("start: REASONING")
    assert_calls(tools, grammar, data.draw(st.integers(0, 2**32)), thinks=thinks)


@pytest.mark.parametrize("place", ["name", "key", "text", "json"])
@pytest.mark.parametrize("tag", [nano().id_to_token(i) for i in sorted(nano().control_ids)])
def test_a_tag_spelled_in_a_tool_is_text(tag, place):
    name = f"{tag}f" if place == "name" else "f"
    key = tag if place == "key" else "k"
    value = {"json": {"type": "array", "items": {"enum": [tag]}, "minItems": 1, "maxItems": 1}}
    schema = value.get(place, {"enum": [tag]} if place == "text" else {"enum": ["v"]})
    expected = {"json": [tag], "text": tag}.get(place, "v")
    parameters = {"type": "object", "properties": {key: schema}, "required": [key]}
    tools = [tool(name, parameters)]
    grammar = reply_grammar(
        nano(), in_reasoning=False, tools=tools, several_calls=False, check=compiler().check
    )
    ids = walk(start(grammar=grammar), 0)
    assert ids is not None
    assert [i for i in ids[:-1] if i in nano().control_ids] == [
        token_id(TAGS[i]) for i in (0, 2, 3, 4, 5, 1)
    ]
    parser = ChatParser(nano(), tools)
    parser.push(ids[:-1])
    (found,) = parser.parsed.tool_calls
    assert (found.name, found.arguments) == (name, {key: expected})


def test_optional_arguments_come_and_go():
    seen = set()
    grammar = reply_grammar(nano(), in_reasoning=False, tools=TOOLS[:1], several_calls=False)
    for seed in range(30):
        ids = walk(start(grammar=grammar), seed)
        if ids is not None:
            parser = ChatParser(nano(), TOOLS)
            parser.push(ids[:-1])
            seen.add(frozenset(parser.parsed.tool_calls[0].arguments))
    optional = [
        frozenset(c) for n in range(3) for c in itertools.combinations(["limit", "flags"], n)
    ]
    assert seen == {frozenset({"query"}) | keys for keys in optional}


def test_content_or_calls():
    grammar = reply_grammar(
        nano(), in_reasoning=True, content='start: %json {"type": "integer"}', tools=TOOLS[:2]
    )
    kinds = set()
    for seed in range(20):
        ids = walk(start(grammar=grammar), seed)
        if ids is not None:
            parser = ChatParser(nano(), TOOLS, [token_id("<think>")])
            parser.push(ids[:-1])
            parser.finish(stopped=True)
            parsed = parser.parsed
            kinds.add(bool(parsed.tool_calls))
            assert bool(parsed.tool_calls) != bool(parsed.content)
            assert not parsed.content or is_valid(int(parsed.content), {"type": "integer"})
            assert "</think>" not in parsed.content
    assert kinds == {True, False}


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"type": "array"}, "schema of an object"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"properties": {"k": {"minimum": 3}}}, "k: .*minimum"),
        ({"properties": {"k": {"oneOf": [{}]}}}, "oneOf"),
        ({"properties": {"k": {"type": "string", "contains": 1}}}, "contains"),
        ({"properties": {"k": {"enum": ["a"], "minLength": 3}}}, "minLength"),
        ({"properties": {"k": {"enum": ["a"], "type": "integer"}}}, "no value of the enum"),
        ({"properties": {"k": {"$ref": "#/$defs/none"}}}, "is not a schema"),
        ({"properties": {"k": False}}, "is not a schema"),
        ({"properties": {" k": {}}}, "' k' cannot be written"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"k": {"$ref": "#/$defs/a"}}},
            "ref",
        ),
    ],
)
def test_what_the_format_cannot_express_is_said(schema, message):
    with pytest.raises(ValueError, match=rf"^tools: parameters of f.*{message}"):
        reply_grammar(nano(), in_reasoning=False, tools=[tool("f", schema)])


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"properties": [1]}, r"properties=\[1\]: allowed is a mapping"),
        ({"properties": {1: {}}}, "properties="),
        ({"required": "x"}, "required='x': allowed is a list of names"),
        ({"required": [1]}, "required="),
        ({"properties": 0}, "properties=0"),
        ({"$ref": 5}, "ref=5: allowed is a text"),
        ({"$defs": 5, "properties": {"k": {"type": "null"}}}, "defs=5"),
        ({"properties": {"k": {"enum": "abc"}}}, "k: enum='abc': allowed is a list"),
        ({"properties": {"k": {"enum": []}}}, "k: enum="),
        ({"properties": {"k": {"type": "string", "minLength": "3"}}}, "k: minLength='3': allowed"),
        ({"properties": {"k": {"type": "string", "maxLength": -1}}}, "k: maxLength=-1"),
        ({"properties": {"k": {"type": "string", "pattern": 5}}}, "k: pattern=5"),
        ({"properties": {"k": {"type": "objct"}}}, "k: type='objct': allowed is one or a list"),
        ({"properties": {"k": {"type": []}}}, "k: type="),
        ({"properties": {"k": {"anyOf": []}}}, "k: anyOf="),
        # What the library that compiles it refuses, or never ends.
        ({"properties": {"k": {"$ref": "#"}}, "required": ["k"]}, "k: .*"),
        (
            {"properties": {"k": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}}
            | {"required": ["k"]},
            "k: .*",
        ),
        ({"properties": {"k": {"type": "string", "pattern": "^a$", "minLength": 3}}}, "k: no text"),
        ({"properties": {"k": {"type": "string", "pattern": "("}}}, "k: .*unclosed group"),
        ({"properties": {"k": {"type": "array", "items": {"enum": "abc"}}}}, "k: enum must be an"),
        ({"properties": {"k": {"type": "integer", "minimum": "5"}}}, "k: .*minimum"),
        ({"properties": {"k": {"type": "array", "items": {"$ref": "#/x"}}}}, "k: .*'/x'"),
    ],
)
def test_what_is_no_schema_is_said_in_one_line(schema, message):
    tools = [
        tool("g", {}),
        tool("f", {"type": "object"} | schema if "$ref" not in schema else schema),
    ]
    with pytest.raises(ValueError, match=rf"^tools: parameters of f: .*{message}") as said:
        reply_grammar(nano(), in_reasoning=False, tools=tools, check=compiler().check)
    assert "\n" not in str(said.value) and len(str(said.value)) < 300


def test_names_and_tags_that_are_missing_are_said():
    with pytest.raises(ValueError, match="two words"):
        reply_grammar(nano(), in_reasoning=False, tools=[tool("two words", None)])

    class Bare:
        def token_to_id(self, token: str) -> int | None:
            return None if token == "</think>" else 7

    with pytest.raises(ValueError, match="no token </think>"):
        reply_grammar(Bare(), in_reasoning=True, content="start: /a/")
