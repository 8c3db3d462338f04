"""Matrix products of few rows as reductions.

At M = 1 or 2 a product reads its whole weight for two or four operations per element, so it is
bound by memory, and a library's GEMM does not reach the memory's speed there. Written as

    y[m, n] = sum_k x[m, k] * w[n, k]

the compiler makes one vectorised loop of it, without a copy of the weight, and fuses what follows.
Sums are fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, fx

MAX_ROWS = 2
_SUMS = 16  # that fit the registers of a CPU


def linear_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    y = torch.cat([_dot(row, weight) for row in in_memory(x).unsqueeze(-2).unbind(0)])
    return (y if bias is None else y + bias.float()).to(x.dtype)


def in_memory(x: Tensor) -> Tensor:
    """x, computed before its use. What the loop of a product reads is otherwise computed in it,
    for every row of the weight again: a whole norm, as it counts as cheap."""
    return x.as_strided(x.shape, x.stride())


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
    out_TH1C, w_1HVC = out_THC.float().unsqueeze(2), w_HVC.float().unsqueeze(0)
    return (out_TH1C * w_1HVC).sum(3).to(out_THC.dtype)


_EINSUMS = {"thn,hnc->thc": absorb_query, "thc,hvc->thv": absorb_value}


def rewrite(graph: fx.Graph) -> int:
    """Replaces the products whose number of rows is static and at most MAX_ROWS; how many."""
    count = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is F.linear:  # torch._C._nn.linear is the same object
            rows = node.args[0].meta["example_value"].shape[:-1]
            target, arguments = linear_by_rows, node.args
        elif node.target is torch.functional.einsum and node.args[0] in _EINSUMS:
            rows = node.args[1].meta["example_value"].shape[:1]
            target, arguments = _EINSUMS[node.args[0]], node.args[1:]
        else:
            continue
        if len(rows) == 1 and isinstance(rows[0], int) and rows[0] <= MAX_ROWS:
            node.target, node.args = target, arguments
            count += 1
    return count
