"""Passes over the graph that Inductor lowers: what they fuse, and what they leave alone."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from glm53.compile.backend import Backend
from glm53.compile.config import ALL_REWRITES
from glm53.compile.passes import PASSES, inductor_options
from glm53.compile.rewrites import REWRITES
from glm53.model import ResidualRMSNorm, RMSNorm
from tests.compile.fake_group import fake_group
from tests.compile.lowering import generated_code
from tests.compile.owed import calls, owe

FUSED = "glm53.all_reduce_add_rms_norm.default("
REDUCED = "_c10d_functional.all_reduce"
DIM, EPS = 16, 3e-3


class OwedFirst(ResidualRMSNorm):
    def forward(self, x, residual):
        assert self.reduce is not None
        stream = self.reduce(x) + residual
        return RMSNorm.forward(self, stream), stream


class MeanNorm(ResidualRMSNorm):
    """Another norm of the sum."""

    def forward(self, x, residual):
        _, stream = super().forward(x, residual)
        return self.weight * stream / (stream.abs().mean(-1, keepdim=True) + self.eps), stream


class UnroundedNorm(ResidualRMSNorm):
    """Rounds once, after the weight."""

    def forward(self, x, residual):
        _, stream = super().forward(x, residual)
        fp32 = stream.float()
        normed = fp32 * torch.rsqrt(fp32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * normed).to(x.dtype), stream


class Chain(nn.Module):
    """Blocks and norms in turn."""

    def __init__(self, kind, dtype, group, operation="sum") -> None:
        super().__init__()
        self.norms = nn.ModuleList(kind(DIM, EPS) for _ in range(3)).to(dtype)
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.2, 2)
        if group is not None:
            owe(self, group, operation)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        for norm in self.norms:
            x, residual = norm(x.sin(), residual)
        return x


def compiled(chain, names=PASSES):
    torch._dynamo.reset()
    return torch.compile(chain, fullgraph=True, dynamic=False, backend=Backend(names))


def inputs(dtype, dynamic=False) -> list[Tensor]:
    tensors = [torch.randn(5, DIM).to(dtype) for _ in range(2)]
    for tensor in tensors if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensors


@pytest.fixture(scope="module", autouse=True)
def group():
    with fake_group() as name, torch.inference_mode():
        yield name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", [ResidualRMSNorm, OwedFirst])
def test_fused(group, kind, dtype, dynamic):
    chain = Chain(kind, dtype, group)
    (code,) = generated_code(compiled(chain), *inputs(dtype, dynamic))
    assert code.count(FUSED) == 3
    assert code.count(f", {EPS}, '{group}')") == 3
    assert code.count(REDUCED) == 0


@pytest.mark.parametrize(
    "kind, operation, dtype",
    [
        (ResidualRMSNorm, "avg", torch.float32),
        (ResidualRMSNorm, "max", torch.float32),
        (MeanNorm, "sum", torch.float32),
        (UnroundedNorm, "sum", torch.bfloat16),
    ],
)
def test_something_else_is_left_alone(group, kind, operation, dtype):
    chain = Chain(kind, dtype, group, operation)
    (code,) = generated_code(compiled(chain), *inputs(dtype))
    assert code.count(FUSED) == 0
    assert code.count(f"{REDUCED}") >= 3


def test_each_reduction_keeps_its_group(group):
    other = torch.distributed.new_group(list(range(4))).group_name
    assert other != group
    chain = Chain(ResidualRMSNorm, torch.float32, group)
    owe(chain.norms[1], other)
    (code,) = generated_code(compiled(chain), *inputs(torch.float32))
    assert code.count(f", {EPS}, '{group}')") == 2
    assert code.count(f", {EPS}, '{other}')") == 1


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_results_are_those_without_the_pass(group, dtype, tolerance):
    chain = Chain(ResidualRMSNorm, dtype, group)
    arguments = inputs(dtype)
    expected = chain(*arguments)
    for names in ((), PASSES):
        torch.testing.assert_close(
            compiled(chain, names)(*arguments), expected, rtol=tolerance, atol=tolerance
        )


def test_a_cached_graph_calls_the_operator_too(group):
    """Then the pass does not run. Without it, or with another eps, the cache must not hit."""
    arguments = inputs(torch.float32)
    with fresh_cache():
        for eps, names, hit, fused in [
            (EPS, PASSES, 0, 3),
            (EPS, PASSES, 1, 3),
            (EPS, (), 0, 0),
            (2 * EPS, PASSES, 0, 3),
        ]:
            chain = Chain(ResidualRMSNorm, torch.float32, group)
            for norm in chain.norms:
                norm.eps = eps
            counters.clear()
            function = compiled(chain, names)
            torch.testing.assert_close(function(*arguments), chain(*arguments))
            assert counters["inductor"]["fxgraph_cache_hit"] == hit
            assert calls(lambda function=function: function(*arguments))[0] == fused


def test_one_rank_generates_the_same_code_with_and_without():
    chain = Chain(ResidualRMSNorm, torch.float32, None)
    (without,), (given,) = (
        generated_code(compiled(chain, names), *inputs(torch.float32)) for names in ((), PASSES)
    )
    # The first line numbers the graphs of the process.
    assert without.partition("\n")[2] == given.partition("\n")[2]


def test_key_holds_the_names():
    (first,) = inductor_options(PASSES).values()
    (again,) = inductor_options(PASSES).values()
    assert first is not again
    assert first.uuid() == again.uuid()
    assert PASSES[0] in ALL_REWRITES
    assert inductor_options(()) == {}


def test_one_rank_adds_and_norms_in_one_kernel():
    """Before a product, with which neither is fused. (One behind which they come may add.)"""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = ResidualRMSNorm(DIM, EPS)
            self.after = nn.Linear(DIM, DIM, bias=False)

        def forward(self, x, residual):
            normed, stream = self.norm(x, residual)
            return self.after(normed), stream

    (code,) = generated_code(compiled(Normed(), (*REWRITES, *PASSES)), *inputs(torch.float32))
    assert code.count("extern_kernels.mm(") == 1
    assert code.count("async_compile.cpp_pybinding(") == 1
