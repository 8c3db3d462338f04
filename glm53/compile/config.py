"""How a network is compiled."""

from dataclasses import dataclass
from itertools import pairwise

import torch

from glm53.compile.passes import PASSES
from glm53.compile.rewrites import REWRITES

INDEX_SCORES = "index_scores"
ALL_REWRITES = (*REWRITES, *PASSES, INDEX_SCORES)
# What does not pay on a kind of device. On a CPU Inductor fuses norms and ropes by itself, and to
# call an operator costs more: a decode step of the medium checkpoint (batch 1, 2 threads) takes
# 1.00 to 1.04 times as long with norm_rope_cache, 1.06 with index_query, 1.01 to 1.04 with both. On
# CUDA each is one launch, and cache_write, which the first replaces, waits for the device.
_NOT_BY_DEFAULT = {"cpu": ("norm_rope_cache", "index_query", "embed_eh_norm")}


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Settings of `GLM53.from_pretrained(compile=...)`.

    buckets: ascending row counts; a batch of at most the largest is padded to the next and runs a
    graph of its own, whose shapes are static; larger ones share a graph with dynamic shapes.
    rewrites: which of ALL_REWRITES are applied, None for those that pay on the network's device;
    without any the graph is the model as written.
    cuda_graphs: capture the buckets' graphs as CUDA graphs, which needs operators that read nothing
    on the host: the others are rewritten, whatever `rewrites` says. No effect but on CUDA.
    """

    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rewrites: tuple[str, ...] | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        buckets = self.buckets
        if (
            not isinstance(buckets, tuple)
            or not buckets
            or not all(type(bucket) is int for bucket in buckets)
            or not all(a < b for a, b in pairwise((0, *buckets)))
        ):
            raise ValueError(f"buckets={buckets!r}: must be a tuple of integers that ascend from 1")
        if self.rewrites is not None:
            if not isinstance(self.rewrites, tuple):
                raise ValueError(f"rewrites={self.rewrites!r}: must be a tuple of names, or None")
            unknown = [name for name in self.rewrites if name not in ALL_REWRITES]
            if unknown:
                raise ValueError(f"rewrites={self.rewrites!r}: {unknown} not in {ALL_REWRITES}")
        if not isinstance(self.cuda_graphs, bool):
            raise ValueError(f"cuda_graphs={self.cuda_graphs!r}: must be True or False")

    def rewrites_on(self, device: torch.device) -> tuple[str, ...]:
        """Those that are applied to a network on `device`."""
        if self.rewrites is not None:
            return self.rewrites
        left_out = _NOT_BY_DEFAULT.get(device.type, ())
        return tuple(name for name in ALL_REWRITES if name not in left_out)
