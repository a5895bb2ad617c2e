"""The marker that a model may carry: here a stage may end."""

import torch
from torch.fx import traceback


def stage_boundary(x: torch.Tensor) -> torch.Tensor:
    """Marks that a new stage starts with what is computed from `x`; returns a view of it.

    Does nothing to a model that is not pipelined.
    """
    with traceback.annotate({"pfeife_stage_boundary": True}):
        return x.view_as(x)


def is_boundary(node: torch.fx.Node) -> bool:
    """Whether a forward node was made by `stage_boundary`."""
    backward = node.meta.get("partitioner_tag") == "is_backward"
    # autograd hands the annotation on to the nodes of the backward
    return not backward and bool((node.meta.get("custom") or {}).get("pfeife_stage_boundary"))
