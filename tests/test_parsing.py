"""Reasoning and tool calls out of replies: what each case must give, found by id and by text."""

import itertools
from typing import Any

import pytest

from glm53.parsing import ChatParser, Parsed, typed_arguments
from tests.chats import TOOLS, assistant, nano, tool, user

OPEN = "<|user|>q<|assistant|><think>"
CLOSED = "<|user|>q<|assistant|><think></think>"


def _parse(text: str, mode: str, *, prompt: str = OPEN, tools: Any = TOOLS, stopped=True) -> Parsed:
    """One-shot: the reply as text, or as the ids that it encodes to (tags as their tokens)."""
    if mode == "text":
        parser = ChatParser(None, tools, prompt)
        parser.push_text(text)
    else:
        parser = ChatParser(nano(), tools, nano().encode(prompt))
        parser.push(nano().encode(text))
    parser.finish(stopped)
    return parser.parsed


both = pytest.mark.parametrize("mode", ["text", "ids"])


def _simple(parsed: Parsed) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    return parsed.reasoning, parsed.content, [(c.name, c.arguments) for c in parsed.tool_calls]


@both
@pytest.mark.parametrize(
    "reply, expected",
    [
        ("a</think>b", ("a", "b", [])),
        ("a\n</think>\n\nb\n", ("a\n", "\n\nb\n", [])),
        ("</think>b", ("", "b", [])),
        ("all of it", ("all of it", "", [])),
        ("", ("", "", [])),
        ("<think>a<think>b</think>c", ("ab", "c", [])),
        ("a</think>b</think>c", ("a", "bc", [])),
        ("a</think><think>b</think>c", ("ab", "c", [])),
        ("a</think>b<think>c", ("a", "b<think>c", [])),
        ("a<tool_call>now</tool_call>", ("a", "", [("now", {})])),
        ("a<tool_call>now</tool_call></think>b", ("a", "b", [("now", {})])),
        ("a < b <thin </think x</think>y", ("a < b <thin </think x", "y", [])),
        # No call after all: the text stays where it began.
        ("one <tool_call> is</think>b", ("one <tool_call> is", "b", [])),
        ("one <tool_call></think>b", ("one <tool_call>", "b", [])),
        ("the <tool_call>f<arg_key>k is</think>b", ("the <tool_call>f<arg_key>k is", "b", [])),
    ],
)
def test_reasoning(mode, reply, expected):
    assert _simple(_parse(reply, mode)) == expected


@both
@pytest.mark.parametrize(
    "prompt, reply, expected",
    [
        (OPEN, "a", ("a", "")),
        (OPEN + "\n", "a", ("a", "")),
        (CLOSED, "a", ("", "a")),
        ("<|user|>q<|assistant|>", "a", ("", "a")),
        ("", "a", ("", "a")),
        # The role before was the one that thought.
        ("<|assistant|><think>a<|user|>b", "c", ("", "c")),
        # A template that leaves the opening tag to the model.
        ("<|assistant|>", "\n<think>a</think>b", ("a", "\nb")),
        (CLOSED, "<think>a</think>b", ("a", "b")),
    ],
)
def test_the_prompt_says_where_the_reply_begins(mode, prompt, reply, expected):
    parsed = _parse(reply, mode, prompt=prompt)
    assert (parsed.reasoning, parsed.content) == expected


def test_a_prompt_that_begins_the_reasoning_leaves_it_open():
    assert _parse("b</think>c", "ids", prompt=OPEN + "I ").reasoning == "b"


def test_a_typed_tag_does_not_open_the_reasoning():
    prompt = nano().encode_chat([user("<think>")], add_generation_prompt=False)
    parser = ChatParser(nano(), None, prompt)
    assert parser.push(nano().encode("a")).content == "a"


