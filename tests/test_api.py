"""The public model: forms of prompts, defaults, texts, streams."""

import pytest
import torch

from glm53 import GLM53, SamplingParams
from tests.engines import (
    END,
    USER,
    assert_idle,
    byte_tokenizer,
    greedy,
    logits_of,
    prompts_of,
    tiny_model,
)

VOCAB = 269  # a few embedding rows more than the tokenizer has names for
GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
EMOJI = list("\N{GRINNING FACE}".encode())


def _model(**arguments) -> GLM53:
    defaults = {"tokenizer": byte_tokenizer(), "overrides": {"vocab_size": VOCAB}}
    return tiny_model(4, **(defaults | arguments))


@pytest.fixture(scope="module")
def shared() -> GLM53:
    return _model()


@pytest.fixture
def model(shared):
    yield shared
    assert_idle(shared.engine())


def _forced(ids) -> dict:
    """Fields that make a model emit `ids` in turn: each is the only one that is left."""
    return {"allowed_token_ids": list(ids), "temperature": 0, "max_new_tokens": len(ids)}


# --- forms of a prompt ---


def test_one_prompt_in_any_form_is_one_completion(model):
    ids = list(b"def f(n)")
    expected = tuple(greedy(model, ids, 6))
    forms = ["def f(n)", ids, tuple(ids), torch.tensor(ids), torch.tensor(ids, dtype=torch.int32)]
    for form in forms:
        result = model.generate(form, GREEDY)
        assert (result.prompt_token_ids, result.token_ids) == (tuple(ids), expected)
        assert result.finish_reason == "length" and result.error is None


def test_a_list_may_mix_forms_and_keeps_its_order(model):
    ids = [list(b"def"), list(b"x = "), list(b"hello world"), list(b"a")]
    mixed = ["def", ids[1], torch.tensor(ids[2]), tuple(ids[3])]
    results = model.generate(mixed, GREEDY)
    assert [list(r.prompt_token_ids) for r in results] == ids
    assert [list(r.token_ids) for r in results] == [greedy(model, i, 6) for i in ids]
    assert [len(score) for score in model.score(mixed)] == [len(i) - 1 for i in ids]


