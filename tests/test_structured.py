"""Structured output through the engine and in a chat: random models, for which every allowed token
is about as likely as any other, and the embedded one."""

import json
import re

import pytest
import torch

from glm53 import GLM53, SamplingParams
from glm53.chat import ChatReply
from glm53.request import Request
from glm53.sampling import Constraint
from glm53.sampling.constraints import ConstraintError
from glm53.tokenizer import IncrementalDetokenizer
from tests.chats import NANO, TOOLS, nano, user
from tests.engines import assert_idle, audit, prompts_of, tiny_model, with_engine
from tests.speculation import agreeing_model, force_drafts, ids_of, sequences_of
from tests.structured import TAGS, VOCAB_SIZE, is_valid, stop_ids, token_id

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 5000},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", None]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
REGEX = r"[a-c]{2,9}(/[xyz ]{1,6})+"
AFTER_THE_END = [5] * 8  # what is drafted there
OVERRIDES = {"vocab_size": VOCAB_SIZE, "eos_token_id": tuple(stop_ids())}
ENDS_SOON = {token_id(text): 6.0 for text in ("</think>", "</arg_value>", "</tool_call>", '"')}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "unit": {"enum": ["C", "F"]},
                "exact": {"type": "boolean"},
            },
            "required": ["place", "days"],
        },
    },
}


@pytest.fixture(scope="module")
def random_model() -> GLM53:
    return agreeing_model(0, tokenizer=nano(), overrides=OVERRIDES)


@pytest.fixture
def model(random_model):
    yield random_model
    assert_idle(random_model.engine())


def run(model: GLM53, prompt, params: list[SamplingParams]):
    """One completion for each of these parameters, all in one batch."""
    engine = model.engine()
    ids = [engine.add(prompt, p) for p in params]
    finished = engine.run()
    return [finished[i][0] for i in ids]


def assert_drafted(completions) -> None:
    """Some drafts were accepted and some were not."""
    drafted = sum(out.metrics.drafted for out in completions)
    assert drafted > sum(out.metrics.accepted for out in completions) > 0


FORMS = {
    "json": {"json_schema": SCHEMA},
    "regex": {"regex": REGEX},
    "grammar": {"grammar": 'start: pair+\npair: "[" pair* "]"'},
}


def assert_in_form(name: str, text: str) -> None:
    if name == "json":
        assert is_valid(json.loads(text), SCHEMA), text
    elif name == "regex":
        assert re.fullmatch(REGEX, text), text
    else:
        while "[]" in text:
            text = text.replace("[]", "")
        assert text == ""


SAMPLINGS = [
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 7, "temperature": 1.3, "top_k": 5, "repetition_penalty": 1.2},
    {"seed": 8, "top_p": 0.7, "min_new_tokens": 6, "logprobs": 2},
    {"seed": 9, "logprobs": 1, "logprobs_mode": "processed", "frequency_penalty": 0.5},
]


def forcing(model: GLM53, prompt, plain) -> GLM53:
    """Drafts that are right 0, 2, 1, 3 times for the completions of `plain`, in their order."""
    drafting = with_engine(model)
    sequences = {i: [*prompt, *out.token_ids, *AFTER_THE_END] for i, out in enumerate(plain)}
    force_drafts(drafting.engine(), sequences, (0, 2, 1, 3), VOCAB_SIZE)
    return drafting


def forcing_one(model: GLM53, plain) -> GLM53:
    """As `forcing`, for requests that go on as this completion; others keep their own drafts."""
    drafting = with_engine(model)
    sequence = [*plain.prompt_token_ids, *plain.token_ids, *AFTER_THE_END]
    force_drafts(drafting.engine(), [sequence], (0, 2, 1, 3), VOCAB_SIZE)
    return drafting


def chatted(model: GLM53, drafts: int, **fields):
    """A reply; with drafts, some of them right and some wrong, the one of plain decoding."""
    reply = model.chat([user("q")], speculative_tokens=0, **fields)
    if drafts:
        plain, drafting = reply, forcing(model, reply.prompt_token_ids, [reply])
        reply = drafting.chat([user("q")], speculative_tokens=drafts, **fields)
        assert reply.token_ids == plain.token_ids
        assert_drafted([reply])
    return reply


