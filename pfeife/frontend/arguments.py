"""What is known of a step's arguments, by whichever door they were found: names, roles, sizes."""

import builtins
import keyword
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.ir.parts import Assumption, Role


@attrs.frozen(eq=False)
class Argument:
    """What one placeholder of Dynamo's graph is; `example` is a fake tensor or a size.

    Ports come in the order of `position` first, then in that of Dynamo's placeholders. `given`
    says that the caller hands the value over, rather than that the step closes over it.
    """

    name: str
    role: Role | None
    names: tuple[str, ...]
    example: Any
    batch_dim: int | None = None
    position: int = 0
    given: bool = False


@attrs.frozen(eq=False)
class Given:
    """A tensor that the caller hands over, by its name among the arguments; `batch_dim` is where
    the batch is, None if nobody has said, and `whole` that it goes whole to every microbatch."""

    name: str
    position: int
    batch_dim: int | None = None
    whole: bool = False


@attrs.frozen
class Kept:
    """A result of Dynamo's graph that the step assigns to an attribute, called `name`; `replaces`
    are the places of the arguments that have the attribute's value from before."""

    name: str
    replaces: tuple[int, ...]


@attrs.frozen(eq=False)
class Inputs:
    """All placeholders of Dynamo's graph; `roots` has the readable name of each module that the
    step finds by itself, by Dynamo's name for it; `modules` are those whose state it takes.
    `kept` has by their indices the results that the step assigns to attributes, `moved` the places
    of the arguments that it assigns to others than their own. `numbers` has what Python alone has
    computed of what the step assigns, `assumed` the places of the arguments of whose values
    something is assumed, such as which branch they lead to; `flags` the results that are added up
    over microbatches, see `answers`; `settled` are the names of `numbers` that were there
    already. `premises` are what a trace takes for granted."""

    arguments: list[Argument]
    roots: dict[str, str]
    modules: weakref.WeakSet[nn.Module] = attrs.field(repr=False)
    kept: Mapping[int, Kept]
    moved: Mapping[int, str]
    numbers: Mapping[str, Any]
    assumed: frozenset[int] = frozenset()
    flags: tuple[int, ...] = ()
    settled: frozenset[str] = frozenset()
    premises: tuple[Assumption, ...] = ()

    @property
    def mode(self) -> str:
        """Whether the modules train, as a person would say it."""
        modes = {module.training for module in self.modules}
        if False not in modes:
            return "in training"
        return "partly in training" if True in modes else "in evaluation"


def with_names_of_sizes(arguments: Sequence[Argument], taken: set[str]) -> list[Argument]:
    """The arguments, of which sizes are called after the first tensor that has them."""
    # Dynamo calls a size s0: that says nothing to who reads a program or passes the size by name.
    places: dict[Any, str] = {}
    for argument in arguments:
        shape = argument.example.shape if isinstance(argument.example, torch.Tensor) else ()
        for dim, size in enumerate(shape):
            places.setdefault(_torch.symbol_named(size), f"{argument.names[0]}.size.{dim}")
    renamed, names = [], dict[Any, str]()  # Dynamo may have a size twice
    for argument in arguments:
        if argument.role == Role.SIZE:
            symbol = _torch.symbol_named(argument.example)
            place = places.get(symbol, argument.names[0])
            name = names[symbol] = names.get(symbol) or port_name(place, taken)
            argument = attrs.evolve(argument, name=name, names=(place,))
        renamed.append(argument)
    return renamed


def at_sizes(
    inputs: Inputs, shapes: Sequence[Any], fixed: bool = False, mode: Any = None
) -> Inputs:
    """The same inputs for arguments of such shapes (a number for one that is none), which decide
    what a trace assumes of symbolic sizes; or, `fixed`, for nothing but these. They are of a mode
    of their own, if none is given."""
    examples = [argument.example for argument in inputs.arguments]
    mode = mode or _torch.symbolic_mode()
    symbols = _torch.Symbols(mode, _numbers_of_symbols(examples, shapes), fixed)

    def at(argument: Argument) -> Argument:
        example = argument.example
        if argument.role == Role.SIZE:
            size = symbols(example)
            # A size that is a plain number here has no port: nothing in the graph would read it.
            role = None if type(size) is int else Role.SIZE
            return attrs.evolve(argument, role=role, example=size)
        if not isinstance(example, torch.Tensor):
            return argument
        fake = fake_like(mode, example, *by_symbols(example, symbols))
        return attrs.evolve(argument, example=fake)

    return attrs.evolve(inputs, arguments=[at(argument) for argument in inputs.arguments])


