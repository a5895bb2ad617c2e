"""Devices: captured on one, run on others."""

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import fx

from pfeife.ir.editing.absorb import absorb
from pfeife.ir.editing.copying import Copy, copied
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
        # A plain node between calls has no rank, so no device: as a part of a body it has.
        program = absorb(program)
        ranks = {call.node: call.rank or 0 for call in program.calls}

        def placed(node: fx.Node, copy: Copy) -> fx.Node:
            new = copy.keep(node)
            if node.name in ranks:  # a body of its own, since calls of several ranks may share one
                new.target = node.name
                body = _on_device(copy.held[str(node.target)], places[ranks[node.name]])
                copy.held[node.name] = body.module(node.name)
            return new

        return attrs.evolve(program, module=copied(program.module, placed).module())

    return run


def _on_device(body: fx.GraphModule, device: torch.device) -> Copy:
    """A copy whose nodes name this device where they named one at all."""

    def placed(node: fx.Node, copy: Copy) -> fx.Node:
        new = copy.keep(node)
        if "device" in node.kwargs:
            new.kwargs = {**new.kwargs, "device": device}
        return new

    return copied(body, placed)
