"""Speed from outside: rewrites, the split at the indexer, Inductor, bucketed entries."""

from glm53.compile.config import CompileConfig
from glm53.compile.inductor_cache import inductor_cache
from glm53.compile.network import CompiledNetwork

__all__ = ["CompileConfig", "CompiledNetwork", "inductor_cache"]