def with_open_sizes(inputs: Inputs, examples: Sequence[Any], rows: Sequence[Any]) -> Inputs:
    """The same inputs with symbols for the sizes that are symbols in Dynamo's `examples`. Those
    that count `rows` are the rows of a microbatch here: as an argument that is such a size, a
    symbol is told by the tensors alone."""
    counted = [size.node.expr for size in rows]
    mode, own = _torch.symbolic_mode(), [argument.example for argument in inputs.arguments]
    sizes = [value.shape if isinstance(value, torch.Tensor) else value for value in own]
    symbols = _torch.Symbols(mode, _numbers_of_symbols(examples, sizes))

    def at(argument: Argument, example: Any) -> Argument:
        if isinstance(example, torch.SymInt):
            size = symbols(example)
            is_port = isinstance(size, torch.SymInt) and example.node.expr not in counted
            role, names = (Role.SIZE, (argument.name,)) if is_port else (None, ())
            return attrs.evolve(argument, role=role, names=names, example=size)
        if not isinstance(argument.example, torch.Tensor):  # a float that Dynamo has as a tensor
            return argument
        shape, strides = by_symbols(example, symbols)
        # A microbatch's part of the batch is not laid out as the whole of it.
        laid_out = None if argument.batch_dim is not None else strides
        return attrs.evolve(argument, example=fake_like(mode, argument.example, shape, laid_out))

    arguments = [at(*pair) for pair in zip(inputs.arguments, examples, strict=True)]
    symbols.assume()
    taken = {argument.name for argument in arguments}
    return attrs.evolve(inputs, arguments=with_names_of_sizes(arguments, taken))


def _numbers_of_symbols(examples: Sequence[Any], sizes: Sequence[Any]) -> dict[Any, int]:
    """What the symbols in examples are where these have such shapes, or are such numbers."""
    numbers: dict[Any, int] = {}
    for example, size in zip(examples, sizes, strict=True):
        if isinstance(example, torch.SymInt):
            numbers[_torch.symbol_named(example)] = int(size)
        elif isinstance(example, torch.Tensor) and isinstance(size, Sequence):
            pairs = zip(map(_torch.symbol_named, example.shape), size, strict=True)
            numbers |= {symbol: int(n) for symbol, n in pairs if symbol is not None}
    return numbers


def text_of(module: fx.GraphModule, inputs: Inputs) -> str:
    """What tells Dynamo's graph from others of the same step: its operations, what it is called
    with, and what of torch its program depends on (where that can be told)."""
    graphs = [graph for graph in module.modules() if isinstance(graph, fx.GraphModule)]
    # By identity: graphs of the same text may hold tensors of other values.
    constants = [
        (name, id(value))
        for graph in graphs
        for name, value in (*vars(graph).items(), *graph.named_buffers(recurse=False))
        if isinstance(value, torch.Tensor)
    ]
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    arguments = [
        attrs.evolve(argument, example=_layout(argument.example, node.meta.get("example_value")))
        for argument, node in zip(inputs.arguments, nodes, strict=True)
    ]
    tensors = (
        argument.example
        for argument in inputs.arguments
        if isinstance(argument.example, torch.Tensor)
    )
    # Beside the graph, kernels and precisions decide what AOTAutograd makes of it. Where these
    # cannot be told, the reason stands in their place: two graphs for one reason are taken for
    # one, as within a process it is the same torch.
    devices = {tensor.device for tensor in tensors}
    try:
        around = _torch.surroundings(sorted(devices, key=str))
    except ValueError as error:
        around = [str(error)]
    modes = (inputs.mode, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), around)
    rest = attrs.evolve(inputs, arguments=arguments)
    return "\n".join(map(str, (*(graph.graph for graph in graphs), constants, rest, modes)))


