"""Whether a program is well formed."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import getitem
from typing import Any

from torch import fx

from pfeife import _torch
from pfeife.ir.editing.absorb import misplaced
from pfeife.ir.nodes import is_source, receive, returned, send, value_of
from pfeife.ir.parts import INPUT_ROLES, AProgram, ProgramBase, Role


def verify(program: AProgram) -> AProgram:
    """Returns the program if it is well formed, else raises ValueError with all that is wrong.

    Well formed: the graph and every body pass fx's own lint; placeholders are exactly the
    input ports and the returned dict has exactly the output ports; no body keeps parameters or
    buffers of its own; calls name call_module nodes, each node once; plain nodes between calls have
    a call that can absorb them (see `absorb`); expressions of sizes give what was captured, and its
    limits hold there; and after the ranks are known and messages inserted,
    every call reads only what its own rank defined or received.
    """
    problems = list(_problems(program))
    if problems:
        raise ValueError("the program is not well formed: " + "; ".join(problems))
    return program


def _problems(program: ProgramBase) -> Iterator[str]:
    broken = _lint(program.module)
    if broken is not None:
        yield broken
        return  # what follows would stumble over it
    yield from _wrong_ports(program)
    yield from _wrong_bodies(program)
    yield from misplaced(program)
    yield from _wrong_sizes(program)
    # Before messages are put in, calls read across ranks: that is what they are put in for.
    if any(node.target is send for node in program.module.graph.nodes):
        yield from _wrong_messages(program)
        yield from _misplaced_reads(program)


def _wrong_ports(program: ProgramBase) -> Iterator[str]:
    graph = program.module.graph
    # Programs are called by position: ports in another order would be given each other's values.
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    if placeholders != [port.name for port in program.inputs]:
        yield f"placeholders {placeholders} are not the input ports"
    results = returned(program.module)
    if not isinstance(results, dict) or list(results) != [port.name for port in program.outputs]:
        yield "the graph does not return a dict of the output ports"
    for port in program.inputs:
        if port.role not in INPUT_ROLES:
            yield f"input {port.name} has the role {port.role}"
    exempt = (Role.TANGENT, Role.SEED, Role.SIZE)
    state = Counter(p.fqn for p in program.inputs if p.role not in exempt)
    for name, count in state.items():
        if count > 1:
            yield f"{count} inputs have the name {name}"
    for name, count in Counter(p.name for p in (*program.inputs, *program.outputs)).items():
        if count > 1:
            yield f"{count} ports are called {name}"


def _wrong_bodies(program: ProgramBase) -> Iterator[str]:
    bodies = [node for node in program.module.graph.nodes if node.op == "call_module"]
    if sorted(node.name for node in bodies) != sorted(call.node for call in program.calls):
        yield "the calls are not the call_module nodes of the graph"
    for node in bodies:
        body = program.module.get_submodule(str(node.target))
        if not isinstance(body, fx.GraphModule):
            yield f"{node.name} calls {type(body).__name__}, not a graph module"
            continue
        broken = _lint(body)
        if broken is not None:
            yield f"the body of {node.name}: {broken}"
        # State goes by ports alone: what a body held of its own nobody would train, move or save.
        held = [name for name, _ in (*body.named_parameters(), *body.named_buffers())]
        if held:
            yield f"the body of {node.name} keeps {held[0]} for itself"


def _lint(module: fx.GraphModule) -> str | None:
    """What fx finds wrong in a graph."""
    try:
        module.graph.lint()
    except RuntimeError as error:
        return str(error)
    return None


def _wrong_sizes(program: ProgramBase) -> Iterator[str]:
    """What expressions of sizes say otherwise than the values that were captured."""
    names = {port.name for port in program.ports(Role.SIZE)}
    inputs = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    sizes = {node.name: node.meta.get("val") for node in inputs if node.name in names}
    for name, number in sizes.items():
        if type(number) is not int:
            yield f"the size {name} is {number} in the capture"
            return
    graphs = [
        module.graph for module in program.module.modules() if isinstance(module, fx.GraphModule)
    ]
    for node in (node for graph in graphs for node in graph.nodes if "sizes" in node.meta):
        value, expressions = value_of(node), node.meta["sizes"]
        layout = None if value is None else (tuple(value.shape), value.stride())
        if layout is None or _told(_layout_at, expressions, sizes) != layout:
            yield f"{node.name} has the sizes {expressions}, and was captured with {layout}"
    for port in (*program.inputs, *program.outputs):
        if port.sizes is not None and _told(_torch.sizes_at, port.sizes, sizes) != port.shape:
            yield f"port {port.name} has the sizes {port.sizes}, and was captured with {port.shape}"
    for limit in program.limits:
        if not _told(_torch.holds, limit, sizes):
            yield f"{limit} does not hold for {sizes}"


def _layout_at(layout: Any, sizes: Mapping[str, int]) -> tuple[Any, ...]:
    return tuple(_torch.sizes_at(numbers, sizes) for numbers in layout)


def _told(function: Callable[..., Any], expressions: Any, sizes: Mapping[str, Any]) -> Any:
    """What a function makes of expressions; None if they are none of these sizes."""
    try:
        return function(expressions, sizes)
    except (ValueError, TypeError, AttributeError, ArithmeticError):  # sympy's
        return None


def _wrong_messages(program: ProgramBase) -> Iterator[str]:
    for node in program.module.graph.nodes:
        if node.target is send and [user.target for user in node.users] != [receive]:
            yield f"{node.name} is to be read by one receive, and nothing else"
        elif node.target is receive:
            sent: Any = node.args[0]
            parts = sorted(user.args[1] for user in node.users if user.target is getitem)
            if parts != list(range(len(sent.args[0]))) or len(parts) != len(node.users):
                yield (
                    f"{sent.name} sends {len(sent.args[0])} values, of which {node.name} hands on "
                    f"{parts}; each is to be read once, by operator.getitem"
                )


def _misplaced_reads(program: ProgramBase) -> Iterator[str]:
    ranks = {call.node: call.rank for call in program.calls}
    rank_of: dict[fx.Node, int | None] = {}
    for node in program.module.graph.nodes:
        rank_of[node] = _rank_of(node, ranks, rank_of)
        if node.op == "output" or node.target is receive:
            continue
        for source in node.all_input_nodes:
            if rank_of[source] not in (None, rank_of[node]):
                yield (
                    f"{node.name} on rank {rank_of[node]} reads {source.name}, "
                    f"which lives on rank {rank_of[source]}"
                )


def _rank_of(
    node: fx.Node, ranks: Mapping[str, int | None], rank_of: Mapping[fx.Node, int | None]
) -> int | None:
    """The rank on which a node's value is; None for inputs, which are everywhere."""
    if is_source(node) or node.op == "output":
        return None
    if node.target in (send, receive):
        return int(node.args[2 if node.target is receive else 1])  # type: ignore[arg-type]
    if node.op == "call_module":
        return ranks.get(node.name)
    source_ranks = (rank_of[source] for source in node.all_input_nodes)
    return next((rank for rank in source_ranks if rank is not None), None)
