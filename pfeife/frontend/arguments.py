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
from pfeife.ir.program import Role, returned


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
    computed of what the step assigns."""

    arguments: list[Argument]
    roots: dict[str, str]
    modules: weakref.WeakSet[nn.Module]
    kept: Mapping[int, Kept]
    moved: Mapping[int, str]
    numbers: Mapping[str, Any]

    @property
    def mode(self) -> str:
        """Whether the modules train, as a person would say it."""
        found = {module.training for module in self.modules}
        if False not in found:
            return "in training"
        return "partly in training" if True in found else "in evaluation"


def describe(
    module: fx.GraphModule,
    examples: Iterable[Any],
    device: torch.device | None = None,
    given: Mapping[int, Given] | None = None,
) -> Inputs:
    """What every placeholder of Dynamo's graph is. Called while Dynamo compiles.

    `given` has what the caller hands over, by the identity of the example. Without it, tensors
    that are neither parameters nor buffers come out as constants: who knows the batch says which
    of them are cut into microbatches. Meta tensors become fake ones on `device`. Raises
    ValueError for a tensor inside of an argument that is not among those `given`.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [_torch.placeholder_source(node) for node in nodes]
    bases = dict.fromkeys(base for base, path, _ in map(_split_source, sources) if path)
    aliases = {base: _aliases(_torch.source_value(base)) for base in bases}
    roots = {base: _torch.source_words(base)[-1] for base in (*bases, *_other_roots(module, bases))}
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    taken: set[str] = set()
    known: dict[str, int] = {}
    order = _torch.frame_arguments()
    arguments = []
    for node, source, example in zip(nodes, sources, examples, strict=True):
        base, path, slot = _split_source(source)
        if not isinstance(example, torch.Tensor):
            arguments.append(Argument(node.name, None, (), example))
            continue
        if example.is_nested:
            raise ValueError(
                f"input {'.'.join(_torch.source_words(source))} is a nested tensor, which has no "
                "rows of equal size to cut; pass dense tensors (padded, with a mask)"
            )
        if slot == "_parameters" or isinstance(example, nn.Parameter):
            role = Role.PARAMETER
        else:
            role = Role.BUFFER if slot == "_buffers" else Role.CONSTANT
        handed = (given or {}).get(id(example))
        spelled = ".".join(_torch.source_words(source)) or node.name
        prefix = f"{roots[base]}." if path and len(bases) > 1 else ""
        names = tuple(prefix + name for name in aliases[base].get(id(example), ())) if path else ()
        names = names or (prefix + path if path else spelled,)
        if handed is not None:
            role, names = Role.CONSTANT if handed.whole else Role.BATCH, (handed.name,)
        elif given is not None and role == Role.CONSTANT and _hidden(source, order):
            raise ValueError(
                f"{spelled} is a tensor inside of an argument that Pfeife does not look into, so "
                "it cannot be cut into microbatches: pass tensors, or lists, tuples, dicts, "
                "mappings or dataclasses of them"
            )
        if known.get(names[0], id(example)) != id(example):  # two tensors of one name
            names = (_unique(spelled, set(known)),)
        known[names[0]] = id(example)
        name = _unique(re.sub(r"\W", "_", names[0]), taken)
        root = _argument_of(source)
        at = order.index(root) if root in order else 0
        arguments.append(
            Argument(
                name,
                role,
                names,
                fake_like(mode, example, device=device),
                batch_dim=handed.batch_dim if handed else None,
                position=handed.position if handed else at,
                given=handed is not None or (root in order and not path),
            )
        )
    modules = [_torch.source_value(base) for base in bases]
    found = weakref.WeakSet(one for one in modules if isinstance(one, nn.Module))
    assigned = {node.name: places for node, places in _torch.assigned().items()}
    kept = {
        index: _kept(assigned[node.name], sources)
        for index, node in enumerate(returned(module))
        if node.name in assigned
    }
    moved = {
        at: _assigned_name(place)
        for at, (node, source) in enumerate(zip(nodes, sources, strict=True))
        for place in assigned.get(node.name, ())
        if place != source and not _hidden(place, order)
    }
    numbers = {_assigned_name(place): one for place, one in _torch.assigned_constants().items()}
    return Inputs(arguments, roots, found, kept, moved, numbers)


def _kept(places: Sequence[str], sources: Sequence[str]) -> Kept:
    replaces = tuple(sources.index(place) for place in places if place in sources)
    return Kept(_assigned_name(places[0]), replaces)


def _assigned_name(place: str) -> str:
    """What a person calls an attribute, which may not be there yet."""
    cut = max(place.rfind("."), place.rfind("["))
    known = _torch.source_value(place) is not None
    words = _torch.source_words(place if known else place[:cut])
    return ".".join(words if known else [*words, *re.findall(r"\w+", place[cut:])])


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
    """The local variable that a source begins with, "" for a global."""
    found = re.match(r"L\['([^']+)'\]", source)
    return found[1] if found else ""


def _aliases(root: Any) -> dict[int, list[str]]:
    """All names of every parameter and buffer of a module, by identity."""
    found: dict[int, list[str]] = {}
    if isinstance(root, nn.Module):
        for name, parameter in root.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), []).append(name)
        for name, buffer in root.named_buffers(remove_duplicate=False):
            found.setdefault(id(buffer), []).append(name)
    return found


# Names of our own ports; fx gives other names to nodes that are called like builtins.
_RESERVED = re.compile(r"(self|seed|loss)$|(output|tangent|grad|new)_")


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
    shape: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A tensor without storage, like the given one but perhaps of another (contiguous) shape,
    and on `device` if that one is on the meta device."""
    place = device if device and tensor.device.type == "meta" else tensor.device
    like: dict[str, Any] = {"dtype": tensor.dtype, "device": place}
    with mode:
        fake = (
            torch.empty_strided(tensor.shape, tensor.stride(), **like)
            if shape is None
            else torch.empty(shape, **like)
        )
    return fake.requires_grad_(tensor.requires_grad)
