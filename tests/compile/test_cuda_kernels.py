"""What a decode step launches on a CUDA device, lowered without one: a lost fusion fails here.

The pieces are those of GLM-5.3's schedule, of small sizes, as the backend hands them to Inductor.
"""

import re
from collections import Counter

import pytest
import torch
from torch import nn

from glm53.compile import CompileConfig, CompiledNetwork
from glm53.compile.backend import Backend
from glm53.compile.passes import PASSES
from glm53.compile.rewrites import REWRITES
from glm53.model import ResidualRMSNorm
from tests.compile.cuda_lowering import cuda_device, fake_decode, fake_tensors
from tests.compile.lowering import generated_code
from tests.compile.test_split import schedule
from tests.tiny import tiny_config

ROWS, LAYERS = 32, 14

# Launches of Triton kernels by each distinct piece at 32 rows, in the order in which they first
# run: up to the first selection; a dense full layer; a dense one and three shared layers; a full
# one and three shared layers; the last of these and the final norm. Then those of a draft step.
# What a rewrite saves, or a version of torch changes, is to be changed here.
DECODER, DRAFT = {
    "2.11": ([3, 7, 31, 35, 34], [3, 10]),
    "2.13": ([3, 7, 28, 31, 30], [3, 9]),
}[torch.__version__[:4]]

# Of a weight to fp32, which may run anywhere before its product.
CONVERSION = re.compile(r"triton_poi_fused__to_copy_\d+\.run\(")
CALL = re.compile(
    r"(triton)_\w+\.run\(|extern_kernels\.(\w+)\(|torch\.ops\.glm53\.(\w+)\.default\("
)


def calls(code: str) -> list[str]:
    """What a piece launches and calls, in order: "triton", "mm", "sparse_mla", ..."""
    return [next(filter(None, match.groups())) for match in CALL.finditer(code)]


def launches(code: str) -> int:
    return calls(code).count("triton")


@pytest.fixture(scope="module")
def network():
    torch._dynamo.reset()
    config = tiny_config(
        num_hidden_layers=LAYERS,
        indexer_types=schedule(LAYERS),
        mlp_layer_types=("dense",) * 3 + ("sparse",) * (LAYERS - 3),
    )
    network, step, cache = fake_decode(config, ROWS, torch.bfloat16)
    config = CompileConfig(buckets=(ROWS,), cuda_graphs=False)
    return CompiledNetwork(network, config), step, cache


@torch.no_grad()
def test_kernels_of_a_decode_step(network):
    compiled, step, cache = network
    codes = generated_code(compiled.model, step, cache, context=cuda_device)
    assert [launches(code) for code in codes] == DECODER
    assert compiled.backend.reports[-1].pieces == [0, 1, 1, 2, 3, 4]
    for code in codes:
        sequence = " ".join(calls(CONVERSION.sub("", code)))
        # From attention to the first product of the feed-forward: W_UV, its result laid out,
        # o_proj, then addition and norm in one kernel.
        attention = r"sparse_mla bmm triton (?:mm|addmm) triton mm"
        assert len(re.findall(attention, sequence)) == sequence.count("sparse_mla"), sequence
    assert sum(code.count("sparse_mla") > 0 for code in codes) == 4


@torch.no_grad()
def test_kernels_of_a_draft_step(network):
    compiled, step, cache = network
    hidden_TD = cache.layers[0].latent.new_empty(ROWS, compiled.config.hidden_size)
    codes = generated_code(
        compiled.draft, step.input_ids, hidden_TD, step, cache, context=cuda_device
    )
    assert [launches(code) for code in codes] == DRAFT


class Normed(nn.Module):
    """A norm before a product. (Behind one, the product may do the addition.)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = ResidualRMSNorm(64, 1e-5)
        self.after = nn.Linear(64, 64, bias=False)

    def forward(self, x, residual):
        normed, stream = self.norm(x, residual)
        return self.after(normed), stream


@torch.no_grad()
@pytest.mark.parametrize("largest, kernels", [(64, 1), (1, 3)])
def test_addition_and_norm_are_one_kernel(largest, kernels):
    """And are seen to be three where Inductor may not fuse."""
    torch._dynamo.reset()
    module, x, residual = fake_tensors(
        Normed().bfloat16(), torch.empty(16, 64).bfloat16(), torch.empty(16, 64).bfloat16()
    )
    compiled = torch.compile(module, fullgraph=True, backend=Backend((*REWRITES, *PASSES)))
    with torch._inductor.config.patch(max_fusion_size=largest):
        (code,) = generated_code(compiled, x, residual, context=cuda_device)
    assert Counter(calls(code)) == {"triton": kernels, "mm": 1}
