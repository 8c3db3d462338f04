"""From what a model wrote to reasoning, content and tool calls; and what it may write, as a
grammar."""

from glm53.parsing.arguments import typed_arguments
from glm53.parsing.grammar import reply_grammar
from glm53.parsing.reply import ChatParser, Parsed, ParsedDelta, ToolCall

__all__ = ["ChatParser", "Parsed", "ParsedDelta", "ToolCall", "reply_grammar", "typed_arguments"]
