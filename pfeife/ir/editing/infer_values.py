"""What whoever edits a graph may leave undone."""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.nodes import attribute, has_effects, output_node, receive, returned, send, tell
from pfeife.ir.parts import AProgram, captured_sizes
from pfeife.ir.seeding import seeded

Bodies = Mapping[str, fx.GraphModule]  # by the targets of their calls
_PASSING = (send, receive, operator.getitem)
Opened = Callable[[], _torch.OpenValues]  # made when something is told


def settle(program: AProgram) -> AProgram:
    """The same program, whose graph and bodies run as they stand, and whose new nodes have the
    fake value (`meta["val"]`) that costs and memory are told by, and expressions of its sizes
    (`meta["sizes"]`) where these are open.

    fx runs a module's code, which an edited graph has only after `recompile()`. What is right is
    kept, and nothing that was given is edited: a body may be another program's as well. A value is
    told from what the node reads, without storage; what reads it is told again as far as shapes,
    dtypes or devices change. What that assumes of open sizes is a limit of the result. Nothing with
    an effect is run for that, nor a function of Python that nobody reads. Raises ValueError for a
    node whose value is not to be found, as where data decide its size.
    """
    bodies = program.bodies
    opened = functools.cache(lambda: _opened(program))
    # Told once: two copies of a shared body would no longer be shared.
    distinct = {id(body): body for body in bodies.values()}  # calls may share one
    settled = {at: _settled(body, {}, opened) for at, body in distinct.items()}
    module = _settled(
        program.module, {at: settled[id(body)] for at, body in bodies.items()}, opened
    )
    if module is program.module:
        return program
    limits = dict.fromkeys((*program.limits, *opened().assumed()))
    return attrs.evolve(program, module=module, limits=tuple(limits))


def _opened(program: AProgram) -> _torch.OpenValues:
    """Symbols for a program's open sizes, of which its limits are known."""
    opened = _torch.OpenValues(captured_sizes(program))
    opened.assume(program.limits)
    return opened


def _settled(module: fx.GraphModule, bodies: Bodies, opened: Opened) -> fx.GraphModule:
    """The module, or where something is to be changed another one with its graph's copy."""
    values = _Values(module, bodies, opened).told()
    same = all(module.get_submodule(at) is body for at, body in bodies.items())
    # The same object comes back where nothing is new: a pass that changes nothing costs nothing,
    # and bodies stay shared between programs.
    if not values and same and _runs_its_graph(module):
        return module

    def told(node: fx.Node, copy: Copy) -> fx.Node:
        new = copy.keep(node)
        if node in values:
            tell(new, *values[node])
        return new

    copy = copied(module, told)
    copy.held.update(bodies)
    return copy.module()


def _runs_its_graph(module: fx.GraphModule) -> bool:
    """Whether a module's code is that of its graph; two functions may have one name in it."""
    if _torch.is_unwritten(module):
        return True
    code = module.graph.python_code("self")
    own_globals = getattr(type(module).forward, "__globals__", {})
    same = all(own_globals.get(name) is value for name, value in code.globals.items())
    return same and code.src == module.code


