"""A joint graph with AOTAutograd's descriptors into a graph with ports."""

import contextlib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.aot.descriptors import Descriptors, Place, new_name, result_name
from pfeife.frontend.arguments import is_below, sizes_of_arguments
from pfeife.frontend.cache.capture_key import Traceable
from pfeife.ir.nodes import (
    is_number,
    is_sized_by_data,
    size_tensor,
)
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import is_random, seeded
from pfeife.ir.verify import verify

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


class PortAssigner:
    """Rewrites a joint graph with descriptors into a graph with ports.

        joint      placeholder, placeholder, ...   operations            return [...], desc=[...]
                       | Descriptors.input             | _copy               | Descriptors.output
        program    x, weight, tangent_loss, ...    the same, named       return {"loss": ...,
                   sizes that are open, a seed     by lines and modules      "grad_weight": ...}

    What the step assigns anew adds updates. A parameter that the step changes in place may have a
    gradient: in eager, that is the gradient of its new value. The first random operation adds a
    seed.
    """

    def __init__(self, joint: fx.GraphModule, traceable: Traceable):
        self.joint, self.traceable = joint, traceable
        self.descriptors = Descriptors(joint, traceable)
        self.graph = fx.Graph()
        self.inputs: list[Port] = []
        self.here: dict[fx.Node, fx.Node] = {}
        self.draws = itertools.count()
        self.open_sizes, self.names = sizes_of_arguments(traceable.arguments)
        self.sizes: dict[Any, fx.Node] = {}  # by their symbols
        examples = [a.example for a in traceable.arguments]
        shapes = [example.shape for example in examples if isinstance(example, torch.Tensor)]
        # A size that data decide and nothing bounds is taken for the largest one of the arguments.
        self.largest = max((_hint(size) for shape in shapes for size in shape), default=1)

    def program(self) -> Program:
        """The flat program. Raises ValueError for what has no place in one."""
        nodes = list(self.joint.graph.nodes)
        # All inputs first: no node that is copied may take a name that is promised to a port.
        for node in nodes:
            if node.op == "placeholder":
                self._input(node)
        # Then the sizes that only shapes of arguments have, which are inputs all the same.
        for symbol in self.names:
            self._size(symbol)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self._copy(node)
        outputs, results = self._outputs()
        _check_tangents(self.traceable, self.inputs)
        self.graph.output(results)
        holder = nn.Module()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                setattr(holder, node.target, getattr(self.joint, node.target))
        module = _torch.graph_module(holder, self.graph)
        limits = _torch.assumed_of_sizes([*self.open_sizes.values()], self.names)
        return verify(Program(module, tuple(self.inputs), tuple(outputs), limits=limits))

    def _input(self, node: fx.Node) -> None:
        place = self.descriptors.input(node)
        if place is None:
            return
        if place.role == Role.SIZE:
            argument = self.descriptors.argument(node.meta["desc"])
            symbol = _torch.symbol_named(argument.example)
            self.here[node] = self._size(symbol, place.names)
            return
        self.here[node] = self.graph.create_node("placeholder", place.name, name=place.name)
        self.here[node].meta = dict(node.meta)
        self._tell_sizes(self.here[node])
        assert self.here[node].name == place.name
        self.inputs.append(self._port(place, node))

    @functools.cached_property
    def seed(self) -> fx.Node:
        """The seed's placeholder, made when the first random operation asks for it."""
        with _torch.FakeTensorMode():
            value = torch.empty((), dtype=torch.int64)
        node = self._more("seed", value)
        self.inputs.append(self._port(Place("seed", Role.SEED, ("seed",)), node))
        return node

    def _size(self, symbol: Any, names: tuple[str, ...] = ()) -> fx.Node:
        """The placeholder of a size of the arguments, by its symbol."""
        if symbol in self.sizes:
            return self.sizes[symbol]
        name = str(self.names[symbol])
        node = self.sizes[symbol] = self._more(name, _hint(self.open_sizes[symbol]))
        kind = torch.int64, torch.device("cpu")
        self.inputs.append(Port(name, Role.SIZE, names or (name,), (), *kind))
        return node

    def _more(self, name: str, value: Any) -> fx.Node:
        """A placeholder behind those that there are."""
        last = [node for node in self.graph.nodes if node.op == "placeholder"]
        with self.graph.inserting_after(last[-1]) if last else contextlib.nullcontext():
            node = self.graph.create_node("placeholder", name, name=name)
        node.meta["val"] = value
        return node

    def _copy(self, node: fx.Node) -> None:
        symbol = _torch.symbol_named(node.meta.get("val"))
        # AOTAutograd asks a tensor for its size where the program has a port of it.
        if symbol in self.sizes:
            self.here[node] = self.sizes[symbol]
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.here.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, name=_plain_name(node))
        copied.meta = dict(node.meta)
        for key in ("ac_graph_id", "recompute"):  # for torch's partitioner; counted by the process
            copied.meta.pop(key, None)
        stack = copied.meta["module_stack"] = _module_stack(node, self.traceable.roots)
        copied.meta["module_path"] = stack[-1][0] if stack else ""
        if node.op == "call_function" and is_random(node.target, node.args, node.kwargs):
            operation: Any = node.target
            copied.args = (operation, next(self.draws), self.seed, *copied.args)
            copied.target = seeded
        self._tell_sizes(copied)
        # A number cannot be sent to another rank, a tensor can.
        if is_number(copied) and any(map(is_sized_by_data, copied.all_input_nodes)):
            copied = self._by_tensor(copied)
        if node.target in _VIEWS:  # fake strides can be wrong (a batch norm of a transposed input)
            copied.target = torch.ops.aten.reshape.default
        copied.target = _torch.as_captured(copied.target, copied.args)
        self.here[node] = copied

    def _tell_sizes(self, node: fx.Node) -> None:
        """Puts numbers in place of the symbols of what only data and the sizes of arguments
        tell."""
        value, by_data, layout = _torch.with_numbers(node.meta.get("val"), self.largest, self.names)
        if "val" in node.meta:
            node.meta["val"] = value
        if by_data:
            node.meta["sized_by_data"] = by_data
        if layout:
            node.meta["sizes"] = layout

    def _by_tensor(self, number: fx.Node) -> fx.Node:
        """The same number, read from a tensor: that can go where what it is computed of cannot.

        before:  found = x.nonzero(), size = sym_size(found, 0)
        after:   found = x.nonzero(), tensor = size_tensor(sym_size, found, 0), size = tensor.item()
        """
        value, tensor = number.meta["val"], number.all_input_nodes[0].meta["val"]
        operation: Any = number.target
        number.args = (operation, *number.args)
        number.target = size_tensor
        with _torch.FakeTensorMode():
            dtype = torch.float64 if isinstance(value, float) else torch.int64
            number.meta["val"] = torch.empty((), dtype=dtype, device=tensor.device)
        item = self.graph.call_function(torch.ops.aten._local_scalar_dense.default, (number,))
        item.meta = {**number.meta, "val": value}
        return item

    def _outputs(self) -> tuple[list[Port], dict[str, fx.Node]]:
        ports, results = [], {}
        for node, desc in self.descriptors.outputs:
            if node is not None:
                port = self._port(self.descriptors.output(desc, node), node)
                ports.append(port)
                results[port.name] = _made(self.graph, port, self.here[node])
        # What the step assigns to an attribute that it has read is a result for Dynamo. The next
        # microbatch must read it, so it also updates the attribute's port, as batch norm does.
        for result, argument in self.traceable.carried:
            node = results[result]
            place = Place(new_name(argument), Role.BUFFER_UPDATE, argument.names)
            if place.name in results:
                raise ValueError(
                    f"the step changes {argument.names[0]} in place and assigns it anew: do one"
                )
            ports.append(self._port(place, node))
            results[place.name] = node
        return ports, results

    def _port(self, place: Place, node: fx.Node) -> Port:
        """The port of a node of either graph."""
        value, by_data, layout = _torch.with_numbers(node.meta["val"], self.largest, self.names)
        layout = node.meta.get("sizes", layout)
        is_open = layout and any(not isinstance(size, int) for size in layout[0])
        return Port(
            place.name,
            place.role,
            place.names,
            tuple(value.shape),
            value.dtype,
            value.device,
            place.batch_dim,
            sized_by_data=bool(by_data) or is_sized_by_data(node),
            sizes=layout[0] if is_open else None,
        )