@both
@pytest.mark.parametrize(
    "reply, calls",
    [
        ("<tool_call>now</tool_call>", [("now", {})]),
        ("<tool_call>now\n</tool_call>", [("now", {})]),
        ("<tool_call> now </tool_call><tool_call>now</tool_call>", [("now", {}), ("now", {})]),
        (
            "<tool_call>search<arg_key>query</arg_key><arg_value>a b</arg_value></tool_call>",
            [("search", {"query": "a b"})],
        ),
        (
            "<tool_call>search\n<arg_key> query\n</arg_key>\n<arg_value> a \n</arg_value>\n"
            "<arg_key>limit</arg_key> <arg_value>3</arg_value>\n</tool_call>",
            [("search", {"query": " a \n", "limit": 3})],
        ),
        (
            "<tool_call>search<arg_key>query</arg_key><arg_value></arg_value></tool_call>",
            [("search", {"query": ""})],
        ),
        (
            "<tool_call>search<arg_key>query</arg_key><arg_value>1</arg_value>"
            "<arg_key>limit</arg_key><arg_value>1</arg_value>"
            "<arg_key>query</arg_key><arg_value>2</arg_value></tool_call>",
            [("search", {"query": "2", "limit": 1})],
        ),
        (
            "<tool_call>search<arg_key>query</arg_key><arg_value>"
            "x</tool_call><tool_call>y<arg_key>z</think>é中😀</arg_value></tool_call>",
            [("search", {"query": "x</tool_call><tool_call>y<arg_key>z</think>é中😀"})],
        ),
        # Neither the tool nor the key is known: nothing says what type it has.
        (
            "<tool_call>what<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
            [("what", {"n": "5"})],
        ),
        (
            "<tool_call>search<arg_key>n</arg_key><arg_value>5</arg_value></tool_call>",
            [("search", {"n": "5"})],
        ),
    ],
)
def test_tool_calls(mode, reply, calls):
    parsed = _parse(reply, mode, prompt=CLOSED)
    assert _simple(parsed) == ("", "", calls)
    assert "".join(c.raw for c in parsed.tool_calls) == reply


@both
def test_text_around_calls_is_content(mode):
    parsed = _parse("r</think>a <tool_call>now</tool_call>\n<tool_call>now</tool_call> b", mode)
    assert _simple(parsed) == ("r", "a \n b", [("now", {}), ("now", {})])


BROKEN = [
    "<tool_call>",
    "<tool_call></tool_call>",
    "<tool_call> \n</tool_call>x",
    "<tool_call>f g</tool_call>",
    '<tool_call>{"name": "f"}</tool_call>',
    "<tool_call>f<arg_key>k",
    "<tool_call>f<arg_key>k</arg_key>",
    "<tool_call>f<arg_key>k</arg_key>x<arg_value>v</arg_value></tool_call>",
    "<tool_call>f<arg_key>k</arg_key></tool_call>",
    "<tool_call>f<arg_key>k</arg_key><arg_value>v",
    "<tool_call>f<arg_key>k</arg_key><arg_value>v</tool_call>",
    "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>x</tool_call>",
    "<tool_call>f<arg_value>v</arg_value></tool_call>",
    "<tool_call><arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
    "</tool_call><arg_key></arg_key><arg_value></arg_value>",
    f"<tool_call>{'f' * 300}</tool_call>",
]


@both
@pytest.mark.parametrize("reply", BROKEN)
def test_what_is_no_call_stays_text(mode, reply):
    for stopped in (False, True):
        assert _simple(_parse(reply, mode, prompt=CLOSED, stopped=stopped)) == ("", reply, [])


@both
def test_a_broken_call_does_not_spoil_the_next(mode):
    parsed = _parse("<tool_call>f<arg_key>k<tool_call>now</tool_call>", mode, prompt=CLOSED)
    assert _simple(parsed) == ("", "<tool_call>f<arg_key>k", [("now", {})])


@both
@pytest.mark.parametrize(
    "reply, calls",
    [
        ("<tool_call>now", [("now", {})]),
        ("<tool_call>no", []),
        (
            "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>\n",
            [("f", {"k": "v"})],
        ),
    ],
)
def test_a_stop_without_the_closing_tag(mode, reply, calls):
    stopped = _parse("r" + reply, mode)
    assert _simple(stopped) == ("r", "" if calls else reply, calls)
    assert [c.raw for c in stopped.tool_calls] == [reply] * len(calls)
    # Cut off by the length limit, nobody knows what would have come.
    assert _simple(_parse("r" + reply, mode, stopped=False)) == ("r", reply, [])


