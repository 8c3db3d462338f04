"""Weights written in place: nothing that was computed with the old ones is handed to a request."""

import gc
import weakref

import pytest
import torch

from glm53 import SamplingParams
from tests.engines import assert_idle, prompts_of, tiny_model, with_engine
from tests.speculation import agreeing_model, assert_mixed

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


def _o_proj(network):
    return network.model.layers[0].self_attn.o_proj


def _new_data(network, factor):
    weight = _o_proj(network).weight
    weight.data = weight.detach() * factor


def _new_parameter(network, factor):
    _o_proj(network).weight = torch.nn.Parameter(_o_proj(network).weight.detach() * factor)


def _new_parameter_of_the_same_memory(network, factor):
    """Its version counter starts anew, so that every such update ends at the same version."""
    _o_proj(network).weight = torch.nn.Parameter(_o_proj(network).weight.data)
    _o_proj(network).weight.mul_(factor)


def _vector(network, factor):
    vector = torch.nn.utils.parameters_to_vector(network.parameters())
    torch.nn.utils.vector_to_parameters(vector * factor, network.parameters())


def _new_buffer(network, factor):
    gate = network.model.layers[1].mlp.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias * factor


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize(
    "update",
    [_new_data, _new_parameter, _new_parameter_of_the_same_memory, _vector, _new_buffer],
)
def test_recycled_ids_and_addresses_are_seen(update, times):
    """Several updates between two generations: what is new takes the place of what is gone."""
    model = tiny_model()
    (prompt,) = prompts_of(130)
    for factor in (1.01, 0.98) * 4:
        model.generate(prompt, PARAMS)
        assert model.generate(prompt, PARAMS).metrics.cached_tokens == 128
        with torch.no_grad():
            for _ in range(times):
                update(model.network, factor)
        assert model.generate(prompt, PARAMS).metrics.cached_tokens == 0


def test_replaced_weights_are_not_kept_alive():
    model = tiny_model()
    model.generate(prompts_of(130)[0], PARAMS)
    weight = _o_proj(model.network).weight
    gone = [weakref.ref(weight), weakref.ref(weight.untyped_storage())]
    del weight
    _new_parameter(model.network, 1.5)
    weight = _o_proj(model.network).weight
    gone.append(weakref.ref(weight.untyped_storage()))
    weight.data = weight.data * 2
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_tensors_may_still_be_swapped():
    """torch swaps no tensor that has weak references."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = tiny_model()
        (prompt,) = prompts_of(130)
        model.generate(prompt, PARAMS)
        model.load_state_dict({n: t * 1.5 for n, t in model.state_dict().items()})
        assert model.generate(prompt, PARAMS).metrics.cached_tokens == 0
        assert model.generate(prompt, PARAMS).metrics.cached_tokens == 128
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_weights_made_in_inference_mode():
    """They have no version counter, and are generated from as others; replaced ones are seen."""
    (prompt,) = prompts_of(130)
    with torch.inference_mode():
        model = tiny_model()
    assert _o_proj(model.network).weight.is_inference()
    completion = model.generate(prompt, PARAMS)
    assert completion.token_ids == tiny_model().generate(prompt, PARAMS).token_ids
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 128
    with torch.inference_mode():
        _new_parameter(model.network, 1.5)
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 0
    with torch.inference_mode():
        _o_proj(model.network).weight.mul_(1.5)
    model.engine().drop_prefixes()
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 0


def test_ordinary_weights_written_in_inference_mode():
    model = tiny_model()
    (prompt,) = prompts_of(130)
    model.generate(prompt, PARAMS)
    with torch.inference_mode():
        _o_proj(model.network).weight.mul_(1.5)
    assert model.generate(prompt, PARAMS).metrics.cached_tokens == 0


def test_an_update_of_the_mtp_layer():
    """No token changes; the drafts are those of an engine that never knew the old weights."""
    model = agreeing_model(1)
    own, (prompt,) = with_engine(model), prompts_of(130)
    params = SamplingParams.override(PARAMS, max_new_tokens=24, speculative_tokens=3)
    before = [own.generate(prompt, params) for _ in range(2)]
    assert [c.metrics.cached_tokens for c in before] == [0, 128]
    with torch.no_grad():
        model.network.model.layers[-1].self_attn.kv_a_proj_with_mqa.weight.mul_(-3)
        model.network.model.layers[-1].eh_proj.weight[:, model.config.hidden_size :].mul_(3)
    again, fresh = own.generate(prompt, params), with_engine(model).generate(prompt, params)
    assert again.metrics.cached_tokens == 0
    assert again.token_ids == fresh.token_ids == before[0].token_ids
    assert again.metrics.accepted_at == fresh.metrics.accepted_at != before[0].metrics.accepted_at
    assert_mixed([*before, again, fresh])
    assert_idle(own.engine())


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


def test_checked_also_where_as_many_run_as_may():
    """A preemption in the step may make room for one that waits."""
    model = tiny_model()
    own = with_engine(model, max_running=2, kv_cache_tokens=64 * 7)
    engine = own.engine()
    small, *large = prompts_of(70, 120, 185)
    own.generate(small, PARAMS)
    growing = SamplingParams.override(PARAMS, max_new_tokens=60)
    for prompt in large:
        engine.add(prompt, growing)
    engine.step()
    late = engine.add(small, PARAMS)
    with torch.no_grad():
        _copy_one(model.network)
    checked = []
    matches = engine._weights.matches
    engine._weights.matches = lambda network: checked.append(matches(network)) or checked[-1]
    engine.step()
    assert len(engine.scheduler.running) == 2 and checked == [False]
    assert engine.run()[late][0].metrics.cached_tokens == 0
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