@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_a_padded_tensor_means_the_same_prompts(model, side):
    prompts = prompts_of(11, 4, 7)
    ids_BS = torch.full((3, 13), 3)
    mask_BS = torch.zeros(3, 13, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        kept = {"left": range(13 - len(prompt), 13), "right": range(len(prompt))}.get(side)
        kept = torch.tensor(list(kept or sorted(torch.randperm(13)[: len(prompt)].tolist())))
        ids_BS[row, kept] = torch.tensor(prompt)
        mask_BS[row, kept] = 1
    results = model.generate(ids_BS, GREEDY, attention_mask=mask_BS)
    assert [list(r.prompt_token_ids) for r in results] == prompts
    assert [r.token_ids for r in results] == [r.token_ids for r in model.generate(prompts, GREEDY)]


def test_a_tensor_without_mask_is_a_list_of_full_rows(model):
    ids_BS = torch.tensor(prompts_of(5, 5))
    results = model.generate(ids_BS, GREEDY)
    assert [list(r.prompt_token_ids) for r in results] == ids_BS.tolist()
    assert len(model.generate(ids_BS[:1], GREEDY)) == 1, "still a list"


def test_a_row_that_is_all_padding_fails_alone(model):
    mask_BS = torch.tensor([[1, 1], [0, 0]])
    good, bad = model.generate(torch.tensor([[9, 10], [9, 10]]), GREEDY, attention_mask=mask_BS)
    assert good.error is None and "empty" in bad.error


def test_an_empty_list_is_no_prompts(model):
    assert model.generate([]) == []
    assert model.score([]) == []
    assert model.generate(torch.empty(0, 4, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    "prompts, mask, message",
    [
        (torch.tensor([[9, 10]]), torch.tensor([1, 1]), "attention_mask has shape"),
        (torch.tensor([9, 10]), torch.tensor([1, 1]), r"\[B, S\]"),
        ([[9, 10]], torch.tensor([[1, 1]]), r"\[B, S\]"),
        (torch.tensor([1.0]), None, "1-D tensor of integers"),
        (torch.tensor([[1.0]]), None, "1-D tensor of integers"),
        (torch.tensor([True]), None, "1-D tensor of integers"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None, "1-D tensor of integers"),
        (5, None, "a prompt must be text"),
        ({"input_ids": [9, 10]}, None, "a prompt must be text"),
        (b"abc", None, "a prompt must be text"),
        ("a\udcff", None, "not valid Unicode"),
        (None, None, "a prompt must be text"),
        ("", None, "empty"),
        (torch.empty(0, dtype=torch.int64), None, "empty"),
    ],
)
def test_prompts_that_are_refused(model, prompts, mask, message):
    with pytest.raises(ValueError, match=message):
        model.generate(prompts, GREEDY, attention_mask=mask)


def test_text_that_is_not_unicode_fails_alone(model):
    good, bad = model.generate(["abc", "a\udcff"], GREEDY)
    assert good.error is None and len(good.token_ids) == 6
    assert bad.finish_reason == "error" and "not valid Unicode" in bad.error


def test_transformers_way_to_call_is_named(model):
    ids = torch.tensor([[9, 10]])
    with pytest.raises(ValueError, match="input_ids is called prompts"):
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match=r"params=\{'temperature': 0\}"):
        model.engine().add([9], {"temperature": 0})


def test_score_names_the_prompt(model):
    with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
        model.score([[9, 10], []])
    with pytest.raises(ValueError, match=r"^the prompt is empty"):
        model.score("")


def test_control_tokens_in_a_prompt_are_control_tokens(model):
    assert model.generate("a<|user|>", GREEDY).prompt_token_ids == (97, USER)


# --- stopping ---


@pytest.mark.parametrize("stop_id", [3, 5, 7, 11, 13, END, 21])
def test_every_source_of_stop_ids_counts(stop_id):
    """3, 5, 7: config; 11, 13: generation_config; END: tokenizer; 21: caller."""
    model = _model(generation_config={"eos_token_id": [11, 13]})
    fields = _forced([stop_id]) | {"max_new_tokens": 4, "stop_token_ids": [21]}
    result = model.generate("abc", **fields)
    assert (result.finish_reason, result.stop_reason) == ("stop", stop_id)
    assert result.token_ids == (stop_id,)
    on = model.generate("abc", **fields, ignore_eos=True)
    assert on.finish_reason == ("stop" if stop_id == 21 else "length")


@pytest.mark.parametrize("generation_config", [{}, {"eos_token_id": None}, {"eos_token_id": 11}])
@pytest.mark.parametrize("eos", [(3,), (3, 5)])
def test_a_file_adds_stop_ids_and_takes_none_away(eos, generation_config):
    model = _model(
        overrides={"vocab_size": VOCAB, "eos_token_id": eos}, generation_config=generation_config
    )
    assert model.generate("a", **_forced([3]) | {"max_new_tokens": 2}).stop_reason == 3
    result = model.generate("a", **_forced([11]) | {"max_new_tokens": 2})
    assert (result.stop_reason == 11) is (generation_config.get("eos_token_id") == 11)


def test_no_stop_id_before_min_new_tokens(model):
    favoured = {"logit_bias": {END: 1e6}, "temperature": 0, "max_new_tokens": 9}
    result = model.generate("abc", **favoured, min_new_tokens=4)
    assert len(result.token_ids) == 5 and result.token_ids[-1] == END
    assert END not in result.token_ids[:-1]
    assert model.generate("abc", **favoured).token_ids == (END,)


def test_a_stop_string_ends_the_text(model):
    ids = list(b"ENDEN")
    free = model.generate("x", temperature=0, max_new_tokens=12, allowed_token_ids=ids)
    assert set(free.text) <= set("END") and len(free.text) == 12
    stop = free.text[5:8]
    cut = free.text.index(stop)
    fields = {"temperature": 0, "max_new_tokens": 12, "allowed_token_ids": ids, "stop": stop}
    result = model.generate("x", **fields)
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.text == free.text[:cut]
    assert result.token_ids == free.token_ids[: cut + len(stop)]
    assert model.generate("x", **fields, include_stop=True).text == free.text[: cut + len(stop)]
    for delta in model.stream("x", **fields):
        assert stop not in delta.text


# --- defaults ---


def test_generation_config_gives_defaults_that_the_caller_overrides():
    model = _model(generation_config={"do_sample": False, "max_new_tokens": 4, "top_k": 3})
    prompt = list(b"def f(n)")
    expected = greedy(model, prompt, 9)
    assert list(model.generate(prompt, ignore_eos=True).token_ids) == expected[:4]
    longer = model.generate(prompt, SamplingParams(max_new_tokens=9), ignore_eos=True)
    assert list(longer.token_ids) == expected
    shorter = model.generate(prompt, SamplingParams(max_new_tokens=9), max_new_tokens=2)
    assert len(shorter.token_ids) <= 2
    sampled = model.generate(
        prompt, temperature=1.0, seed=0, ignore_eos=True, logprobs=3, logprobs_mode="processed"
    )
    assert len(sampled.token_ids) == 4
    assert all(len(row) == 3 for row in sampled.logprobs), "top_k of the file still holds"


def test_a_bad_generation_config_is_named():
    with pytest.raises(ValueError, match=r"generation_config.json: top_p=7"):
        _model(generation_config={"top_p": 7}).generate("a")
    with pytest.raises(ValueError, match=r"generation_config.eos_token_id=-1"):
        _model(generation_config={"eos_token_id": -1})


def test_a_file_does_not_change_what_a_call_returns(caplog):
    model = _model(generation_config={"num_return_sequences": 3, "max_length": 50, "top_k": 1})
    assert len(model.generate("a", max_new_tokens=2, ignore_eos=True).token_ids) == 2
    assert len(model.generate("a", max_new_tokens=2, n=2)) == 2
    ends = [d.completion is not None for d in model.stream("a", max_new_tokens=2, ignore_eos=True)]
    assert ends == [False, True]
    assert [r.getMessage() for r in caplog.records] == [
        "generation_config.json: max_length=50 is not supported"
    ]


def test_score_needs_nothing_of_the_files_texts():
    model = _model(tokenizer=None, generation_config={"stop_strings": ["x"]})
    assert model.score([9, 10, 11]).shape == (2,)
    with pytest.raises(ValueError, match="without a tokenizer"):
        model.generate([9, 10, 11])


def test_the_librarys_own_defaults(model):
    params = model.engine().resolve(SamplingParams())
    assert (params.temperature, params.top_p, params.n, params.max_new_tokens) == (1.0, 1.0, 1, 256)


def test_sizes_of_the_cache():
    per_token = tiny_model().engine()._cache.nbytes // (64 * 16)
    assert tiny_model(kv_cache_tokens=200).engine().pool.num_pages == 3
    by_bytes = tiny_model(kv_cache_tokens=None, kv_cache_bytes=per_token * 64 * 2 + 9)
    assert by_bytes.engine()._cache.nbytes == per_token * 64 * 2
    with pytest.raises(ValueError, match="kv_cache_tokens=63"):
        tiny_model(kv_cache_tokens=63)
    with pytest.raises(ValueError, match=f"kv_cache_bytes={per_token}"):
        tiny_model(kv_cache_tokens=None, kv_cache_bytes=per_token)
    with pytest.raises(ValueError, match="not both"):
        tiny_model(kv_cache_bytes=1 << 20)
    with pytest.raises(ValueError, match="max_batch_tokens=0"):
        tiny_model(max_batch_tokens=0)
    with pytest.raises(ValueError, match="max_running=0"):
        tiny_model(max_running=0).engine()


def test_the_default_cache_holds_sixteen_full_contexts():
    model = tiny_model(kv_cache_tokens=None, overrides={"max_position_embeddings": 130})
    assert model.engine().pool.num_pages == 16 * 130 // 64


# --- streams ---


def test_deltas_add_up(model):
    fields = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3, "logprobs": 1}
    whole = model.generate("def f", ignore_eos=True, **fields)
    deltas = list(model.stream("def f", ignore_eos=True, **fields))
    assert [d.completion is None for d in deltas] == [True] * 29 + [False]
    assert "".join(d.text for d in deltas) == deltas[-1].completion.text == whole.text
    assert tuple(i for d in deltas for i in d.token_ids) == whole.token_ids
    assert tuple(x for d in deltas for x in d.logprobs) == whole.logprobs
    assert whole.text == model.tokenizer.decode(whole.token_ids, skip_special_tokens=True)


