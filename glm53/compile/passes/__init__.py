"""Passes over the graph that Inductor lowers, after autograd and decompositions; one file each.

They are given to each compilation, never set for the process. What matches there is ATen, with
functional collectives as they were traced, whoever put them there.
"""

from typing import Any

PASSES = ("all_reduce_add_rms_norm",)


def inductor_options(names: tuple[str, ...]) -> dict[str, Any]:
    """Options of a compilation that runs the named passes."""
    if not names:
        return {}
    from glm53.compile.passes.post_grad import PostGradPasses  # imports triton, if it is installed

    return {"post_grad_custom_pre_pass": PostGradPasses(names)}