class _Values:
    """The values of a graph's nodes, told one after another.

    x            has one, is an input
    a = x * 2    has none: told
    b = a.sum()  reads a: told again, as it was
    c = b + 1    reads b: not looked at
    """

    def __init__(self, module: fx.GraphModule, bodies: Bodies, opened: Opened):
        self.module, self.bodies, self.opened = module, bodies, opened
        self.of: dict[fx.Node, Any] = {}
        self.sizes: dict[fx.Node, Any] = {}  # expressions of those that are open
        self.parts: dict[fx.Node, Any] = {}  # such expressions of all that calls and messages give
        self.symbolic: dict[fx.Node, Any] = {}  # values with symbols for open sizes
        self.again: set[fx.Node] = set()  # what reads these is told again

    def told(self) -> dict[fx.Node, tuple[Any, Any]]:
        """The values that nodes are to have and have not, and the expressions of their sizes."""
        changed = {}
        for node in self.module.graph.nodes:
            if "val" in node.meta:
                self.of[node], self.sizes[node] = node.meta["val"], node.meta.get("sizes")
            elif node.op == "get_attr":
                self.of[node] = attribute(self.module, node.target)
            elif node.op == "call_module" and _has_values(self.bodies[str(node.target)]):
                results = returned(self.bodies[str(node.target)])
                self.of[node] = fx.node.map_arg(results, lambda result: result.meta["val"])
                self.parts[node] = fx.node.map_arg(results, lambda result: result.meta.get("sizes"))
            if node.op == "call_module" or node.target in (send, receive):
                self.again.add(node)  # these pass on what others have made
            if node.op == "call_function" and self._is_wanted(node):
                value, sizes = self._value(node)
                same = node in self.of and sizes == self.sizes.get(node)
                if not same or _layout(value) != _layout(self.of[node]):
                    self.again.add(node)
                    self.of[node], self.sizes[node] = value, sizes
                    # a message's node has no value of its own, but the parts that are read of it
                    if node.target not in (send, receive):
                        changed[node] = value, sizes
        return changed

    def _is_wanted(self, node: fx.Node) -> bool:
        """Whether to tell a value (again); what a node has is kept where what it reads has none."""
        if has_effects(node):
            return False
        if node in self.of:
            # A value that is there is kept unless something has changed that the node reads:
            # capture knew more than its operations say.
            reads = node.all_input_nodes
            return not self.again.isdisjoint(reads) and all(source in self.of for source in reads)
        return bool(node.users) or not inspect.isroutine(node.target)

    def _value(self, node: fx.Node) -> tuple[Any, Any]:
        try:
            if node.target in _PASSING and self._passes(node):
                return self._passed(node)
            # Any error of torch's is what the user has written: a size that does not fit, a dtype
            # that an operation does not take. It is told with the node, for the traceback is our
            # own.
            value = self.symbolic[node] = self._run(node)
        except Exception as error:
            has = "another value than before" if node in self.of else "no meta['val']"
            raise ValueError(
                f"{node.format_node()} has {has}, and it cannot be told from its arguments: "
                f"{type(error).__name__}: {error}"
            ) from error
        try:
            plain, sizes = self.opened().told(value)
        except ValueError:
            raise ValueError(
                f"{node.format_node()} has a size that data decide, so its value cannot be told "
                "from its arguments; write meta['val'] of what is new before it, and of itself as "
                "large as it can be"
            ) from None
        if sizes is not None:  # which say it more simply than what was just computed
            del self.symbolic[node]
        if self.opened().sizes:  # to be with the others of its graph
            mode = self._mode(*(self.of.get(source) for source in node.all_input_nodes))
            plain = pytree.tree_map_only(
                torch.Tensor, lambda tensor: _torch.fake_on(tensor, tensor.device, mode), plain
            )
        return plain, sizes

    def _passes(self, node: fx.Node) -> bool:
        """Whether a node hands on what a call or a message gives, or a message is made of."""
        return node.target is not operator.getitem or node.args[0] in self.parts

    def _passed(self, node: fx.Node) -> tuple[Any, Any]:
        target: Any = node.target
        value = target(*fx.node.map_arg(node.args, self._read))
        read = fx.node.map_arg(
            node.args, lambda source: self.parts.get(source, self.sizes.get(source))
        )
        if node.target is operator.getitem:
            return value, target(*read)
        self.parts[node] = target(*read)
        return value, None

    def _run(self, node: fx.Node) -> Any:
        """What a node makes of what it reads, with symbols for open sizes."""
        target: Any = node.target
        # Symbols cost more than numbers: they are for programs with open sizes alone.
        is_open = bool(self.opened().sizes)
        read = self._open if is_open else self._read
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
        if target is seeded:  # draws nothing here: the value is as without the seed
            target, args = args[0], args[3:]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.opened().mode if is_open else self._mode(args, kwargs))
            if is_open:
                stack.enter_context(_torch.python_kernels())
            with torch.no_grad():
                return target(*args, **kwargs)

    def _open(self, node: fx.Node) -> Any:
        """A node's value with symbols for open sizes."""
        if node not in self.symbolic:
            self.symbolic[node] = self._opened(node)
        return self.symbolic[node]

    def _opened(self, node: fx.Node) -> Any:
        opened, value = self.opened(), self._read(node)
        if node.op == "placeholder" and node.name in opened.sizes:
            return opened.sizes[node.name]
        if node.op == "call_function" and not isinstance(value, torch.Tensor):
            of_data = node.target is torch.ops.aten._local_scalar_dense.default
            return value if of_data else self._run(node)
        return opened.value(value, self.sizes.get(node))

    def _read(self, node: fx.Node) -> Any:
        if node not in self.of:
            raise ValueError(f"{node.name} has no meta['val'], and is not run to tell it")
        return self.of[node]

    def _mode(self, *arguments: Any) -> _torch.FakeTensorMode:
        """That of the arguments, else of any value, else a new one."""
        # torch refuses operations on fake tensors of several modes
        for values in (arguments, *self.of.values()):
            for value in pytree.tree_leaves(values):
                if isinstance(value, _torch.FakeTensor):
                    return value.fake_mode
        return _torch.FakeTensorMode(allow_non_fake_inputs=True)


def _has_values(body: fx.GraphModule) -> bool:
    return all("val" in node.meta for node in output_node(body).all_input_nodes)


def _layout(value: Any) -> list[Any]:
    """What costs and memory see of a value."""
    return [
        (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in pytree.tree_leaves(value)
    ]
