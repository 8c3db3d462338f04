"""Types for the arguments of a tool call, which the model writes as bare text.

The format writes strings as they are and everything else as JSON, and says not which it was. The
tool's JSON schema does: `5` is a number for an integer and a text for a string.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
# Keywords that imply a type where none is given.
_IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}


def typed_arguments(arguments: Mapping[str, str], schema: Any) -> dict[str, Any]:
    """The arguments with values of the types that `schema` declares.

    schema: JSON schema of the tool's parameters; None for a tool that is not known.

    A value becomes what it is as JSON if the schema allows a value of that type (`type` also as a
    list, `enum`, `const`, `anyOf`, `oneOf`, `allOf`, local `$ref`; no other keyword is checked);
    `5.0` may be an integer. Everything else stays text: strings (`001`, `"quoted"`), what is no
    JSON or does not fit (`NaN`, `five`), and keys about whose type nothing is said. Where string
    and another type are allowed, the other is tried first.
    """
    return {
        key: _typed(text, _property(schema, key, schema), schema) for key, text in arguments.items()
    }


def _typed(text: str, schema: Any, root: Any) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        return text
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return next((v for v in (value, whole) if _allows(schema, v, root, ())), text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _property(schema: Any, key: str, root: Any, seen: tuple[str, ...] = ()) -> Any:
    """Schema of one argument, None where nothing is said about it."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    parts = []
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen += (reference,)
        parts.append(resolve_reference(reference, root))
    for keyword in ("allOf", "anyOf", "oneOf"):
        if isinstance(members := schema.get(keyword), list):
            parts += members
    found = [_property(part, key, root, seen) for part in parts]
    return next((f for f in found if f is not None), schema.get("additionalProperties"))


def _allows(schema: Any, value: Any, root: Any, seen: tuple[str, ...]) -> bool | None:
    """Whether a value of this type fits; None where the schema does not speak about types."""
    if not isinstance(schema, Mapping):
        return None
    verdicts: list[bool | None] = []
    types = schema.get("type", next((t for k, t in _IMPLIED.items() if k in schema), None))
    if types is not None:
        names = types if isinstance(types, list) else [types]
        verdicts.append(any(fits_type(value, name) for name in names))
    if isinstance(choices := schema.get("enum"), list):
        verdicts.append(any(_same(value, choice) for choice in choices))
    if "const" in schema:
        verdicts.append(_same(value, schema["const"]))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        target = resolve_reference(reference, root)
        verdicts.append(_allows(target, value, root, (*seen, reference)))
    if isinstance(members := schema.get("allOf"), list):
        verdicts += [_allows(member, value, root, seen) for member in members]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(members := schema.get(keyword), list):
            anyone = [_allows(member, value, root, seen) for member in members]
            verdicts.append(True if True in anyone else None if None in anyone else False)
    said = [verdict for verdict in verdicts if verdict is not None]
    return all(said) if said else None


def fits_type(value: Any, name: Any) -> bool:
    """Whether a value is of the type that JSON schema calls `name`; here 5.0 is no integer."""
    kind = TYPES.get(name) if isinstance(name, str) else None
    if kind is None or (isinstance(value, bool) and name != "boolean"):
        return False
    return isinstance(value, kind)


def _same(value: Any, choice: Any) -> bool:
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)


def resolve_reference(reference: str, root: Any) -> Any:
    """What a local JSON pointer (`#/$defs/name`) points at, None where that is nothing."""
    if not reference.startswith("#"):
        return None
    target = root
    for part in reference[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or part not in target:
            return None
        target = target[part]
    return target