def test_any_sampling_with_and_without_drafts(model):
    names = [name for name in FORMS for _ in SAMPLINGS]
    (prompt,) = prompts_of(70, vocab_size=4000)
    fields = {"max_new_tokens": 60, "logit_bias": ENDS_SOON}
    outs = {}
    for drafts in (0, 3):
        params = [
            SamplingParams(speculative_tokens=drafts, **fields, **f, **s)
            for f in FORMS.values()
            for s in SAMPLINGS
        ]
        outs[drafts] = run(forcing(model, prompt, outs[0]) if drafts else model, prompt, params)
    assert_drafted(outs[3])
    assert ids_of(outs[3]) == ids_of(outs[0])
    for plain, drafted in zip(outs[0], outs[3], strict=True):
        for one, other in zip(plain.logprobs or (), drafted.logprobs or (), strict=True):
            assert one == pytest.approx(other, abs=1e-4)
    ended = [(n, out) for n, out in zip(names, outs[3], strict=True) if out.finish_reason == "stop"]
    assert len(ended) > 0.5 * len(names)
    for name, out in ended:
        assert out.stop_reason in stop_ids()
        assert_in_form(name, out.text)
    assert {out.finish_reason for out in outs[3]} <= {"stop", "length"}


def test_drafts_accepted_within_a_form(model):
    """Drafts of the test's making: each row of a step stands after its own prefix."""
    (prompt,) = prompts_of(30, vocab_size=4000)
    fields = {"max_new_tokens": 40, "logit_bias": ENDS_SOON, "seed": 2}
    params = [
        SamplingParams(speculative_tokens=0, min_new_tokens=9, **fields, **form)
        for form in FORMS.values()
    ]
    plain = run(model, prompt, params)
    drafting = forcing(model, prompt, plain)
    outs = run(drafting, prompt, [SamplingParams.override(p, speculative_tokens=3) for p in params])
    assert ids_of(outs) == ids_of(plain)
    for out in outs:
        assert out.metrics.accepted_at[1] > 0
    assert_idle(drafting.engine())


def test_completions_of_one_prompt_under_preemption(model):
    small = with_engine(model, kv_cache_tokens=64 * 6)
    (prompt,) = prompts_of(100, vocab_size=4000)
    fields = {"json_schema": SCHEMA, "seed": 3, "n": 5, "max_new_tokens": 90}
    fields |= {"logit_bias": ENDS_SOON | {token_id('"'): 1.0}}
    plain = model.generate(prompt, speculative_tokens=0, **fields)
    sequences = [[*ids, *AFTER_THE_END] for ids in sequences_of(plain)]
    force_drafts(small.engine(), sequences, vocab_size=VOCAB_SIZE)
    got = small.generate(prompt, speculative_tokens=3, **fields)
    assert small.engine().stats.preemptions > 0
    assert ids_of(got) == ids_of(plain)
    assert_drafted(got)
    assert len({out.token_ids for out in got}) > 1
    for out in got:
        if out.finish_reason == "stop":
            assert_in_form("json", out.text)
    assert_idle(small.engine())


def test_only_the_completion_without_a_token_fails(model):
    (prompt,) = prompts_of(9, vocab_size=4000)
    fields = SamplingParams(temperature=0.0, max_new_tokens=12, speculative_tokens=3)
    over = SamplingParams.override
    free = model.generate(prompt, over(fields, speculative_tokens=0))
    params = [
        fields,
        over(fields, regex="[ac]{5}b+", allowed_token_ids=[*map(token_id, "ac"), *stop_ids()]),
        over(fields, regex="[a-c]{4}", seed=1),
        over(fields, regex="ab", min_new_tokens=9),
    ]
    outs = run(forcing_one(model, free), prompt, params)
    assert outs[0].token_ids == free.token_ids
    assert_drafted(outs[:1])
    assert re.fullmatch("[a-c]{4}", outs[2].text) and outs[2].finish_reason == "stop"
    for out in (outs[1], outs[3]):
        assert out.finish_reason == "error"
        assert out.error is not None and "continue or end the grammar" in out.error
    assert outs[3].text == "ab"


FAULTS = ["grammar", "detokenizer", "end of text"]


