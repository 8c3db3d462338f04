"""Greedy generation against transformers' own `generate`, token for token."""

from types import SimpleNamespace

import pytest
import torch

from tests.engines import greedy, logits_of, prompts_of, tiny_model, with_engine
from tests.tiny import load_reference, write_checkpoint

LENGTHS = (5, 33, 12, 20)
NEW = 64
PAD = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> SimpleNamespace:
    """One set of weights in both libraries; 18 index heads, 7 selected keys, up to 96 of them."""
    ours = tiny_model(2, overrides={"num_nextn_predict_layers": 0})
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, ours.network, ours.config)
    theirs = load_reference(folder)
    theirs.generation_config.eos_token_id = None
    return SimpleNamespace(ours=ours, theirs=theirs, prompts=prompts_of(*LENGTHS, seed=6))


def _theirs(model, prompts, **arguments) -> list[list[int]]:
    """New ids of a left-padded batch."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=NEW,
        pad_token_id=PAD,
        **arguments,
    )
    return out[:, width:].tolist()


@pytest.fixture(scope="module")
def continuations(pair) -> list[list[int]]:
    return _theirs(pair.theirs, pair.prompts)


def test_the_case_is_decided_by_more_than_rounding(pair, continuations):
    """Otherwise the tests below would compare coin tosses."""
    for prompt, output in zip(pair.prompts, continuations, strict=True):
        rows_TW = logits_of(pair.ours, prompt + output)[len(prompt) - 1 : -1]
        best, second = rows_TW.topk(2, dim=-1).values.unbind(-1)
        assert (best - second).min() > 1e-3, "choose another seed"
        assert len(set(output)) > 5, "a loop of few tokens would prove little"


@pytest.mark.parametrize("budget, pages", [(1024, 16), (7, 16), (1024, 3)])
def test_a_mixed_batch_continues_as_in_transformers(pair, continuations, budget, pages):
    own = with_engine(pair.ours, max_batch_tokens=budget, kv_cache_tokens=64 * pages)
    completions = own.generate(pair.prompts, temperature=0, max_new_tokens=NEW, ignore_eos=True)
    assert [list(c.token_ids) for c in completions] == continuations
    assert (own.engine().stats.preemptions > 0) is (pages == 3)


def test_the_uncached_loop_agrees_too(pair, continuations):
    assert greedy(pair.ours, pair.prompts[0], 20) == continuations[0][:20]


def test_it_stops_where_transformers_stops(pair, continuations):
    """Any id that comes up will do as a stop id; transformers pads what comes after it."""
    stops = [continuations[1][10], continuations[2][40]]
    theirs = _theirs(pair.theirs, pair.prompts, eos_token_id=stops)
    completions = with_engine(pair.ours).generate(
        pair.prompts, temperature=0, max_new_tokens=NEW, ignore_eos=True, stop_token_ids=stops
    )
    assert {c.finish_reason for c in completions} >= {"stop"}
    for completion, ids in zip(completions, theirs, strict=True):
        count = len(completion.token_ids)
        assert list(completion.token_ids) == ids[:count]
        assert set(ids[count:]) <= {PAD}
        if completion.finish_reason == "stop":
            assert completion.stop_reason == ids[count - 1] in stops
