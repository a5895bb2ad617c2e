"""What the arguments of Dynamo's graph are: state by its fully qualified names, batch, sizes."""

import builtins
import keyword
import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.checks.foreign_generators import check_draws
from pfeife.frontend.trace.data_writes import check_given
from pfeife.ir.nodes import returned
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


def describe(
    module: fx.GraphModule,
    examples: Iterable[Any],
    device: torch.device | None = None,
    caller_tensors: Mapping[int, Given] | None = None,
    whole: bool = False,
) -> Inputs:
    """What every placeholder of Dynamo's graph is. Called while Dynamo compiles.

    Sizes that Dynamo leaves open are those of a microbatch; `whole`, of the batch of a call, and
    who cuts it makes numbers of them.

    `caller_tensors` has what the caller hands over, by the identity of the example. Without it,
    tensors that are neither parameters nor buffers come out as constants: who knows the batch says
    which of them are cut into microbatches. Meta tensors become fake ones on `device`. Raises
    ValueError for a tensor inside of an argument that is not among `caller_tensors`, and for draws
    of Python's and numpy's.
    """
    check_draws(module)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [_torch.placeholder_source(node) for node in nodes]
    describer = _Describer(module, sources, device, caller_tensors, whole)
    arguments = [
        describer.argument(node, source, example)
        for node, source, example in zip(nodes, sources, examples, strict=True)
    ]
    # Once all arguments are known: an assumption may be about sizes of several.
    describer.symbols.assume()
    arguments = _with_names_of_sizes(arguments, describer.taken)
    pairs = zip(nodes, arguments, strict=True)
    check_given(module, {n for n, a in pairs if a.given and a.role in (Role.BATCH, Role.CONSTANT)})
    modules = weakref.WeakSet(
        holder for holder in describer.holders if isinstance(holder, nn.Module)
    )
    assigned = {node.name: places for node, places in _torch.assigned().items()}
    assignments = {
        index: _kept(assigned[node.name], sources)
        for index, node in enumerate(returned(module))
        if node.name in assigned
    }
    moved = {
        at: _assigned_name(place)
        for at, (node, source) in enumerate(zip(nodes, sources, strict=True))
        for place in assigned.get(node.name, ())
        if place != source and not _hidden(place, describer.order)
    }
    constants = _torch.assigned_constants()
    numbers = {_assigned_name(place): constant for place, constant in constants.items()}
    settled = {
        _assigned_name(place)
        for place, constant in constants.items()
        if _torch.is_there(place, constant)
    }
    assumed_sources = _torch.assumed_values()
    assumed = frozenset(at for at, source in enumerate(sources) if source in assumed_sources)
    return Inputs(
        arguments,
        describer.roots,
        modules,
        assignments,
        moved,
        numbers,
        assumed,
        settled=frozenset(settled),
    )


def _with_names_of_sizes(arguments: Sequence[Argument], taken: set[str]) -> list[Argument]:
    """The arguments, of which sizes are called after the first tensor that has them."""
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
    values: dict[Any, int] = {}
    for argument, shape in zip(inputs.arguments, shapes, strict=True):
        if argument.role == Role.SIZE:
            values[_torch.symbol_named(argument.example)] = int(shape)
        elif isinstance(argument.example, torch.Tensor):
            named = map(_torch.symbol_named, argument.example.shape)
            values |= {
                symbol: n for symbol, n in zip(named, shape, strict=True) if symbol is not None
            }
    mode = mode or _torch.symbolic_mode()
    symbols = _torch.Symbols(mode, values, fixed)
    arguments = [_at_sizes(argument, mode, symbols) for argument in inputs.arguments]
    return attrs.evolve(inputs, arguments=arguments)


def _at_sizes(argument: Argument, mode: Any, symbols: _torch.Symbols) -> Argument:
    example = argument.example
    if argument.role == Role.SIZE:
        size = symbols(example)
        return attrs.evolve(argument, role=None if type(size) is int else Role.SIZE, example=size)
    if not isinstance(example, torch.Tensor):
        return argument
    shape, strides = (list(map(symbols, numbers)) for numbers in (example.shape, example.stride()))
    return attrs.evolve(argument, example=fake_like(mode, example, shape, strides))


