"""Input of the MTP layer's projection, in one launch.

    out[t] = [ RMSNorm_e(positions[t] == 0 ? 0 : table[ids[t]]) | RMSNorm_h(hidden[t]) ]

ids are the tokens that follow the rows, positions the rows' own: a prompt's first row gets no
embedding, and RMSNorm(0) = 0. Both norms have the same eps.

ids_T [T] int64, positions_T [T] int64, table_WD [W, D] (if it is distributed over ranks, its
rows are gathered first, and `ids` are then 0 .. T - 1), hidden_TD [T, D]. Returns [T, 2 D].
Norm and its roundings: `norm_rope.py`.
"""

import torch
from torch import Tensor

from glm53.ops.cpu_kernel import CPUKernel
from glm53.ops.norm_rope import dense_rows, rms_norm


def embed_eh_norm_ref(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> Tensor:
    """The semantics."""
    embeddings_TD = table_WD[ids_T].masked_fill((positions_T == 0)[:, None], 0)
    normed = rms_norm(embeddings_TD, enorm_D, eps), rms_norm(hidden_TD, hnorm_D, eps)
    return torch.cat(normed, dim=-1)


def _fused(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> tuple[Tensor]:
    return (embed_eh_norm_ref(ids_T, positions_T, table_WD, hidden_TD, enorm_D, hnorm_D, eps),)


_cpu_kernel = CPUKernel(_fused, rows="TTWT..")


@torch.library.custom_op("glm53::embed_eh_norm", mutates_args=(), device_types="cpu")
def _embed_eh_norm(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> Tensor:
    if ids_T.shape[0] > 0:
        # Here, because an exception inside a parallel loop would end the process.
        lowest, highest = (int(bound) for bound in ids_T.aminmax())
        if lowest < 0 or highest >= table_WD.shape[0]:
            raise IndexError(f"ids {lowest} to {highest} in a table of {table_WD.shape[0]} rows")
    return _cpu_kernel(
        dense_rows(ids_T),
        dense_rows(positions_T),
        table_WD,
        dense_rows(hidden_TD),
        enorm_D,
        hnorm_D,
        eps=eps,
    )[0]


@_embed_eh_norm.register_kernel("cuda")
def _(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> Tensor:
    from glm53.ops.kernels.embed_eh_norm import launch

    return launch(ids_T, positions_T, table_WD, hidden_TD, enorm_D, hnorm_D, eps)


@_embed_eh_norm.register_fake
def _(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    eps: float,
) -> Tensor:
    return hidden_TD.new_empty(hidden_TD.shape[0], 2 * hidden_TD.shape[1])


def embed_eh_norm(
    ids_T: Tensor,
    positions_T: Tensor,
    table_WD: Tensor,
    hidden_TD: Tensor,
    enorm_D: Tensor,
    hnorm_D: Tensor,
    *,
    eps: float,
) -> Tensor:
    """[T, 2 D]: normed embedding, normed hidden state; see the module docstring.

    On a CPU an id outside the table raises IndexError.
    """
    return _embed_eh_norm(ids_T, positions_T, table_WD, hidden_TD, enorm_D, hnorm_D, eps)
