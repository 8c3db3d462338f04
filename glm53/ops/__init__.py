"""Operators: one file per family, each with its equation, reference, kernel and registration."""

from glm53.ops.all_reduce_add_rms_norm import all_reduce_add_rms_norm
from glm53.ops.cache_write import cache_write
from glm53.ops.embed_eh_norm import embed_eh_norm
from glm53.ops.fixed_shapes import fixed_shapes
from glm53.ops.index_query import index_query
from glm53.ops.index_select import index_select, logical_to_physical
from glm53.ops.norm_rope_cache import norm_rope_cache
from glm53.ops.precision import no_autocast
from glm53.ops.routed_experts import routed_experts
from glm53.ops.sparse_mla import sparse_mla
from glm53.ops.tiered_sparse_mla import tiered_sparse_mla

__all__ = [
    "all_reduce_add_rms_norm",
    "cache_write",
    "embed_eh_norm",
    "fixed_shapes",
    "index_query",
    "index_select",
    "logical_to_physical",
    "no_autocast",
    "norm_rope_cache",
    "routed_experts",
    "sparse_mla",
    "tiered_sparse_mla",
]
