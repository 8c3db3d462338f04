"""Conversations, tools and the embedded model's tokenizer, for tests of templates and parsers."""

from functools import cache
from pathlib import Path
from typing import Any

import glm53
from glm53.tokenizer import Tokenizer

NANO = Path(glm53.__file__).parent / "data" / "nano"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds <b>text</b> in „Müllers“ files",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "flags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "later", "defer_loading": True}},
]


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


TWO_TURNS = [
    user("one"),
    assistant("first", reasoning_content="thought one"),
    user("two"),
    assistant("\n second ", reasoning_content="\nthought two\n"),
]

# name: messages, tools, variables
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], Any, dict[str, Any]]] = {
    "plain": ([user("hi")], None, {}),
    "system": ([{"role": "system", "content": "Be brief."}, user("hi\n\nthere ")], None, {}),
    "effort-low": ([user("hi")], None, {"reasoning_effort": "low"}),
    "effort-high": ([user("hi")], None, {"reasoning_effort": "high"}),
    "effort-medium": ([user("hi")], None, {"reasoning_effort": "medium"}),
    "non-ascii": ([user('naïve 中文 😀‍👩 \\ " <b>&amp;</b>')], TOOLS, {}),
    "parts": ([user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])], None, {}),
    "kept": (TWO_TURNS, None, {}),
    "kept-explicitly": ([*TWO_TURNS, user("three")], None, {"clear_thinking": False}),
    "cleared": ([*TWO_TURNS, user("three")], None, {"clear_thinking": True}),
    "cleared-but-last": (TWO_TURNS, None, {"clear_thinking": True}),
    "inline-thinking": (
        [user("q"), assistant("<think>\nr <think> s\n</think>\n\nanswer"), user("more")],
        None,
        {},
    ),
    "tool-loop": (
        [
            user("find"),
            assistant(
                None,
                reasoning_content="I search.",
                tool_calls=[
                    call("search", {"query": "ä 中", "limit": 3, "flags": ["i", "ß"]}),
                    call("now", {}),
                ],
            ),
            tool("first result"),
            tool("second result"),
            assistant("Searching again", tool_calls=[call("search", {"query": "", "limit": None})]),
            tool("third"),
        ],
        TOOLS,
        {"reasoning_effort": "high"},
    ),
    "bare-tools": ([user("x")], [TOOLS[0]["function"]], {}),
}


@cache
def nano() -> Tokenizer:
    return Tokenizer.from_pretrained(NANO)
