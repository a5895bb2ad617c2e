"""What waits for what when nothing goes on, in words."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Union

import networkx as nx

from strict.gpu import Meets, Operation

if TYPE_CHECKING:
    from strict.host import Host

Node = Union["Host", Operation]


class Stuck(AssertionError):
    """Nothing goes on: the text names the circle, or what is missing."""


def described(hosts: Sequence["Host"]) -> str:
    """The circle of all that waits; without one, what waits for a rank that has ended."""
    by_rank = {host.rank: host for host in hosts}
    starts: list[Node] = [host for host in hosts if not host.ended]
    starts += [one for host in hosts for stream in host.gpu.streams for one in stream.posted]
    graph = nx.DiGraph()
    graph.add_nodes_from(starts)
    for node in starts:
        graph.add_edges_from((node, other) for other in _waits(node, by_rank))
    try:
        circle = [source for source, _ in nx.find_cycle(graph, starts)]
    except nx.NetworkXNoCycle:
        ends = [(node, other) for node in starts for other in graph[node] if not graph[other]]
        told = (f"{_told(node)} waits for {_told(other)}" for node, other in ends)
        return "nothing goes on: " + "; ".join(dict.fromkeys(told))
    return f"{'; '.join(map(_told, circle))}; each waits for the next, in a circle"


def _waits(node: Node, hosts: dict[int, "Host"]) -> Iterator[Node]:
    """What must happen first, as far as it is known."""
    if not isinstance(node, Operation):
        yield from (other for other in node.waits() if other is not node)
    elif node.started:
        assert node.meets is not None
        yield from _missing(node, node.meets, hosts)
    else:
        yield from (one for one in (node.before, node.after) if one and not one.done)
        at = node.stream.hardware.index(node)
        yield from list(node.stream.hardware)[max(0, at - 1) : at]


def _missing(node: Operation, meets: Meets, hosts: dict[int, "Host"]) -> Iterator[Node]:
    """The next operation of each rank that is missing in a communicator, or that rank's host."""
    here, comm = node.stream.gpu.rank, meets.communicator
    peers = {half.peer for half in meets.halves} if meets.halves else {*comm.ranks} - {here}
    for peer in sorted(peers):
        stream = comm.streams.get(peer)
        theirs = stream.posted if stream else []
        at = comm.current.get(peer)
        if at is not None and meets.collective and at.meets and at.meets.collective:
            continue
        yield theirs[0] if theirs else hosts[peer]


def _told(node: Node) -> str:
    if isinstance(node, Operation):
        on = node.stream.name if node.meets is None else node.meets.communicator.name
        return f"rank {node.stream.gpu.rank} at {node.where}: {node.what} on {on}"
    if node.ended:
        return f"rank {node.rank}, which has ended"
    return f"rank {node.rank} at {node.where()}: its host {node.why or 'runs'}"
