import copy
import dataclasses
import logging
import math
import pickle

import numpy as np
import pytest
import torch

from glm53.sampling import LIBRARY_DEFAULTS, SamplingParams

FIELDS = (
    "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty logit_bias bad_words allowed_token_ids stop "
    "stop_token_ids include_stop ignore_eos seed n logprobs prompt_logprobs logprobs_mode "
    "speculative_tokens logits_processors json_schema regex grammar record"
).split()


def test_fields_are_the_documented_ones_and_all_default_to_none():
    assert [f.name for f in dataclasses.fields(SamplingParams)] == FIELDS
    assert all(getattr(SamplingParams(), name) is None for name in FIELDS)


NOT_INTEGERS = [True, 1.0, 1.5, math.nan, "1", [1]]
NOT_NUMBERS = [True, math.nan, math.inf, -math.inf, "1", [1.0]]
REFUSED = {
    "max_new_tokens": [0, -1, *NOT_INTEGERS],
    "min_new_tokens": [-1, *NOT_INTEGERS],
    "temperature": [-0.1, *NOT_NUMBERS],
    "top_k": [-2, *NOT_INTEGERS],
    "top_p": [0, 0.0, -0.5, 1.01, *NOT_NUMBERS],
    "min_p": [-0.1, 1.1, *NOT_NUMBERS],
    "repetition_penalty": [0, -1.0, *NOT_NUMBERS],
    "presence_penalty": [2.1, -2.1, *NOT_NUMBERS],
    "frequency_penalty": [2.1, -2.1, *NOT_NUMBERS],
    "logit_bias": [5, "ab", [1, 2], [(1, 2, 3)], {-1: 1.0}, {1.0: 1.0}, {"9": 1.0}, {1: math.inf},
                   {1: math.nan}, {1: True}, {True: 1.0}, [(1, 0.5), (1, 0.7)]],
    "bad_words": ["word", 5, [""], [[]], [[1.5]], [[-1]], [5], [[True]]],
    "allowed_token_ids": [[], 5, "12", [-1], [1.0], [True]],
    "stop": ["", [""], [5], 5, b"x"],
    "stop_token_ids": [5, [-1], [2.0], "2"],
    "include_stop": [1, 0, "yes"],
    "ignore_eos": [1, 0.0],
    "seed": [-1, 2**64, *NOT_INTEGERS],
    "n": [0, -1, *NOT_INTEGERS],
    "logprobs": [-1, *NOT_INTEGERS],
    "prompt_logprobs": [-1, *NOT_INTEGERS],
    "logprobs_mode": ["raw_logits", True, 0],
    "speculative_tokens": [-1, *NOT_INTEGERS],
    "logits_processors": [5, len, [5], [len, None]],
    "json_schema": ["", "{", "[]", "true", 5, ["object"], {1, 2}, {"enum": [object()]}, b"{}"],
    "regex": ["", 5, b"a", ["a"]],
    "grammar": ["", 5, b"a", ["a"]],
    "record": [1, 0, "yes"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values]
)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name}.*: allowed is "):
        SamplingParams(**{name: value})


def test_every_field_has_refused_values():
    assert set(REFUSED) == set(FIELDS)


def test_one_constraint_at_most():
    with pytest.raises(ValueError, match=r"^json_schema and regex: give one"):
        SamplingParams(json_schema={}, regex="a")
    with pytest.raises(ValueError, match=r"^json_schema and grammar"):
        SamplingParams.override(SamplingParams(json_schema="{}"), grammar="start: /a/")


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("temperature", 0, 0.0),
        ("temperature", np.float32(0.5), 0.5),
        ("top_k", -1, -1),
        ("top_k", np.int64(3), 3),
        ("top_p", 1, 1.0),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("logprobs", 0, 0),
        ("logits_processors", [len], (len,)),
        ("json_schema", {"b": 1, "a": True}, '{"b": 1, "a": true}'),
        ("stop", "x", ("x",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("bad_words", ["a", [1, 2]], ("a", (1, 2))),
        ("allowed_token_ids", torch.tensor([3, 1]), (3, 1)),
        ("logit_bias", {7: 1, 3: -2.5}, ((3, -2.5), (7, 1.0))),
    ],
)
def test_good_value_is_kept_as(name, value, kept):
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == kept
    assert type(got) is type(kept)


def test_immutable_hashable_and_copied():
    ids, bias = [1, 2], {3: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias, bad_words=[ids])
    ids.append(9)
    bias[4] = 2.0
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ((1, 2),)
    assert params.logit_bias == ((3, 1.0),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1
    same = SamplingParams(stop_token_ids=[1, 2], logit_bias={3: 1.0}, bad_words=[(1, 2)])
    assert hash(params) == hash(same)
    assert params == same == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))


def test_minimum_above_maximum():
    with pytest.raises(ValueError, match="min_new_tokens=5 is above max_new_tokens=4"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)
    with pytest.raises(ValueError, match="min_new_tokens=300 is above max_new_tokens=256"):
        SamplingParams(min_new_tokens=300).resolve({})


