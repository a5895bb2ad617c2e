"""Forward nodes into clusters along the model's own structure, each with its backward nodes."""

from bisect import bisect
from collections.abc import Mapping
from itertools import accumulate, pairwise, takewhile
from typing import Any, Literal

from torch import fx

from pfeife import _torch
from pfeife.ir.nodes import is_boundary, is_number, is_source, node_bytes, returned
from pfeife.ir.outline import Group, inline, is_view, outline, viewed
from pfeife.ir.parts import Kind, Role
from pfeife.ir.program import Program
from pfeife.ir.seeding import seeded
from pfeife.passes.compose import Pass

Side = Literal["begin", "end"]


def fuse(*, boundaries: Mapping[str, Side] | None = None) -> Pass:
    """A pass from a flat program to a graph of cluster calls.

    Every cluster holds one heavy operation (one with a FLOP formula, or one that reads a
    parameter of two or more dimensions) and what is cheap around it. Between two heavy
    operations the border lies where the fewest bytes cross; among equals, where the most
    modules are left. There is always a border before a `stage_boundary` and at the start or end
    of the modules that `boundaries` names. Backward nodes belong to the cluster of the forward
    node that they differentiate. Raises ValueError for a module that computes nothing.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> [call.node for call in pfeife.fuse()(flat).calls]
    ['cluster_0_forward', 'cluster_1_forward', 'cluster_1_backward', 'cluster_0_backward']
    """

    def run(program: Program) -> Program:
        flat, _ = inline(program)
        forward, backward = _halves(flat)
        matrices = {p.name for p in flat.ports(Role.PARAMETER) if len(p.shape) > 1}
        starts = _read(_starts(forward, matrices, boundaries or {}), forward, _wanted(flat))
        clusters = {node: bisect(starts, i) - 1 for i, node in enumerate(forward)}
        groups = {node.name: Group(unit, Kind.FORWARD) for node, unit in clusters.items()}
        for node, unit in _backward_clusters(backward, clusters).items():
            groups[node.name] = Group(unit, Kind.BACKWARD)
        return outline(flat, groups, word="cluster")

    return run


