"""Floating-point operations of nodes and calls, by torch's formulas, and their types."""

from collections import Counter
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.nodes import sharers, value_of
from pfeife.ir.parts import Kind, ProgramBase
from pfeife.ir.seeding import seeded


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one node, 0 for those without a formula, and where operands
    whose sizes data decide do not fit one another by what is said of them. Of rows that data share
    out each member is taken to have as many."""
    operation, arguments = operation_of(node)
    formula = _torch.flop_formulas().get(getattr(operation, "overloadpacket", None))
    if formula is None:
        return 0

    def value(argument: Any) -> Any:
        return argument.meta.get("val") if isinstance(argument, fx.Node) else argument

    args, kwargs = pytree.tree_map(value, (arguments, node.kwargs))
    try:
        count = int(formula(*args, **kwargs, out_val=node.meta.get("val")))
        return count // max(map(sharers, (node, *node.all_input_nodes)))
    except AssertionError:
        if any(source.meta.get("sized_by_data") for source in node.all_input_nodes):
            return 0
        raise


def graph_flops(graph: fx.Graph) -> Counter[torch.dtype]:
    """Those of a graph, by the dtype in which they are done."""
    flops: Counter[torch.dtype] = Counter()
    for node in graph.nodes:
        count = node_flops(node) if node.op == "call_function" else 0
        if count:
            flops[computed_dtype(node)] += count
    return flops


def flops_of(program: ProgramBase) -> Counter[torch.dtype]:
    """The floating-point operations of a microbatch, forward and backward, by the dtype in which
    they are done; those of a program that recomputes have what it computes twice."""
    program = absorb(program)
    bodies = [program.body(call) for call in program.calls] or [program.module]
    return sum((graph_flops(body.graph) for body in bodies), Counter())


def operation_of(node: fx.Node) -> tuple[Any, tuple]:
    """What a node runs, and on which arguments; a seeded operation is seen through."""
    return (node.args[0], node.args[3:]) if node.target is seeded else (node.target, node.args)


def computed_dtype(node: fx.Node) -> torch.dtype:
    """That of a node's first tensor argument: what is multiplied has one dtype."""
    leaves = pytree.tree_leaves((operation_of(node)[1], node.kwargs))
    values = [leaf.meta.get("val") for leaf in leaves if isinstance(leaf, fx.Node)]
    return next((v.dtype for v in values if isinstance(v, torch.Tensor)), torch.float32)


def underflows(program: ProgramBase) -> bool:
    """Whether backwards compute in a type without the range of float32, which bfloat16 has: then a
    step may run again, with another gradient of its loss."""
    bodies = [program.body(call) for call in program.calls if call.kind != Kind.FORWARD]
    values = (value_of(node) for body in bodies for node in body.graph.nodes)
    dtypes = {value.dtype for value in values if value is not None and value.is_floating_point()}
    return any(torch.finfo(d).tiny > torch.finfo(torch.float32).tiny for d in dtypes)
