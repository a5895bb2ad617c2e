"""What a joint program depends on, as a text: what has the same one has the same program.

Dynamo's graph of the step is the greater part. Dynamo itself runs in every process, so whatever
the step reads (its code and that of what it calls, attributes, globals, closures, shapes, modes)
has either gone into the graph or makes no difference. From there on no code but torch's and ours
runs, or there is no key.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.arguments import Argument, sizes_of_arguments
from pfeife.frontend.cache.graph_json import name_of, spelled
from pfeife.frontend.forward import Forward

FORMAT = 1  # of what is kept under such a key
MOST_BYTES = 2**26  # of tensors in the graph itself
_TREATED = ("tag_activation_checkpoint", "autograd_function_apply")  # their bodies are graphs


@attrs.frozen(eq=False)
class Traceable:
    """A forward and all that decides about its joint program: the arguments with their examples,
    the index of the loss, where the batch is in results, the results that are new values of
    arguments, by name, and the names of the outermost modules."""

    step: Forward
    arguments: Sequence[Argument]
    loss: int | None
    result_dims: Sequence[int | None]
    carried: Sequence[tuple[str, Argument]]
    roots: Mapping[str, str]


def key_of(traceable: Traceable) -> str:
    """A digest that only those have who have the same program. Raises ValueError, with the reason,
    where that cannot be told: the step is traced as it runs, or its graph has something in it that
    runs code of others (a custom operation, a library's kernel)."""
    digest = hashlib.sha256()
    for line in _lines(traceable):
        # A string of the user may have lone surrogates. The zero byte tells two lines from one that
        # has the text of both.
        digest.update(line.encode(errors="surrogatepass") + b"\0")
    return digest.hexdigest()


def _lines(traceable: Traceable) -> Iterator[str]:
    step = traceable.step
    # Its Python is all that there is of it, and code has no digest that says what it does.
    if step.graph is None:
        raise ValueError("the step is traced as it runs, and that is the only way to know it")
    devices = {a.example.device for a in traceable.arguments if isinstance(a.example, torch.Tensor)}
    yield f"format {FORMAT}"
    yield f"pfeife {sources(Path(__file__).parents[2])}"
    yield from _torch.surroundings(sorted(devices, key=str))
    sizes, names = sizes_of_arguments(traceable.arguments)
    for argument in traceable.arguments:
        yield spelled(
            [
                argument.name,
                argument.role and argument.role.value,
                argument.names,
                argument.batch_dim,
            ]
        )
        yield spelled([argument.position, _example(argument.example, names)])
    # Other sizes may lead a trace another way, even where they stay open.
    open_sizes = list(sizes.values())
    yield spelled([[size.node.hint for size in open_sizes], [*map(str, names.values())]])
    yield spelled(_torch.assumed_of_sizes(open_sizes, names))
    yield spelled([traceable.loss, list(traceable.result_dims), dict(traceable.roots)])
    yield spelled([(result, argument.name) for result, argument in traceable.carried])
    yield spelled([sorted(step.shared()), [value.requires_grad for value in step.results]])
    yield from _graph(step.graph)


def _example(value: Any, names: Mapping[Any, Any]) -> Any:
    """An example of an argument, whose symbolic sizes are expressions of their `names`."""
    if isinstance(value, torch.SymInt):
        return _torch.named_sizes([value], names)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    layout = [_torch.named_sizes(numbers, names) for numbers in (value.shape, value.stride())]
    # A value with open sizes has no spelling of its own (`graph_json`): here its sizes are by name.
    if all(type(size) is int for size in (*layout[0], *layout[1])):
        return value
    kind = [value.dtype, value.device, value.storage_offset(), value.requires_grad]
    return [type(value).__name__, layout, kind]


def _graph(module: fx.GraphModule) -> Iterator[str]:
    """Every node of a graph and of the graphs in it."""
    if module.meta.get("_checkpoint_context_fn") is not None:
        raise ValueError("a function of the user decides what a checkpoint keeps")
    for node in module.graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            target = _function(node.target)
        elif node.op == "call_module":
            raise ValueError(f"the graph calls the module {target}")
        yield spelled([node.op, node.name, target, node.args, node.kwargs])
        # These come out in the program's own nodes, where errors and reports read them.
        yield spelled([node.meta.get("stack_trace"), node.meta.get("custom"), _modules(node)])
        if node.op == "get_attr":
            yield from _attribute(module, target)


def _modules(node: fx.Node) -> list[Any]:
    stack = node.meta.get("nn_module_stack") or {}
    return [[path, getattr(kind, "__name__", str(kind))] for path, kind in stack.values()]


def _attribute(module: fx.GraphModule, name: str) -> Iterator[str]:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        yield f"{name} {{"
        yield from _graph(value)
        yield "}"
        return
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
        raise ValueError(f"the graph has {name}, a {type(value).__name__}")
    yield spelled([name, value])
    if value.numel() * value.element_size() > MOST_BYTES:
        raise ValueError(f"the graph has {name}, which is large")
    data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    yield f"{name_of(value.dtype)} {hashlib.sha256(data).hexdigest()}"


def _function(target: Any) -> str:
    """The name of a function in Dynamo's graph. Raises ValueError for one that is not torch's."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", str(target))
    if _torch.is_operation(target) or (_torch.is_higher_order(target) and name in _TREATED):
        return str(target)
    if not _torch.is_torchs(target):
        raise ValueError(f"the graph calls {name}, which is not torch's")
    return f"{getattr(target, '__module__', None)} {name} {type(target).__name__}"


@functools.cache
def sources(home: Path) -> str:
    """A digest of the code in a folder, ours: while that is worked on, versions stay."""
    digest = hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        digest.update(f"{path.relative_to(home)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