@pytest.fixture(params=FAULTS)
def failing(request, monkeypatch) -> list[int]:
    """A prompt whose completion cannot accept its fifth token."""
    (prompt,) = prompts_of(9, vocab_size=4000)
    if request.param == "grammar":
        append = Constraint.append

        def fails(self, token_id):
            self.count = getattr(self, "count", 0) + 1
            if self.count == 5:
                raise ConstraintError("the grammar cannot go on: boom")
            append(self, token_id)

        monkeypatch.setattr(Constraint, "append", fails)
        return prompt

    class Failing(IncrementalDetokenizer):
        def __init__(self, tokenizer, prompt_tail) -> None:
            super().__init__(tokenizer, prompt_tail=prompt_tail)
            self.left = 4 if list(prompt_tail) == prompt[-8:] else 10**9

        def push(self, ids):
            self.left -= 1
            if self.left < 0:
                raise LookupError("boom")
            return super().push(ids)

        def finish(self):
            if self.left < 0 and request.param == "end of text":
                raise LookupError("boom again")
            return super().finish()

    monkeypatch.setattr("glm53.request.IncrementalDetokenizer", Failing)
    return prompt


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_error_in_accepting_costs_the_others_nothing(model, failing, drafts):
    fields = SamplingParams(
        temperature=0.0, max_new_tokens=12, logprobs=0, ignore_eos=True, speculative_tokens=drafts
    )
    over = SamplingParams.override
    form = {"regex": "(?s:.*)", "stop_token_ids": [VOCAB_SIZE - 1], "record": True}
    others = prompts_of(12, 30, 7, seed=4, vocab_size=4000)
    lengths = (12, 5, 12)  # one ends in the step that fails
    alone = [
        model.generate(p, over(fields, max_new_tokens=n))
        for p, n in zip(others, lengths, strict=True)
    ]
    engine = model.engine()
    add = [(p, over(fields, max_new_tokens=n)) for p, n in zip(others, lengths, strict=True)]
    add.insert(1, (failing, over(fields, **form)))
    ids = [engine.add(p, params) for p, params in add]
    deltas = []
    while engine.num_unfinished:
        deltas += engine.step()
        audit(engine)
    own = [[d for d in deltas if d.request_id == i] for i in ids]
    bad = own.pop(1)
    for told, expected in zip(own, alone, strict=True):
        assert [d.completion for d in told[:-1]] == [None] * (len(told) - 1)
        assert told[-1].completion.token_ids == expected.token_ids
        assert told[-1].completion.text == expected.text == "".join(d.text for d in told)
        assert tuple(i for d in told for i in d.token_ids) == expected.token_ids
        assert drafts or len(told) == len(expected.token_ids)
    out = bad[-1].completion
    assert (out.finish_reason, "boom" in out.error, "\n" in out.error) == ("error", True, False)
    assert len(out.token_ids) == len(out.logprobs) in (4, 5)
    assert tuple(i for d in bad for i in d.token_ids) == out.token_ids
    assert "".join(d.text for d in bad) == out.text
    batch = model.generate([failing, others[0]], over(fields, **form, max_new_tokens=9))
    assert batch[0].finish_reason == "error"


