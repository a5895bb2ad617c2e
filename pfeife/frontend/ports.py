"""A joint graph with AOTAutograd's descriptors into a graph with ports."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.arguments import Argument, is_below, sizes_of_arguments
from pfeife.frontend.cache.capture_key import Traceable
from pfeife.ir.nodes import (
    has_effects,
    is_number,
    is_sized_by_data,
    output_node,
    size_tensor,
    source_line,
)
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import is_random, seeded
from pfeife.ir.verify import verify


class PortAssigner:
    """Rewrites a joint graph with descriptors into a graph with ports.

        placeholders                      returned
        ParamAOTInput, BufferAOTInput     PlainAOTOutput          ->  loss, output
          ->  parameter, buffer           InputMutationAOTOutput  ->  buffer_update
                                            of the batch  ->  output
        PlainAOTInput    ->  batch        GradAOTOutput of state  ->  gradient
        TangentAOTInput  ->  tangent                of the batch  ->  batch_gradient

    What the step assigns anew adds updates. A parameter that the step changes in place is read and
    updated like a buffer, and may have a gradient: in eager, that is the gradient of its new value.
    The first random operation adds a seed.
    """

    def __init__(self, joint: fx.GraphModule, traceable: Traceable):
        _simplify(joint.graph)
        _take_changes_apart(joint.graph)
        joint.graph.eliminate_dead_code(has_effects)
        self.joint, self.asked, self.loss = joint, traceable, traceable.loss
        arguments = traceable.arguments
        self.by_name = {registered(argument): argument for argument in arguments}
        self.rest = stateless(arguments)
        self.graph = fx.Graph()
        self.inputs: list[Port] = []
        self.here: dict[fx.Node, fx.Node] = {}
        self.seed: fx.Node | None = None
        self.draws = 0
        named_sizes = sizes_of_arguments(arguments)
        self.given = {symbol: size for symbol, (_, size) in named_sizes.items()}
        self.names = {
            symbol: _torch.name_of_size(name) for symbol, (name, _) in named_sizes.items()
        }
        self.sizes: dict[Any, fx.Node] = {}  # by their symbols
        shapes = [a.example.shape for a in arguments if isinstance(a.example, torch.Tensor)]
        # A size that data decide and nothing bounds is taken for the largest one of the arguments.
        self.largest = max((_hint(size) for shape in shapes for size in shape), default=1)
        self.changed = {
            desc.mutated_input.target
            for desc in output_node(joint).meta["desc"]
            if isinstance(desc, _torch.InputMutationAOTOutput)
            and isinstance(desc.mutated_input, _torch.ParamAOTInput)
        }

    def program(self) -> Program:
        """The flat program. Raises ValueError for what has no place in one."""
        nodes = list(self.joint.graph.nodes)
        # All inputs first: no node that is copied may take a name that is promised to a port.
        for node in nodes:
            if node.op == "placeholder":
                self._input(node)
        for symbol in self.names:
            self._size(symbol)
        for node in nodes:
            if node.op not in ("placeholder", "output"):
                self._copy(node)
        outputs, results = self._outputs(output_node(self.joint))
        self._check_tangents(self.asked.step.results)
        self.graph.output(results)
        holder = nn.Module()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                setattr(holder, node.target, getattr(self.joint, node.target))
        module = _torch.graph_module(holder, self.graph)
        limits = _torch.assumed_of_sizes([*self.given.values()], self.names)
        return verify(Program(module, tuple(self.inputs), tuple(outputs), limits=limits))

    def _input(self, node: fx.Node) -> None:
        desc: Any = node.meta["desc"]
        tangent = isinstance(desc, _torch.TangentAOTInput)
        if tangent and isinstance(desc.output, _torch.InputMutationAOTOutput):
            if node.users or not isinstance(desc.output.mutated_input, _torch.ParamAOTInput):
                raise ValueError(self._changed(desc.output.mutated_input))
            return  # nobody reads it
        if tangent:
            result = result_name(getattr(desc.output, "idx", -1), self.loss)
            port = self._port(f"tangent_{result}", Role.TANGENT, (result,), node)
        else:
            argument = self._argument(desc)
            assert argument.role is not None
            if argument.role == Role.SIZE:
                symbol = _torch.symbol_named(argument.example)
                self.here[node] = self._size(symbol, argument.names)
                return
            role = Role.BUFFER if getattr(desc, "target", "") in self.changed else argument.role
            port = self._port(argument.name, role, argument.names, node, argument.batch_dim)
        self.here[node] = self.graph.create_node("placeholder", port.name, name=port.name)
        self.here[node].meta = dict(node.meta)
        self._tell_sizes(self.here[node])
        assert self.here[node].name == port.name
        self.inputs.append(port)

    def _check_tangents(self, values: Sequence[torch.Tensor]) -> None:
        """Every differentiable result must have its gradient come in."""
        wanted = {
            result_name(index, self.loss)
            for index, value in enumerate(values)
            if value.requires_grad and self.loss in (None, index)
        }
        tangents = {port.fqn for port in self.inputs if port.role == Role.TANGENT}
        if tangents != wanted:
            raise ValueError(
                f"the results {sorted(wanted)} are differentiable, but AOTAutograd gives gradients "
                f"of {sorted(tangents)}; return copies (x.clone()) of results that share storage"
            )

    def _seed(self) -> fx.Node:
        """The seed's placeholder, made when the first random operation asks for it."""
        if self.seed is None:
            with _torch.FakeTensorMode():
                value = torch.empty((), dtype=torch.int64)
            self.seed = self._more("seed", value)
            self.inputs.append(self._port("seed", Role.SEED, ("seed",), self.seed))
        return self.seed

    def _size(self, symbol: Any, names: tuple[str, ...] = ()) -> fx.Node:
        """The placeholder of a size of the arguments, by its symbol."""
        if symbol in self.sizes:
            return self.sizes[symbol]
        name = str(self.names[symbol])
        node = self.sizes[symbol] = self._more(name, _hint(self.given[symbol]))
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
        if symbol in self.sizes:
            self.here[node] = self.sizes[symbol]
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.here.__getitem__)
        copied = self.graph.create_node(node.op, node.target, args, kwargs, name=_plain_name(node))
        copied.meta = dict(node.meta)
        for key in ("ac_graph_id", "recompute"):  # for torch's partitioner; counted by the process
            copied.meta.pop(key, None)
        stack = copied.meta["module_stack"] = _module_stack(node, self.asked.roots)
        copied.meta["module_path"] = stack[-1][0] if stack else ""
        if node.op == "call_function" and is_random(node.target, node.args, node.kwargs):
            operation: Any = node.target
            copied.args = (operation, self.draws, self._seed(), *copied.args)
            copied.target = seeded
            self.draws += 1
        self._tell_sizes(copied)
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
            node.meta["sized_by_data"] = True
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

    def _outputs(self, joint: fx.Node) -> tuple[list[Port], dict[str, fx.Node]]:
        ports, results = [], {}
        for node, desc in zip(joint.args[0], joint.meta["desc"], strict=True):  # type: ignore[arg-type]
            if node is not None:  # the gradient of what has no influence on the loss
                port = self._output(desc, node)
                ports.append(port)
                results[port.name] = self._made(port, self.here[node])
        # What the step assigns to an attribute that it has read is a result for Dynamo. The next
        # microbatch must read it, so it also updates the attribute's port, as batch norm does.
        for result, argument in self.asked.carried:
            node = results[result]
            name = new_name(argument)
            port = self._port(name, Role.BUFFER_UPDATE, argument.names, node)
            if port.name in results:
                raise ValueError(
                    f"the step changes {argument.names[0]} in place and assigns it anew: do one"
                )
            ports.append(port)
            results[port.name] = node
        return ports, results

    def _made(self, port: Port, value: fx.Node) -> fx.Node:
        """The node of an output; a copy for what arrives as it is handed back (a gradient, or an
        input that another one becomes in place), so that some rank computes it."""
        if value.op != "placeholder" or port.role in (Role.LOSS, Role.BUFFER_UPDATE):
            return value
        copied = self.graph.call_function(torch.ops.aten.clone.default, (value,))
        copied.meta = dict(value.meta)
        return copied

    def _argument(self, desc: Any) -> Argument:
        if isinstance(desc, _torch.PlainAOTInput):
            return self.rest[desc.idx]
        if isinstance(desc, _torch.ParamAOTInput | _torch.BufferAOTInput):
            return self.by_name[desc.target]
        raise ValueError(
            "the step does more than to compute its results (it prints, asserts or calls out: "
            f"{type(desc).__name__}), which cannot be put into a schedule; take that out of it"
        )

    def _changed(self, source: Any) -> str:
        """Why an input that the step changes in place is refused."""
        output = output_node(self.joint)
        changes: Any = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
        line = next(
            source_line(node)
            for node, desc in changes
            if isinstance(desc, _torch.InputMutationAOTOutput) and desc.mutated_input == source
        )
        if isinstance(source, _torch.ParamAOTInput):
            return (
                f"the step changes the parameter {self.by_name[source.target].names[0]} in place, "
                "and autograd would have to follow it: do that under torch.no_grad(), or after "
                f"optimizer.step() ({line})"
            )
        where = self.rest[source.idx].names[0] if hasattr(source, "idx") else str(source)
        return (
            f"the step changes its input {where} in place; only buffers of modules may be changed, "
            "and inputs that are cut into microbatches and have no gradients: copy the input "
            f"first, by x = x.clone() ({line})"
        )

    def _new(self, source: Any, node: fx.Node) -> Port:
        """What an input becomes that the step changes in place: a result with its rows."""
        argument = self.rest[source.idx] if isinstance(source, _torch.PlainAOTInput) else None
        new = node.meta["val"]
        if argument is None or argument.batch_dim is None or not _in_its_place(argument, new):
            raise ValueError(self._changed(source))
        name = new_name(argument)
        return self._port(name, Role.OUTPUT, (name,), node, argument.batch_dim)

    def _output(self, desc: Any, node: fx.Node) -> Port:
        if isinstance(desc, _torch.PlainAOTOutput):
            name = result_name(desc.idx, self.loss)
            role = Role.LOSS if name == "loss" else Role.OUTPUT
            return self._port(name, role, (name,), node, self.asked.result_dims[desc.idx])
        if isinstance(desc, _torch.InputMutationAOTOutput):
            source = desc.mutated_input
            if not isinstance(source, _torch.BufferAOTInput | _torch.ParamAOTInput):
                return self._new(source, node)
            argument = self.by_name[source.target]
            return self._port(new_name(argument), Role.BUFFER_UPDATE, argument.names, node)
        if isinstance(desc, _torch.GradAOTOutput):
            source = desc.grad_of
            if isinstance(source, _torch.PlainAOTInput):
                argument = self.rest[source.idx]
                role, dim = Role.BATCH_GRADIENT, argument.batch_dim
            else:
                assert isinstance(source, _torch.ParamAOTInput | _torch.BufferAOTInput)
                argument, role, dim = self.by_name[source.target], Role.GRADIENT, None
            return self._port(f"grad_{argument.name}", role, argument.names, node, dim)
        raise ValueError(f"the step has a result that Pfeife does not know: {desc}")

    def _port(
        self,
        name: str,
        role: Role,
        names: tuple[str, ...],
        node: fx.Node,
        dim: int | None = None,
    ) -> Port:
        """The port of a node of either graph."""
        value, by_data, layout = _torch.with_numbers(node.meta["val"], self.largest, self.names)
        layout = node.meta.get("sizes", layout)
        shape, kind = tuple(value.shape), (value.dtype, value.device)
        by_data = by_data or is_sized_by_data(node)
        sizes = layout[0] if layout and any(not isinstance(n, int) for n in layout[0]) else None
        return Port(name, role, names, shape, *kind, dim, sized_by_data=by_data, sizes=sizes)


