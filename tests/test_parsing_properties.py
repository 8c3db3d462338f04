"""Properties of the reply parser: cuts, lost text, and what the template wrote comes back."""

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm53.parsing import ChatParser, Parsed
from tests.chats import TOOLS, assistant, call, nano, user

TAGS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
TAG_IDS = [token_id for tag in TAGS if (token_id := nano().token_to_id(tag)) is not None]
PROMPTS = ["<|user|>q<|assistant|><think>", "<|user|>q<|assistant|><think></think>"]
WORDS = [
    "now",
    "search",
    "query",
    "limit",
    " ",
    "\n",
    "3",
    "<",
    "</",
    "think>",
    "é中",
    "\N{GRINNING FACE}",
]
REPLIES = st.lists(st.sampled_from([*TAGS, *WORDS]) | st.text(max_size=3), max_size=25)
CALL = "<tool_call>search<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>"


def _cut(sequence: Any, cuts: list[int]) -> list[Any]:
    bounds = sorted({0, len(sequence), *(cut % (len(sequence) + 1) for cut in cuts)})
    return [sequence[a:b] for a, b in itertools.pairwise(bounds)]


def _collect(parser: ChatParser, chunks: list[Any], stopped: bool = True) -> Parsed:
    """The reply put together from its deltas, which must be what the parser says it was."""
    push = parser.push_text if chunks and isinstance(chunks[0], str) else parser.push
    deltas = [push(chunk) for chunk in chunks]
    deltas.append(parser.finish(stopped))
    collected = Parsed(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple(tool_call for delta in deltas for tool_call in delta.tool_calls),
    )
    assert collected == parser.parsed
    return collected


@settings(max_examples=150)
@given(REPLIES, st.lists(st.integers(0, 200)), st.sampled_from(PROMPTS), st.booleans())
@example(["a", "</think>", "b", CALL, CALL], list(range(200)), PROMPTS[0], True)
@example(
    ["<tool_call>", "f", "\n", "g", "</tool_call>", "</think>"], [11, 12, 13], PROMPTS[0], True
)
def test_cuts_of_text_do_not_matter(pieces, cuts, prompt, stopped):
    reply = "".join(pieces)
    whole = _collect(ChatParser(None, TOOLS, prompt), [reply], stopped)
    assert _collect(ChatParser(None, TOOLS, prompt), _cut(reply, cuts), stopped) == whole
    assert _collect(ChatParser(None, TOOLS, prompt), list(reply), stopped) == whole


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(TAG_IDS) | st.integers(0, len(nano()) + 5), max_size=40),
    st.lists(st.integers(0, 200)),
    st.sampled_from(PROMPTS),
)
@example(nano().encode("a</think>b" + CALL * 2), list(range(200)), PROMPTS[0])
def test_cuts_of_ids_do_not_matter(ids, cuts, prompt):
    prompt_ids = nano().encode(prompt)
    whole = _collect(ChatParser(nano(), TOOLS, prompt_ids), [ids])
    assert _collect(ChatParser(nano(), TOOLS, prompt_ids), _cut(ids, cuts)) == whole
    assert _collect(ChatParser(nano(), TOOLS, prompt_ids), [[i] for i in ids]) == whole


@settings(max_examples=100)
@given(REPLIES, st.sampled_from(PROMPTS))
@example(["a</think>b", CALL, "c"], PROMPTS[0])
def test_ids_and_text_agree(pieces, prompt):
    """Encoding makes a token of every tag, so both parsers see the same tags."""
    reply = "".join(pieces)
    by_text = _collect(ChatParser(None, TOOLS, prompt), [reply])
    by_id = _collect(ChatParser(nano(), TOOLS, nano().encode(prompt)), [nano().encode(reply)])
    assert by_id == by_text


NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,10}", fullmatch=True)
TYPED: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(max_size=8) | st.sampled_from([*TAGS[:-1], "3", "null", ' "x" ', "<|user|>"]),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.text(max_size=3) | st.integers() | st.none(), max_size=3),
    "object": st.dictionaries(st.text(max_size=3), st.booleans(), max_size=3),
}
ARGUMENTS = st.dictionaries(
    NAMES,
    st.one_of([st.tuples(st.just(kind), values) for kind, values in TYPED.items()]),
    max_size=4,
)


@settings(max_examples=100)
@given(
    reasoning=st.text(max_size=20).map(str.strip),
    content=st.text(max_size=20).map(str.strip),
    calls=st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3, unique_by=lambda c: c[0]),
    size=st.integers(1, 9),
)
def test_what_the_template_writes_comes_back(reasoning, content, calls, size):
    tools = [
        {
            "name": name,
            "parameters": {"properties": {key: {"type": kind} for key, (kind, _) in typed.items()}},
        }
        for name, typed in calls
    ]
    values = [(name, {key: value for key, (_, value) in typed.items()}) for name, typed in calls]
    message = assistant(
        content,
        reasoning_content=reasoning,
        tool_calls=[call(name, arguments) for name, arguments in values],
    )
    prompt = nano().encode_chat([user("q")])
    whole = nano().encode_chat([user("q"), message], add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    reply = whole[len(prompt) :]
    chunks = [reply[i : i + size] for i in range(0, len(reply), size)]
    parsed = _collect(ChatParser(nano(), tools, prompt), chunks)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == values
    # 1, 1.0 and True are equal: not so as JSON.
    assert json.dumps([c.arguments for c in parsed.tool_calls]) == json.dumps(
        [arguments for _, arguments in values]
    )


def _without_think(text: str) -> str:
    while "<think>" in text or "</think>" in text:
        text = text.replace("<think>", "").replace("</think>", "")
    return text


def _fuzz(seed: int, streams: int) -> int:
    """Random replies, cut at random. All text must arrive, in its order: calls with their tags,
    tags of reasoning or not. Returns how many calls were found."""
    rng = random.Random(seed)
    tokenizer = nano()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = [i for word in WORDS for i in tokenizer.encode(word, allow_special=False)]
    call_ids = tokenizer.encode(CALL)
    calls = 0
    for _ in range(streams):
        tags, words, skew = TAG_IDS + [call_ids[0]] * 2, texts, rng.random()
        ids: list[int] = []
        for _ in range(rng.randrange(25)):
            kind = rng.random()
            if kind < 0.4 * skew:
                ids.append(rng.choice(tags))
            elif kind < 0.1 + 0.4 * skew:
                start = rng.randrange(3)
                ids += call_ids[start // 2 : len(call_ids) - rng.randrange(3)]
            elif kind < 0.8:
                ids.append(rng.choice(words))
            else:
                ids.append(rng.randrange(len(tokenizer) + 3))
        parser = ChatParser(tokenizer, TOOLS, rng.choice(prompts))
        arrived: list[str] = []
        for token_id in ids:
            delta = parser.push([token_id])
            arrived += [delta.reasoning, delta.content, *(c.raw for c in delta.tool_calls)]
        delta = parser.finish(rng.random() < 0.5)
        arrived += [delta.reasoning, delta.content, *(c.raw for c in delta.tool_calls)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert _without_think("".join(arrived)) == _without_think(text), ids
        calls += len(parser.parsed.tool_calls)
    return calls


def test_no_text_is_lost():
    assert _fuzz(seed=0, streams=2_000) > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_no_text_is_lost_in_many_streams(seed):
    assert _fuzz(seed, streams=10_000) > 1_000
