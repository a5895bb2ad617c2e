"""A program of one device as that of another, which need not be there."""

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.nodes import (
    attribute,
    has_effects,
    is_number,
    is_sized_by_data,
    receive,
    returned,
    send,
    source_line,
    tell,
    value_of,
)
from pfeife.ir.parts import Port, Role, captured_sizes
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded
from pfeife.passes.compose import Pass
from pfeife.passes.moved_attention import MovedAttention

_COPY = torch.ops.aten._to_copy.default
_CPU = torch.device("cpu")
_PLAINLY = "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"


def move_to_device(device: torch.device | str) -> Pass:
    """A pass that makes a program of one device that of another: ports, fake values, and the
    devices that operations name. Nothing is run, and the device need not be there: what was
    captured on a laptop is planned, accounted and lowered for a GPU.

        before  full([8], 1.0, device=cpu)     after  full([8], 1.0, device=cuda:0)
                c, held by value                      _to_copy(c, device=cuda:0)

    Seeds stay on the CPU, which reads them, and so does what else is there in a program of another
    device. A CPU's attention becomes that of CUDA which torch prefers by default (a flat program
    only, on compute capability 8.0 and above). The other operations stay those that were captured:
    a capture on the new device might have chosen others. Premises are those of the capture.

    Raises ValueError, with the line of the model, for an operation that the new device has not, and
    for a program of several devices, such as `place` makes. What the choice of a kernel assumes of
    open sizes is a limit of the result.

    >>> net = torch.nn.Linear(4, 1)
    >>> flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4))
    >>> print(pfeife.move_to_device("cuda:0")(flat).inputs[0])
    weight: parameter weight float32 1x4 cuda:0
    """
    target = torch.device(device)
    if target.type == "meta":
        raise ValueError("move_to_device: nothing runs on meta tensors; name another device")
    if target.type != "cpu" and target.index is None:
        target = torch.device(target.type, 0)

    def run(program: Program) -> Program:
        # A program is moved whole: values that stayed behind would need copies that nobody planned.
        home = _home(program)
        if home == target:
            return program
        mover = _Mover(home, target, captured_sizes(program))
        seeds = {port.name for port in program.ports(Role.SEED)}
        module = mover.module(program.module, stay=seeds)
        counts = (
            attrs.evolve(count, module=mover.module(count.module)) for count in program.counts
        )
        placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
        return attrs.evolve(
            program,
            module=module,
            inputs=tuple(_as(placeholders[port.name], port) for port in program.inputs),
            outputs=tuple(_as(returned(module)[port.name], port) for port in program.outputs),
            counts=tuple(counts),
            limits=tuple(dict.fromkeys((*program.limits, *mover.opened.assumed()))),
        )

    return run


def _home(program: Program) -> torch.device:
    """The device of a program; what another one needs of the CPU is beside it."""
    node_on: dict[torch.device, fx.Node] = {}
    for module in program.module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            for device in _places(node) if node.op != "get_attr" else ():
                node_on.setdefault(device, node)
    devices = [device for device in node_on if device != _CPU]
    if len(devices) > 1:
        places = (
            f"{node_on[device].name} is on {device} ({source_line(node_on[device])})"
            for device in devices
        )
        raise ValueError(f"move_to_device: a program of several devices: {'; '.join(places)}")
    return devices[0] if devices else _CPU


def _places(node: fx.Node) -> Iterator[torch.device]:
    """The devices of a node's values, and those that it names."""
    for leaf in pytree.tree_leaves((node.meta.get("val"), node.args, node.kwargs)):
        if isinstance(leaf, torch.Tensor):
            yield leaf.device
        elif isinstance(leaf, torch.device) and (leaf.type == "cpu" or leaf.index is not None):
            yield leaf


def _as(node: fx.Node, port: Port) -> Port:
    """A port that is what its node is."""
    value = value_of(node)
    if value is None:
        return port
    return attrs.evolve(port, dtype=value.dtype, device=value.device)


