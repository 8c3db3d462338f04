"""What Inductor's caches have to know of a piece besides its graph."""

import functools
import hashlib
import types
from pathlib import Path
from typing import Any

from torch import fx

_PACKAGE = Path(__file__).parents[1]
# Their arguments, which are in the graph, say what they do.
_AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")


def cache_options(piece: fx.GraphModule) -> dict[str, Any]:
    """Options of a compilation with which the caches accept a piece.

    AOTAutograd's cache refuses graphs that call functions of others than torch, as rewrites make
    them: a name in its key does not tell what is computed. Together with our sources it does, and
    so do the names of our operators.
    """
    targets = {node.target for node in piece.graph.nodes if node.op == "call_function"}
    own = {
        f"{target.__module__}.{target.__name__}"
        for target in targets
        if isinstance(target, types.FunctionType) and target.__module__.startswith("glm53.")
    }
    names = sorted(own.union(_AUTOCAST))
    return {"unsafe_marked_cacheable_functions": dict.fromkeys(names, sources_key())}


@functools.cache
def sources_key() -> str:
    """Of everything of ours that a graph may call."""
    digest = hashlib.sha256()
    for folder in ("compile", "ops"):
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(_PACKAGE)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