def test_a_stream_of_n_completions(model):
    fields = {"max_new_tokens": 5, "temperature": 1.0, "seed": 3, "n": 3, "ignore_eos": True}
    texts, finished = [""] * 3, {}
    for delta in model.stream("abc", **fields):
        texts[delta.index] += delta.text
        if delta.completion is not None:
            finished[delta.index] = delta.completion
    assert [finished[i].text for i in range(3)] == texts
    assert [c.token_ids for c in model.generate("abc", **fields)] == [
        finished[i].token_ids for i in range(3)
    ]


@pytest.mark.parametrize("how", ["close", "break", "raise"])
def test_leaving_a_stream_cancels_it(model, how):
    engine = model.engine()
    stream = model.stream("abc" * 30, max_new_tokens=50, ignore_eos=True, n=2, temperature=1.0)
    if how == "close":
        next(stream)
        assert engine.num_unfinished == 2 and engine.pool.num_free < engine.pool.num_pages
        stream.close()
    elif how == "break":
        for _ in stream:
            break
        del stream
    else:
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                raise ZeroDivisionError
        stream.close()
    assert_idle(engine)


def test_a_stream_that_is_never_read_holds_nothing(model):
    stream = model.stream("abc")
    assert model.engine().num_unfinished == 0
    stream.close()


