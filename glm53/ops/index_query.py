"""Queries of sparse attention and of the indexer, ready for their kernels, in one launch.

    query[t, h]       = [ q_latent[t, h] | rope(q_pe[t, h]) ]
    index_query[t, j] = rope of the first R dims(index_q[t, j])
    weights[t, j]     = head_weights[t, j] * weight_scale

q_latent is the absorbed query (q_nope @ W_UK). A layer that shares its selection leaves the second
and third line out. Index queries stay in their dtype; a quantised layout would fold its scale into
the weights as well.

q_latent_THC [T, H, C], q_pe_THR [T, H, R] (rows may be slices of q_b_proj's output), cos_TR and
sin_TR [T, R / 2] fp32; index_q_TJG [T, J, G], head_weights_TJ [T, J] fp32. Rope: `norm_rope.py`.
"""

import torch
from torch import Tensor

from glm53.ops.cpu_kernel import CPUKernel
from glm53.ops.norm_rope import dense_rows, partial_rope, rope


def index_query_ref(
    q_latent_THC: Tensor,
    q_pe_THR: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    index_q_TJG: Tensor | None,
    head_weights_TJ: Tensor | None,
    weight_scale: float,
    interleave: bool,
    index_interleave: bool,
) -> tuple[Tensor, ...]:
    """The semantics."""
    cos_T1R, sin_T1R = cos_TR[:, None], sin_TR[:, None]
    q_pe_THR = rope(q_pe_THR, cos_T1R, sin_T1R, interleave)
    query_THX = torch.cat((q_latent_THC, q_pe_THR), dim=-1)
    if index_q_TJG is None or head_weights_TJ is None:
        return (query_THX,)
    index_q_TJG = partial_rope(index_q_TJG, cos_T1R, sin_T1R, index_interleave)
    return query_THX, index_q_TJG, head_weights_TJ * weight_scale


_cpu_kernel = CPUKernel(index_query_ref, rows="TTTTTT")


@torch.library.custom_op("glm53::index_query", mutates_args=(), device_types="cpu")
def _index_query(
    q_latent_THC: Tensor,
    q_pe_THR: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    index_q_TJG: Tensor | None,
    head_weights_TJ: Tensor | None,
    weight_scale: float,
    interleave: bool,
    index_interleave: bool,
) -> list[Tensor]:
    return list(
        _cpu_kernel(
            dense_rows(q_latent_THC),
            dense_rows(q_pe_THR),
            dense_rows(cos_TR),
            dense_rows(sin_TR),
            None if index_q_TJG is None else dense_rows(index_q_TJG),
            None if head_weights_TJ is None else dense_rows(head_weights_TJ),
            weight_scale=weight_scale,
            interleave=interleave,
            index_interleave=index_interleave,
        )
    )


@_index_query.register_kernel("cuda")
def _(
    q_latent_THC: Tensor,
    q_pe_THR: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    index_q_TJG: Tensor | None,
    head_weights_TJ: Tensor | None,
    weight_scale: float,
    interleave: bool,
    index_interleave: bool,
) -> list[Tensor]:
    from glm53.ops.kernels.index_query import launch

    return launch(
        q_latent_THC,
        q_pe_THR,
        cos_TR,
        sin_TR,
        index_q_TJG,
        head_weights_TJ,
        weight_scale,
        interleave,
        index_interleave,
    )


@_index_query.register_fake
def _(
    q_latent_THC: Tensor,
    q_pe_THR: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    index_q_TJG: Tensor | None,
    head_weights_TJ: Tensor | None,
    weight_scale: float,
    interleave: bool,
    index_interleave: bool,
) -> list[Tensor]:
    num_rows, num_heads, latent_dim = q_latent_THC.shape
    query_THX = q_latent_THC.new_empty(num_rows, num_heads, latent_dim + q_pe_THR.shape[2])
    if index_q_TJG is None or head_weights_TJ is None:
        return [query_THX]
    return [
        query_THX,
        index_q_TJG.new_empty(index_q_TJG.shape),
        head_weights_TJ.new_empty(head_weights_TJ.shape),
    ]


def index_query(
    q_latent_THC: Tensor,
    q_pe_THR: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    index_q_TJG: Tensor | None = None,
    head_weights_TJ: Tensor | None = None,
    *,
    interleave: bool,
    index_interleave: bool = False,
    weight_scale: float = 1.0,
) -> list[Tensor]:
    """[query_THX], and with index arguments [query_THX, index query TJG, weights_TJ fp32].

    See the module docstring. The two index arguments come together or not at all.
    """
    return _index_query(
        q_latent_THC,
        q_pe_THR,
        cos_TR,
        sin_TR,
        index_q_TJG,
        head_weights_TJ,
        weight_scale,
        interleave,
        index_interleave,
    )
