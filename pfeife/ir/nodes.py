"""What is asked of a node of a graph, and marks: two of a message, one of a border in a model."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from pfeife import _torch
from pfeife.ir.seeding import seeded


def find_node(module: fx.GraphModule, name: str) -> fx.Node:
    """The node of a graph with a name. Raises KeyError if there is none."""
    for node in module.graph.nodes:
        if node.name == name:
            return node
    raise KeyError(f"no node {name} in the graph")


def output_node(module: fx.GraphModule) -> fx.Node:
    """The node that says what a graph returns."""
    return next(node for node in reversed(module.graph.nodes) if node.op == "output")


def returned(module: fx.GraphModule) -> Any:
    """What a graph returns: a dict of nodes for a program, a tuple of nodes for a body."""
    return output_node(module).args[0]


def attribute(module: torch.nn.Module, target: object) -> Any:
    """What a module holds by the target of a node: a tensor, or another module."""
    return operator.attrgetter(str(target))(module)


def is_source(node: fx.Node) -> bool:
    """Whether a node brings a value into the graph rather than computing one."""
    return node.op in ("placeholder", "get_attr")


def sizes_of(node: fx.Node) -> tuple[_torch.Size, ...]:
    """The sizes of a node's tensor, as expressions of the names of size ports where these decide
    them."""
    value = value_of(node)
    assert value is not None
    sizes: tuple[_torch.Size, ...] = node.meta["sizes"][0] if "sizes" in node.meta else value.shape
    return sizes


def unknown_sizes_of(node: fx.Node) -> tuple[_torch.Size, ...]:
    """The same, and expressions of names of their own for sizes that data decide."""
    by_data = node.meta.get("sized_by_data")
    return by_data if isinstance(by_data, tuple) else sizes_of(node)


def has_effects(node: fx.Node) -> bool:
    """Whether a node does more than to compute its value; what may draw random numbers does not,
    for draws are seeded (attention counts as random even without dropout)."""
    return node.is_impure(impure_random=False)


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that stands for a node's value; None where it is not one tensor."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_number(node: fx.Node) -> bool:
    """Whether a node computes a number rather than tensors, such as `x.item()`. Numbers are no
    messages: every body that reads one computes it for itself, of tensors."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), int | float | bool)


def is_sized_by_data(node: fx.Node) -> bool:
    """Whether data decide the size of a node's value, as of `x.nonzero()`. Its fake value has the
    most that this can be, and a flat graph says which sizes these are; where it is sent, the sizes
    travel first (`lowering.envelope`)."""
    return bool(node.meta.get("sized_by_data"))


def sharers(node: fx.Node) -> int:
    """Over how many members data share out the rows of a node's value, of each of which it has the
    most: about so many times what it is."""
    return int(node.meta.get("sharers", 1))


def tell(node: fx.Node, value: Any, sizes: Any = None) -> None:
    """Says of a node what its fake value is, and with which expressions of sizes it is laid out:
    a pair of those of its shape and its strides, None where no size port decides them."""
    node.meta.pop("sizes", None)
    node.meta["val"] = value
    if sizes is not None:
        node.meta["sizes"] = sizes


def node_bytes(node: fx.Node) -> int:
    """Bytes of a node's value, without what it shares with others."""
    value = value_of(node)
    return 0 if value is None else value.numel() * value.dtype.itemsize


def source_line(node: fx.Node) -> str:
    """The line of the user's model that a node comes from, or the node itself."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    return places[-1] if places else f"node {node.name}"


def size_tensor(operation: Any, *args: Any) -> torch.Tensor:
    """A number that an operation tells of a tensor whose size data decide, as a tensor: that may
    travel where the first one may not."""
    value = operation(*args)
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return torch.scalar_tensor(value, dtype=dtype, device=args[0].device)


def send(values: tuple, source: int, destination: int) -> tuple:
    """Marks that rank `source` sends `values` as one message to rank `destination`."""
    return values


def receive(message: tuple, source: int, destination: int) -> tuple:
    """Marks that rank `destination` receives a message of rank `source`: fresh copies."""
    return message


def stage_boundary(x: torch.Tensor) -> torch.Tensor:
    """Marks that a new stage starts with what is computed from `x`; returns a view of it.

    Does nothing to a model that is not pipelined.
    """
    with traceback.annotate({"pfeife_stage_boundary": True}):
        return x.view_as(x)


def is_boundary(node: torch.fx.Node) -> bool:
    """Whether a forward node was made by `stage_boundary`."""
    backward = node.meta.get("partitioner_tag") == "is_backward"
    # autograd hands the annotation on to the nodes of the backward
    return not backward and bool((node.meta.get("custom") or {}).get("pfeife_stage_boundary"))


def operation_name(node: fx.Node) -> str:
    """The name of what a node computes, without its overload."""
    target: Any = node.args[0] if node.target is seeded else node.target
    if hasattr(target, "_schema"):
        return str(target).split(".")[1]
    return getattr(target, "__name__", str(target))


def bound(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names in its operator's schema, defaults included."""
    target: Any = node.target
    args: Sequence[Any] = node.args
    if target is seeded:
        target, args = args[0], args[3:]  # without its index and its seed
    if not hasattr(target, "_schema"):
        return {str(index): value for index, value in enumerate(args)}
    arguments = {}
    for index, argument in enumerate(target._schema.arguments):
        value = args[index] if index < len(args) else node.kwargs.get(argument.name)
        default = argument.default_value if argument.has_default_value() else None
        arguments[argument.name] = default if value is None else value
    return arguments
