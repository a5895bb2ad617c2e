"""Other people's graphs as programs, so that passes may change them."""

import torch
from torch import fx

from pfeife.ir.copying import copied
from pfeife.ir.nodes import output_node, value_of
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program


def from_graph(module: fx.GraphModule) -> Program:
    """A graph of tensors as a flat program: what a torch.compile backend is given, or AOTAutograd's
    forward or backward.

    Its placeholders are batch ports, and its results, a tensor or a tuple, the outputs "result_0",
    "result_1" and so on by their places; places with None are left out. The graph is copied. Nodes
    need their fake values in `meta["val"]`. Raises ValueError for what is no tensor.
    """
    copy = copied(module, output=False)
    output = output_node(module).args[0]
    values = output if isinstance(output, tuple | list) else (output,)
    results = {f"result_{at}": node for at, node in enumerate(values) if node is not None}
    inputs = [_port(node.name, node, Role.BATCH) for node in copy.here if node.op == "placeholder"]
    outputs = [_port(name, node, Role.OUTPUT) for name, node in results.items()]
    copy.graph.output(copy.read(results))
    return Program(copy.module("GraphModule"), tuple(inputs), tuple(outputs))


def _port(name: str, node: object, role: Role) -> Port:
    value = value_of(node) if isinstance(node, fx.Node) else None
    if value is None or any(not isinstance(size, int) for size in value.shape):
        has = value.shape if isinstance(value, torch.Tensor) else "no fake tensor"
        raise ValueError(
            f"{name} of the graph ({node}) has {has}; a program takes tensors of one shape each"
        )
    return Port(name, role, (name,), tuple(value.shape), value.dtype, value.device)