def _simplify(graph: fx.Graph) -> None:
    """Takes out what is there for autograd's sake alone: the transpose of a matrix's transpose,
    of which it makes four for every linear layer, and the detaching of what it saves."""
    transpose, detach = torch.ops.aten.t.default, torch.ops.aten.detach.default
    for node in graph.nodes:
        if node.target is transpose and node.args[0].target is transpose:
            node.replace_all_uses_with(node.args[0].args[0])
        elif node.target is detach and node.args[0].op != "placeholder":
            node.replace_all_uses_with(node.args[0])


def _take_changes_apart(graph: fx.Graph) -> None:
    """Takes out the gradients that would arrive at the new values of parameters that the step
    changes in place, to which AOTAutograd adds those of the parameters: the step is where they are
    read last."""
    tangents = [
        node
        for node in graph.nodes
        if isinstance(node.meta.get("desc"), _torch.TangentAOTInput)
        and isinstance(node.meta["desc"].output, _torch.InputMutationAOTOutput)
    ]
    for tangent in tangents:
        for user in list(tangent.users):
            if user.target is torch.ops.aten.add.Tensor and user.args[0] is tangent:
                user.replace_all_uses_with(user.args[1])
                graph.erase_node(user)
        results = next(iter(reversed(graph.nodes)))
        assert results.op == "output"
        # Of what the step does not read there is no gradient.
        results.args = ([None if result is tangent else result for result in results.args[0]],)


