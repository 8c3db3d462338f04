"""Options that do not go together, or not at all, are refused by name."""

import math

import pytest

from glm53 import GLM53
from glm53.compile import CompileConfig
from glm53.options import EngineOptions
from tests.chats import NANO


@pytest.mark.parametrize("options", [dict(batch_invariant=True), dict(kv_cache_hot_tokens=64)])
def test_not_for_compiled_models(options):
    (name,) = options
    EngineOptions(**options)
    for compile in (True, CompileConfig()):
        with pytest.raises(ValueError, match=rf"{name}=.*compiled"):
            EngineOptions(compile=compile, **options)


def test_compile_cache_is_a_folder_for_compiled_models(tmp_path):
    file = tmp_path / "file"
    file.touch()
    EngineOptions(compile=True, compile_cache=tmp_path / "new")
    for folder in (5, file, str(file)):
        with pytest.raises(ValueError, match="compile_cache"):
            EngineOptions(compile=True, compile_cache=folder)
    with pytest.raises(ValueError, match="no use without compile"):
        EngineOptions(compile_cache=tmp_path)
    for value in (1, "yes", None):
        with pytest.raises(ValueError, match="compile="):
            EngineOptions(compile=value)


@pytest.mark.parametrize("dtype, cache", [("float16", None), ("bfloat16", "float32")])
def test_caches_of_another_dtype_than_the_model(dtype, cache):
    """Prompts of which every row has keys of its own, and of which rows share them."""
    model = GLM53.from_pretrained(
        NANO, dtype=dtype, kv_cache_dtype=cache, kv_cache_tokens=4096, progress=False
    )
    for prompt in ("import os", "import os\n" * 40):
        reply = model.generate(prompt, max_new_tokens=3, temperature=0, logprobs=1)
        assert len(reply.token_ids) == 3
        for step in reply.logprobs:
            assert all(math.isfinite(value) for value in step.values())
