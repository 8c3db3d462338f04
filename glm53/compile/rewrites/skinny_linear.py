"""Matrix products of few rows as reductions.

A product of few rows reads its whole weight for a few operations per element, so it is bound by
memory, and a library's GEMM does not reach the memory's speed there. Written as

    y[m, n] = sum_k x[m, k] * w[n, k]

the compiler makes one vectorised loop of it, which reads a row of the weight once for all m, copies
nothing, and fuses what follows. Sums are fp32.

Where that pays was measured, see MAX_K. All other products stay what they are.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, fx

# By M (the next larger one counts), the largest K for which a reduction is faster. On 2 threads of
# bf16, GB/s of reduction and of GEMM: M = 1, any K: 35 to 58 against 22; M = 2: 47 against 27;
# M = 4: K = 512: 16 against 10, K = 4096: 10 against 16 (x in fp32 leaves the first-level cache);
# M = 8 and 16: at most as fast.
MAX_K = {1: math.inf, 2: math.inf, 4: 1024}
# Of the products that absorb kv_b_proj, a GEMM copies the weight first. W_UK lies the wrong way
# round for a reduction.
MAX_ROWS_QUERY = 2
MAX_ROWS_VALUE = 16
_SUMS = 16  # that fit the registers of a CPU


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    y = torch.cat([_dot(row, weight) for row in in_memory(x).unsqueeze(-2).unbind(0)])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def in_memory(x: Tensor) -> Tensor:
    """x, computed before its use. What the loop of a product reads is otherwise computed in it,
    for every row of the weight again: a whole norm, as it counts as cheap."""
    return x.as_strided(x.shape, x.stride(), x.storage_offset())


def _dot(x_1K: Tensor, weight_NK: Tensor) -> Tensor:
    return (x_1K.float() * weight_NK.float()).sum(-1).unsqueeze(0)


def absorb_query(q_THN: Tensor, w_HNC: Tensor) -> Tensor:
    """`einsum("thn,hnc->thc")`.

    The weight's rows go along the output, so a loop that sums one output at a time jumps from row
    to row: _SUMS of them at a time read whole cache lines.
    """
    parts_HNc = w_HNC.split(-(-w_HNC.shape[2] // _SUMS), dim=2)
    rows = []
    for q_HN in q_THN.float().unbind(0):
        q_HN1 = q_HN.unsqueeze(-1)
        rows.append(torch.cat([(q_HN1 * part_HNc.float()).sum(1) for part_HNc in parts_HNc], -1))
    return torch.stack(rows).to(q_THN.dtype)


def absorb_value(out_THC: Tensor, w_HVC: Tensor) -> Tensor:
    """`einsum("thc,hvc->thv")`."""
    rows = [(out_HC.unsqueeze(1) * w_HVC.float()).sum(2) for out_HC in out_THC.float().unbind(0)]
    return torch.stack(rows).to(out_THC.dtype)


_EINSUMS = {
    "thn,hnc->thc": (absorb_query, MAX_ROWS_QUERY),
    "thc,hvc->thv": (absorb_value, MAX_ROWS_VALUE),
}


def pays(num_rows: int, k: int) -> bool:
    """Is a product of [num_rows, k] with a weight faster as a reduction?"""
    return any(num_rows <= rows and k <= largest for rows, largest in MAX_K.items())


def rewrite(graph: fx.Graph) -> int:
    """Replaces the products whose number of rows is static, where it pays; how many."""
    count = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is F.linear:  # torch._C._nn.linear is the same object
            x = node.args[0].meta["example_value"]
            few = x.dim() == 2 and isinstance(x.shape[0], int) and pays(*x.shape)
            target, arguments = linear_by_rows, node.args
        elif node.target is torch.functional.einsum and node.args[0] in _EINSUMS:
            target, max_rows = _EINSUMS[node.args[0]]
            rows = node.args[1].meta["example_value"].shape[0]
            few = isinstance(rows, int) and rows <= max_rows
            arguments = node.args[1:]
        else:
            continue
        if few:
            node.target, node.args = target, arguments
            count += 1
    return count
