"""The one value that flows through Pfeife: a frozen `Program` around an fx graph that runs.

At every level (flat aten graph, cluster calls, stage calls, stage calls with sends and
receives) the graph takes one microbatch: its placeholders are the input ports, and it returns a
dict from the names of the output ports to tensors.
"""

from collections.abc import Callable
from typing import Any

import attrs
import networkx as nx
import torch
from torch import fx

from pfeife.ir.editing.copying import copied
from pfeife.ir.editing.rewrite import Edit, Rewrite, Where, edit, replace, rewrite
from pfeife.ir.messages import to_networkx
from pfeife.ir.nodes import output_node, value_of
from pfeife.ir.parts import Port, ProgramBase, Role
from pfeife.ir.source import source


@attrs.frozen(eq=False, slots=False, repr=False)
class Program(ProgramBase):
    """A graph module of one microbatch with its ports, at any level: flat, clusters, stages, ranks.
    `pfeife.capture` makes one, passes make others of it, a `Plan` says where it is cut, a
    `Schedule` in which order its calls run. `ir.parts.ProgramBase` has its fields.

    Next: `print(program)` writes all of it, `.ports(Role.BATCH)` says what goes in, `.graph()` has
    it for networkx, `pfeife.evaluate` runs it, `pfeife.totals` has its figures, and `.rewrite`,
    `.replace` and `.edit` make another one."""

    def graph(self) -> nx.DiGraph:
        """What computes, and what flows: a networkx graph of any level.

        Its nodes are the names of the calls, and of operations that stand by themselves (of a flat
        program all). They have `kind` (F, B, I, W, or "op"), `target`, `flops`, `bytes` (of the
        results) and, where known, `unit`, `rank` and `seconds`. Edges have `values` (names),
        `bytes`, and whether they are `sent` from rank to rank.
        """
        return to_networkx(self)

    def rewrite(self, function: Rewrite, of: Where = "bodies") -> "Program":
        """A copy in which each operation is what `function` makes of it.

        As with fx's Transformer, but on a copy, on every body of a graph of calls (`of="calls"`:
        on the graph around them, with its sends and receives), and with all that a program needs:
        new nodes keep the line of the model and get their fake values. `function` is given an
        `ir.rewrite.Operation` and returns a node, mostly of `operation.make(...)`, or None to keep
        the operation. Raises ValueError if it gives something else, or an output another form.

        >>> aten = torch.ops.aten
        >>> flat = pfeife.capture(lambda x: x.relu().sum(), torch.ones(2))
        >>> def smooth(operation):
        ...     if operation.target is aten.relu.default:
        ...         return operation.make(aten.silu.default, *operation.args)
        >>> [node.name for node in flat.rewrite(smooth).module.graph.nodes]
        ['x', 'silu_default', 'sum_1', 'output']
        """
        return rewrite(self, function, of)

    def replace(
        self,
        pattern: Callable[..., Any],
        replacement: Callable[..., Any],
        of: Where = "bodies",
    ) -> "Program":
        """A copy in which each part that matches one function of torch.ops is another one: both are
        functions of the same arguments, as torch.fx.subgraph_rewriter takes them. What others read
        from the inside of a match keeps it from being one.

        >>> aten = torch.ops.aten
        >>> flat = pfeife.capture(lambda x: (x * x).sum(), torch.ones(2))
        >>> square = flat.replace(lambda x: aten.mul.Tensor(x, x), lambda x: aten.square.default(x))
        >>> [node.name for node in square.module.graph.nodes]
        ['x', 'square_default', 'sum_1', 'output']
        """
        return replace(self, pattern, replacement, of)

    def edit(self, change: Edit, of: Where = "bodies") -> "Program":
        """A copy of which `change` has edited every graph module in place (or has returned another
        one), by whatever fx offers. Raises ValueError if a body takes or gives other values than
        before, or an output has another form.

        >>> flat = pfeife.capture(lambda x: x.sum(), torch.ones(2))
        >>> lean = flat.edit(lambda module: module.graph.eliminate_dead_code())
        """
        return edit(self, change, of)

    def source(self) -> str:
        """The text of a Python file that needs torch alone (and Pfeife where random numbers are
        drawn): a class `Program`, called with the inputs in their order, and as a script a run on
        zeros. Raises ValueError for a function without a name and for a large constant."""
        return source(self)


def from_graph(module: fx.GraphModule) -> Program:
    """A graph of tensors as a flat program: what a torch.compile backend is given, or AOTAutograd's
    forward or backward.

    Its placeholders are batch ports, and its results, a tensor or a tuple, the outputs "result_0",
    "result_1" and so on by their places; places with None are left out. The graph is copied. Nodes
    need their fake values in `meta["val"]`. Raises ValueError for what is no tensor.
    """
    copy = copied(module, output=False)
    output = output_node(module).args[0]
    values = output if isinstance(output, tuple | list) else (output,)
    # A backward of AOTAutograd gives None for what needs no gradient.
    results = {f"result_{at}": node for at, node in enumerate(values) if node is not None}
    inputs = [_port(node.name, node, Role.BATCH) for node in copy.here if node.op == "placeholder"]
    outputs = [_port(name, node, Role.OUTPUT) for name, node in results.items()]
    copy.graph.output(copy.read(results))
    return Program(copy.module("GraphModule"), tuple(inputs), tuple(outputs))


def _port(name: str, node: object, role: Role) -> Port:
    value = value_of(node) if isinstance(node, fx.Node) else None
    if value is None or any(not isinstance(size, int) for size in value.shape):
        has = value.shape if isinstance(value, torch.Tensor) else "no fake tensor"
        raise ValueError(
            f"{name} of the graph ({node}) has {has}; a program takes tensors of one shape each"
        )
    return Port(name, role, (name,), tuple(value.shape), value.dtype, value.device)
