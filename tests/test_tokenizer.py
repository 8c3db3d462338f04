"""Tokenizer, incremental detokenising and stop strings, against naive whole-text oracles."""

import json
import time
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from glm53.config import GLM53Config
from glm53.tokenizer import IncrementalDetokenizer, StopStrings, stop_token_ids
from glm53.tokenizer import Tokenizer as OurTokenizer

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"]
MARKUP = ["<think>", "</think>"]
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    alphabet="aé中😀\N{REPLACEMENT CHARACTER} \n‍👩", max_size=30
)
# Bytes as a model may emit them: ends of characters missing, stray continuation bytes.
BYTES = st.lists(st.sampled_from([0x61, 0x20, 0x80, 0xBF, 0xC3, 0xE0, 0xE4, 0xF0, 0x9F, 0x98]))
FAST = settings(max_examples=120, deadline=None)


def _byte_level(folder) -> OurTokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n"] * 4
    backend.train_from_iterator([*corpus, "I said 😀 😁 hello world END stop"] * 3, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(word, special=False, normalized=False) for word in MARKUP])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return OurTokenizer.from_pretrained(folder)


def _sentencepiece_like(folder) -> OurTokenizer:
    """BPE with metaspace words, byte fallback, and the first space stripped when decoding."""
    words = ["▁", "a", "b", "▁a", "▁b", "ab", "</s>", "<unk>"]
    vocab = {word: i for i, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return OurTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> OurTokenizer:
    return _byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> OurTokenizer:
    return _sentencepiece_like(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module", params=[_byte_level, _sentencepiece_like])
def tokenizer(request, tmp_path_factory) -> OurTokenizer:
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def _bytes_to_ids(tokenizer: OurTokenizer, data: list[int]) -> list[int]:
    """One id a byte, past every merge."""
    spelled = {ord(char): char for char in pre_tokenizers.ByteLevel.alphabet() if ord(char) < 256}
    rest = iter(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(spelled.values()), key=ord))
    table = {byte: spelled[byte] if byte in spelled else next(rest) for byte in range(256)}
    ids = [tokenizer.token_to_id(table[byte]) for byte in data]
    assert all(token_id is not None for token_id in ids)
    return [token_id for token_id in ids if token_id is not None]


def _pieces(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.finish()]


CUTS = st.lists(st.integers(0, 3), max_size=80)
ONE_BY_ONE = st.just([1] * 400)


@FAST
@given(text=TEXTS)
def test_encode_and_decode_round_trip(byte_level, text):
    assert byte_level.decode(byte_level.encode(text)) == text


@FAST
@given(text=TEXTS, cuts=CUTS | ONE_BY_ONE)
def test_pieces_add_up_to_the_text(tokenizer, text, cuts):
    ids = tokenizer.encode(text)
    pieces = _pieces(IncrementalDetokenizer(tokenizer), ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids)


@FAST
@given(data=BYTES, cuts=CUTS | ONE_BY_ONE)
def test_pieces_of_broken_bytes_add_up(byte_level, data, cuts):
    ids = _bytes_to_ids(byte_level, data)
    pieces = _pieces(IncrementalDetokenizer(byte_level), ids, cuts)
    assert "".join(pieces) == bytes(data).decode("utf-8", errors="replace")


@FAST
@given(text=TEXTS, cuts=CUTS | ONE_BY_ONE)
def test_text_so_far_is_always_a_prefix_of_the_decoded_ids(byte_level, text, cuts):
    ids, done, sent = byte_level.encode(text), 0, ""
    detokenizer = IncrementalDetokenizer(byte_level)
    for size in [*cuts, len(ids)]:
        sent += detokenizer.push(ids[done : done + size])
        done += size
        assert byte_level.decode(ids[:done]).startswith(sent)
        assert text.startswith(sent)


@FAST
@given(text=TEXTS, at=st.integers(0, 60))
def test_prompt_tail_is_context_and_not_repeated(byte_level, text, at):
    prefix = "ab def"  # so that no cut leaves the prompt empty
    ids = byte_level.encode(prefix + text)
    at = min(at, len(ids))
    shown = byte_level.decode(ids[:at])
    detokenizer = IncrementalDetokenizer(byte_level, prompt_tail=ids[:at][-8:])
    rest = "".join(_pieces(detokenizer, ids[at:], [1] * len(ids)))
    unfinished = "\N{REPLACEMENT CHARACTER}" if not (prefix + text).startswith(shown) else ""
    assert shown.removesuffix(unfinished) + rest == prefix + text


@pytest.mark.parametrize("known", [1, 2, 3])
def test_prompt_that_is_nothing_but_part_of_a_character(byte_level, known):
    ids = _bytes_to_ids(byte_level, list("😀!".encode()))
    detokenizer = IncrementalDetokenizer(byte_level, prompt_tail=ids[:known])
    assert detokenizer.push(ids[known:]) == "😀!"


def test_four_byte_emoji_comes_whole(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    ids = _bytes_to_ids(byte_level, list("😀!".encode()))
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀", "!"]
    assert detokenizer.finish() == ""


def test_unfinished_character_is_flushed_once(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    ids = _bytes_to_ids(byte_level, list("a😀".encode())[:-1])
    assert "".join(detokenizer.push([i]) for i in ids) == "a"
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.finish() == ""


def test_text_before_an_unfinished_character_is_not_held(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(_bytes_to_ids(byte_level, [0x61, 0x62, 0xF0])) == "ab"


def test_unfinished_prompt_token_keeps_what_was_whole_in_it(byte_level):
    """A token may hold a space and half a character: the space belongs to the prompt."""
    ids = byte_level.encode("said \U0001f000")  # not in the corpus, its first two bytes are
    split = next(i for i in range(len(ids)) if byte_level.decode(ids[:i]).endswith(" \ufffd"))
    assert byte_level.decode(ids[split - 1 : split]) == " \ufffd"
    detokenizer = IncrementalDetokenizer(byte_level, prompt_tail=ids[:split])
    assert "".join(_pieces(detokenizer, ids[split:], [1] * len(ids))) == "\U0001f000"


def test_real_replacement_character_is_sent(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    pieces = [detokenizer.push([i]) for i in byte_level.encode("a\N{REPLACEMENT CHARACTER}b")]
    assert "".join(pieces) == "a\N{REPLACEMENT CHARACTER}b"


def test_first_word_after_a_prompt_keeps_its_space(sentencepiece):
    prompt, new = sentencepiece.encode("a"), [sentencepiece.token_to_id("▁b")]
    assert IncrementalDetokenizer(sentencepiece, prompt_tail=prompt).push(new) == " b"
    assert IncrementalDetokenizer(sentencepiece).push(new) == "b"


def test_skipped_tokens_in_between_do_not_eat_a_space(sentencepiece):
    word, end = sentencepiece.token_to_id("▁a"), sentencepiece.token_to_id("</s>")
    detokenizer = IncrementalDetokenizer(sentencepiece)
    assert [detokenizer.push([i]) for i in (word, end, word)] == ["a", "", " a"]
    shown = IncrementalDetokenizer(sentencepiece, skip_special_tokens=False)
    assert "".join(shown.push([i]) for i in (word, end, word)) == "a</s> a"


def test_long_runs_of_byte_tokens_stream(sentencepiece):
    """Every character of byte-fallback text is sent with its last byte."""
    text = "中文字😀" * 20
    ids = sentencepiece.encode(text)[1:]
    detokenizer = IncrementalDetokenizer(sentencepiece)
    pieces = [detokenizer.push([i]) for i in ids]
    assert [piece for piece in pieces if piece] == list(text)


@pytest.mark.parametrize("cut", range(30, 43))
def test_prompt_tail_cut_anywhere_in_a_run_of_bytes(sentencepiece, cut):
    text = "中文字😀" * 8
    ids = sentencepiece.encode(text)[1:]
    detokenizer = IncrementalDetokenizer(sentencepiece, prompt_tail=ids[:cut][-8:])
    rest = "".join(_pieces(detokenizer, ids[cut:], [1] * len(ids)))
    whole = text.encode()[:cut].decode(errors="ignore")
    assert rest == text[len(whole) :]


@pytest.mark.parametrize("byte", [0x61, 0x80, 0xF0])
def test_cost_per_token_does_not_grow(byte_level, byte):
    """Decoded ids a step are bounded, broken bytes included."""
    sizes, decode = [], byte_level.decode
    counting = SimpleNamespace(
        decode=lambda ids: sizes.append(len(ids)) or decode(ids),
        special_ids=byte_level.special_ids,
        id_to_token=byte_level.id_to_token,
    )
    detokenizer = IncrementalDetokenizer(counting)  # pyright: ignore[reportArgumentType]
    ids = _bytes_to_ids(byte_level, [byte]) * 3000
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert text == byte_level.decode(ids)
    assert max(sizes) <= 40 and len(sizes) <= 2 * 3000 + 9


def test_unused_rows_give_no_text(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    ids = byte_level.encode("ab")
    assert detokenizer.push([*ids, 5000, byte_level.vocab_size]) == "ab"
    assert byte_level.decode([5000]) == ""


def test_special_tokens_in_text(byte_level):
    user, think = byte_level.token_to_id("<|user|>"), byte_level.token_to_id("<think>")
    text = "a<|user|>b<think>"
    assert {user, think} <= set(byte_level.encode(text))
    plain = byte_level.encode(text, allow_special=False)
    assert byte_level.control_ids.isdisjoint(plain)
    assert byte_level.decode(plain) == text
    assert byte_level.encode("def fib", allow_special=False) == byte_level.encode("def fib")


def test_skip_special_tokens(byte_level):
    ids = byte_level.encode("<|user|>a<think>b")
    assert byte_level.decode(ids) == "<|user|>a<think>b"
    assert byte_level.decode(ids, skip_special_tokens=True) == "a<think>b"


def test_ids_and_sizes(byte_level):
    assert byte_level.special_ids == {byte_level.token_to_id(token) for token in SPECIAL}
    assert byte_level.control_ids - byte_level.special_ids == {
        byte_level.token_to_id(token) for token in MARKUP
    }
    assert byte_level.eos_token_ids == {byte_level.token_to_id("<|endoftext|>")}
    assert byte_level.vocab_size == len(byte_level) == max(byte_level.control_ids) + 1
    assert byte_level.token_to_id("no such token") is None


def test_plain_completion_equals_transformers(byte_level, tmp_path):
    transformers = pytest.importorskip("transformers")
    byte_level.transformers_tokenizer.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for text in ("def fib(n):", "a<|user|>b 😀", ""):
        ids = byte_level.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert byte_level.decode(ids) == theirs.decode(ids)


def test_unknown_and_remote_tokenizer_classes_still_load(tmp_path):
    expected = _byte_level(tmp_path).encode("def fib")
    (tmp_path / "evil.py").write_text("raise SystemExit('remote code ran')")
    config = {"tokenizer_class": "GLM99", "auto_map": {"AutoTokenizer": [None, "evil.Tok"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert OurTokenizer.from_pretrained(tmp_path).encode("def fib") == expected
    (tmp_path / "tokenizer_config.json").unlink()
    assert OurTokenizer.from_pretrained(tmp_path).encode("def fib") == expected


def test_loading_never_opens_a_socket(tmp_path, monkeypatch):
    _byte_level(tmp_path)

    def refuse(*args, **kwargs):
        raise AssertionError("network used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    OurTokenizer.from_pretrained(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        OurTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=str(tmp_path)):
        OurTokenizer.from_pretrained(tmp_path)


def test_encode_refuses_what_is_not_text(byte_level):
    with pytest.raises(ValueError, match="bytes"):
        byte_level.encode(b"a")


@pytest.mark.parametrize("allow_special", [True, False])
@pytest.mark.parametrize("text", ["\udcff", "good \ud83d bad", "\ude00\ud83d"])
def test_encode_refuses_lone_surrogates(byte_level, text, allow_special):
    with pytest.raises(ValueError, match="not valid Unicode") as error:
        byte_level.encode(text, allow_special)
    assert str(error.value).isascii(), "it can be printed"


def _naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def _naive_releasable(text: str, stops: list[str]) -> int:
    """Length of `text` that no later character can make part of a match."""
    held = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
    return len(text) - max(held, default=0)


@settings(max_examples=300, deadline=None)
@given(
    deltas=st.lists(st.text(alphabet="abE", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="abE", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_against_the_whole_text(deltas, stops, include):
    matcher, emitted, seen = StopStrings(stops, include), "", ""
    expected, stop = _naive_stop("".join(deltas), stops, include)
    for delta in deltas:
        seen += delta
        piece, found = matcher.push(delta)
        emitted += piece
        if found is not None:
            assert (emitted, found) == (expected, stop) and matcher.flush() == ""
            return
        assert len(emitted) == _naive_releasable(seen, stops)
    assert stop is None
    assert emitted + matcher.flush() == expected
    assert matcher.flush() == ""


def _run(stops, deltas, include=False):
    matcher, pieces = StopStrings(stops, include), []
    for delta in deltas:
        piece, found = matcher.push(delta)
        pieces.append(piece)
        if found is not None:
            return pieces, found
    return [*pieces, matcher.flush()], None


def test_stop_string_over_several_tokens():
    assert _run(["END"], ["a", "E", "N", "Dx"]) == (["a", "", "", ""], "END")
    assert _run(["END"], ["a", "E", "X"]) == (["a", "", "EX", ""], None)
    assert _run(["END"], ["a", "E", "N"]) == (["a", "", "", "EN"], None)
    assert _run(["END"], ["aEND", "b"], include=True) == (["aEND"], "END")
    assert _run(["END"], ["E", "E", "ND"]) == (["", "E", ""], "END")


def test_the_match_that_ends_first_wins():
    assert _run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert _run(["abcd", "bc"], list("abcd")) == (["", "", "a"], "bc")
    assert _run(["bc", "abc"], ["xabc"]) == (["x"], "abc")


def test_no_stop_strings_hold_nothing():
    assert _run([], ["ab", "", "c"]) == (["ab", "", "c", ""], None)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "END", [3]])
def test_bad_stop_strings(stops):
    with pytest.raises(ValueError, match="stop="):
        StopStrings(stops)


def test_pushing_after_a_stop_is_a_bug():
    matcher = StopStrings(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")


def test_stop_strings_are_fast_on_long_texts():
    matcher, start = StopStrings(["x" * 50 + "y", "stop"]), time.perf_counter()
    text = "".join(matcher.push("x")[0] for _ in range(5000)) + matcher.flush()
    assert text == "x" * 5000
    assert time.perf_counter() - start < 5


CONFIG = GLM53Config(
    vocab_size=400,
    hidden_size=60,
    intermediate_size=52,
    moe_intermediate_size=20,
    num_hidden_layers=1,
    num_attention_heads=3,
    q_lora_rank=28,
    kv_lora_rank=18,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=9,
    n_routed_experts=12,
    n_shared_experts=1,
    num_experts_per_tok=3,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    index_topk=7,
    index_n_heads=5,
    index_head_dim=14,
    indexer_types=("full",),
    mlp_layer_types=("sparse",),
    rope_theta=1e4,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    eos_token_id=(3, 5),
)


@pytest.mark.parametrize(
    "generation, extra, expected",
    [
        (None, (), {3, 5}),
        ({}, (), {3, 5}),
        ({"eos_token_id": None}, (), {3, 5}),
        ({"eos_token_id": 7}, (), {3, 5, 7}),
        ({"eos_token_id": 0}, (), {0, 3, 5}),
        ({"eos_token_id": [5, 7]}, (9, 3), {3, 5, 7, 9}),
    ],
)
def test_stop_ids_are_the_union(byte_level, generation, extra, expected):
    assert stop_token_ids(CONFIG, generation, None, extra) == expected
    both = stop_token_ids(CONFIG, generation, byte_level, extra)
    assert both == expected | byte_level.eos_token_ids


@pytest.mark.parametrize("extra", [(-1,), (400,), ("a",), (True,), (1.5,)])
def test_bad_stop_ids(extra):
    with pytest.raises(ValueError, match="stop_token_ids="):
        stop_token_ids(CONFIG, None, None, extra)
    with pytest.raises(ValueError, match="generation_config"):
        stop_token_ids(CONFIG, {"eos_token_id": list(extra)})
