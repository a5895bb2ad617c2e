"""What whoever edits a graph may leave undone."""

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife.ir.program import Program


def settle(program: Program) -> Program:
    """The same program, once its graph and its bodies run as they stand, and new nodes have the
    fake value (`meta["val"]`) that costs and memory are told by.

    fx runs a module's code, which an edited graph has only after `recompile()`. Raises ValueError
    for a node whose value is not to be found.
    """
    bodies = [program.body(call) for call in program.calls]
    for module in {id(one): one for one in (program.module, *bodies)}.values():
        for node in module.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = _value(node)
        module.recompile()
    return program


def _value(node: fx.Node) -> object:
    def value(argument: object) -> object:
        return argument.meta["val"] if isinstance(argument, fx.Node) else argument

    try:
        args, kwargs = pytree.tree_map(value, (node.args, node.kwargs))
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise ValueError(
            f"{node.format_node()} has no meta['val'], and it cannot be told from its arguments: "
            f"{type(error).__name__}: {error}"
        ) from error
