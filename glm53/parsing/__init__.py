"""From what a model wrote to reasoning, content and tool calls."""

from glm53.parsing.arguments import typed_arguments
from glm53.parsing.reply import ChatParser, Parsed, ParsedDelta, ToolCall

__all__ = ["ChatParser", "Parsed", "ParsedDelta", "ToolCall", "typed_arguments"]
