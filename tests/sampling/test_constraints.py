"""Grammars without a model: every id that a mask allows, and none that it should not."""

import builtins
import json
import re

import pytest
import regex

from glm53 import SamplingParams
from glm53.sampling import ConstraintCompiler
from glm53.sampling.constraints import ConstraintError
from tests.chats import nano
from tests.structured import (
    VOCAB_SIZE,
    compiler,
    is_valid,
    plain_ids,
    start,
    stop_ids,
    token_id,
    walk,
)

SCHEMAS = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "count": {"type": "integer", "minimum": -3, "maximum": 1200},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
            "kind": {"enum": ["a", "b c", 3, None]},
            "deep": {"$ref": "#/$defs/point"},
        },
        "required": ["name", "deep"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}},
                "required": ["x", "on"],
                "additionalProperties": False,
            }
        },
    },
    "array": {
        "type": "array",
        "items": {"anyOf": [{"type": "integer"}, {"type": "null"}, {"const": "x"}]},
        "minItems": 2,
        "maxItems": 4,
    },
    "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]+$", "maxLength": 9},
    "map": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "additionalProperties": {"type": "integer", "maximum": 99, "minimum": 0},
    },
}
REGEXES = [
    r"[a-c]{2,5}",
    r"([0-9]{2}-){1,3}x?",
    r"(GET|PUT|POST) /[a-z]+(/[a-z]+)?( HTTP/1\.[01])?",
    r"a\/b|/c",
    "x\ny*",
]


def text_of(ids: list[int]) -> str:
    return nano().decode(ids)


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_way_through_a_schema_is_valid(name):
    schema, ended = SCHEMAS[name], 0
    for seed in range(12):
        ids = walk(start(json_schema=schema), seed)
        if ids is not None:
            ended += 1
            value = json.loads(text_of(ids[:-1]))
            assert is_valid(value, schema), value
    assert ended >= 10


@pytest.mark.parametrize("pattern", REGEXES)
def test_a_mask_is_what_partial_matching_allows(pattern):
    """Both ways: nothing too much is allowed, and nothing too little."""
    names = {i: nano().decode([i]) for i in range(nano().vocab_size)}
    for seed in range(2):
        constraint, done = start(regex=pattern), []
        ids = walk(start(regex=pattern), seed)
        assert ids is not None
        assert re.fullmatch(pattern, text_of(ids[:-1]))
        for token in ids:
            allowed_W = constraint.allowed()
            assert allowed_W is not None
            got = set(allowed_W.nonzero().flatten().tolist())
            before = text_of(done)
            expected = {
                i
                for i, text in names.items()
                if i not in nano().control_ids
                and regex.fullmatch(pattern, before + text, partial=True)
            }
            if re.fullmatch(pattern, before):
                expected |= set(stop_ids())
            if len(got) == 1 and not got & set(stop_ids()):
                # Only one text can follow: the id is the one that the tokenizer would take.
                longest = max((names[i] for i in expected), key=len)
                assert got <= expected and all(longest.startswith(names[i]) for i in expected)
            else:
                assert got == expected
            if token not in stop_ids():
                constraint.append(token)
                done.append(token)


FORMS_OF_TAGS = {
    "regex": lambda tag: {"regex": f"{re.escape(tag)}[ab]{{2}}{re.escape(tag)}"},
    "choice": lambda tag: {"regex": f"({re.escape(tag)}|x{re.escape(tag)}y)"},
    "const": lambda tag: {"json_schema": {"const": tag}},
    "enum": lambda tag: {"json_schema": {"enum": [tag, f"x{tag}{tag}", 5]}},
    "pattern": lambda tag: {
        "json_schema": {"type": "string", "pattern": f"^{re.escape(tag)}[ab]{re.escape(tag)}$"}
    },
    "key": lambda tag: {
        "json_schema": {
            "type": "object",
            "properties": {tag: {"type": "boolean"}},
            "required": [tag],
            "additionalProperties": False,
        }
    },
    "lark": lambda tag: {"grammar": f"start: {json.dumps(tag)} /[ab]/ {json.dumps('z' + tag)}"},
}
CONTROL = sorted(nano().control_ids)


@pytest.mark.parametrize("form", FORMS_OF_TAGS)
@pytest.mark.parametrize("tag", [nano().id_to_token(i) for i in CONTROL])
def test_text_that_spells_a_tag_is_written_in_ordinary_tokens(form, tag):
    for seed in range(3):
        ids = walk(start(**FORMS_OF_TAGS[form](tag)), seed)
        assert ids is not None and ids[-1] in stop_ids()
        assert not set(ids[:-1]) & nano().control_ids
        assert tag in text_of(ids[:-1]) or text_of(ids[:-1]) == "5"


def test_free_text_has_no_control_tokens():
    for fields in ({"regex": "(?s:.*)x"}, {"json_schema": {"type": "string"}}):
        constraint = start(**fields)
        if "json_schema" in fields:
            constraint.append(token_id('"'))
        allowed_W = constraint.allowed()
        assert allowed_W is not None and allowed_W[token_id("<")]
        assert not allowed_W[CONTROL].any() and not allowed_W[nano().vocab_size :].any()


def test_tags_have_names_in_a_grammar():
    ids = walk(start(grammar='start: <think> "</think>" </think>'), 0)
    assert ids is not None and ids[0] == token_id("<think>") and ids[-2] == token_id("</think>")
    assert text_of(ids[1:-2]) == "</think>" and not set(ids[1:-2]) & nano().control_ids


