"""Norms, ropes and cache writes of one layer's attention inputs, in one launch.

    q_out[t]                   = RMSNorm(q_latent[t])                            every t
    latent_cache[slots[t]]     = [ RMSNorm(kv_a[t, :C]) | rope(kv_a[t, C:]) ]    slots[t] >= 0
    index_key_cache[slots[t]]  = rope(LayerNorm(index_key[t])), first R dims     slots[t] >= 0

A row whose slot is negative (padding, or a page that another rank owns) writes no byte, but its
query is still normed. Values are rounded to the activations' dtype, then to the cache's. A layer
without an indexer leaves the third line out.

q_latent_TQ [T, Q], kv_a_TX [T, C + R] (rows may be slices of one merged projection), cos_TR and
sin_TR [T, R / 2] fp32, slots_T [T] int64, latent_cache_MX [M, C + R]; index_key_TG [T, G],
index_key_cache_MG [M, G]. Norms, ropes and their roundings: `norm_rope.py`.
"""

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from glm53.ops.cpu_kernel import CPUKernel
from glm53.ops.norm_rope import (
    dense_rows,
    layer_norm,
    partial_rope,
    rms_norm,
    rope,
)


def _latent_rows(
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    eps: float,
    interleave: bool,
) -> Tensor:
    latent_dim = kv_norm_C.shape[0]
    k_pe_TR = rope(kv_a_TX[:, latent_dim:], cos_TR, sin_TR, interleave)
    return torch.cat((rms_norm(kv_a_TX[:, :latent_dim], kv_norm_C, eps), k_pe_TR), dim=-1)


def _index_keys(
    index_key_TG: Tensor,
    weight_G: Tensor,
    bias_G: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    eps: float,
    interleave: bool,
) -> Tensor:
    keys_TG = layer_norm(index_key_TG, weight_G, bias_G, eps)
    return partial_rope(keys_TG, cos_TR, sin_TR, interleave).to(index_key_TG.dtype)


def norm_rope_cache_ref(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None,
    index_norm_weight_G: Tensor | None,
    index_norm_bias_G: Tensor | None,
    index_key_cache_MG: Tensor | None,
    eps: float,
    index_eps: float,
    interleave: bool,
    index_interleave: bool,
) -> Tensor:
    """The semantics."""
    written_T = slots_T >= 0
    slots = slots_T[written_T]
    rows_TX = _latent_rows(kv_a_TX, kv_norm_C, cos_TR, sin_TR, eps, interleave)
    latent_cache_MX[slots] = rows_TX[written_T].to(latent_cache_MX.dtype)
    if index_key_TG is not None:
        assert index_norm_weight_G is not None and index_norm_bias_G is not None
        assert index_key_cache_MG is not None
        keys_TG = _index_keys(
            index_key_TG,
            index_norm_weight_G,
            index_norm_bias_G,
            cos_TR,
            sin_TR,
            index_eps,
            index_interleave,
        )
        index_key_cache_MG[slots] = keys_TG[written_T].to(index_key_cache_MG.dtype)
    return rms_norm(q_latent_TQ, q_norm_Q, eps)


def _fused(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None,
    index_norm_weight_G: Tensor | None,
    index_norm_bias_G: Tensor | None,
    index_key_cache_MG: Tensor | None,
    *,
    eps: float,
    index_eps: float,
    interleave: bool,
    index_interleave: bool,
) -> tuple[Tensor]:
    # A scatter has no mask, so a row without a slot repeats the write of a row that has one.
    ramp_T = torch.arange(slots_T.shape[0], device=slots_T.device)
    source_T = torch.where(slots_T >= 0, ramp_T, slots_T.argmax())
    slots_T = slots_T[source_T]
    cos_TR, sin_TR = cos_TR[source_T], sin_TR[source_T]
    rows_TX = _latent_rows(kv_a_TX[source_T], kv_norm_C, cos_TR, sin_TR, eps, interleave)
    latent_cache_MX.index_put_((slots_T,), rows_TX.to(latent_cache_MX.dtype))
    if index_key_TG is not None:
        assert index_norm_weight_G is not None and index_norm_bias_G is not None
        assert index_key_cache_MG is not None
        keys_TG = _index_keys(
            index_key_TG[source_T],
            index_norm_weight_G,
            index_norm_bias_G,
            cos_TR,
            sin_TR,
            index_eps,
            index_interleave,
        )
        index_key_cache_MG.index_put_((slots_T,), keys_TG.to(index_key_cache_MG.dtype))
    return (rms_norm(q_latent_TQ, q_norm_Q, eps),)


_cpu_kernel = CPUKernel(_fused, rows="T.T.TTTMT..M")