def with_open_sizes(inputs: Inputs, examples: Sequence[Any], rows: Sequence[Any]) -> Inputs:
    """The same inputs with symbols for the sizes that are symbols in Dynamo's `examples`. Those
    that count `rows` are the rows of a microbatch here: as an argument that is such a size, a
    symbol is told by the tensors alone."""
    counted = [size.node.expr for size in rows]
    mode, values = _torch.symbolic_mode(), dict[Any, int]()
    for argument, example in zip(inputs.arguments, examples, strict=True):
        if isinstance(argument.example, torch.Tensor):  # else a float that Dynamo has as a tensor
            pairs = zip(example.shape, argument.example.shape, strict=True)
            values |= {_torch.symbol_named(size): int(n) for size, n in pairs}
        elif isinstance(example, torch.SymInt):
            values[_torch.symbol_named(example)] = argument.example
    symbols = _torch.Symbols(mode, values)

    def at(argument: Argument, example: Any) -> Argument:
        if isinstance(example, torch.SymInt):
            size = symbols(example)
            is_port = isinstance(size, torch.SymInt) and example.node.expr not in counted
            role, names = (Role.SIZE, (argument.name,)) if is_port else (None, ())
            return attrs.evolve(argument, role=role, names=names, example=size)
        if not isinstance(argument.example, torch.Tensor):
            return argument
        own, strides = argument.example, None
        shape = list(map(symbols, example.shape))
        if argument.batch_dim is None:
            strides = list(map(symbols, example.stride()))
        return attrs.evolve(argument, example=fake_like(mode, own, shape, strides))

    arguments = [at(*pair) for pair in zip(inputs.arguments, examples, strict=True)]
    symbols.assume()
    taken = {argument.name for argument in arguments}
    return attrs.evolve(inputs, arguments=_with_names_of_sizes(arguments, taken))


def text_of(module: fx.GraphModule, inputs: Inputs) -> str:
    """What tells Dynamo's graph from others of the same step: its operations, what it is called
    with, and what of torch its program depends on (where that can be told)."""
    graphs = [graph for graph in module.modules() if isinstance(graph, fx.GraphModule)]
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


class _Describer:
    """Describes placeholders one after another, so that no two arguments have one name.

    A source is the outermost module's, its base, and the path of modules from there; the path is
    the fully qualified name, below the base's own name where the step uses several modules:

        L['self'].model._modules['a']._parameters['w']  ->  base L['self'].model, path a.w
    """

    def __init__(
        self,
        module: fx.GraphModule,
        sources: Sequence[str],
        device: torch.device | None,
        caller_tensors: Mapping[int, Given] | None,
        whole: bool,
    ):
        self.whole = whole
        self.bases = dict.fromkeys(base for base, path, _ in map(_split_source, sources) if path)
        self.holders = [_torch.source_value(base) for base in self.bases]
        self.names = dict(zip(self.bases, map(aliases, self.holders), strict=True))
        roots = (*self.bases, *_other_roots(module, self.bases))
        self.roots = {base: _torch.source_words(base)[-1] for base in roots}
        self.order = _torch.frame_arguments()
        self.device, self.given = device, caller_tensors
        self.mode = _torch.symbolic_mode()
        self.symbols = _torch.Symbols(self.mode)
        self.taken: set[str] = set()
        self.known: dict[str, int] = {}  # tensors by the names that they have

    def argument(self, placeholder: fx.Node, source: str, example: Any) -> Argument:
        """What one placeholder is, by its source and the value that Dynamo calls the graph with."""
        spelled = ".".join(_torch.source_words(source))
        example_value = None if self.whole else placeholder.meta.get("example_value")
        if isinstance(example_value, torch.SymInt):
            # Each microbatch begins at another place of the batch's memory.
            is_place = spelled.endswith(".storage_offset")
            size = int(example_value.node.hint) if is_place else self.symbols(example_value)
            role = None if isinstance(size, int) else Role.SIZE
            return Argument(placeholder.name, role, (spelled,), size)
        if not isinstance(example, torch.Tensor):
            return Argument(placeholder.name, None, (), example)
        if example.is_nested:
            raise ValueError(
                f"input {spelled} is a nested tensor, which has no "
                "rows of equal size to cut; pass dense tensors (padded, with a mask)"
            )
        handed = (self.given or {}).get(id(example))
        role = self._role(source, example, handed)
        names = (handed.name,) if handed else self._names(source, example, spelled)
        if self.known.get(names[0], id(example)) != id(example):  # two tensors of one name
            names = (_unique(spelled, set(self.known)),)
        self.known[names[0]] = id(example)
        root = _argument_of(source)
        at = self.order.index(root) if root in self.order else 0
        inside = root in self.order and not _split_source(source)[1]
        return Argument(
            port_name(names[0], self.taken),
            role,
            names,
            self._fake(example_value, example),
            batch_dim=handed.batch_dim if handed else None,
            position=handed.position if handed else at,
            given=handed is not None or inside,
        )

    def _fake(self, example_value: Any, example: torch.Tensor) -> torch.Tensor:
        """A tensor without storage as an argument is, of symbolic sizes where Dynamo's are."""
        if not isinstance(example_value, torch.Tensor):
            return fake_like(self.mode, example, device=self.device)
        shape, strides = (
            list(map(self.symbols, n)) for n in (example_value.shape, example_value.stride())
        )
        return fake_like(self.mode, example, shape, strides, self.device)

    def _role(self, source: str, example: torch.Tensor, handed: Given | None) -> Role:
        if handed:
            return Role.CONSTANT if handed.whole else Role.BATCH
        slot = _split_source(source)[2]
        if slot == "_parameters" or isinstance(example, nn.Parameter):
            return Role.PARAMETER
        if slot == "_buffers":
            return Role.BUFFER
        if self.given is not None and _hidden(source, self.order):
            raise ValueError(
                f"{'.'.join(_torch.source_words(source))} is a tensor inside of an argument that "
                "Pfeife does not look into, so it cannot be cut into microbatches: pass tensors, "
                "or lists, tuples, dicts, mappings or dataclasses of them"
            )
        return Role.CONSTANT

    def _names(self, source: str, example: torch.Tensor, spelled: str) -> tuple[str, ...]:
        """A tied parameter has the names of all its uses, the first one first."""
        base, path, _ = _split_source(source)
        if not path:
            return (spelled,)
        prefix = f"{self.roots[base]}." if len(self.bases) > 1 else ""
        return tuple(prefix + name for name in self.names[base].get(id(example), (path,)))


