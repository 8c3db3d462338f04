"""A model from a checkpoint folder, and back to one."""

import copy
import io
import json
import pickle

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


def test_save_pretrained_of_a_model_that_was_no_folder(tmp_path):
    model = tiny_model(
        4,
        tokenizer=byte_tokenizer(),
        overrides={"vocab_size": 269},
        generation_config={"eos_token_id": [11, 13], "top_k": 9},
    )
    model.save_pretrained(tmp_path)
    again = GLM53.from_pretrained(tmp_path, device="cpu", kv_cache_tokens=640, progress=False)
    assert again.generation_config == {"eos_token_id": [11, 13], "top_k": 9}
    assert again.tokenizer.encode("def<|user|>") == model.tokenizer.encode("def<|user|>")
    assert again.tokenizer.eos_token_ids == model.tokenizer.eos_token_ids
    assert again.generate("abc", GREEDY).text == model.generate("abc", GREEDY).text


def test_saving_over_the_own_folder(shared, folder, tmp_path):
    target = tmp_path / "own"
    GLM53.from_pretrained(folder, device="cpu", progress=False).save_pretrained(target)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    GLM53.from_pretrained(target, device="cpu", progress=False).save_pretrained(target)
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_after_generation(shared, duplicate):
    wanted = shared.generate("abc", GREEDY)
    engine = shared.engine()
    twin = duplicate(shared)
    assert shared.engine() is engine and twin._engine is None
    assert twin.generate("abc", GREEDY).token_ids == wanted.token_ids
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert not twin(torch.tensor([[9, 10]])).any(), "one network, not two"
    assert shared.generate("abc", GREEDY).token_ids == wanted.token_ids


def test_torch_save_after_generation(shared):
    wanted = shared.generate("abc", GREEDY)
    file = io.BytesIO()
    torch.save(shared, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.generate("abc", GREEDY).token_ids == wanted.token_ids


BAD_ARGUMENTS = {
    "dtype": ({"kv_cache_dtype": torch.float16}, "kv_cache_dtype=torch.float16"),
    "dtype name": ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'"),
    "tokens": ({"kv_cache_tokens": 640.0}, r"kv_cache_tokens=640\.0"),
    "bytes": ({"kv_cache_bytes": "1G"}, "kv_cache_bytes='1G'"),
    "running": ({"max_running": 0}, "max_running=0"),
    "running type": ({"max_running": 1.5}, r"max_running=1\.5"),
    "rows": ({"max_batch_tokens": True}, "max_batch_tokens=True"),
}


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_weights_are_read(
    shared, folder, monkeypatch, arguments, message
):
    monkeypatch.setattr("glm53.api.load_transformer", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        GLM53.from_pretrained(folder, device="cpu", progress=False, **arguments)
    with pytest.raises(ValueError, match=message):
        GLM53(shared.network, **arguments)


@pytest.mark.parametrize("eos", [269, -1, "5", 1.5, [True]])
def test_bad_stop_ids_are_refused_before_weights_are_read(shared, tmp_path, monkeypatch, eos):
    write_checkpoint(tmp_path, shared.network, shared.config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    monkeypatch.setattr("glm53.api.load_transformer", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"generation_config\.eos_token_id"):
        GLM53.from_pretrained(tmp_path, device="cpu", progress=False)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_the_cache_dtype_may_be_a_name(shared, name):
    model = GLM53(shared.network, kv_cache_tokens=64, kv_cache_dtype=name)
    assert model.engine()._cache.dtype == getattr(torch, name)


@pytest.mark.parametrize("size", [{"kv_cache_tokens": 640}, {"kv_cache_bytes": 1 << 20}])
def test_the_default_cache_dtype_follows_the_model(folder, size):
    model = GLM53.from_pretrained(folder, device="cpu", dtype="bfloat16", progress=False, **size)
    narrow = model.engine()._cache
    wide = model.float().engine()._cache
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    for cache in (narrow, wide):
        if "kv_cache_bytes" in size:
            assert (1 << 20) * 0.9 < cache.nbytes <= 1 << 20
        else:
            assert cache.num_pages == 10


@pytest.mark.parametrize(
    "name, text",
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", "[" * 100_000),
    ],
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