def _layout(example: Any, example_value: Any) -> Any:
    """What a text has of an argument: the sizes that Dynamo leaves open are not those of a call."""
    if not isinstance(example, torch.Tensor):
        return example_value if isinstance(example_value, torch.SymInt) else example
    like = example_value if isinstance(example_value, torch.Tensor) else example
    return like.shape, like.stride(), example.dtype, example.device, example.requires_grad


def is_below(path: str, base: str) -> bool:
    """Whether a module is another one or inside of it, by Dynamo's names."""
    return path == base or path.startswith(f"{base}.")


def aliases(root: Any) -> dict[int, list[str]]:
    """All names of every parameter and buffer of a module, by identity."""
    names_of: dict[int, list[str]] = {}
    if isinstance(root, nn.Module):
        for name, parameter in root.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        for name, buffer in root.named_buffers(remove_duplicate=False):
            names_of.setdefault(id(buffer), []).append(name)
    return names_of


# Names of our own ports; fx gives other names to nodes that are called like builtins.
_RESERVED = re.compile(r"(self|seed|loss)$|(output|tangent|grad|new)_")


def port_name(name: str, taken: set[str]) -> str:
    """What the port is called of an argument with a name, which may have dots; no two have one."""
    return unique_name(re.sub(r"\W", "_", name), taken)


def sizes_of_arguments(
    arguments: Sequence[Argument],
) -> tuple[dict[Any, torch.SymInt], dict[Any, Any]]:
    """The symbolic sizes of arguments, and the symbols that they are in a program, whose names are
    those of ports; both by their symbols."""
    sizes = [(a.name, a.example) for a in arguments if a.role == Role.SIZE]
    taken = {argument.name for argument in arguments}
    for argument in arguments:
        shape = argument.example.shape if isinstance(argument.example, torch.Tensor) else ()
        sizes += [(f"{argument.name}_size_{dim}", size) for dim, size in enumerate(shape)]
    open_sizes, names = dict[Any, torch.SymInt](), dict[Any, Any]()
    for name, size in sizes:
        symbol = _torch.symbol_named(size)
        if symbol is not None and symbol not in open_sizes:
            own_name = name if name in taken else port_name(name, taken)
            open_sizes[symbol], names[symbol] = size, _torch.name_of_size(own_name)
    return open_sizes, names


def unique_name(name: str, taken: set[str]) -> str:
    """A name for a port like the given one that is not taken; from then on it is."""
    name = name if re.match(r"[A-Za-z_]", name) else f"_{name}"
    if keyword.iskeyword(name) or hasattr(builtins, name) or _RESERVED.match(name):
        name = f"in_{name}"
    # Otherwise fx renames the node, and a port would not have the name of its node.
    candidate, count = name, 0
    while candidate in taken:
        count += 1
        candidate = f"{name}_{count}"
    taken.add(candidate)
    return candidate


def fake_like(
    mode: Any,
    tensor: torch.Tensor,
    shape: Sequence[Any] | None = None,
    strides: Sequence[Any] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A tensor without storage, like the given one but perhaps of another shape (contiguous, or
    with `strides`), of perhaps symbolic sizes, and on `device` if that one is on the meta
    device."""
    place = device if device and tensor.device.type == "meta" else tensor.device
    like: dict[str, Any] = {"dtype": tensor.dtype, "device": place}
    # With the strides of the argument: what is a view of a transposed tensor would else be a copy.
    if shape is None:
        shape, strides = tensor.shape, tensor.stride()
    with mode:
        fake = (
            torch.empty(shape, **like)
            if strides is None
            else torch.empty_strided(shape, strides, **like)
        )
    return fake.requires_grad_(tensor.requires_grad)


def by_symbols(
    example: torch.Tensor, symbols: Callable[[Any], Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """The shape and the strides of an example, of which `symbols` makes those of another mode."""
    return list(map(symbols, example.shape)), list(map(symbols, example.stride()))
