"""What ends a completion: stop ids, and stop strings in streamed text."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm53.config import GLM53Config
from glm53.tokenizer.text import Tokenizer


class StopStrings:
    """Streaming search for stop strings in text deltas.

    Text is held back only while it may be the beginning of a stop string: the longest suffix that
    is a proper prefix of one. The match that ends first wins; of several that end at the same
    character, the longest. So the result does not depend on how the text was cut into deltas.

    Args:
        stops: non-empty strings; no string at all means that everything passes at once.
        include_stop: whether the emitted text ends with the stop string or just before it.

    Raises:
        ValueError: an empty stop string, or one `str` in place of a sequence.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop={stops!r}: must be a sequence of non-empty strings")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=1)
        self._include_stop = include_stop
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Add `text`: what may be shown now, and the stop string that was completed, if one was.

        After a match the rest of `text` is dropped, and nothing may be pushed any more.
        """
        assert not self._stopped, "text pushed after a stop string"
        text = self._held + text
        ends = [(text.find(s) + len(s), -len(s), s) for s in self._stops if s in text]
        if ends:
            end, negative_length, stop = min(ends)
            self._held, self._stopped = "", True
            return text[: end if self._include_stop else end + negative_length], stop
        start = next(
            i
            for i in range(max(0, len(text) - self._longest + 1), len(text) + 1)
            if i == len(text) or any(s.startswith(text[i:]) for s in self._stops)
        )
        self._held = text[start:]
        return text[:start], None

    def flush(self) -> str:
        """The held text, when generation ended for another reason. Nothing after a match."""
        held, self._held = self._held, ""
        return held


def stop_token_ids(
    config: GLM53Config,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
    extra: Iterable[int] = (),
) -> frozenset[int]:
    """Every id that ends a completion: the union of all that name one.

    Args:
        config: its `eos_token_id`.
        generation_config: generation_config.json as a dict; `eos_token_id` an int, a list or null.
        tokenizer: its own end id.
        extra: the caller's ids.

    Raises:
        ValueError: an id that is not an integer in the vocabulary, with its source.
    """
    named = (generation_config or {}).get("eos_token_id")
    sources = {
        "eos_token_id": config.eos_token_id,
        "generation_config.eos_token_id": () if named is None else named,
        "tokenizer.eos_token_id": tokenizer.eos_token_ids if tokenizer else (),
        "stop_token_ids": extra,
    }
    ids: set[int] = set()
    for name, values in sources.items():
        for value in values if isinstance(values, Iterable) else [values]:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r}: must be a token id")
            if not 0 <= value < config.vocab_size:
                raise ValueError(f"{name}={value!r}: must be below {config.vocab_size}")
            ids.add(value)
    return frozenset(ids)
