"""One chat reply being generated: deltas of a completion, parted into reasoning, content, calls."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from glm53.parsing import ChatParser, Parsed, ParsedDelta, ToolCall, reply_grammar
from glm53.request import Completion, Delta
from glm53.sampling import SamplingParams, constraint_of
from glm53.tokenizer import StopStrings, Tokenizer

ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatCompletion(Completion):
    """A finished reply: `text` is all of it, tags included; reasoning, content and tool_calls are
    its parts. Stop strings are looked for in the content only, and cut nothing but the content."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The reply as a message of the conversation that goes on."""
        return Parsed(self.reasoning, self.content, self.tool_calls).message()


@dataclass(frozen=True, slots=True)
class ChatDelta(Delta):
    """What one step added to a reply. A tool call comes whole, when it is complete."""

    completion: ChatCompletion | None = None
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ChatReply:
    """Deltas of one completion in, those of a reply out. params: resolved; check_grammar:
    `Engine.check_grammar`.

    `params`, the attribute, is what the completion is to be sampled with: without stop strings,
    which would also end the reasoning, and with the grammar of the whole reply if there is one.
    ValueError: tools, tool_choice or params that cannot be followed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Iterable[Mapping[str, Any]] | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tool_choice: ToolChoice = "auto",
        check_grammar: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        tools = list(tools or ())
        self._parser = ChatParser(tokenizer, tools, prompt_ids)
        in_reasoning = self._parser.in_reasoning
        self.params = _sampled_with(
            params, tokenizer, tools, tool_choice, in_reasoning, check_grammar
        )
        self._stop_strings = StopStrings(tuple(params.stop or ()), bool(params.include_stop))
        self._min_tokens = params.min_new_tokens or 0
        self._num_tokens = 0
        self._content: list[str] = []
        self.stop: str | None = None
        """The stop string that was completed: nothing after it counts."""

    def add(self, delta: Delta) -> ChatDelta:
        """delta: the next one. The last one's completion becomes the reply's."""
        completion, token_ids = delta.completion, delta.token_ids
        if completion is not None and isinstance(completion.stop_reason, int):
            token_ids = token_ids[:-1]  # which ended the reply
        parts: list[ParsedDelta] = []
        for token_id in token_ids:
            if self.stop is None:
                self._num_tokens += 1
                parts.append(self._cut(self._parser.push([token_id])))
        if completion is not None and self.stop is None:
            self._num_tokens += len(delta.token_ids) - len(token_ids)
            parts.append(self._cut(self._parser.finish(completion.finish_reason == "stop")))
            if self.stop is None and (held := self._stop_strings.flush()):
                self._content.append(held)
                parts.append(ParsedDelta(content=held))
        return ChatDelta(
            delta.request_id,
            delta.index,
            delta.token_ids,
            delta.text,
            delta.logprobs,
            None if completion is None else self._completion(completion),
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            tuple(call for part in parts for call in part.tool_calls),
        )

    def _cut(self, part: ParsedDelta) -> ParsedDelta:
        """With the content that no stop string begins or has ended."""
        content = part.content
        if self._num_tokens >= self._min_tokens:
            content, self.stop = self._stop_strings.push(content)
        self._content.append(content)
        return ParsedDelta(part.reasoning, content, part.tool_calls)

    def _completion(self, completion: Completion) -> ChatCompletion:
        values = {f.name: getattr(completion, f.name) for f in fields(Completion)}
        if self.stop is not None:
            token_ids, logprobs = completion.token_ids[: self._num_tokens], completion.logprobs
            values |= {
                "finish_reason": "stop",
                "stop_reason": self.stop,
                "token_ids": token_ids,
                "text": self._tokenizer.decode(token_ids, skip_special_tokens=True),
                "logprobs": logprobs and logprobs[: self._num_tokens],
            }
        parsed = self._parser.parsed
        return ChatCompletion(
            **values,
            reasoning=parsed.reasoning,
            content="".join(self._content),
            tool_calls=parsed.tool_calls,
        )


def _sampled_with(
    params: SamplingParams,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    in_reasoning: bool,
    check_grammar: Callable[[str], None] | None,
) -> SamplingParams:
    params = replace(params, stop=())
    constraint = constraint_of(params)
    callable_tools = _callable_tools(tools, tool_choice)
    is_forced = tool_choice not in ("auto", "none")
    if is_forced and constraint is not None:
        raise ValueError(
            f"{constraint[0]} is for content, and tool_choice={tool_choice!r} asks for a call"
        )
    if tool_choice == "none":
        call_id = tokenizer.token_to_id("<tool_call>")
        if call_id is None:
            raise ValueError("tool_choice='none': the tokenizer has no token <tool_call> to ban")
        params = replace(params, bad_words=(*(params.bad_words or ()), (call_id,)))
    if constraint is None and not is_forced:
        return params
    grammar = reply_grammar(
        tokenizer,
        in_reasoning=in_reasoning,
        content=None if constraint is None else constraint[1],
        tools=callable_tools,
        several_calls=isinstance(tool_choice, str),
        check=check_grammar,
    )
    tags = [i for i in params.stop_token_ids or () if f"<[{i}]>" in grammar]
    if tags:  # a stop id does not come before the grammar may end
        raise ValueError(f"stop_token_ids: {tags} are tags within the reply that is asked for")
    return replace(params, json_schema=None, regex=None, grammar=grammar)


def _callable_tools(
    tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice
) -> Sequence[Mapping[str, Any]]:
    """The tools that a constrained reply may call."""
    named = {tool.get("function", tool)["name"]: tool for tool in tools}
    # The template does not show these until somebody asks for them by name.
    shown = [
        tool
        for tool in named.values()
        if not (tool.get("defer_loading") or tool.get("function", tool).get("defer_loading"))
    ]
    match tool_choice:
        case "none":
            return ()
        case "auto":
            return shown
        case "required" if shown:
            return shown
        case "required":
            raise ValueError("tool_choice='required': there are no tools")
        case {"type": "function", "function": {"name": name, **others}} if not others:
            if name not in named:
                raise ValueError(f"tool_choice: {name!r} is none of the tools {sorted(named)}")
            return (named[name],)
    raise ValueError(
        f"tool_choice={tool_choice!r}: allowed is 'auto', 'none', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}"
    )