def _check_tangents(traceable: Traceable, inputs: Sequence[Port]) -> None:
    """Every differentiable result must have its gradient come in."""
    loss = traceable.loss
    wanted = {
        result_name(index, loss)
        for index, value in enumerate(traceable.step.results)
        if value.requires_grad and loss in (None, index)
    }
    tangents = {port.fqn for port in inputs if port.role == Role.TANGENT}
    if tangents != wanted:
        raise ValueError(
            f"the results {sorted(wanted)} are differentiable, but AOTAutograd gives gradients "
            f"of {sorted(tangents)}; return copies (x.clone()) of results that share storage"
        )


def _made(graph: fx.Graph, port: Port, value: fx.Node) -> fx.Node:
    """The node of an output; a copy for what arrives as it is handed back (a gradient, or an
    input that another one becomes in place), so that some rank computes it."""
    if value.op != "placeholder" or port.role in (Role.LOSS, Role.BUFFER_UPDATE):
        return value
    copied = graph.call_function(torch.ops.aten.clone.default, (value,))
    copied.meta = dict(value.meta)
    return copied


def _plain_name(node: fx.Node) -> str:
    """What a node is called before others of its name are told from it. Numbers that are computed
    of sizes have names of their own: those of a program for one size are those of one for many."""
    of_sizes = node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)
    return "size" if of_sizes else re.sub(r"_\d+$", "", node.name)


def _hint(size: Any) -> int:
    """What a size of an argument was when the step was captured."""
    return int(_torch.with_numbers(size, 1, {})[0])


_HELD = re.compile(r"(?:__dict__\['_modules'\]|_modules)\['([^']+)'\]")  # Dynamo's for a module's


def _module_stack(node: fx.Node, roots: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The modules that a forward node comes from, the innermost last: their paths ("" for the
    outermost) and the names of their classes; `roots` has the readable names of the outermost."""
    modules = []
    for path, kind in (node.meta.get("nn_module_stack") or {}).values():
        root = next((root for root in roots if is_below(path, root)), "")
        rest = _HELD.sub(r"\1", path.removeprefix(root).removeprefix("."))
        name = f"{roots[root]}.{rest}".rstrip(".") if len(roots) > 1 and root else rest
        modules.append((name, getattr(kind, "__name__", str(kind))))
    return tuple(modules)