_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def registered(argument: Argument) -> str:
    """The name under which `_Joint` has a parameter or buffer."""
    return f"{'p' if argument.role == Role.PARAMETER else 'b'}_{argument.name}"


def _plain_name(node: fx.Node) -> str:
    """What a node is called before others of its name are told from it. Numbers that are computed
    of sizes have names of their own: those of a program for one size are those of one for many."""
    of_sizes = node.op == "call_function" and isinstance(node.meta.get("val"), torch.SymInt)
    return "size" if of_sizes else re.sub(r"_\d+$", "", node.name)


def _hint(size: Any) -> int:
    """What a size of an argument was when the step was captured."""
    return int(_torch.with_numbers(size, 1, {})[0])


def stateless(arguments: Sequence[Argument]) -> list[Argument]:
    """The arguments that are no state of modules, in the order of their ports."""
    rest = [a for a in arguments if a.role in (Role.BATCH, Role.CONSTANT, Role.SIZE)]
    return sorted(rest, key=lambda argument: argument.position)


def result_name(index: int, loss: int | None) -> str:
    """The port of a result of the step by its index; `loss` is the index of the loss."""
    return "loss" if index == loss else f"output_{index}"


def new_name(argument: Argument) -> str:
    """The port of what an argument becomes that the step changes in place."""
    return f"new_{argument.name}"


def _in_its_place(argument: Argument, value: torch.Tensor) -> bool:
    """Whether a value can be written to where an argument is, and autograd need not know of it."""
    old = argument.example
    return old.shape == value.shape and old.dtype == value.dtype and not old.requires_grad


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
