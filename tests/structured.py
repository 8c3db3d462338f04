"""For the tests of structured output: a validator of JSON schemas written for them, random walks
through a grammar, and the compiler for the embedded model's tokenizer."""

import random
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from glm53 import SamplingParams
from glm53.sampling import Constraint, ConstraintCompiler
from tests.chats import nano

STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
TAGS = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
VOCAB_SIZE = 4133  # more rows than the tokenizer has names

_TYPES: dict[str, Any] = {
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def stop_ids() -> list[int]:
    return [token_id(stop) for stop in STOPS]


def token_id(token: str) -> int:
    found = nano().token_to_id(token)
    assert found is not None
    return found


@cache
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(nano().to_json(), plain_ids, VOCAB_SIZE, stop_ids())


def plain_ids(text: str) -> list[int]:
    return nano().encode(text, allow_special=False)


def start(**fields: Any) -> Constraint:
    constraint = compiler().start(SamplingParams(**fields).resolve({}))
    assert constraint is not None
    return constraint


def is_valid(value: Any, schema: Any, root: Any = None) -> bool:
    """Does `value` fit? Knows the keywords that the tests use, and no others."""
    root = schema if root is None else root
    if isinstance(schema, bool):
        return schema
    return all(_holds(value, key, schema, root) for key in schema)


def _holds(value: Any, keyword: str, schema: dict[str, Any], root: Any) -> bool:
    wanted = schema[keyword]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match keyword:
        case "type":
            return any(_is(value, n) for n in ([wanted] if isinstance(wanted, str) else wanted))
        case "enum":
            return any(type(value) is type(choice) and value == choice for choice in wanted)
        case "const":
            return type(value) is type(wanted) and value == wanted
        case "anyOf":
            return any(is_valid(value, member, root) for member in wanted)
        case "allOf":
            return all(is_valid(value, member, root) for member in wanted)
        case "$ref":
            assert wanted.startswith("#/$defs/")
            return is_valid(value, root["$defs"][wanted.removeprefix("#/$defs/")], root)
        case "minimum":
            return not number or value >= wanted
        case "maximum":
            return not number or value <= wanted
        case "minLength":
            return not isinstance(value, str) or len(value) >= wanted
        case "maxLength":
            return not isinstance(value, str) or len(value) <= wanted
        case "pattern":
            return not isinstance(value, str) or re.search(wanted, value) is not None
        case "minItems":
            return not isinstance(value, list) or len(value) >= wanted
        case "maxItems":
            return not isinstance(value, list) or len(value) <= wanted
        case "items":
            return not isinstance(value, list) or all(is_valid(v, wanted, root) for v in value)
        case "properties":
            return not isinstance(value, dict) or all(
                is_valid(value[key], wanted[key], root) for key in wanted if key in value
            )
        case "required":
            return not isinstance(value, dict) or set(wanted) <= set(value)
        case "additionalProperties":
            known = schema.get("properties", {})
            return not isinstance(value, dict) or all(
                is_valid(value[key], wanted, root) for key in value if key not in known
            )
        case "$defs" | "default" | "title" | "description" | "format":
            return True
    raise AssertionError(f"the validator does not know {keyword}")


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        whole = isinstance(value, int) or (name == "number" and isinstance(value, float))
        return whole and not isinstance(value, bool)
    return isinstance(value, _TYPES[name])


def walk(constraint: Constraint, seed: int, limit: int = 600) -> list[int] | None:
    """Ids of a random way through a grammar, the stop id included; None past `limit`.

    Every allowed id is as likely as any other, but that what closes something is preferred now and
    then: free text would hardly ever end.
    """
    draw, ids = random.Random(seed), []
    closing = {*stop_ids(), *map(token_id, TAGS), token_id("</think>")}
    closing |= {token_id(text) for text in '"]},'}
    while len(ids) < limit:
        allowed_W = constraint.allowed()
        assert allowed_W is not None and len(allowed_W) == VOCAB_SIZE
        allowed: Iterable[int] = allowed_W.nonzero().flatten().tolist()
        preferred = [i for i in allowed if i in closing]
        choices = preferred if preferred and draw.random() < 0.3 else list(allowed)
        assert choices, (ids, nano().decode(ids))
        ids.append(draw.choice(choices))
        if ids[-1] in stop_ids():
            return ids
        constraint.append(ids[-1])
    return None
