"""What the arguments of Dynamo's graph are: state by its fully qualified names, batch, sizes."""

import builtins
import keyword
import re
from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import fx, nn

from pfeife import _torch
from pfeife.program import Role


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


def describe(
    module: fx.GraphModule, examples: Iterable[Any], device: torch.device | None = None
) -> list[Argument]:
    """What every placeholder of Dynamo's graph is. Called while Dynamo compiles.

    Tensors that are neither parameters nor buffers come out as constants: who knows the batch
    says which of them are cut into microbatches. Meta tensors become fake ones on `device`.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [_torch.placeholder_source(node) for node in nodes]
    bases = dict.fromkeys(base for base, path, _ in map(_split_source, sources) if path)
    aliases = {base: _aliases(_torch.source_root(base)) for base in bases}
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
        if slot == "_parameters" or isinstance(example, nn.Parameter):
            role = Role.PARAMETER
        else:
            role = Role.BUFFER if slot == "_buffers" else Role.CONSTANT
        prefix = f"{words(base)[-1]}." if path and len(bases) > 1 else ""
        names = tuple(prefix + name for name in aliases[base].get(id(example), ())) if path else ()
        names = names or (prefix + path if path else ".".join(words(source)) or node.name,)
        if known.get(names[0], id(example)) != id(example):  # two tensors of one name
            names = (_unique(".".join(words(source)), set(known)),)
        known[names[0]] = id(example)
        name = _unique(re.sub(r"\W", "_", names[0]), taken)
        root = _argument_of(source)
        arguments.append(
            Argument(
                name,
                role,
                names,
                fake_like(mode, example, device=device),
                position=order.index(root) if root in order else 0,
                given=root in order and not path,
            )
        )
    return arguments


def roots(module: fx.GraphModule) -> list[nn.Module]:
    """The outermost modules whose state a graph takes. Called while Dynamo compiles."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    sources = [_split_source(_torch.placeholder_source(node)) for node in nodes]
    bases = dict.fromkeys(base for base, path, _ in sources if path)
    return [root for root in map(_torch.source_root, bases) if root is not None]


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


def words(source: str) -> list[str]:
    """The names in one of Dynamo's sources."""
    return re.findall(r"\w+", re.sub(r"^[LG]\b", "", source))


def _aliases(root: nn.Module | None) -> dict[int, list[str]]:
    """All names of every parameter and buffer of a module, by identity."""
    found: dict[int, list[str]] = {}
    if root is not None:
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