def test_streams_take_one_prompt(model):
    with pytest.raises(ValueError, match="one prompt"):
        model.stream(["a", "b"])


def test_two_streams_share_their_steps(model):
    engine = model.engine()
    prompts = prompts_of(6, 14)
    before = engine.stats.steps
    streams = [model.stream(prompt, GREEDY) for prompt in prompts]
    found: list[list[int]] = [[], []]
    for first, second in zip(*streams, strict=True):
        found[0] += first.token_ids
        found[1] += second.token_ids
    assert found == [greedy(model, prompt, 6) for prompt in prompts]
    # The second joins after the first one's first step.
    assert engine.stats.steps - before == 7


def test_generate_within_the_loop_of_a_stream(model):
    """The stream goes on in the same steps, and its deltas wait for it."""
    prompts = prompts_of(6, 14)
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    before = model.engine().stats.steps
    ids, inner = [], None
    for delta in model.stream(prompts[0], GREEDY):
        ids += delta.token_ids
        if inner is None:
            inner = model.generate(prompts[1], GREEDY)
            inner_score = model.score(prompts[1])
    assert ids == expected[0] and list(inner.token_ids) == expected[1]
    assert len(inner_score) == 13
    assert model.engine().stats.steps - before == 1 + 6 + 1


def test_a_broken_character_is_never_streamed(model):
    prompt = [*b"say ", *EMOJI[:2]]
    fields = {"allowed_token_ids": EMOJI, "temperature": 1.0, "seed": 1, "max_new_tokens": 40}
    deltas = list(model.stream(prompt, **fields))
    # Half of one character after another: U+FFFD stands for bytes that can no longer become one.
    assert "".join(d.text for d in deltas) == deltas[-1].completion.text
    whole = bytes([*EMOJI[:2], *deltas[-1].completion.token_ids]).decode(errors="replace")
    assert deltas[-1].completion.text == whole


# --- model ---


def test_the_model_has_transformers_names(model):
    names = dict(model.named_parameters())
    assert set(names) == set(dict(model.network.named_parameters()))
    assert "model.layers.1.mlp.experts.gate_up_proj" in names and "lm_head.weight" in names
    ids = torch.tensor([[9, 10, 11]])
    assert torch.equal(model(ids), model.network(ids))
    loss, logits = model(ids, labels=ids, logits_to_keep=1)
    assert loss.requires_grad and logits.shape == (1, 1, VOCAB)


def test_generation_leaves_the_plain_forward_differentiable(shared):
    shared.generate("abc", GREEDY)
    shared(torch.tensor([[9, 10, 11]])).sum().backward()
    assert shared.lm_head.weight.grad is not None
    shared.zero_grad()
    assert shared.generate("abc", GREEDY).error is None


def test_generation_within_inference_mode_and_without():
    model = _model()
    fields = {"temperature": 1.0, "seed": 1, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    with torch.inference_mode():
        first = model.generate("abc", max_new_tokens=5, ignore_eos=True, **fields)
    second = model.generate("abc", max_new_tokens=5, ignore_eos=True, **fields)
    with torch.no_grad():
        third = model.generate("abc", max_new_tokens=5, ignore_eos=True, **fields)
    assert first.token_ids == second.token_ids == third.token_ids


def test_a_bfloat16_model_generates():
    model = _model().to(torch.bfloat16)
    own = GLM53(model.network, model.tokenizer, kv_cache_tokens=64 * 4)
    assert own.engine()._cache.dtype == torch.bfloat16
    results = own.generate(prompts_of(30, 70), GREEDY, logprobs=0)
    assert [len(r.token_ids) for r in results] == [6, 6]
    for result in results:
        ids = (*result.prompt_token_ids, *result.token_ids)
        reference_SW = logits_of(own, ids).float().log_softmax(-1)[-7:-1]
        own_S = [row[i] for row, i in zip(result.logprobs, result.token_ids, strict=True)]
        wanted = [float(row[i]) for row, i in zip(reference_SW, result.token_ids, strict=True)]
        assert own_S == pytest.approx(wanted, abs=0.3)
