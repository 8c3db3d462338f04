"""A model from a checkpoint folder, and back to one."""

import json

import pytest
import torch

from glm53 import GLM53, SamplingParams
from tests.engines import byte_tokenizer, tiny_model
from tests.tiny import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def shared() -> GLM53:
    return tiny_model(4, tokenizer=byte_tokenizer(), overrides={"vocab_size": 269})


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, shared.network, shared.config)
    shared.tokenizer.transformers_tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 11, "top_k": 9}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_from_pretrained_generates_as_the_model_it_was(shared, folder):
    loaded = GLM53.from_pretrained(folder, device="cpu", kv_cache_tokens=640, progress=False)
    assert loaded.engine().pool.num_pages == 10
    assert not loaded.training
    assert loaded.generation_config == {"eos_token_id": 11, "top_k": 9}
    assert loaded.dtype == torch.float32 and loaded.device.type == "cpu"
    wanted = shared.generate("def f(n)", GREEDY)
    result = loaded.generate("def f(n)", GREEDY)
    assert (result.token_ids, result.text) == (wanted.token_ids, wanted.text)
    assert loaded.generate("a", allowed_token_ids=[11], max_new_tokens=3).stop_reason == 11


def test_a_checkpoint_without_tokenizer_takes_ids(shared, tmp_path):
    write_checkpoint(tmp_path, shared.network, shared.config)
    loaded = GLM53.from_pretrained(tmp_path, device="cpu", kv_cache_tokens=640, progress=False)
    assert loaded.tokenizer is None
    result = loaded.generate([9, 10, 11], GREEDY)
    assert result.token_ids == shared.generate([9, 10, 11], GREEDY).token_ids
    assert result.text == ""
    with pytest.raises(ValueError, match="without a tokenizer"):
        loaded.generate("abc")


def test_save_pretrained_keeps_weights_and_side_files(folder, tmp_path):
    loaded = GLM53.from_pretrained(folder, device="cpu", kv_cache_tokens=640, progress=False)
    for target in (tmp_path / "first", tmp_path / "first"):  # a second time over the same files
        loaded.save_pretrained(target)
    again = GLM53.from_pretrained(target, device="cpu", kv_cache_tokens=640, progress=False)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert again.generation_config == loaded.generation_config
    assert again.generate("abc", GREEDY).text == loaded.generate("abc", GREEDY).text


@pytest.mark.parametrize(
    "name, text", [("generation_config.json", "{"), ("generation_config.json", "[]")]
)
def test_a_broken_generation_config_is_named(shared, tmp_path, name, text):
    write_checkpoint(tmp_path, shared.network, shared.config)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        GLM53.from_pretrained(tmp_path, device="cpu", progress=False)


def test_what_does_not_fit_is_refused_with_the_numbers(folder):
    with pytest.raises(MemoryError, match=r"\d"):
        GLM53.from_pretrained(folder, device="cpu", kv_cache_bytes=1 << 50, progress=False)
    with pytest.raises(ValueError, match="dtype='int8'"):
        GLM53.from_pretrained(folder, device="cpu", dtype="int8", progress=False)
