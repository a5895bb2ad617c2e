"""What the placeholders of Dynamo's graph are: state by its fully qualified names, batch, sizes."""

import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.frontend.arguments import (
    Argument,
    Given,
    Inputs,
    Kept,
    aliases,
    by_symbols,
    fake_like,
    is_below,
    port_name,
    unique_name,
    with_names_of_sizes,
)
from pfeife.frontend.watch.data_writes import check_given
from pfeife.frontend.watch.foreign_generators import check_draws
from pfeife.ir.nodes import returned
from pfeife.ir.parts import Role


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
    arguments = with_names_of_sizes(arguments, describer.taken)
    pairs = zip(nodes, arguments, strict=True)
    check_given(module, {n for n, a in pairs if a.given and a.role in (Role.BATCH, Role.CONSTANT)})
    # Where Python branches on a value, Dynamo guards it: the next microbatch may have another one.
    assumed_sources = _torch.assumed_values()
    return Inputs(
        arguments,
        describer.roots,
        weakref.WeakSet(holder for holder in describer.holders if isinstance(holder, nn.Module)),
        assumed=frozenset(at for at, source in enumerate(sources) if source in assumed_sources),
        **_assignments(module, nodes, sources, describer.order),
    )


def _assignments(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    sources: Sequence[str],
    order: Sequence[str],
) -> dict[str, Any]:
    """What a step assigns to attributes, as fields of `Inputs`: results, other arguments (`moved`),
    and what Python alone has computed."""
    assigned = {node.name: places for node, places in _torch.assigned().items()}
    constants = _torch.assigned_constants()
    return {
        "kept": {
            index: _kept(assigned[node.name], sources)
            for index, node in enumerate(returned(module))
            if node.name in assigned
        },
        "moved": {
            at: _assigned_name(place)
            for at, (node, source) in enumerate(zip(nodes, sources, strict=True))
            for place in assigned.get(node.name, ())
            if place != source and not _hidden(place, order)
        },
        "numbers": {_assigned_name(place): constant for place, constant in constants.items()},
        "settled": frozenset(
            _assigned_name(place)
            for place, constant in constants.items()
            if _torch.is_there(place, constant)
        ),
    }


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
        # Before anything is asked of its shape, which it has not.
        if example.is_nested:
            raise ValueError(
                f"input {spelled} is a nested tensor, which has no "
                "rows of equal size to cut; pass dense tensors (padded, with a mask)"
            )
        handed = (self.given or {}).get(id(example))
        role = self._role(source, example, handed)
        names = (handed.name,) if handed else self._names(source, example, spelled)
        if self.known.get(names[0], id(example)) != id(example):  # two tensors of one name
            names = (unique_name(spelled, set(self.known)),)
        self.known[names[0]] = id(example)
        # Ports stand in the order of the step's own parameters, and before what it closes over.
        root = _argument_of(source)
        at = self.order.index(root) if root in self.order else 0
        inside = root in self.order and not _split_source(source)[1]
        shape, strides = None, None
        if isinstance(example_value, torch.Tensor):  # of symbolic sizes where Dynamo's are
            shape, strides = by_symbols(example_value, self.symbols)
        return Argument(
            port_name(names[0], self.taken),
            role,
            names,
            fake_like(self.mode, example, shape, strides, self.device),
            batch_dim=handed.batch_dim if handed else None,
            position=handed.position if handed else at,
            given=handed is not None or inside,
        )

    def _role(self, source: str, example: torch.Tensor, handed: Given | None) -> Role:
        if handed:
            return Role.CONSTANT if handed.whole else Role.BATCH
        slot = _split_source(source)[2]
        if slot == "_parameters" or isinstance(example, nn.Parameter):
            return Role.PARAMETER
        if slot == "_buffers":
            return Role.BUFFER
        # It would go whole to every microbatch, which the caller has not said of it.
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
        # Two models may both have a `weight`; of one model the names are those of its state_dict().
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
    # An attribute that the step makes is not there yet, while Dynamo compiles.
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


def _split_source(source: str) -> tuple[str, str, str]:
    """`L['m']._modules['a']._buffers['b']` as ("L['m']", "a.b", "_buffers")."""
    # Of a module with a `__getattr__` of its own Dynamo reads the `__dict__`.
    source = re.sub(r"\.__dict__\['(_modules|_parameters|_buffers)'\]", r".\1", source)
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
