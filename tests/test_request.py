"""One completion: what ends it, what its text is, and that its deltas add up."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm53.request import Completion, Delta, Request
from tests.engines import END, USER, byte_tokenizer, make_request

TOKENIZER = byte_tokenizer()
EMOJI = list("\N{GRINNING FACE}".encode())
# Text whose tokens are not its characters: "Dx" and "EN" are one token each.
EN, DX = TOKENIZER.encode("EN")[0], TOKENIZER.encode("Dx")[0]


def _start(**arguments) -> Request:
    defaults = {"tokenizer": TOKENIZER, "eos_ids": (END,), "max_new_tokens": 100}
    return make_request(TOKENIZER.encode("Hi "), **(defaults | arguments))


def _feed(request: Request, ids) -> list[Delta]:
    """Deltas of sampled ids, up to the last one."""
    deltas = []
    for i in ids:
        assert not deltas or deltas[-1].completion is None
        deltas.append(request.accept(i, None if request.params.logprobs is None else {i: -i / 8}))
        if deltas[-1].completion is not None:
            break
    return deltas


def _completion(deltas: list[Delta]) -> Completion:
    """The completion, which the deltas have to add up to."""
    assert all(delta.completion is None for delta in deltas[:-1])
    completion = deltas[-1].completion
    assert completion is not None
    assert "".join(delta.text for delta in deltas) == completion.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == completion.token_ids
    if completion.logprobs is None:
        assert all(delta.logprobs is None for delta in deltas)
    else:
        assert tuple(x for d in deltas for x in d.logprobs or ()) == completion.logprobs
        assert len(completion.logprobs) == len(completion.token_ids)
    return completion


def _bytes(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("stop_id", [3, 5, 7])
@pytest.mark.parametrize("caller", [(), (9, 11)])
def test_each_stop_id_ends_the_completion(stop_id, caller):
    request = _start(eos_ids=(3, 5, 7), stop_token_ids=caller)
    result = _completion(_feed(request, [*_bytes("ab"), stop_id, 99]))
    assert (result.finish_reason, result.stop_reason) == ("stop", stop_id)
    assert result.token_ids == (97, 98, stop_id)
    assert result.text == "ab"
    assert result.error is None


@pytest.mark.parametrize("stop_id, ends", [(9, True), (3, False), (END, False)])
def test_ignore_eos_leaves_only_the_callers_ids(stop_id, ends):
    request = _start(eos_ids=(3, END), stop_token_ids=[9], ignore_eos=True)
    delta = _feed(request, [stop_id])[-1]
    assert (delta.completion is not None) is ends


def test_include_stop_shows_the_stop_id():
    request = _start(include_stop=True)
    result = _completion(_feed(request, [*_bytes("a"), END]))
    assert result.text == "a<|end|>"


def test_special_tokens_that_do_not_stop_are_no_text():
    result = _completion(_feed(_start(max_new_tokens=3), [97, USER, 98]))
    assert result.token_ids == (97, USER, 98)
    assert result.text == "ab"


def test_a_stop_string_over_several_tokens_is_never_half_shown():
    request = _start(stop="END")
    deltas = _feed(request, [*_bytes("a"), *_bytes("E"), *_bytes("N"), DX, 99])
    assert [delta.text for delta in deltas] == ["a", "", "", ""]
    result = _completion(deltas)
    assert (result.finish_reason, result.stop_reason, result.text) == ("stop", "END", "a")
    assert result.token_ids == (97, ord("E"), ord("N"), DX), "up to the token that completed it"


def test_what_only_began_like_a_stop_string_is_shown_in_full():
    request = _start(stop=["END"], max_new_tokens=3)
    deltas = _feed(request, _bytes("aEX"))
    assert [delta.text for delta in deltas] == ["a", "", "EX"]
    assert _completion(deltas).finish_reason == "length"


def test_held_text_is_shown_when_the_completion_ends():
    for last, reason in ((END, "stop"), (ord("N"), "length")):
        result = _completion(_feed(_start(stop="END", max_new_tokens=3), [*_bytes("aE"), last]))
        assert result.finish_reason == reason
        assert result.text == ("aE" if last == END else "aEN")


@pytest.mark.parametrize("include, text", [(False, "a"), (True, "aEND")])
def test_include_stop_shows_the_stop_string_and_nothing_after_it(include, text):
    result = _completion(_feed(_start(stop="END", include_stop=include), [97, EN, DX]))
    assert (result.text, result.stop_reason) == (text, "END")


def test_a_stop_string_and_the_last_allowed_token_together_are_a_stop():
    result = _completion(_feed(_start(stop="b", max_new_tokens=2), _bytes("ab")))
    assert (result.finish_reason, result.stop_reason, result.text) == ("stop", "b", "a")


def test_a_stop_string_in_the_prompt_does_not_stop():
    result = _completion(_feed(_start(stop=["Hi", " "], max_new_tokens=2), _bytes("ab")))
    assert result.finish_reason == "length"


@pytest.mark.parametrize("stop", ["b", "ab"])
def test_stop_strings_wait_for_min_new_tokens(stop):
    request = _start(stop=stop, min_new_tokens=3, max_new_tokens=9)
    result = _completion(_feed(request, _bytes("abcabc")))
    assert result.text == "abcab"[: 5 - len(stop)]
    assert result.finish_reason == "stop"


def test_min_new_tokens_masks_the_stop_ids_not_the_request():
    request = _start(min_new_tokens=2)
    masked = request.sampler.stop_ids
    assert masked is not None and masked.tolist() == [END]


def test_a_character_over_several_tokens_comes_whole():
    request = _start(max_new_tokens=6)
    deltas = _feed(request, [97, *EMOJI, 98])
    assert [delta.text for delta in deltas] == ["a", "", "", "", "\N{GRINNING FACE}", "b"]
    assert [delta.token_ids for delta in deltas] == [(i,) for i in (97, *EMOJI, 98)]
    _completion(deltas)


def test_a_character_that_stays_unfinished_is_flushed_at_the_end():
    for ids, new in ((EMOJI[:3], 3), ([*EMOJI[:3], END], 9)):
        result = _completion(_feed(_start(max_new_tokens=new), ids))
        assert result.text == "\N{REPLACEMENT CHARACTER}"


def test_a_prompt_that_ends_within_a_character_leaves_it_to_the_completion():
    request = make_request(
        [*_bytes("a text"), *EMOJI[:2]], tokenizer=TOKENIZER, max_new_tokens=3, eos_ids=(END,)
    )
    assert _completion(_feed(request, [*EMOJI[2:], 98])).text == "\N{GRINNING FACE}b"


def test_the_models_limit_ends_a_completion_as_length():
    result = _completion(_feed(_start(limit=5), _bytes("abc")))
    assert (result.finish_reason, result.stop_reason, result.text) == ("length", None, "ab")


@pytest.mark.parametrize("reason, error", [("cancelled", None), ("error", "a logit is NaN")])
def test_other_ends_keep_what_there_is(reason, error):
    request = _start(stop="END", logprobs=0)
    deltas = [*_feed(request, [*_bytes("abE"), *EMOJI[:2]]), request.finish(reason, error)]
    result = _completion(deltas)
    assert deltas[-1].token_ids == ()
    assert (result.finish_reason, result.stop_reason, result.error) == (reason, None, error)
    assert result.text == "abE\N{REPLACEMENT CHARACTER}"
    assert result.prompt_token_ids == tuple(_bytes("Hi "))


def test_a_request_that_is_cancelled_before_its_first_token():
    request = _start(logprobs=1)
    result = _completion([request.finish("cancelled")])
    assert (result.token_ids, result.text, result.logprobs) == ((), "", ())
    assert result.metrics.ttft is None and result.metrics.tokens_per_second is None


def test_without_a_tokenizer_there_is_no_text():
    result = _completion(_feed(_start(tokenizer=None, max_new_tokens=2), [97, 98]))
    assert (result.token_ids, result.text) == ((97, 98), "")


def test_logprobs_belong_to_their_tokens():
    request = _start(stop="END", logprobs=0)
    deltas = _feed(request, [97, EN, DX])
    result = _completion(deltas)
    assert result.logprobs == ({97: -97 / 8}, {EN: -EN / 8}, {DX: -DX / 8})
    assert [delta.logprobs for delta in deltas] == [(x,) for x in result.logprobs]


def test_metrics():
    request = _start(max_new_tokens=3)
    request.preemptions = 2
    metrics = _completion(_feed(request, _bytes("abc"))).metrics
    assert metrics.ttft is not None and metrics.ttft >= 0
    assert metrics.tokens_per_second is not None and metrics.tokens_per_second > 0
    assert metrics.preemptions == 2
    one = _completion(_feed(_start(max_new_tokens=1), [97])).metrics
    assert one.ttft is not None and one.tokens_per_second is None


def _oracle(ids: list[int], stops: list[str], new: int) -> tuple[str, int | str | None]:
    """Text and stop reason, each from the whole text of a growing prefix."""
    for count in itertools.count(1):
        part = ids[:count]
        if part[-1] == END:
            return TOKENIZER.decode(part[:-1], skip_special_tokens=True), END
        text = TOKENIZER.decode(part, skip_special_tokens=True)
        ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
        if ends:
            _, start, stop = min(ends)
            return text[:start], stop
        if count == new:
            return text, None
    raise AssertionError


ALPHABET = st.sampled_from([*b"aENDx ", EN, DX, END, USER, *EMOJI])
STOPS = st.lists(st.sampled_from(["END", "ND", "Dx", "a E", " ", "xx", "\N{GRINNING FACE}"]))


@given(ids=st.lists(ALPHABET, min_size=1, max_size=14), stops=STOPS)
def test_any_tokens_give_the_text_of_the_whole(ids, stops):
    request = _start(stop=stops, max_new_tokens=len(ids), logprobs=0)
    deltas = _feed(request, ids)
    result = _completion(deltas)
    text, stop_reason = _oracle(ids, stops, len(ids))
    assert result.text == text
    assert result.stop_reason == stop_reason
    assert result.finish_reason == ("length" if stop_reason is None else "stop")
    shown, seen = "", ()
    for delta in deltas:
        shown, seen = shown + delta.text, seen + delta.token_ids
        whole = TOKENIZER.decode(seen, skip_special_tokens=True)
        assert whole.startswith(shown), "delta text never runs ahead of its ids"
