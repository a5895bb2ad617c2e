"""Devices: captured on one, run on others."""

import operator
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.absorb import absorb
from pfeife.ir.program import Program


def place(devices: Sequence[torch.device | str]) -> Callable[[Program], Program]:
    """A pass that makes every rank's bodies create their tensors on that rank's device.

    A captured graph names the device of the capture in operations such as `full` or `arange`;
    this names rank r's `devices[r]` instead, so that a program captured on one GPU runs on
    several. Ports keep the capture's device. Raises ValueError if a rank has no device.
    """
    places = [torch.device(device) for device in devices]

    def run(program: Program) -> Program:
        beyond = [call.node for call in program.calls if not 0 <= (call.rank or 0) < len(places)]
        if beyond or not program.calls:
            raise ValueError(
                f"{len(places)} devices do not place {beyond or 'a flat program'}: partition the "
                "program first and give every rank a device"
            )
        program = absorb(program)
        ranks = {call.node: call.rank or 0 for call in program.calls}
        graph, held = _copy(program.module.graph, {}), {}
        for node in graph.nodes:
            if node.name in ranks:  # a body of its own, since calls of several ranks may share one
                body = program.module.get_submodule(str(node.target))
                placed = _copy(body.graph, {"device": places[ranks[node.name]]})  # type: ignore[arg-type]
                node.target = node.name
                held[node.name] = _torch.graph_module(body, placed, node.name)
            elif node.op == "get_attr":
                held[str(node.target)] = operator.attrgetter(str(node.target))(program.module)
        return attrs.evolve(program, module=_torch.graph_module(held, graph))

    return run


def _copy(graph: fx.Graph, changed: dict[str, torch.device]) -> fx.Graph:
    """A copy whose nodes have the changed keyword arguments where they had them at all."""
    new = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        here[node] = new.node_copy(node, here.__getitem__)
        present = {name: value for name, value in changed.items() if name in node.kwargs}
        here[node].kwargs = {**here[node].kwargs, **present}
    return new
