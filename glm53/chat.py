"""One chat reply being generated: deltas of a completion, parted into reasoning, content, calls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from glm53.parsing import ChatParser, Parsed, ParsedDelta, ToolCall
from glm53.request import Completion, Delta
from glm53.sampling import SamplingParams
from glm53.tokenizer import StopStrings, Tokenizer


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
    """Deltas of one completion in, those of a reply out. params: resolved; their stop strings must
    not be looked for elsewhere, or they would also end the reasoning."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Iterable[Mapping[str, Any]] | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = ChatParser(tokenizer, tools, prompt_ids)
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
