"""What whoever edits a graph may leave undone."""

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.ir.program import Program, has_effects, output_node, receive, returned, send
from pfeife.ir.seeding import seeded

Bodies = Mapping[str, fx.GraphModule]  # by the targets of their calls


def settle(program: Program) -> Program:
    """The same program, whose graph and bodies run as they stand, and whose new nodes have the
    fake value (`meta["val"]`) that costs and memory are told by.

    fx runs a module's code, which an edited graph has only after `recompile()`. What is right is
    kept, and nothing that was given is edited: a body may be another program's as well. A value is
    told from what the node reads, without storage; what reads it is told again as far as shapes,
    dtypes or devices change. Nothing with an effect is run for that, nor a function of Python that
    nobody reads. Raises ValueError for a node whose value is not to be found, as where data decide
    its size.
    """
    bodies = {str(program.node(call.node).target): program.body(call) for call in program.calls}
    known = {id(body): _settled(body, {}) for body in bodies.values()}  # calls may share one
    module = _settled(program.module, {at: known[id(body)] for at, body in bodies.items()})
    return program if module is program.module else attrs.evolve(program, module=module)


def _settled(module: fx.GraphModule, bodies: Bodies) -> fx.GraphModule:
    """The module, or where something is to be changed another one with its graph's copy."""
    values = _Values(module, bodies).told()
    same = all(module.get_submodule(at) is body for at, body in bodies.items())
    if not values and same and _runs_its_graph(module):
        return module
    graph = fx.Graph()
    here: dict[fx.Node, fx.Node] = {}
    held: dict[str, Any] = dict(bodies)
    for node in module.graph.nodes:
        here[node] = graph.node_copy(node, here.__getitem__)
        if node in values:
            here[node].meta["val"] = values[node]
        if node.op == "get_attr":
            held[str(node.target)] = _attribute(module, node)
    return _torch.graph_module(held, graph, type(module).__name__)


def _runs_its_graph(module: fx.GraphModule) -> bool:
    """Whether a module's code is that of its graph; two functions may have one name in it."""
    if _torch.is_unwritten(module):
        return True
    code = module.graph.python_code("self")
    mine = getattr(type(module).forward, "__globals__", {})
    same = all(mine.get(name) is value for name, value in code.globals.items())
    return same and code.src == module.code


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


class _Values:
    """The values of a graph's nodes, told one after another.

    x            has one, is an input
    a = x * 2    has none: told
    b = a.sum()  reads a: told again, as it was
    c = b + 1    reads b: not looked at
    """

    def __init__(self, module: fx.GraphModule, bodies: Bodies):
        self.module, self.bodies = module, bodies
        self.of: dict[fx.Node, Any] = {}
        self.again: set[fx.Node] = set()  # what reads these is told again

    def told(self) -> dict[fx.Node, Any]:
        """The values that nodes are to have and have not."""
        found = {}
        for node in self.module.graph.nodes:
            if "val" in node.meta:
                self.of[node] = node.meta["val"]
            elif node.op == "get_attr":
                self.of[node] = _attribute(self.module, node)
            elif node.op == "call_module" and _has_values(self.bodies[str(node.target)]):
                results = returned(self.bodies[str(node.target)])
                self.of[node] = fx.node.map_arg(results, lambda one: one.meta["val"])
            if node.op == "call_module" or node.target in (send, receive):
                self.again.add(node)  # these pass on what others have made
            if node.op == "call_function" and self._is_wanted(node):
                value = self._value(node)
                if node not in self.of or _layout(value) != _layout(self.of[node]):
                    self.again.add(node)
                    self.of[node] = value
                    if node.target not in (send, receive):
                        found[node] = value
        return found

    def _is_wanted(self, node: fx.Node) -> bool:
        """Whether to tell a value (again); what a node has is kept where what it reads has none."""
        if has_effects(node):
            return False
        if node in self.of:
            reads = node.all_input_nodes
            return not self.again.isdisjoint(reads) and all(one in self.of for one in reads)
        return bool(node.users) or not inspect.isroutine(node.target)

    def _value(self, node: fx.Node) -> Any:
        target: Any = node.target
        try:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._read)
            if target is seeded:  # draws nothing here: the value is as without the seed
                target, args = args[0], args[3:]
            with self._mode(args, kwargs), torch.no_grad():
                value = target(*args, **kwargs)
        except Exception as error:
            has = "another value than before" if node in self.of else "no meta['val']"
            raise ValueError(
                f"{node.format_node()} has {has}, and it cannot be told from its arguments: "
                f"{type(error).__name__}: {error}"
            ) from error
        if _has_symbols(value):
            raise ValueError(
                f"{node.format_node()} has a size that data decide, so its value cannot be told "
                "from its arguments; write meta['val'] of what is new before it, and of itself as "
                "large as it can be"
            )
        return value

    def _read(self, node: fx.Node) -> Any:
        if node not in self.of:
            raise ValueError(f"{node.name} has no meta['val'], and is not run to tell it")
        return self.of[node]

    def _mode(self, *arguments: Any) -> _torch.FakeTensorMode:
        """That of the arguments, else of any value, else a new one."""
        for values in (arguments, *self.of.values()):
            for value in pytree.tree_leaves(values):
                if isinstance(value, _torch.FakeTensor):
                    return value.fake_mode
        return _torch.FakeTensorMode(allow_non_fake_inputs=True)


def _has_values(body: fx.GraphModule) -> bool:
    return all("val" in node.meta for node in output_node(body).all_input_nodes)


def _has_symbols(value: Any) -> bool:
    """Whether torch's rules leave sizes open, of which a capture has the most."""
    leaves = pytree.tree_leaves(value)
    sizes = [size for one in leaves if isinstance(one, torch.Tensor) for size in one.shape]
    return any(isinstance(one, (torch.SymInt, torch.SymFloat)) for one in (*leaves, *sizes))


def _layout(value: Any) -> list[Any]:
    """What costs and memory see of a value."""
    return [
        (tuple(one.shape), one.dtype, one.device) if isinstance(one, torch.Tensor) else one
        for one in pytree.tree_leaves(value)
    ]