# Not `torch.library.custom_op`: before every call that mutates it walks the schema in a time that
# grows with the square of the number of arguments, here three times as long as the kernel runs.
@_disable_dynamo  # torch.compiler.disable would import all of Dynamo here
def _on_cpu(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None,
    index_norm_weight_G: Tensor | None,
    index_norm_bias_G: Tensor | None,
    index_key_cache_MG: Tensor | None,
    eps: float,
    index_eps: float,
    interleave: bool,
    index_interleave: bool,
) -> Tensor:
    if slots_T.shape[0] == 0:
        return q_latent_TQ.new_empty(q_latent_TQ.shape)
    # Here, because an exception inside a parallel loop would end the process.
    last_slot = int(slots_T.amax())
    if last_slot >= latent_cache_MX.shape[0]:
        raise IndexError(f"slot {last_slot} of a cache with {latent_cache_MX.shape[0]} slots")
    if last_slot < 0:
        # Nothing to repeat: write somewhere else.
        slots_T = torch.arange(slots_T.shape[0], device=slots_T.device)
        latent_cache_MX = latent_cache_MX.new_empty(kv_a_TX.shape)
        if index_key_TG is not None and index_key_cache_MG is not None:
            index_key_cache_MG = index_key_cache_MG.new_empty(index_key_TG.shape)
    return _cpu_kernel(
        dense_rows(q_latent_TQ),
        q_norm_Q,
        dense_rows(kv_a_TX),
        kv_norm_C,
        dense_rows(cos_TR),
        dense_rows(sin_TR),
        dense_rows(slots_T),
        latent_cache_MX,
        None if index_key_TG is None else dense_rows(index_key_TG),
        index_norm_weight_G,
        index_norm_bias_G,
        index_key_cache_MG,
        eps=eps,
        index_eps=index_eps,
        interleave=interleave,
        index_interleave=index_interleave,
    )[0]


def _on_cuda(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None,
    index_norm_weight_G: Tensor | None,
    index_norm_bias_G: Tensor | None,
    index_key_cache_MG: Tensor | None,
    eps: float,
    index_eps: float,
    interleave: bool,
    index_interleave: bool,
) -> Tensor:
    from glm53.ops.kernels.norm_rope_cache import launch

    return launch(
        q_latent_TQ,
        q_norm_Q,
        kv_a_TX,
        kv_norm_C,
        cos_TR,
        sin_TR,
        slots_T,
        latent_cache_MX,
        index_key_TG,
        index_norm_weight_G,
        index_norm_bias_G,
        index_key_cache_MG,
        eps,
        index_eps,
        interleave,
        index_interleave,
    )


def _fake(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None,
    index_norm_weight_G: Tensor | None,
    index_norm_bias_G: Tensor | None,
    index_key_cache_MG: Tensor | None,
    eps: float,
    index_eps: float,
    interleave: bool,
    index_interleave: bool,
) -> Tensor:
    return q_latent_TQ.new_empty(q_latent_TQ.shape)


torch.library.define(
    "glm53::norm_rope_cache",
    torch.library.infer_schema(_on_cpu, mutates_args=("latent_cache_MX", "index_key_cache_MG")),
)
torch.library.impl("glm53::norm_rope_cache", "cpu", _on_cpu)
torch.library.impl("glm53::norm_rope_cache", "cuda", _on_cuda)
torch.library.register_fake("glm53::norm_rope_cache", _fake)
_norm_rope_cache = torch.ops.glm53.norm_rope_cache.default


def norm_rope_cache(
    q_latent_TQ: Tensor,
    q_norm_Q: Tensor,
    kv_a_TX: Tensor,
    kv_norm_C: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    slots_T: Tensor,
    latent_cache_MX: Tensor,
    index_key_TG: Tensor | None = None,
    index_norm_weight_G: Tensor | None = None,
    index_norm_bias_G: Tensor | None = None,
    index_key_cache_MG: Tensor | None = None,
    *,
    eps: float,
    interleave: bool,
    index_eps: float = 0.0,
    index_interleave: bool = False,
) -> Tensor:
    """Normed query latent [T, Q]; writes both caches in place; see the module docstring.

    The four index arguments come together or not at all. Slots of one call must be distinct. On a
    CPU a slot past the end raises IndexError.
    """
    return _norm_rope_cache(
        q_latent_TQ,
        q_norm_Q,
        kv_a_TX,
        kv_norm_C,
        cos_TR,
        sin_TR,
        slots_T,
        latent_cache_MX,
        index_key_TG,
        index_norm_weight_G,
        index_norm_bias_G,
        index_key_cache_MG,
        eps,
        index_eps,
        interleave,
        index_interleave,
    )
