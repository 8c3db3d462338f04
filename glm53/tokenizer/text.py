"""Text to ids and back: the checkpoint's own tokenizer, and incremental detokenising.

The only file that imports transformers, and only where a tokenizer is loaded. Everything here is
host-side string work; nothing is read from a network and no code of a checkpoint runs.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm53.tokenizer.template import ChatTemplate, chat_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What decoders put in place of bytes that are not (yet) UTF-8.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A checkpoint's tokenizer.json, and its chat template, behind the calls this library needs.

    `transformers_tokenizer` stays reachable for whatever else transformers does.
    """

    def __init__(self, transformers_tokenizer: "PreTrainedTokenizerFast") -> None:
        self.transformers_tokenizer = transformers_tokenizer
        self._backend = transformers_tokenizer.backend_tokenizer
        self._plain = None
        added = transformers_tokenizer.added_tokens_decoder
        self.control_ids: frozenset[int] = frozenset(added)
        """Ids of every added token: those hidden by `skip_special_tokens`, and markup (`<think>`)
        that tokenizer.json adds as visible text."""
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        """Ids that `skip_special_tokens` leaves out."""

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Tokenizer":
        """Load `folder/tokenizer.json`, with tokenizer_config.json where there is one.

        The class that tokenizer_config.json names is not looked up: tokenizer.json is complete
        by itself, and so an unknown or remote class neither fails nor runs.

        Raises:
            FileNotFoundError: no tokenizer.json in `folder`.
            ValueError: the files are there and cannot be read as a tokenizer.
        """
        if not (Path(folder) / "tokenizer.json").is_file():
            raise FileNotFoundError(f"no tokenizer.json in {str(folder)!r}")
        from transformers import PreTrainedTokenizerFast

        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the Rust parser raises bare Exception
            raise ValueError(f"tokenizer in {str(folder)!r} cannot be read: {error}") from error
        return cls(loaded)

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of named ids. The embedding may have more rows than that."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end id, if any. Decoding stops on `stop_token_ids`, a wider set."""
        eos = self.transformers_tokenizer.eos_token_id
        return frozenset({eos} if isinstance(eos, int) else ())

    def token_to_id(self, token: str) -> int | None:
        """Id of the token spelled `token`, None where the vocabulary has none."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Spelling of `token_id` in tokenizer.json, None for an unused embedding row."""
        return self._backend.id_to_token(token_id)

    def to_json(self) -> str:
        """The text of a tokenizer.json, with what tokenizer_config.json adds."""
        data = json.loads(self._backend.to_str())
        return json.dumps(data | {"truncation": None, "padding": None})

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Ids of `text`.

        With `allow_special` this is transformers' `tokenizer.encode(text)`: control tokens spelled
        out in the text become their ids, and whatever tokenizer.json's post-processor adds is
        added (nothing, for GLM-5.x). Without it no added token is looked for in the text or added
        to it: what a user typed into a chat stays text, even where it is spelled like a role
        marker or like markup (`<think>`), special or not.

        Raises:
            ValueError: `text` is not a str, or no valid Unicode.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={text!r}: must be a str, not {type(text).__name__}")
        _check_unicode(text)
        if allow_special:
            return self._backend.encode(text).ids
        return self._without_control_tokens().encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of `ids`. Ids that name no token (unused embedding rows) give no text.

        Bytes that are not UTF-8 become U+FFFD.
        """
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, prompt_tail: Sequence[int] = ()) -> "IncrementalDetokenizer":
        """A new detokeniser of what comes after `prompt_tail`. Special tokens give no text."""
        return IncrementalDetokenizer(self, prompt_tail=prompt_tail)

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's template, None without one: the file chat_template.jinja, else the
        field of tokenizer_config.json (of several by name, the one called "default").

        Raises:
            ValueError: the template is not valid Jinja, or none of several is the default.
        """
        source = self.transformers_tokenizer.chat_template
        if isinstance(source, Mapping):
            if "default" not in source:
                raise ValueError(f'chat_template: none of {sorted(source)} is called "default"')
            source = source["default"]
        return ChatTemplate(source) if source else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the checkpoint's template writes it, ending where a reply begins.

        messages: mappings with `role`, `content` and what else the template knows
        (`reasoning_content`, `tool_calls` with arguments as a mapping or as JSON text). tools:
        mappings in the usual function form. variables: the template's own (`reasoning_effort`,
        `clear_thinking`); those that are None are left out.

        Raises:
            ValueError: there is no template, or it raised an error, or a value is not JSON.
        """
        variables["add_generation_prompt"] = add_generation_prompt
        return self._template().render(chat_inputs(messages, tools, variables), self._constants())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        allow_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Ids of `render_chat`.

        Only control tokens that the template writes become their ids. What is spelled like one in
        messages, tools or variables stays text (but for the tags of inline reasoning, at which the
        template splits an assistant's content), unless `allow_special`. Where nothing is spelled
        so, these are the ids of the rendered text.

        Raises:
            ValueError: as `render_chat`; or typed tokens cannot be told from the template's; or
                the vocabulary makes a control token out of plain text.
        """
        inputs = chat_inputs(
            messages, tools, {**variables, "add_generation_prompt": add_generation_prompt}
        )
        template, constants = self._template(), self._constants()
        if allow_special:
            text, tokens = template.render(inputs, constants), []
        else:
            spellings = map(self.id_to_token, self.control_ids)
            text, tokens = template.render_with_origin(inputs, constants, filter(None, spellings))
        # Added tokens cut a text before it is split into words. So each stretch between two of the
        # template's is encoded by itself, as it is in the whole; most need no look.
        ids: list[int] = []
        encoded = stretch = 0
        has_typed = False
        for start, end, typed in [*tokens, (len(text), len(text), False)]:
            if typed:
                has_typed = True
                continue
            if has_typed:
                ids += self._encode_marked_up(text[encoded:stretch])
                ids += self._encode_typed(text[stretch:start])
                encoded, has_typed = start, False
            stretch = end
        return ids + self._encode_marked_up(text[encoded:])

    def _encode_marked_up(self, text: str) -> list[int]:
        _check_unicode(text)
        # Without what a post-processor would add: a template writes its own first token.
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_typed(self, text: str) -> list[int]:
        ids = self.encode(text, allow_special=False)
        if not self.control_ids.isdisjoint(ids):
            raise ValueError(f"{text!r}: this vocabulary makes a control token out of plain text")
        return ids

    def _template(self) -> ChatTemplate:
        template = self.chat_template
        if template is None:
            raise ValueError(
                "this checkpoint has no chat template: there is no chat_template.jinja, and no "
                "chat_template in tokenizer_config.json"
            )
        return template

    def _constants(self) -> dict[str, Any]:
        return dict(self.transformers_tokenizer.special_tokens_map)

    def _without_control_tokens(self) -> Any:
        """The same tokenizer with no added tokens to look for. Built once, on first use."""
        if self._plain is None:
            data = json.loads(self._backend.to_str())
            data["added_tokens"] = []
            self._plain = type(self._backend).from_str(json.dumps(data))
        return self._plain


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = text[error.start : error.end]
        raise ValueError(
            f"the text is not valid Unicode: {broken!r} at character {error.start} is a lone "
            "surrogate (what Python makes of bytes that are not UTF-8)"
        ) from None


