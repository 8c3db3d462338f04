"""All passes of a compilation as the one object that Inductor asks for."""

from pathlib import Path

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from glm53.compile.passes import all_reduce_add_rms_norm
from glm53.ops import norm_rope

_PASSES = {"all_reduce_add_rms_norm": all_reduce_add_rms_norm.fuse}


class PostGradPasses(CustomGraphPass):
    """The named passes, in their order."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def __call__(self, graph: fx.Graph) -> None:
        for name in self.names:
            _PASSES[name](graph)

    def uuid(self) -> object:
        """What the result depends on besides the graph, for the key of Inductor's caches.

        Groups and constants are taken from the graph, which is in that key itself. A group is
        looked up by its name when the code runs, so its size is in neither.
        """
        sources = (*sorted(map(str, Path(__file__).parent.glob("*.py"))), norm_rope.__file__)
        return self.names, get_hash_for_files(sources)
