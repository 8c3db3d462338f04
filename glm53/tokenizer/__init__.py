"""Text and ids: tokenizer, chat template, incremental detokenising, stop strings."""

from glm53.tokenizer.stopping import StopStrings, stop_token_ids
from glm53.tokenizer.template import ChatTemplate
from glm53.tokenizer.text import IncrementalDetokenizer, Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopStrings",
    "Tokenizer",
    "stop_token_ids",
]