def _halves(flat: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    """Forward nodes and backward nodes: those are tagged so, or depend on a tangent."""
    tangents = {port.name for port in flat.ports(Role.TANGENT)}
    late = {node for node in flat.module.graph.nodes if node.name in tangents}
    forward, backward = [], []
    for node in flat.module.graph.nodes:
        if is_source(node) or node.op == "output":
            continue
        # AOTAutograd tags a backward's nodes; what others have put in between them has no tag, but
        # depends on a tangent.
        tagged = node.meta.get("partitioner_tag") == "is_backward"
        if tagged or any(source in late for source in node.all_input_nodes):
            late.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return forward, backward


def _starts(
    forward: list[fx.Node], matrices: set[str], boundaries: Mapping[str, Side]
) -> list[int]:
    """Positions in the forward order at which a cluster starts, the first being 0."""
    if not forward:
        return [0]
    crossing = _crossing_bytes(forward)
    forced = {_module_border(forward, path, side) for path, side in boundaries.items()}
    forced |= {i for i, node in enumerate(forward) if is_boundary(node)}
    heavy = [i for i, node in enumerate(forward) if _is_heavy(node, matrices)]

    def dislike(position: int) -> tuple[int, int, int]:
        shared = _shared_depth(forward[position - 1], forward[position])
        return (crossing[position], shared, -position)

    # One border between two heavy operations, unless somebody has asked for one there:
    #
    #     matmul  gelu  mul  matmul        crossing bytes decide, then the modules that end
    #            ^     ^    ^
    starts = {0} | (forced - {len(forward)})
    for first, second in pairwise(heavy):
        between = [i for i in range(first + 1, second + 1) if _may_start(forward[i])]
        if between and not any(first < i <= second for i in forced):
            starts.add(min(between, key=dislike))
    return sorted(starts)


def _wanted(flat: Program) -> set[fx.Node]:
    """The nodes that what the program returns depends on."""
    wanted = set(returned(flat.module).values())
    for node in reversed(flat.module.graph.nodes):
        if node in wanted:
            wanted.update(node.all_input_nodes)
    return wanted


def _read(starts: list[int], forward: list[fx.Node], wanted: set[fx.Node]) -> list[int]:
    """The starts of clusters that compute something for others: one of which nobody reads a value
    (a custom operation that only prints) would have no call, so it is joined with the next one."""
    wanted_before = [0, *accumulate(int(n in wanted and not is_number(n)) for n in forward)]
    useful = starts[:1]
    for start in starts[1:]:
        # something is wanted between the two starts, and something from this one on
        if wanted_before[useful[-1]] < wanted_before[start] < wanted_before[-1]:
            useful.append(start)
    return useful


def _is_heavy(node: fx.Node, matrices: set[str]) -> bool:
    """Whether a node is worth a cluster of its own."""
    operation: Any = node.args[0] if node.target is seeded else node.target
    if getattr(operation, "overloadpacket", None) in _torch.flop_formulas():
        return True
    return not is_view(node) and any(
        viewed(source).name in matrices for source in node.all_input_nodes
    )


def _may_start(node: fx.Node) -> bool:
    """Parts of a tuple stay with the operation that made the tuple."""
    return not (
        node.all_input_nodes and isinstance(node.all_input_nodes[0].meta.get("val"), tuple | list)
    )


def _crossing_bytes(forward: list[fx.Node]) -> list[int]:
    """For each position the bytes of values made before it and read from it on, by forwards."""
    position = {node: i for i, node in enumerate(forward)}
    # what begins to cross at a position, less what has crossed for the last time
    change = [0] * (len(forward) + 1)
    for i, node in enumerate(forward):
        last = max((position[user] for user in node.users if user in position), default=i)
        change[i + 1] += node_bytes(node)
        change[last + 1] -= node_bytes(node)
    return list(accumulate(change))


def _shared_depth(before: fx.Node, after: fx.Node) -> int:
    """How many enclosing modules two nodes have in common."""
    pairs = zip(module_path(before).split("."), module_path(after).split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def module_path(node: fx.Node) -> str:
    """The innermost module that a node was captured in, "" for the outermost."""
    return str(node.meta.get("module_path") or "")


def _module_border(forward: list[fx.Node], path: str, side: Side) -> int:
    if side not in ("begin", "end"):
        raise ValueError(f"split at {path}: {side!r} is neither 'begin' nor 'end'")
    inside = [
        i
        for i, node in enumerate(forward)
        if (module_path(node) == path or module_path(node).startswith(f"{path}."))
        and not is_number(node)  # every body that reads one computes it
    ]
    if not inside:
        names = sorted({module_path(node) for node in forward} - {""})
        raise ValueError(
            f"split at {path}: no module of that name computes anything; there are {names}"
        )
    return inside[0] if side == "begin" else inside[-1] + 1


def _backward_clusters(
    backward: list[fx.Node], clusters: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """The cluster of every backward node, never later than those whose gradients it reads.

    Autograd numbers operations as it records them, and a backward node has the number (`seq_nr`) of
    the operation that it differentiates. What has none (sums of gradients, casts) goes where it is
    read, which the first sweep, from the end, knows. Backwards run from the last cluster to the
    first, so the second sweep moves each node down to the lowest cluster that it reads from.
    """
    origin: dict[int, int] = {}
    for node, unit in clusters.items():
        # an operation that was decomposed has one number for several nodes: the first counts
        origin.setdefault(node.meta.get("seq_nr", -1), unit)
    last = max(clusters.values(), default=0)
    cluster_of: dict[fx.Node, int] = {}
    for node in reversed(backward):
        if node.meta.get("is_gradient_acc"):  # a sum has no origin: it is made where its terms are
            cluster_of[node] = last
            continue
        readers = [cluster_of[user] for user in node.users if user in cluster_of]
        by_origin = origin.get(node.meta.get("seq_nr", -1))
        cluster_of[node] = by_origin if by_origin is not None else max(readers, default=last)
    for node in backward:
        sources = [cluster_of[source] for source in node.all_input_nodes if source in cluster_of]
        # Lower is later: backwards run from the last cluster to the first.
        cluster_of[node] = min([cluster_of[node], *sources])
    return cluster_of
