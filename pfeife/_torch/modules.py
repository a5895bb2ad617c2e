"""Modules of graphs that write their code when it is asked for."""

from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(
    root: torch.nn.Module | dict[str, Any], graph: fx.Graph, name: str = "GraphModule"
) -> fx.GraphModule:
    """A graph as a module, which writes its code when that is read or run for the first time: most
    programs on the way to a step never are, and writing it is a third of what a pass takes. If the
    class moves: fx.GraphModule, which writes it at once."""
    made: fx.GraphModule = _LazyGraphModule(root, graph, name)
    return made


def is_unwritten(module: fx.GraphModule) -> bool:
    """Whether a module has no code yet: it will be that of its graph."""
    return isinstance(module, _LazyGraphModule) and module._needs_recompile()
