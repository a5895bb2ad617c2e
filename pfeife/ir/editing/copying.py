"""Graphs copied node by node: what every pass that changes a graph is made of."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.nodes import attribute, returned

# What stands for a node in the copy, None: the node as it is.
Change = Callable[[fx.Node, "Copy"], Any]


class Copy:
    """A new graph that is written node by node, of the nodes of `owner` or of several modules.

    `here` has what stands for an old node from where it was written on: mostly a new node, a number
    where an input was fixed, a tuple of nodes where a call was replaced by its body. `held` has
    what the new module holds, by the targets of its nodes.
    """

    def __init__(self, owner: torch.nn.Module):
        self.owner = owner
        self.graph = fx.Graph()
        self.here: dict[fx.Node, Any] = {}
        self.held: dict[str, Any] = {}

    def read(self, arguments: Any) -> Any:
        """Arguments of old nodes, with what stands for these here."""
        return fx.node.map_arg(arguments, self.here.__getitem__)

    def keep(
        self,
        node: fx.Node,
        owner: torch.nn.Module | None = None,
        read: Callable[[fx.Node], Any] | None = None,
    ) -> fx.Node:
        """A copy of a node with its name and `meta`, and of what its module (that of the copy,
        unless an `owner` is given) holds for it. It reads what stands here for what the old one
        read, or what `read` says."""
        new = self.here[node] = self.graph.node_copy(node, read or self.here.__getitem__)
        if node.op in ("get_attr", "call_module"):
            # Held by name here, not read of the owner later: the owner may be one of several, and
            # what a change puts in the place of a body has the body's name.
            value, name = attribute(owner or self.owner, node.target), str(node.target)
            # modules that are put together may call different things alike
            if self.held.setdefault(name, value) is not value:
                new.target = name = f"{name}_{new.name}"
                self.held[name] = value
        return new

    def inline(self, body: fx.GraphModule, arguments: Iterable[Any]) -> Any:
        """Copies the nodes of another graph, in which such values stand for its inputs; gives what
        stands for its results."""
        values = iter(arguments)
        for node in body.graph.nodes:
            if node.op == "placeholder":
                self.here[node] = next(values)
            elif node.op != "output":
                self.keep(node, body)
        return self.read(returned(body))

    def input(self, node: fx.Node) -> fx.Node:
        """A new input that stands for a value of the old graph."""
        new = self.here[node] = self.graph.create_node("placeholder", node.name, name=node.name)
        new.meta = dict(node.meta)
        return new

    def part(self, whole: fx.Node, index: int, value: fx.Node, name: str | None = None) -> fx.Node:
        """One of the results of a call or message of the new graph, `whole[index]`, which is what
        an old `value` was, and has its name unless given another."""
        new = self.graph.create_node(
            "call_function", operator.getitem, (whole, index), name=name or value.name
        )
        new.meta = dict(value.meta)
        return new

    def module(self, name: str | None = None) -> fx.GraphModule:
        """The graph as a module with all that it holds, of the old one's class name unless given
        another."""
        return _torch.graph_module(self.held, self.graph, name or type(self.owner).__name__)


def copied(module: fx.GraphModule, change: Change | None = None, *, output: bool = True) -> Copy:
    """A copy of a graph in which each node is what `change` makes of it.

        old   x -> a -> b -> output        `change` is asked for x, a, b and the output, in order
        new   x -> a -> c -> b -> output   for a it kept a, wrote c behind it, and gave c

    `change` writes nodes into `copy.graph`, and gives what is to be read in the old one's place: a
    node that it has copied by `copy.keep(node)` and then edited, another node or value, or None for
    a plain copy. Names, lines of the model and fake values go along. Without `output` the caller
    writes that node. Nothing is done to the old graph.

    >>> flat = pfeife.capture(lambda x: x.relu().sum(), torch.ones(2))
    >>> def twice(node, copy):
    ...     if node.op == "call_function":
    ...         return copy.graph.call_function(torch.ops.aten.mul.Tensor, (copy.keep(node), 2))
    >>> [node.name for node in copied(flat.module, twice).graph.nodes]
    ['x', 'relu', 'mul_tensor', 'sum_1', 'mul_tensor_1', 'output']
    """
    copy = Copy(module)
    for node in module.graph.nodes:
        if node.op == "output" and not output:
            break
        new = change(node, copy) if change else None
        copy.here[node] = copy.keep(node) if new is None else new
    return copy


def copied_part(
    module: torch.nn.Module,
    reads: Iterable[fx.Node],
    members: Iterable[fx.Node],
    results: Iterable[fx.Node],
    name: str,
) -> fx.GraphModule:
    """Some nodes of a graph as a body: what it `reads` from others are its inputs, and it returns
    a tuple of its `results`."""
    body = Copy(module)
    for node in reads:
        body.input(node)
    for node in members:
        body.keep(node)
    body.graph.output(body.read(tuple(results)))
    return body.module(name)
