"""Generation through the compiled network: the tokens of the eager one, at every step."""

import pytest
import torch

from glm53 import GLM53
from glm53.compile import CompileConfig
from tests.chats import NANO

PROMPTS = ["def read_lines(path):\n", "import os\n" * 9, "class A:\n    def f(self, x):\n"]


@pytest.fixture(scope="module")
def models():
    torch._dynamo.reset()
    options = dict(dtype="float32", kv_cache_tokens=4096, progress=False, max_batch_tokens=48)
    eager = GLM53.from_pretrained(NANO, **options)
    compiled = GLM53.from_pretrained(NANO, **options, compile=CompileConfig(buckets=(4,)))
    compiled.engine()
    return eager, compiled


def decoder_calls(engine) -> int:
    return sum(n for (entry, _), n in engine._runner.compiled.calls.items() if entry == "decoder")


@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_tokens_equal(models, speculative_tokens):
    eager, compiled = models
    options = dict(max_new_tokens=24, temperature=0, speculative_tokens=speculative_tokens)
    expected = eager.generate(PROMPTS, **options)
    engine = compiled.engine()
    calls, steps = decoder_calls(engine), engine.stats.steps
    with torch.compiler.set_stance("fail_on_recompile"):
        results = compiled.generate(PROMPTS, **options)
    assert [c.token_ids for c in results] == [c.token_ids for c in expected]
    # Every step ran the compiled decoder, so none fell back.
    assert decoder_calls(engine) - calls == engine.stats.steps - steps > 0
