"""Sizes of the batch that a program leaves open: what they are in a call, and as plain numbers.

x [rows, length] -> view(x, [rows * length]) -> ...     `rows`, `length`: size ports, ints
for x [4, 7]        rows 4, length 7
settled             view(x, [28]), without the ports
"""

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.nodes import is_number, is_source
from pfeife.ir.parts import AProgram, Role, captured_sizes

_SIZE = torch.ops.aten.sym_size.int  # of a tensor; what data decide is read by an item


def sizes_in(program: AProgram, values: Mapping[str, Any]) -> dict[str, int]:
    """The values of a program's size ports, by their names: as given among `values`, which are by
    the names of the ports, or as the shapes of the tensors among these tell. Raises ValueError for
    one that nothing tells, or that two tensors have otherwise."""
    if not program.ports(Role.SIZE):
        return {}
    open_ports = {p.name for p in program.inputs if p.role == Role.SIZE or p.sizes}
    open_values = {n: v for n, v in values.items() if n in open_ports and v is not None}
    shapes = {n: v if isinstance(v, int) else tuple(v.shape) for n, v in open_values.items()}
    return sizes_of_shapes(program, shapes)


def sizes_of_shapes(program: AProgram, shapes: Mapping[str, Any]) -> dict[str, int]:
    """The same from the shapes of tensors, and the numbers that are known."""
    ports = program.ports(Role.SIZE)
    wanted = {_torch.name_of_size(port.name): port.name for port in ports}
    sizes = {name: int(shapes[name]) for name in wanted.values() if name in shapes}
    for port in program.inputs:
        shape = shapes.get(port.name, ()) if port.sizes else ()
        for size, number in zip(port.sizes or (), shape, strict=False):
            name = wanted.get(size)
            if name is not None and sizes.setdefault(name, number) != number:
                raise ValueError(
                    f"{port.role} {port.fqn} {list(shape)}: its sizes are to be "
                    f"{list(port.sizes or ())}, and {name} is {sizes[name]}"
                )
    # Only a size that is a plain name has told it: other expressions would have to be solved.
    missing = sorted(set(wanted.values()) - sizes.keys())
    if missing:
        raise ValueError(f"nothing tells the sizes {missing} of the program: pass them by name")
    return sizes


def with_sizes(program: AProgram, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of inputs by the names of their ports, and those of the size ports that they tell."""
    return {**values, **sizes_in(program, values)} if program.ports(Role.SIZE) else dict(values)


def numbers_of_sizes(program: AProgram, graph: fx.Graph, of_tensors: bool = False) -> set[str]:
    """The names of size ports in the graph of a program or a body of it, and of the numbers that
    are computed of nothing else; `of_tensors`: or of sizes that tensors in it have."""
    sizes = {port.name for port in program.ports(Role.SIZE)}
    numbers: set[str] = set()
    for node in graph.nodes:
        read = [source.name for source in node.all_input_nodes]
        # `x.item()` is a number too, but of data: it reads a tensor, which is in no such set.
        of_sizes = bool(read) and is_number(node) and numbers.issuperset(read)
        is_port = is_source(node) and node.name in sizes
        if of_sizes or is_port or (of_tensors and node.target is _SIZE):
            numbers.add(node.name)
    return numbers


def broken_limit(program: AProgram, sizes: Mapping[str, int]) -> str:
    """Which limit of a program such sizes break, "" if none."""
    broken = (str(limit) for limit in program.limits if not _torch.holds(limit, sizes))
    return next(broken, "")


def is_open(program: AProgram) -> bool:
    """Whether a program holds for other sizes than those that it was captured at: some of torch's
    kernels take any for a number."""
    sizes = captured_sizes(program).items()
    return not all(_torch.is_single(program.limits, name, size) for name, size in sizes)


def settled(program: AProgram) -> AProgram:
    """A flat program for nothing but the sizes that it was captured at: numbers in place of its
    size ports and of what is computed of them. Its nodes have the names that they had."""
    if not program.ports(Role.SIZE):
        return program

    def plain(ports: Any) -> Any:
        return tuple(attrs.evolve(port, sizes=None) for port in ports if port.role != Role.SIZE)

    sizes = captured_sizes(program)
    return attrs.evolve(
        program,
        module=_settled(program.module, sizes),
        inputs=plain(program.inputs),
        outputs=plain(program.outputs),
        counts=tuple(
            attrs.evolve(count, module=_settled(count.module, sizes)) for count in program.counts
        ),
        limits=(),
    )


def _settled(module: fx.GraphModule, sizes: Mapping[str, int]) -> fx.GraphModule:
    """A copy of a graph with numbers in place of inputs with such names, and of what is computed of
    nothing else."""

    def fixed(node: fx.Node, copy: Copy) -> Any:
        read = [copy.here[source] for source in node.all_input_nodes]
        is_known = (
            is_number(node) and read and not any(isinstance(value, fx.Node) for value in read)
        )
        if is_known or node.target is _SIZE or (node.op == "placeholder" and node.name in sizes):
            return node.meta["val"]
        new = copy.keep(node)
        new.meta.pop("sizes", None)
        return new

    return copied(module, fixed).module()


def resized(program: AProgram, sizes: Mapping[str, int]) -> AProgram:
    """A copy whose ports and nodes have the shapes (numbers the values) that they have where the
    size ports are such numbers: for costs, bytes and figures of other sizes than those of the
    capture."""
    if not program.ports(Role.SIZE) or dict(sizes) == captured_sizes(program):
        return program

    def anew(module: fx.GraphModule) -> Copy:
        return _resized(module, sizes, numbers_of_sizes(program, module.graph, of_tensors=True))

    inputs, outputs = (
        tuple(attrs.evolve(port, shape=port.shape_at(sizes)) for port in ports)
        for ports in (program.inputs, program.outputs)
    )
    calls = anew(program.module)
    calls.held.update({at: anew(body).module() for at, body in program.bodies.items()})
    return attrs.evolve(program, module=calls.module(), inputs=inputs, outputs=outputs)


def _resized(module: fx.GraphModule, sizes: Mapping[str, int], numbers: Collection[str]) -> Copy:
    def resized(node: fx.Node, copy: Copy) -> fx.Node:
        new = copy.keep(node)
        value: Any = node.meta.get("val")
        if "sizes" in node.meta:
            shape, strides = (_torch.sizes_at(layout, sizes) for layout in node.meta["sizes"])
            new.meta["val"] = _torch.fake_tensor(
                value.fake_mode, value.dtype, value.device, shape, strides, 0
            )
        elif node.op == "placeholder" and node.name in sizes:
            new.meta["val"] = sizes[node.name]
        elif node.name in numbers:
            new.meta["val"] = _computed(new)
        return new

    return copied(module, resized)


def _computed(number: fx.Node) -> Any:
    """What a node computes of values that are known."""
    function: Any = number.target
    args, kwargs = fx.node.map_arg(
        (number.args, dict(number.kwargs)), lambda source: source.meta["val"]
    )
    return function(*args, **kwargs)
