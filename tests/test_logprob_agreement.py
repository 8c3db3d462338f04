"""Log-probabilities of generation, of `score` and of the plain forward agree to 1e-5 in fp32.

Measured: at most 7e-6 for sampled tokens of the tiny models, whose logits reach 7 (1.2e-5 for an id
of the whole vocabulary, on the model with logits of 8), and 4e-6 on nano, where they reach 18. On
nano 2e-6 of it is fp32 itself: the spacing of numbers at a log-probability below -16. The rest is
the order of sums, which differs with the number of rows of a step; `batch_invariant=True` takes it
away, see test_batch_invariance.py.
"""

import pytest
import torch

from glm53 import GLM53, SamplingParams
from tests.engines import logits_of, prompts_of, tiny_model, with_engine
from tests.speculation import assert_mixed, force_drafts, ids_of, sequences_of
from tests.test_readme import ROOT

TOLERANCE = 1e-5
PARAMS = SamplingParams(temperature=1.0, seed=1, max_new_tokens=12, ignore_eos=True, logprobs=0)
TEXTS = ["def fib(n):\n", "class Stack:\n    def __init__(self, items):\n        self" * 5, "x ="]


@pytest.fixture(scope="module", params=["nano", 0, 3, 5])
def model_and_prompts(request) -> tuple[GLM53, list[list[int]]]:
    if request.param != "nano":
        return tiny_model(request.param), prompts_of(67, 1, 30)
    folder = ROOT / "glm53" / "data" / "nano"
    nano = GLM53.from_pretrained(folder, dtype="float32", progress=False)
    return nano, [nano.tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("budget", "count", "speculative"), [(7, 1, 0), (7, 3, 3), (64, 3, 0), (1024, 3, 3)]
)
def test_three_ways(model_and_prompts, budget, count, speculative):
    model, prompts = model_and_prompts
    own = with_engine(model, max_batch_tokens=budget, max_running=3)
    plain = with_engine(model).generate(prompts[:count], PARAMS, speculative_tokens=0)
    force_drafts(own.engine(), sequences_of(plain), vocab_size=model.config.vocab_size)
    outs = own.generate(prompts[:count], PARAMS, speculative_tokens=speculative)
    assert ids_of(outs) == ids_of(plain)
    if speculative:
        assert_mixed(outs)
    scores = own.score([[*c.prompt_token_ids, *c.token_ids] for c in outs])
    for completion, score in zip(outs, scores, strict=True):
        ids = [*completion.prompt_token_ids, *completion.token_ids]
        assert len(ids) > 7  # index_topk of the tiny models
        rows = logits_of(model, ids)[:-1].log_softmax(-1)
        forward = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        generated = torch.tensor([row[i] for i, row in pairs])
        assert (score - forward).abs().max() < TOLERANCE
        assert (score[-len(generated) :] - generated).abs().max() < TOLERANCE
        assert (forward[-len(generated) :] - generated).abs().max() < TOLERANCE