def test_tags_spelled_out_in_other_tokens_are_text():
    spelled = nano().encode("</think></arg_value></tool_call><tool_call>", allow_special=False)
    end = nano().encode("</think>")
    begin = nano().encode("<tool_call>search<arg_key>query</arg_key><arg_value>")
    close = nano().encode("</arg_value></tool_call>")
    parser = ChatParser(nano(), TOOLS, nano().encode(OPEN))
    parser.push([*spelled, *end, *spelled, *begin, *spelled, *close])
    parser.finish()
    text = nano().decode(spelled)
    assert _simple(parser.parsed) == (text, text, [("search", {"query": text})])


def test_a_tag_without_an_id_is_found_in_text():
    class Fewer:
        special_ids = nano().special_ids
        detokenizer = staticmethod(nano().detokenizer)

        def token_to_id(self, token):
            return None if "arg" in token else nano().token_to_id(token)

    spell = nano().encode
    arguments = "<arg_key>limit</arg_key><arg_value>3</arg_value>"
    ids = spell("r</think>a</think><tool_call>search")
    ids += spell(arguments, allow_special=False) + spell("</tool_call>")
    parser = ChatParser(Fewer(), TOOLS, spell(OPEN))
    parser.push(ids)
    parser.finish()
    assert _simple(parser.parsed) == ("r", "a", [("search", {"limit": 3})])


def test_every_cut_of_a_reply_gives_the_same():
    reply = "a</think>bc"
    for cuts in itertools.product([0, 1], repeat=len(reply) - 1):
        pieces = "".join(c + "\0" * cut for c, cut in zip(reply, (*cuts, 0), strict=True))
        parser = ChatParser(prompt=OPEN)
        deltas = [parser.push_text(piece) for piece in pieces.split("\0")]
        deltas.append(parser.finish())
        assert "".join(d.reasoning for d in deltas) == "a"
        assert "".join(d.content for d in deltas) == "bc"


def test_text_is_held_back_no_longer_than_needed():
    parser = ChatParser(prompt=OPEN)
    assert parser.push_text("ab</thi").reasoning == "ab"
    assert parser.push_text("s").reasoning == "</this"
    assert parser.push_text("<<").reasoning == "<"
    assert parser.push_text("/think>c").content == "c"
    assert parser.parsed.reasoning == "ab</this<"


def test_characters_over_several_tokens_come_whole():
    parser = ChatParser(nano(), None, nano().encode(CLOSED))
    ids = nano().encode("\N{MUSICAL SYMBOL G CLEF}")
    assert len(ids) > 1
    contents = [parser.push([token_id]).content for token_id in ids]
    assert contents == [""] * (len(ids) - 1) + ["\N{MUSICAL SYMBOL G CLEF}"]
    parser.push(ids[:1])
    assert parser.push(nano().encode("<tool_call>")).content == "\N{REPLACEMENT CHARACTER}"


def test_the_end_token_gives_no_text():
    parser = ChatParser(nano(), None, nano().encode(CLOSED))
    parser.push(nano().encode("a<|observation|>"))
    assert parser.finish(True).content == ""
    assert parser.parsed.content == "a"


def test_a_reply_goes_on_as_a_message():
    reply = (
        "r</think>c<tool_call>search<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>"
    )
    parsed = _parse(reply, "ids")
    message = parsed.message()
    assert message == assistant(
        "c",
        reasoning_content="r",
        tool_calls=[
            {"type": "function", "function": {"name": "search", "arguments": {"limit": 3}}}
        ],
    )
    text = nano().render_chat([user("q"), message, tool("x")])
    assert f"<|user|>q<|assistant|><think>{reply}<|observation|>" in text
    assert Parsed("r", "c").message() == assistant("c", reasoning_content="r")


def test_tools_need_names():
    with pytest.raises(ValueError, match="no name"):
        ChatParser(tools=[{"type": "function", "function": {}}])


# Types.