def test_an_interrupt_in_accepting_loses_nothing_of_those_before(model, monkeypatch):
    first, second = prompts_of(9, 12, vocab_size=4000)
    fields = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    alone = model.generate([first, second], fields)
    engine, accept = model.engine(), Request.accept
    ids = [engine.add(p, fields) for p in (first, second)]
    deltas = engine.step()

    def interrupted(self, token_id, logprobs):
        if self.request_id == ids[1]:
            monkeypatch.setattr(Request, "accept", accept)
            raise KeyboardInterrupt
        return accept(self, token_id, logprobs)

    monkeypatch.setattr(Request, "accept", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    deltas += engine.cancel(ids[1])
    while engine.num_unfinished:
        deltas += engine.step()
    told = [i for d in deltas if d.request_id == ids[0] for i in d.token_ids]
    assert told == list(alone[0].token_ids)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_limit_of_the_compiler_ends_one_completion(model, drafts):
    first, second = prompts_of(9, 12, vocab_size=4000)
    fields = SamplingParams(temperature=0.0, max_new_tokens=8, speculative_tokens=drafts)
    alone = model.generate(second, fields)
    # Completions of one grammar share what has been built of its automaton, and so the limit.
    bad = SamplingParams.override(fields, regex=f"[bc]a{{30000{drafts}}}")
    engine = model.engine()
    ids = [engine.add(first, bad), engine.add(second, fields)]
    finished = engine.run()
    assert finished[ids[1]][0].token_ids == alone.token_ids
    (out,) = finished[ids[0]]
    assert out.finish_reason == "error" and len(out.token_ids) == 1
    assert re.fullmatch("[bc]a?", out.text)
    assert out.error == "the grammar cannot go on: lexer error: too many expressions constructed"


@pytest.mark.parametrize("drafts", [0, 3])
def test_stop_token_ids_wait_for_the_end_of_the_form(model, drafts):
    """And a stop string does not."""
    (prompt,) = prompts_of(9, vocab_size=4000)
    stop = token_id("/")
    fields = {"regex": "[ab]{3}(/[ab]{2})*", "seed": 3, "speculative_tokens": drafts}
    out = model.generate(prompt, stop_token_ids=[stop], logit_bias={stop: 60.0}, **fields)
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert re.fullmatch("[ab]{3}", out.text)
    cut = model.generate(prompt, stop=["a", "b"], **fields)
    assert cut.finish_reason == "stop" and cut.stop_reason in ("a", "b") and cut.text == ""


def test_what_cannot_be_followed_is_refused_early(model):
    for fields, message in (
        ({"regex": "("}, "^regex: "),
        ({"json_schema": {"type": "objct"}}, "^json_schema: "),
        ({"regex": "a", "ignore_eos": True}, "^regex: ignore_eos"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(["a", "b"], **fields)
    with pytest.raises(ValueError, match=r"^json_schema: .* without a tokenizer"):
        tiny_model().generate([9], json_schema=SCHEMA)


def test_the_embedded_model_writes_json():
    model = GLM53.from_pretrained(NANO, device="cpu", progress=False, kv_cache_tokens=64 * 40)
    params = [
        SamplingParams(json_schema=SCHEMA, temperature=t, seed=s, speculative_tokens=k)
        for t, s in ((0.0, 0), (1.0, 1), (1.0, 2))
        for k in (0, 3)
    ]
    outs = run(model, "config = ", params)
    assert_drafted(outs[1::2])
    assert ids_of(outs[0::2]) == ids_of(outs[1::2])
    assert all(out.finish_reason == "stop" for out in outs)
    for out in outs:
        assert_in_form("json", out.text)


@pytest.mark.parametrize("drafts", [0, 3])
def test_reasoning_comes_before_the_constraint(model, drafts):
    thought = 0
    for seed in range(4):
        reply = chatted(
            model,
            drafts,
            json_schema=SCHEMA,
            seed=seed,
            logit_bias=ENDS_SOON | {token_id("</think>"): 5.0},
            max_new_tokens=150,
        )
        assert reply.finish_reason == "stop" and not reply.tool_calls
        thought += bool(reply.reasoning)
        assert_in_form("json", reply.content)
        assert reply.token_ids.count(token_id("</think>")) == 1
    assert thought


def test_reasoning_that_is_cut_off_has_no_content(model):
    bias = {token_id("</think>"): -50.0}
    reply = model.chat([user("q")], regex="a", seed=1, logit_bias=bias, max_new_tokens=9)
    assert (reply.finish_reason, reply.content) == ("length", "") and reply.reasoning


def test_neither_an_end_nor_a_call_slips_past_the_constraint(model):
    bias = dict.fromkeys([*stop_ids(), token_id("<tool_call>"), token_id("<|assistant|>")], 30.0)
    bias[token_id("</think>")] = 5.0
    fields = {"seed": 0, "logit_bias": bias, "max_new_tokens": 60}
    free = model.chat([user("q")], tools=TOOLS, **fields)
    assert not free.content and len(free.token_ids) < 60
    reply = model.chat([user("q")], regex="[ab]{3}", **fields)
    assert (reply.content, reply.finish_reason) == (reply.content[:3], "stop")
    assert re.fullmatch("[ab]{3}", reply.content)


def test_a_prompt_that_closed_the_reasoning_is_constrained_at_once(model):
    prompt = [*nano().encode_chat([user("q")]), token_id("</think>")]
    params = model.engine().resolve(SamplingParams(regex="[ab]{3}", seed=1))
    reply = ChatReply(nano(), None, prompt, params)
    out = model.generate(prompt, reply.params)
    assert re.fullmatch("[ab]{3}", out.text) and out.finish_reason == "stop"


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", ["weather", "now", None])
def test_forced_calls(model, name, drafts):
    tools, choice = [*TOOLS[1:], WEATHER], "required"
    if name is not None:
        choice = {"type": "function", "function": {"name": name}}
    schemas = {"weather": WEATHER["function"]["parameters"], "now": {"type": "object"}}
    called = set()
    for seed in range(4):
        reply = chatted(
            model,
            drafts,
            tools=tools,
            tool_choice=choice,
            seed=seed,
            logit_bias=ENDS_SOON | dict.fromkeys(stop_ids(), 3.0),
            max_new_tokens=200,
        )
        assert reply.finish_reason == "stop" and reply.stop_reason in stop_ids()
        assert reply.tool_calls and not reply.content
        assert name is None or len(reply.tool_calls) == 1
        for found in reply.tool_calls:
            called.add(found.name)
            assert is_valid(found.arguments, schemas[found.name]), found
            assert not set(found.arguments) - set(schemas[found.name].get("properties", ()))
    assert called <= ({"weather", "now"} if name is None else {name})


def test_tool_choice_none_and_auto(model):
    call_id = token_id("<tool_call>")
    fields = {"seed": 1, "max_new_tokens": 12, "logit_bias": {call_id: 40.0}, "tools": TOOLS}
    auto = model.chat([user("q")], **fields)
    assert call_id in auto.token_ids
    none = model.chat([user("q")], tool_choice="none", **fields)
    assert call_id not in none.token_ids and not none.tool_calls
    # With a constraint "auto" leaves the choice: here the bias makes it, after the reasoning.
    fields["logit_bias"] = {call_id: 40.0} | ENDS_SOON | dict.fromkeys(stop_ids(), 41.0)
    either = model.chat([user("q")], regex="a", **(fields | {"max_new_tokens": 200}))
    assert either.tool_calls and not either.content


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": "required", "tools": TOOLS[2:]}, "there are no tools"),
        ({"tool_choice": "any"}, "tool_choice='any': allowed is"),
        ({"tool_choice": {"name": "now"}, "tools": TOOLS}, "allowed is"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
            "'x' is none of the tools",
        ),
        ({"tool_choice": "required", "tools": TOOLS, "regex": "a"}, "^regex is for content"),
        (
            {"tool_choice": "required", "tools": TOOLS, "stop_token_ids": [token_id(TAGS[1])]},
            "^stop_token_ids: .* tags within the reply",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "name": "f",
                        "parameters": {"properties": {"k": {"$ref": "#"}}, "required": ["k"]},
                    }
                ],
            },
            "^tools: parameters of f: k: ",
        ),
        (
            {"tool_choice": "required", "tools": [{"name": "f", "parameters": {"type": "array"}}]},
            "parameters of f: must be the schema of an object",
        ),
    ],
)
def test_a_tool_choice_that_cannot_be_followed_is_said(model, fields, message):
    with pytest.raises(ValueError, match=message):
        model.stream_chat([user("q")], **fields)


def test_masks_have_no_effect_on_other_rows(model):
    """A batch of a constrained and a free completion: the free one's log-probabilities stay."""
    (prompt,) = prompts_of(20, vocab_size=4000)
    free = SamplingParams(temperature=0.0, max_new_tokens=8, logprobs=3, speculative_tokens=3)
    over = SamplingParams.override
    alone = model.generate(prompt, over(free, speculative_tokens=0))
    params = [over(free, json_schema=SCHEMA), free]
    _, beside = run(forcing_one(model, alone), prompt, params)
    assert beside.token_ids == alone.token_ids
    assert_drafted([beside])
    for one, other in zip(alone.logprobs, beside.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert torch.isfinite(torch.tensor([v for d in beside.logprobs for v in d.values()])).all()
