"""Weights written in place: nothing that was computed with the old ones is handed to a request."""

import pytest
import torch

from glm53 import SamplingParams
from tests.engines import assert_idle, prompts_of, tiny_model, with_engine

PARAMS = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True, speculative_tokens=0)


def _copy_one(network):
    weight = network.model.layers[1].self_attn.kv_a_proj_with_mqa.weight
    weight.copy_(weight * 1.5)


def _load_state_dict(network):
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state["model.embed_tokens.weight"] *= 1.5
    network.load_state_dict(state)


def _assign_state_dict(network):
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state["model.embed_tokens.weight"] *= 1.5
    network.load_state_dict(state, assign=True)


def _replace(network):
    attention = network.model.layers[0].self_attn
    attention.o_proj.weight = torch.nn.Parameter(attention.o_proj.weight * 1.5)


def _other_data(network):
    weight = network.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data * 1.5


def _write_bias(network):
    network.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.arange(6.0) * 9)


def _replace_bias(network):
    network.model.layers[1].mlp.gate.e_score_correction_bias = torch.arange(6.0) * 9


def _optimizer(**options):
    def step(network):
        weight = network.model.layers[0].self_attn.o_proj.weight
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.1, **options).step()
        weight.grad = None

    return step


UPDATES = {
    "copy one": _copy_one,
    "load_state_dict": _load_state_dict,
    "load_state_dict(assign=True)": _assign_state_dict,
    "replace": _replace,
    "other data": _other_data,
    "write the bias": _write_bias,
    "replace the bias": _replace_bias,
    "optimizer": _optimizer(foreach=False),
    "foreach optimizer": _optimizer(foreach=True),
}


@pytest.mark.parametrize("update", list(UPDATES))
def test_every_way_of_writing_is_seen(update):
    model = tiny_model()
    (prompt,) = prompts_of(130)
    model.generate(prompt, PARAMS)
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 128
    before = model.score(prompt)
    with torch.no_grad():
        UPDATES[update](model.network)
    again = model.generate(prompt, PARAMS, logprobs=0)
    assert again.metrics.cached_tokens == 0
    assert (model.score(prompt) - before).abs().max() > 1e-3
    fresh = with_engine(model).generate(prompt, PARAMS, logprobs=0)
    assert again.token_ids == fresh.token_ids
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 128
    assert_idle(model.engine())


def _write_through_data(network):
    network.model.embed_tokens.weight.data.mul_(1.5)


@pytest.mark.parametrize("update", [_write_through_data, _optimizer(fused=True)])
def test_what_no_version_counter_sees_is_said_by_hand(update):
    model = tiny_model()
    (prompt,) = prompts_of(130)
    model.generate(prompt, PARAMS)
    update(model.network)
    model.engine().drop_prefixes()
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 0
    assert_idle(model.engine())


def test_a_request_that_waited_during_the_update():
    """It was added before, with the old weights' pages in the tree, and is admitted after."""
    model = tiny_model()
    own = with_engine(model, max_running=1)
    engine = own.engine()
    (prompt,) = prompts_of(130)
    first = engine.add(prompt, SamplingParams.override(PARAMS, max_new_tokens=70))
    second = engine.add(prompt, SamplingParams.override(PARAMS, logprobs=0))
    engine.step()
    with torch.no_grad():
        _copy_one(model.network)
    finished = engine.run()
    assert finished[first][0].finish_reason == "length"
    (completion,) = finished[second]
    assert completion.metrics.cached_tokens == 0
    fresh = with_engine(model).generate(prompt, PARAMS, logprobs=0)
    assert completion.token_ids == fresh.token_ids
    for found, wanted in zip(completion.logprobs, fresh.logprobs, strict=True):
        assert found.keys() == wanted.keys()
        assert all(abs(found[i] - wanted[i]) < 1e-5 for i in found)
    assert_idle(engine)


def test_an_update_while_the_prompt_is_computed():
    """Half of the keys of a page are of the old weights: nobody else may start from it."""
    model = tiny_model()
    own = with_engine(model, max_batch_tokens=100)
    engine = own.engine()
    (prompt,) = prompts_of(130)
    engine.add(prompt, PARAMS)
    engine.step()
    assert engine.scheduler.running[0].num_computed == 100
    with torch.no_grad():
        _write_bias(model.network)
    engine.run()
    assert own.generate(prompt, PARAMS).metrics.cached_tokens == 0
    assert own.generate(prompt, PARAMS).metrics.cached_tokens == 128
    assert_idle(engine)