class _Mover:
    """Copies of what is at home, for the target, with the values that torch's own rules tell, in
    which open sizes are symbols."""

    def __init__(self, home: torch.device, target: torch.device, sizes: Mapping[str, int]):
        self.home, self.target = home, target
        self.opened = _torch.OpenValues(sizes)
        self.of: dict[fx.Node, Any] = {}  # the values of new nodes
        self.modules: dict[int, fx.GraphModule] = {}  # calls may share one
        self.attention = MovedAttention(self.of, self._operation)

    def device(self, device: torch.device) -> torch.device:
        here = device.type == self.home.type and device.index in (None, self.home.index)
        return self.target if here else device

    def value(self, node: fx.Node, stays: bool = False) -> Any:
        """An old node's value as it was, but for where it is."""
        if node.op == "placeholder" and node.name in self.opened.sizes:
            return self.opened.sizes[node.name]
        sizes = node.meta.get("sizes")

        def moved(tensor: torch.Tensor) -> Any:
            return self.opened.value(tensor, sizes, None if stays else self.device(tensor.device))

        return pytree.tree_map_only(torch.Tensor, moved, node.meta.get("val"))

    def module(
        self, module: fx.GraphModule, values: Collection[Any] = (), stay: Collection[str] = ()
    ) -> fx.GraphModule:
        """A moved graph, whose inputs have these `values`, else their own; those with names in
        `stay` stay where they are."""
        if id(module) in self.modules:
            return self.modules[id(module)]
        left = iter(values)

        def moved(node: fx.Node, copy: Copy) -> fx.Node:
            new = copy.keep(node)
            if node.op == "placeholder":
                self._tell(new, next(left, self.value(node, node.name in stay)))
            elif node.op == "call_function":
                return self._moved(node, new)
            elif node.op in ("get_attr", "call_module"):
                copy.held[str(node.target)], new = self._held(module, new)
            return new

        self.modules[id(module)] = copied(module, moved).module()
        return self.modules[id(module)]

    def _tell(self, node: fx.Node, value: Any) -> None:
        self.of[node] = value
        if "val" in node.meta:
            tell(node, *self.opened.told(value))

    def _held(self, module: fx.GraphModule, node: fx.Node) -> tuple[Any, fx.Node]:
        """What a module has by the name of a new node's target, and the node to read of it: a
        tensor that is held by value stays where it is, and a copy is read."""
        held = attribute(module, node.target)
        if isinstance(held, fx.GraphModule):
            values = [self.of[source] for source in node.all_input_nodes]
            held = self.module(held, values)
            if node.op == "call_module":
                self._tell(node, fx.node.map_arg(returned(held), self.of.__getitem__))
        elif isinstance(held, torch.Tensor):
            self._tell(node, self.opened.value(held))
            if held.device == self.home:
                copy = node.graph.call_function(_COPY, (node,), {"device": self.target})
                copy.meta = dict(node.meta)
                self._operation(copy)
                return held, copy
        return held, node

    def _moved(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """A new node, or what is in the place of one that only the CPU has."""
        try:
            if self.target.type == "cuda" and new.target == _torch.attention.ON_CPU:
                return self.attention.forward(new, saves=_reads(old, 1))
            if self.target.type == "cuda" and new.target == _torch.attention.ON_CPU_BACKWARD:
                return self.attention.backward(new)
        except ValueError as error:
            raise ValueError(
                f"move_to_device: attention for which {self.target.type} has no kernel: {error} "
                f"({source_line(new)}); or capture the step under {_PLAINLY}"
            ) from error
        self._operation(new)
        return new

    def _operation(self, node: fx.Node) -> None:
        operation: Any = node.args[0] if node.target is seeded else node.target
        if _torch.is_missing(operation, self.target.type):
            raise ValueError(
                f"move_to_device: {operation} is no operation of {self.target.type} "
                f"({source_line(node)}); capture the step without it: attention under "
                f"{_PLAINLY}, recurrent layers after torch.backends.mkldnn.set_flags(False), a "
                f"custom operator with a kernel for {self.target.type} (`register_kernel`)"
            )
        named = pytree.tree_map_only(torch.device, self.device, (node.args, node.kwargs))
        node.args, node.kwargs = named
        self._tell(node, self._value(node, operation))

    def _value(self, node: fx.Node, operation: Any) -> Any:
        """A new node's value: on another device it may have another dtype or other strides."""
        old = node.meta.get("val")
        # What data decide, and what has an effect, is not run: it stays as large as it was.
        if not _is_ruled(node, old):
            return self.value(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.of.__getitem__)
        try:
            with self.opened.mode, torch.no_grad():
                return operation(*(args[3:] if node.target is seeded else args), **kwargs)
        except Exception as error:
            if _torch.lacks_device(error):
                return self.value(node)
            raise ValueError(
                f"move_to_device: {node.name} is not to be had on {self.target} "
                f"({source_line(node)}): {type(error).__name__}: {error}"
            ) from error


def _is_ruled(node: fx.Node, value: Any) -> bool:
    """Whether what a node reads tells its value, and not data or a graph."""
    passes_on = node.target in (send, receive, operator.getitem)
    has_value = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
    has_value |= is_number(node) and node.target is not torch.ops.aten._local_scalar_dense.default
    elsewhere = is_sized_by_data(node) or _torch.is_higher_order(node.target) or has_effects(node)
    return (passes_on or has_value) and not elsewhere


def _reads(node: fx.Node, at: int) -> bool:
    """Whether somebody reads one of a node's results."""
    return any(part.args[1] == at and part.users for part in node.users)