TYPES: dict[str, Any] = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "z": {"type": ["null", "integer"]},
    "opt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "one": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "both": {"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]},
    "e": {"enum": ["5", 7, None]},
    "es": {"type": "string", "enum": ["1", "2"]},
    "c": {"const": 3},
    "ref": {"$ref": "#/$defs/size"},
    "deep": {"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]},
    "lost": {"$ref": "#/$defs/nothing"},
    "far": {"$ref": "https://example.org/schema"},
    "ring": {"$ref": "#/$defs/ring"},
    "rest": {"type": "array", "anyOf": [{"minItems": 1}, {"maxItems": 0}]},
    "implied": {"items": {"type": "integer"}},
    "any": {},
    "true": True,
    "odd": {"type": "date"},
}
SCHEMA = {
    "type": "object",
    "properties": TYPES,
    "$defs": {
        "size": {"type": "integer"},
        "a/b": {"type": "object"},
        "ring": {"$ref": "#/$defs/ring"},
    },
}


@pytest.mark.parametrize(
    "key, text, value",
    [
        ("n", "5", 5),
        ("n", " -5\n", -5),
        ("n", "5.0", 5),
        ("n", "1e3", 1000),
        ("n", "5.5", "5.5"),
        ("n", "005", "005"),
        ("n", "five", "five"),
        ("n", "true", "true"),
        ("n", "", ""),
        ("n", "9" * 5000, "9" * 5000),
        ("n", "12345678901234567890123", 12345678901234567890123),
        ("s", "7", "7"),
        ("s", "001", "001"),
        ("s", "null", "null"),
        ("s", '"quoted"', '"quoted"'),
        ("s", '{"k": 1}', '{"k": 1}'),
        ("s", "  spaced ", "  spaced "),
        ("x", "1.5", 1.5),
        ("x", "5", 5),
        ("x", "5.0", 5.0),
        ("x", "NaN", "NaN"),
        ("x", "-Infinity", "-Infinity"),
        ("x", "1e999", "1e999"),
        ("x", "false", "false"),
        ("b", "true", True),
        ("b", "false", False),
        ("b", "1", "1"),
        ("b", "True", "True"),
        ("o", '{"k": 1}', {"k": 1}),
        ("o", '{"k": NaN}', '{"k": NaN}'),
        ("o", "[1]", "[1]"),
        ("o", "{'k': 1}", "{'k': 1}"),
        ("a", "[1, 2]", [1, 2]),
        ("a", "[1, 1e999]", "[1, 1e999]"),
        ("a", "[" * 100_000, "[" * 100_000),
        ("z", "null", None),
        ("z", "3", 3),
        ("z", "x", "x"),
        ("opt", "null", None),
        ("opt", "3", "3"),
        ("one", "3", 3),
        ("one", "true", True),
        ("one", "null", "null"),
        ("both", "3", 3),
        ("both", "null", "null"),
        ("e", "5", "5"),
        ("e", "7", 7),
        ("e", "null", None),
        ("e", "8", "8"),
        ("es", "1", "1"),
        ("c", "3", 3),
        ("c", "4", "4"),
        ("ref", "3", 3),
        ("deep", '{"k": []}', {"k": []}),
        ("deep", "null", None),
        ("deep", "3", "3"),
        ("lost", "3", "3"),
        ("far", "3", "3"),
        ("ring", "3", "3"),
        ("rest", "[1]", [1]),
        ("implied", "[1]", [1]),
        ("any", "3", "3"),
        ("true", "3", "3"),
        ("odd", "3", "3"),
        ("unknown", "3", "3"),
    ],
)
def test_types_by_schema(key, text, value):
    typed = typed_arguments({key: text}, SCHEMA)[key]
    assert typed == value
    assert type(typed) is type(value)


@pytest.mark.parametrize(
    "schema", [None, {}, [], "x", {"properties": []}, {"properties": {"n": 3}}]
)
def test_without_a_schema_arguments_are_text(schema):
    assert typed_arguments({"n": "3", "b": "true"}, schema) == {"n": "3", "b": "true"}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/args", "$defs": {"args": {"properties": {"n": {"type": "integer"}}}}},
        {"allOf": [{"properties": {"s": {}}}, {"properties": {"n": {"type": "integer"}}}]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ],
)
def test_properties_may_be_declared_elsewhere(schema):
    assert typed_arguments({"n": "3"}, schema) == {"n": 3}