class IncrementalDetokenizer:
    """Ids in, text out, as soon as it is certain; the pieces add up to the decoded whole.

    Decoding id by id is wrong in two ways: a character may be spread over several ids, and a
    token's text may depend on its left neighbour (a leading space, a run of bytes). So a short
    window of ids is decoded again at each step. It starts where an earlier piece ended cleanly,
    and what has been sent of it is known, so a step costs the same at any length. Replacement
    characters at the end are held back: more bytes may turn them into a character. A real U+FFFD
    is sent with the text that follows it, or by `finish`.

    `prompt_tail` (the last few ids of the prompt are enough) is left context: its text is not
    repeated, but a character that it leaves unfinished is sent whole.
    """

    # A valid character needs at most 4 ids, so a window that long is a run of broken bytes.
    _MAX_WINDOW = 32
    _KEPT = 8

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        window = self._visible(prompt_tail)
        cut, unfinished = self._character_bounds(window)
        self._window = window[cut:]
        self._sent = tokenizer.decode(self._window)
        self._clean = len(self._window) - unfinished

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, perhaps none."""
        new = self._visible(ids)
        if not new:
            return ""
        self._window += new
        text = self._tokenizer.decode(self._window)
        settled = text.rstrip(_REPLACEMENT)
        if settled == text:
            delta = self._advance(text)
            self._trim(self._clean)
        elif len(self._window) > self._MAX_WINDOW:
            # UTF-8 resynchronises: only the last replacement can still become a character.
            delta = self._advance(text[:-1])
            self._trim(max(0, len(self._window) - self._KEPT), held=1)
        else:
            delta = self._advance(settled) if settled.startswith(self._sent) else ""
        return delta

    def finish(self) -> str:
        """What is still held back: text that ends within a character, as U+FFFD."""
        return self._advance(self._tokenizer.decode(self._window))

    def _visible(self, ids: Iterable[int]) -> list[int]:
        # A decoder drops such ids itself, but a window of nothing else would give no context.
        name = self._tokenizer.id_to_token
        return [i for i in map(int, ids) if i not in self._skipped and name(i) is not None]

    def _character_bounds(self, ids: list[int]) -> tuple[int, int]:
        """How many ids at the start and at the end of a prompt's tail are parts of characters."""
        if not ids:
            return 0, 0
        # Where the text itself begins with U+FFFD no start looks whole. Then any start will do:
        # only byte-fallback decoders, which spoil a run of bytes as a whole, need a right one.
        for whole_start in (True, False):
            for end, start in itertools.product(range(4), range(4)):
                part = ids[start : max(start, len(ids) - end)]
                text = self._tokenizer.decode(part)
                edges = text[-1:] + (text[:1] if whole_start else "")
                if text and _REPLACEMENT not in edges:
                    return start, end
        # Nothing whole: few ids may all belong to one character that the next ids complete.
        return 0, len(ids) if len(ids) < 4 else 0

    def _advance(self, text: str) -> str:
        """Mark `text` (of the window) as sent, and return the part that was not."""
        sent = self._sent
        if not text.startswith(sent):
            # What was no character at the end of the prompt has become one. Its U+FFFD goes, and
            # where a decoder spoils a whole run of bytes, the end of the whole characters counts.
            while sent.endswith(_REPLACEMENT) and not text.startswith(sent):
                sent = sent[:-1]
            settled = self._tokenizer.decode(self._window[: self._clean])
            sent = max(filter(text.startswith, (sent, settled)), key=len, default=sent)
        if not text.startswith(sent):
            # Byte-fallback decoders take back a whole run of bytes when a bad one follows.
            self._window, self._clean, sent = self._window[self._clean :], 0, ""
            text = self._tokenizer.decode(self._window)
        self._sent = text
        return text[len(sent) :]

    def _trim(self, start: int, held: int = 0) -> None:
        """Drop the window's ids before `start`; of its text the last `held` characters wait."""
        window = self._window[start:]
        text = self._tokenizer.decode(window)
        self._window, self._sent = window, text[: len(text) - held]
        self._clean = 0 if held else len(self._window)