def _kept(places: Sequence[str], sources: Sequence[str]) -> Kept:
    # Dynamo may read an attribute by its object's `__dict__`, and writes it by its name.
    read = [re.sub(r"\.__dict__\['(\w+)'\]", r".\1", source) for source in sources]
    replaces = tuple(read.index(place) for place in places if place in read)
    return Kept(_assigned_name(places[0]), replaces)


def _assigned_name(place: str) -> str:
    """What a person calls an attribute, or an entry of what it will be, whether they are there
    already or not."""
    cut = len(place)
    # Cut from the end until something is there: the rest is what the step will make.
    while cut > 0 and _torch.source_value(place[:cut]) is None:
        cut = max(place.rfind(".", 0, cut), place.rfind("[", 0, cut))
    prefix = place[: max(cut, 0)] or place
    return ".".join([*_torch.source_words(prefix), *re.findall(r"\w+", place[len(prefix) :])])


def _hidden(source: str, order: Sequence[str]) -> bool:
    """Whether a tensor is inside of an argument of the step, other than in a module."""
    holder = _torch.source_value(source.rpartition(".")[0])
    return _argument_of(source) in order and not isinstance(holder, nn.Module)


def _other_roots(module: fx.GraphModule, bases: Collection[str]) -> set[str]:
    """Dynamo's names of the outermost modules that have no parameters in the graph."""
    stacks = [node.meta.get("nn_module_stack") or {} for node in module.graph.nodes]
    roots = {next(iter(stack.values()))[0] for stack in stacks if stack}
    return {root for root in roots if not any(is_below(root, base) for base in bases)}


def is_below(path: str, base: str) -> bool:
    """Whether a module is another one or inside of it, by Dynamo's names."""
    return path == base or path.startswith(f"{base}.")


def _split_source(source: str) -> tuple[str, str, str]:
    """`L['m']._modules['a']._buffers['b']` as ("L['m']", "a.b", "_buffers")."""
    step = r"\.(_modules|_parameters|_buffers)\['([^']+)'\]"
    run = re.search(rf"(?:{step})+$", source)
    if not run:
        return source, "", ""
    steps = list(re.finditer(step, run.group()))
    return source[: run.start()], ".".join(s[2] for s in steps), steps[-1][1]


def _argument_of(source: str) -> str:
    """The local variable that a source starts with, "" for a global."""
    match = re.match(r"L\['([^']+)'\]", source)
    return match[1] if match else ""


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
    return _unique(re.sub(r"\W", "_", name), taken)


def sizes_of_arguments(arguments: Sequence[Argument]) -> dict[Any, tuple[str, torch.SymInt]]:
    """The symbolic sizes of arguments and what they are called in a program, by their symbols."""
    sizes = [(a.name, a.example) for a in arguments if a.role == Role.SIZE]
    taken = {argument.name for argument in arguments}
    for argument in arguments:
        shape = argument.example.shape if isinstance(argument.example, torch.Tensor) else ()
        sizes += [(f"{argument.name}_size_{dim}", size) for dim, size in enumerate(shape)]
    by_symbol: dict[Any, tuple[str, torch.SymInt]] = {}
    for name, size in sizes:
        symbol = _torch.symbol_named(size)
        if symbol is not None and symbol not in by_symbol:
            name = name if name in taken else port_name(name, taken)
            by_symbol[symbol] = name, size
    return by_symbol


def _unique(name: str, taken: set[str]) -> str:
    name = name if re.match(r"[A-Za-z_]", name) else f"_{name}"
    if keyword.iskeyword(name) or hasattr(builtins, name) or _RESERVED.match(name):
        name = f"in_{name}"
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
    if shape is None:
        shape, strides = tensor.shape, tensor.stride()
    with mode:
        fake = (
            torch.empty(shape, **like)
            if strides is None
            else torch.empty_strided(shape, strides, **like)
        )
    return fake.requires_grad_(tensor.requires_grad)
