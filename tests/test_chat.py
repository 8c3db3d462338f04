"""Chat through the engine: a model that says what it is told to, and the embedded one."""

import pytest
import torch

from glm53 import GLM53, ChatCompletion, Completion, Delta, SamplingParams
from glm53.chat import ChatReply
from tests.chats import NANO, TOOLS, call, nano, user
from tests.engines import assert_idle, tiny_model

CALL = "<tool_call>search<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>"


class Scripted:
    """A tiny model whose logits are replaced: it writes `reply`, whatever it is asked."""

    def __init__(self) -> None:
        stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
        config = {"vocab_size": 4096, "eos_token_id": tuple(map(nano().token_to_id, stops))}
        config["num_nextn_predict_layers"] = 0  # drafts would ask the head too
        self.model = tiny_model(0, tokenizer=nano(), overrides=config)
        self.ids: list[int] = []
        self.model.lm_head.register_forward_hook(self._say)

    def _say(self, _module, _inputs, logits_BW):
        forced_BW = torch.zeros_like(logits_BW)
        forced_BW[..., self.ids.pop(0) if self.ids else 0] = 1
        return forced_BW

    def says(self, reply: str) -> GLM53:
        self.ids = nano().encode(reply)
        return self.model


@pytest.fixture(scope="module")
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def scripted(script):
    yield script
    assert_idle(script.model.engine())


def test_a_reply_is_split(scripted):
    model = scripted.says(f"think</think>content{CALL}<|observation|>")
    reply = model.chat([user("q")], tools=TOOLS, temperature=0)
    assert (reply.reasoning, reply.content) == ("think", "content")
    assert [(c.name, c.arguments, c.raw) for c in reply.tool_calls] == [
        ("search", {"limit": 3}, CALL)
    ]
    assert reply.finish_reason == "stop"
    assert reply.stop_reason == nano().token_to_id("<|observation|>")
    assert reply.text == f"think</think>content{CALL}"
    assert list(reply.prompt_token_ids) == nano().encode_chat([user("q")], tools=TOOLS)
    assert reply.message()["tool_calls"] == [call("search", {"limit": 3})]


def test_the_template_gets_its_variables(scripted):
    for options in ({"reasoning_effort": "low"}, {"clear_thinking": True}, {}):
        messages = [user("a"), {"role": "assistant", "content": "x", "reasoning_content": "y"}]
        messages.append(user("<|user|>"))
        reply = scripted.says("b<|user|>").chat(messages, temperature=0, **options)
        assert list(reply.prompt_token_ids) == nano().encode_chat(messages, **options)
    special = scripted.says("b<|user|>").chat(messages, temperature=0, allow_special=True)
    assert len(special.prompt_token_ids) < len(reply.prompt_token_ids)


def test_deltas_add_up_to_the_reply(scripted):
    model = scripted.says(f"think\n\N{MUSICAL SYMBOL G CLEF}</think>co<b{CALL}{CALL}tent<|user|>")
    deltas = list(model.stream_chat([user("q")], tools=TOOLS, temperature=0))
    reply = deltas[-1].completion
    assert isinstance(reply, ChatCompletion)
    assert (
        "".join(d.reasoning for d in deltas)
        == reply.reasoning
        == "think\n\N{MUSICAL SYMBOL G CLEF}"
    )
    assert "".join(d.content for d in deltas) == reply.content == "co<btent"
    assert tuple(c for d in deltas for c in d.tool_calls) == reply.tool_calls
    assert len(reply.tool_calls) == 2
    assert tuple(i for d in deltas for i in d.token_ids) == reply.token_ids
    assert all(delta.completion is None for delta in deltas[:-1])


def test_a_truncated_thought_is_no_content(scripted):
    reply = scripted.says("think more").chat([user("q")], temperature=0, max_new_tokens=1)
    assert reply.finish_reason == "length"
    assert reply.content == "" and "think more".startswith(reply.reasoning) and reply.reasoning


@pytest.mark.parametrize("include, content", [(False, "A"), (True, "A\n\n")])
def test_stop_strings_are_looked_for_in_the_content(scripted, include, content):
    model = scripted.says("x\n\ny</think>A\n\nB and so on<|user|>")
    fields = {"temperature": 0, "stop": "\n\n", "include_stop": include, "logprobs": 0}
    deltas = list(model.stream_chat([user("q")], **fields))
    reply = deltas[-1].completion
    assert reply is not None
    assert (reply.reasoning, reply.content) == ("x\n\ny", content)
    assert (reply.finish_reason, reply.stop_reason) == ("stop", "\n\n")
    assert "".join(delta.content for delta in deltas) == content
    assert reply.logprobs is not None and len(reply.logprobs) == len(reply.token_ids)
    assert "B and so on" not in reply.text and reply.text.startswith("x\n\ny</think>A\n\n")


def test_the_beginning_of_a_stop_string_is_content_at_the_end(scripted):
    reply = scripted.says("x</think>A\n<|user|>").chat([user("q")], temperature=0, stop="\n\n")
    assert reply.content == "A\n"


def test_min_new_tokens_delays_stop_strings(scripted):
    model = scripted.says("</think>a b a b c")
    early = model.chat([user("q")], temperature=0, stop="b", max_new_tokens=6, min_new_tokens=4)
    assert early.content.startswith("a b a ")


def test_a_stop_string_within_a_delta_of_several_tokens():
    ids = tuple(nano().encode("r</think>A\n\nB and so on"))
    count = 1 + next(i for i in range(len(ids)) if "\n\n" in nano().decode(ids[: i + 1]))
    assert count < len(ids)
    params = SamplingParams(stop="\n\n", logprobs=0).resolve({})
    reply = ChatReply(nano(), None, nano().encode_chat([user("q")]), params)
    logprobs = tuple({token_id: -1.0} for token_id in ids)
    first = reply.add(Delta(0, 0, ids, "", logprobs))
    assert (first.reasoning, first.content, reply.stop) == ("r", "A", "\n\n")
    completion = Completion((), ids, nano().decode(ids), "cancelled", logprobs=logprobs)
    last = reply.add(Delta(0, 0, completion=completion)).completion
    assert last is not None
    assert (last.finish_reason, last.stop_reason, last.content) == ("stop", "\n\n", "A")
    assert (last.token_ids, last.logprobs) == (ids[:count], logprobs[:count])
    assert last.text == nano().decode(ids[:count])


def test_leaving_a_stream_cancels_it(scripted):
    model = scripted.says("think" * 20)
    for _ in model.stream_chat([user("q")], temperature=0):
        break
    assert_idle(model.engine())


def test_what_cannot_be_chatted_is_said(scripted):
    model = scripted.says("")
    with pytest.raises(ValueError, match="n=2"):
        model.chat([user("q")], n=2)
    with pytest.raises(ValueError, match="unknown role"):
        model.chat([{"role": "robot", "content": "q"}])
    with pytest.raises(ValueError, match="without a tokenizer"):
        tiny_model().chat([user("q")])
    with pytest.raises(ValueError, match="no name"):
        model.chat([user("q")], tools=[{"function": {"description": "x"}}])


def test_the_embedded_model_chats():
    model = GLM53.from_pretrained(NANO, device="cpu", progress=False)
    reply = model.chat([user("hi")], max_new_tokens=8, temperature=0)
    assert reply.prompt_token_ids[-1] == nano().token_to_id("<think>")
    prefix = [*reply.prompt_token_ids]
    assert reply.token_ids == model.generate(prefix, max_new_tokens=8, temperature=0).token_ids
