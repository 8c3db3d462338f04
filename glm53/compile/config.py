"""How a network is compiled."""

from dataclasses import dataclass

from glm53.compile.rewrites import REWRITES

INDEX_SCORES = "index_scores"
ALL_REWRITES = (*REWRITES, INDEX_SCORES)


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Settings of `GLM53.from_pretrained(compile=...)`.

    buckets: ascending row counts; a batch of at most the largest is padded to the next and runs a
    graph of its own, whose shapes are static; larger ones share a graph with dynamic shapes.
    rewrites: which of ALL_REWRITES are applied; without any the graph is the model as written.
    """

    buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rewrites: tuple[str, ...] = ALL_REWRITES

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.buckets), self.buckets, strict=False))
        if not self.buckets or not rising or not all(isinstance(b, int) for b in self.buckets):
            raise ValueError(f"buckets={self.buckets!r}: must be ascending integers from 1 on")
        unknown = sorted(set(self.rewrites) - set(ALL_REWRITES))
        if unknown:
            raise ValueError(f"rewrites={self.rewrites!r}: {unknown} are none of {ALL_REWRITES}")