@pytest.mark.parametrize("build", [SamplingParams, SamplingParams.override])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("do_sample", "temperature=0"),
        ("num_return_sequences", "use n"),
        ("max_tokens", "use max_new_tokens"),
        ("max_length", "use max_new_tokens"),
        ("min_tokens", "use min_new_tokens"),
        ("num_beams", "beam search is not supported"),
        ("use_beam_search", "beam search is not supported"),
        ("bad_words_ids", "use bad_words"),
        ("stop_strings", "use stop"),
        ("eos_token_id", "use stop_token_ids"),
        ("include_stop_str_in_output", "use include_stop"),
        ("temprature", "did you mean temperature"),
        ("qqq", "allowed are .*bad_words.*top_p"),
    ],
)
def test_other_names_get_an_error_that_names_ours(build, name, ours):
    with pytest.raises(ValueError, match=rf"{name}.*{ours}"):
        build(**{name: 1})


def test_override_replaces_single_fields():
    params = SamplingParams(temperature=0.5, top_k=3)
    assert SamplingParams.override(params, top_k=7) == SamplingParams(temperature=0.5, top_k=7)
    assert SamplingParams.override(params, top_k=None) == SamplingParams(temperature=0.5)
    assert SamplingParams.override(None) == SamplingParams()
    assert params.top_k == 3
    with pytest.raises(ValueError, match="top_k=-5"):
        SamplingParams.override(params, top_k=-5)
    with pytest.raises(ValueError, match="params="):
        SamplingParams.override({"top_k": 3})


def test_resolve_order_caller_then_config_then_library():
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "eos_token_id": [1, 2]}
    got = SamplingParams(top_p=0.5).resolve(config)
    assert (got.temperature, got.top_p, got.top_k) == (0.6, 0.5, 0)
    for name, value in LIBRARY_DEFAULTS.items():
        if name not in ("temperature", "top_p"):
            assert getattr(got, name) == value, name
    unset = {name for name in FIELDS if getattr(got, name) is None}
    open_fields = {"allowed_token_ids", "seed", "logprobs", "prompt_logprobs"}
    open_fields |= {"json_schema", "regex", "grammar"}
    assert unset == open_fields | {"speculative_tokens"}  # the engine knows the checkpoint
    assert got.resolve({}) == got


def test_resolve_reads_transformers_names():
    config = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "bad_words_ids": [[4], [5, 6]],
        "stop_strings": ["END"],
        "num_return_sequences": 2,
    }
    got = SamplingParams().resolve(config)
    assert (got.max_new_tokens, got.min_new_tokens, got.min_p, got.n) == (7, 2, 0.1, 2)
    assert (got.repetition_penalty, got.bad_words, got.stop) == (1.1, ((4,), (5, 6)), ("END",))
    assert SamplingParams(stop=[]).resolve(config).stop == ()


def test_do_sample_false_is_greedy_unless_the_caller_gives_a_temperature():
    config = {"do_sample": False, "temperature": 0.6}
    assert SamplingParams().resolve(config).temperature == 0
    assert SamplingParams(temperature=0.3).resolve(config).temperature == 0.3
    assert SamplingParams().resolve({"do_sample": True, "temperature": 0.6}).temperature == 0.6
    assert SamplingParams().resolve({"temperature": 0.6}).temperature == 0.6


def test_bad_value_in_the_file_names_the_file():
    with pytest.raises(ValueError, match=r"generation_config\.json: top_p=7"):
        SamplingParams().resolve({"top_p": 7})


def test_unsupported_key_in_the_file_warns_once(caplog):
    with caplog.at_level(logging.WARNING, "glm53"):
        for _ in range(3):
            SamplingParams().resolve({"num_beams": 4, "typical_p": 1.0, "guidance_scale": None})
    messages = [r.getMessage() for r in caplog.records]
    assert messages == ["generation_config.json: num_beams=4 is not supported and ignored"]


def test_bad_word_text_becomes_both_forms():
    ids = {"cat": [10], " cat": [20, 21], "same": [30], " same": [30], "\n": [40], " \n": [41]}
    params = SamplingParams(bad_words=[" cat", [5, 6], "same", "\n"])
    got = params.resolve({}, ids.__getitem__)
    assert got.bad_words == ((10,), (20, 21), (5, 6), (30,), (40,), (41,))
    with pytest.raises(ValueError, match="' cat' is text and there is no tokenizer"):
        params.resolve({})
    with pytest.raises(ValueError, match="has no ids"):
        params.resolve({}, lambda text: [])


@pytest.mark.parametrize(
    "field",
    [
        {"logit_bias": {11: 1.0}},
        {"bad_words": [[1, 11]]},
        {"allowed_token_ids": [0, 11]},
        {"stop_token_ids": [11]},
    ],
)
def test_id_outside_the_vocabulary(field):
    params = SamplingParams(**field)
    params.check_vocabulary(12)
    with pytest.raises(ValueError, match=rf"{next(iter(field))}: id 11 is outside 0\.\.10"):
        params.check_vocabulary(11)
