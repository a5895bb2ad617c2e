"""Modules of graphs that write their code when it is asked for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.nn.parallel import DistributedDataParallel


def graph_module(
    root: torch.nn.Module | dict[str, Any], graph: fx.Graph, name: str = "GraphModule"
) -> fx.GraphModule:
    """A graph as a module, which writes its code when that is read or run for the first time: most
    programs on the way to a step never are, and writing it is a third of what a pass takes. If the
    class moves: fx.GraphModule, which writes it at once."""
    # It is an fx.GraphModule in all else: code that is asked for by others is written then.
    module: fx.GraphModule = _LazyGraphModule(root, graph, name)
    return module


def is_unwritten(module: fx.GraphModule) -> bool:
    """Whether a module has no code yet: it will be that of its graph."""
    return isinstance(module, _LazyGraphModule) and module._needs_recompile()


def function_of(module: fx.GraphModule) -> Callable[..., Any]:
    """What a graph's code does, without what a module's call looks for first (hooks, whether the
    code is written): twice as fast for tiny graphs, and silent where an operation fails."""
    write(module)
    return module.forward


def write(module: torch.nn.Module) -> None:
    """Writes the code of all graphs in a module, before several threads run them: torch gives nodes
    other names while it writes, and two that write at once mix theirs up."""
    for submodule in module.modules():
        if isinstance(submodule, _LazyGraphModule):
            submodule.real_recompile()


def saved_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers that its `state_dict()` has, by name. If the set of
    the others moves: `state_dict(keep_vars=True)` without those of its children."""
    # Both names of a tied tensor: a checkpoint has both.
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    left = module._non_persistent_buffers_set
    return own | {name: buffer for name, buffer in buffers if name not in left}


def running_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel in whose forward this is called. If the note moves: the modules
    alone, by which wrappers around a step's own module are not seen."""
    wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return wrapper


def hooks_of_all_modules() -> tuple[dict[int, Any], ...]:
    """The hooks that run with every module, which torch lists nowhere in public. If the dicts move:
    none, so that a step does not see those that come after its first call."""
    names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return tuple(getattr(torch.nn.modules.module, f"_global_{name}") for name in names)