def test_a_token_that_is_refused_is_an_error():
    constraint = start(regex="ab")
    with pytest.raises(ConstraintError, match=r"^id 5 is not in the grammar$"):
        constraint.append(5)


def test_a_limit_reached_by_a_token_is_an_error_of_one_line():
    constraint = start(regex="[bc]a{300000}")
    message = "^the grammar cannot go on: lexer error: too many expressions constructed$"
    constraint.append(token_id("b"))
    assert constraint.allowed() is not None
    with pytest.raises(ConstraintError, match=message):
        constraint.append(nano().encode("aa")[0])
    assert start(regex="[bc]a{300000}").allowed() is not None  # another is not the worse for it


def test_characters_of_several_tokens():
    ids = walk(start(regex="[é☃]{3}"), 1)
    assert ids is not None and len(ids) > 4
    assert re.fullmatch("[é☃]{3}", text_of(ids[:-1]))


def test_a_grammar():
    lark = 'start: "(" start ")" | WORD\nWORD: /[xy]/'
    texts = {text_of((walk(start(grammar=lark), seed) or [])[:-1]) for seed in range(20)}
    assert len(texts) > 2
    for text in texts:
        depth = text.count("(")
        assert re.fullmatch(rf"\({{{depth}}}[xy]\){{{depth}}}", text)


def test_drafts_are_looked_at_and_forgotten():
    constraint, ids = start(regex="abc(de|fg)"), nano().encode
    before = constraint.allowed()
    assert before is not None
    ahead = constraint.allowed([token_id("a"), token_id("b")])
    assert ahead is not None and ahead[token_id("c")] and not ahead[token_id("a")]
    for refused in ([token_id("b")], [token_id("a"), stop_ids()[0]], [*ids("abcde"), 5]):
        assert constraint.allowed(refused) is None
    after = constraint.allowed()
    assert after is not None and after.equal(before)
    for token in ids("abcde"):
        constraint.append(token)
    last = constraint.allowed()
    assert last is not None and last.nonzero().flatten().tolist() == sorted(stop_ids())
    constraint.append(stop_ids()[0])


def test_a_constraint_is_not_shared():
    first, second = start(regex="[ab]c"), start(regex="[ab]c")
    first.append(token_id("a"))
    mask = second.allowed()
    assert mask is not None and mask[token_id("b")] and not mask[token_id("c")]


def test_stop_ids_are_the_completions_own():
    def stops(**fields) -> list[int]:
        constraint = start(regex="a", **fields)
        constraint.append(token_id("a"))
        mask = constraint.allowed()
        assert mask is not None
        return mask.nonzero().flatten().tolist()

    assert stops() == sorted(stop_ids())
    assert stops(stop_token_ids=[77]) == sorted([77, *stop_ids()])
    assert stops(stop_token_ids=[77, 4132], ignore_eos=True) == [77, 4132]
    constraint = start(regex="[ab]{2}", stop_token_ids=[token_id("a")])
    for _ in range(2):
        mask = constraint.allowed()
        assert mask is not None and not mask[token_id("a")] and mask[token_id("b")]
        constraint.append(token_id("b"))
    mask = constraint.allowed()
    assert mask is not None and mask.nonzero().flatten().tolist() == sorted(
        [token_id("a"), *stop_ids()]
    )
    with pytest.raises(ValueError, match=r"^regex: ignore_eos leaves no id"):
        start(regex="a", ignore_eos=True)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"regex": "("}, "^regex: .*unclosed group$"),
        ({"regex": "(?=a)b"}, "^regex: "),
        ({"json_schema": {"type": "objct"}}, "^json_schema: .*Invalid type: objct$"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "^json_schema: .*uniqueItems"),
        ({"json_schema": {"x-guidance": 3}}, "^json_schema: "),
        ({"grammar": "begin: /a/"}, "^grammar: .*start"),
        ({"json_schema": {"$ref": "#"}}, "^json_schema: no text fits it$"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "^json_schema: .*unclosed group$"),
        ({"regex": r"[^\s\S]"}, "^regex: no text fits it$"),
        ({"regex": "(" + "a" * 5000}, "^regex: .*a \\.\\.\\. error: unclosed group$"),
    ],
)
def test_what_is_no_grammar_is_said(fields, message):
    with pytest.raises(ValueError, match=message) as said:
        start(**fields)
    assert "\n" not in str(said.value) and len(str(said.value)) < 400
    assert start(regex="a").allowed() is not None


def test_white_space_between_the_tokens_of_json_is_bounded():
    constraint = start(json_schema={"type": "array", "items": {"type": "null"}})
    for token in [token_id("["), token_id("Ċ"), *[token_id("Ġ")] * 32]:
        constraint.append(token)
    mask = constraint.allowed()
    assert mask is not None and mask[token_id("]")]
    assert not mask[token_id("Ġ")] and not mask[token_id("Ċ")]


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install '\.\[structured\]' -c constraints"):
        ConstraintCompiler(nano().to_json(), plain_ids, VOCAB_SIZE, stop_ids())


def test_a_tokenizer_that_cannot_be_used_is_said():
    with pytest.raises(ValueError, match=r"^llguidance cannot use this tokenizer"):
        ConstraintCompiler("{}", plain_ids, VOCAB_SIZE, stop_ids())


def test_without_a_constraint_there_is_none():
    assert compiler().start(SamplingParams().resolve({})) is None
