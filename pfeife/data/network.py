"""The links between the ranks of a world: one by one, or by the nodes that the ranks are in."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import attrs

from pfeife.data import checks
from pfeife.data.link import Link, LinkKind, link_kind
from pfeife.data.machine import Machine, Mesh

_LARGE = 2**24  # bytes of a message by which kinds of links are compared


@attrs.frozen
class Node:
    """Ranks that are joined by links of a kind of their own."""

    ranks: tuple[int, ...] = attrs.field(validator=checks.each(checks.not_negative))
    inside: LinkKind


@attrs.frozen(slots=False)
class Network:
    """The links between the ranks of a world, in both directions of a pair.

    Either measured ones (`links`, one for each direction), or `nodes` whose ranks are joined by the
    node's links, and by those `across` with the ranks of other nodes. Raises ValueError for both
    at once, a rank that is in two nodes, a pair with two links, and several nodes without links
    across.
    """

    links: tuple[Link, ...] = ()
    nodes: tuple[Node, ...] = ()
    across: LinkKind | None = None

    def __attrs_post_init__(self) -> None:
        if self.links and self.nodes:
            raise ValueError("Network: it has links one by one and nodes; give one of them")
        if len(self.nodes) > 1 and self.across is None:
            raise ValueError(f"Network: {len(self.nodes)} nodes, and no links across")
        ends = Counter((link.source, link.destination) for link in self.links)
        for (source, destination), count in ends.items():
            if count > 1:
                raise ValueError(f"Network: {count} links from rank {source} to {destination}")
        for rank, count in Counter(r for node in self.nodes for r in node.ranks).items():
            if count > 1:
                raise ValueError(f"Network: rank {rank} is in nodes {count} times")

    @classmethod
    def of(
        cls,
        *,
        nodes: int = 1,
        ranks_per_node: int,
        inside: str | LinkKind | Sequence[str | LinkKind],
        between: str | LinkKind | None = None,
    ) -> "Network":
        """Nodes of so many ranks each, neighbours in the world.

        `inside` is what joins the ranks of a node, one for all nodes or one a node; `between`
        what joins those of different nodes. Both are names of shipped figures (see `link_kinds`) or
        figures of one's own. Raises ValueError for an unknown name, with the names, and for other
        contradictions.

        >>> two = Network.of(nodes=2, ranks_per_node=8, inside="nvlink4", between="ib-ndr")
        >>> two.link(6, 7).name, two.link(7, 8).name
        ('nvlink4', 'ib-ndr')
        """
        for name, count in (("nodes", nodes), ("ranks_per_node", ranks_per_node)):
            if type(count) is not int or count < 1:
                raise ValueError(f"Network.of: {name}={count!r} must be a positive integer")
        kinds = [inside] * nodes if isinstance(inside, str | LinkKind) else list(inside)
        if len(kinds) != nodes:
            raise ValueError(f"Network.of: {len(kinds)} kinds of links inside of {nodes} nodes")
        if nodes > 1 and between is None:
            raise ValueError(
                f"Network.of: between= what joins the {nodes} nodes is missing, such as 'ib-ndr'"
            )
        ranks_of = (range(at * ranks_per_node, (at + 1) * ranks_per_node) for at in range(nodes))
        made = tuple(Node(tuple(r), _kind(k)) for r, k in zip(ranks_of, kinds, strict=True))
        return cls(nodes=made, across=None if between is None else _kind(between))

    @cached_property
    def _link_of(self) -> dict[tuple[int, int], Link]:
        return {(link.source, link.destination): link for link in self.links}

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {rank: at for at, node in enumerate(self.nodes) for rank in node.ranks}

    def link(self, source: int, destination: int) -> Link | LinkKind:
        """The link from a rank to another. Raises ValueError for a pair of whose link nothing is
        known."""
        link: Link | LinkKind | None = self._link_of.get((source, destination))
        here, there = self._node_of.get(source), self._node_of.get(destination)
        if here is not None and there is not None and source != destination:
            link = self.nodes[here].inside if here == there else self.across
        if link is None:
            raise ValueError(f"the network knows no link from rank {source} to rank {destination}")
        return link

    def joins(self, ranks: int) -> bool:
        """Whether it has the links between all of so many ranks."""
        if self.nodes:
            return all(rank in self._node_of for rank in range(ranks))
        return all(pair in self._link_of for pair in itertools.permutations(range(ranks), 2))

    def within(self, mesh: Mesh) -> "Network":
        """The links of a mesh's pipelines, by the ranks of one: the slowest of all pipelines.

        Raises ValueError where a rank of the mesh is in no node.
        """
        if not self.nodes:
            return _slowest_within(mesh, self._link_of)
        # Ranks of a pipeline are in one node where they are in every pipeline. The key of a rank:
        # the nodes that it is in, pipeline by pipeline.
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.ranks):
            ranks = [mesh.in_world(replica, rank) for replica in range(mesh.replicas)]
            groups.setdefault(tuple(map(self._at, ranks)), []).append(rank)
        slowest = {key: max((self.nodes[at].inside for at in key), key=_seconds) for key in groups}
        # Ranks with different keys are in different nodes in some pipeline, but may share one in
        # others. So `across` is their slowest link only if nothing inside of a node is slower; else
        # each pair of ranks has to be looked at.
        if self.across is None or all(
            _seconds(self.across) >= _seconds(k) for k in slowest.values()
        ):
            nodes = tuple(Node(tuple(ranks), slowest[key]) for key, ranks in groups.items())
            return Network(nodes=nodes, across=self.across)
        pairs = (pair for p in mesh.pipelines for pair in itertools.permutations(p, 2))
        return _slowest_within(mesh, {pair: self.link(*pair) for pair in pairs})

    def _at(self, rank: int) -> int:
        if rank not in self._node_of:
            raise ValueError(
                f"the network has {len(self._node_of)} ranks, and rank {rank} is none of them"
            )
        return self._node_of[rank]

    def between(self, mesh: Mesh) -> "Network":
        """The links over which the replicas of a mesh reduce: those between the same ranks of
        different pipelines; of nodes, one of each kind."""
        if self.nodes:
            return Network(tuple(self._reducing(mesh)))
        rank_of = {rank: mesh.place(rank)[1] for pipeline in mesh.pipelines for rank in pipeline}
        links = (link for link in self.links if {link.source, link.destination} <= rank_of.keys())
        return Network(
            tuple(link for link in links if rank_of[link.source] == rank_of[link.destination])
        )

    def _reducing(self, mesh: Mesh) -> Iterator[Link]:
        # Neighbours in the order of the nodes meet every kind of link that joins the replicas of a
        # rank: inside of each node that several are in, and across. All pairs would be too many.
        seen: set[LinkKind | Link] = set()
        for rank in range(mesh.ranks):
            ranks = (mesh.in_world(replica, rank) for replica in range(mesh.replicas))
            for source, destination in itertools.pairwise(sorted(ranks, key=self._at)):
                link = self.link(source, destination)
                if link not in seen:
                    seen.add(link)
                    yield _link(link, source, destination)

    def for_members(self, machine: Machine, mesh: Mesh) -> Machine:
        """The machine with the figures of the slowest link over which the members of a mesh's
        groups tell one another; itself where there are none.

        Raises ValueError for a pair of members of whose link nothing is known.
        """
        seen: dict[Link | LinkKind, Link] = {}
        for group in mesh.groups:
            for source, destination in itertools.pairwise(group):
                link = self.link(source, destination)
                seen.setdefault(link, _link(link, source, destination))
        return Network((*seen.values(),)).seen_by(machine)

    def kinds(self) -> tuple[Link | LinkKind, ...]:
        """What joins ranks: all links one by one, or the kinds that nodes of several ranks have."""
        inside = {node.inside: None for node in self.nodes if len(node.ranks) > 1}
        across = (self.across,) if self.across and len(self.nodes) > 1 else ()
        return (*self.links, *inside, *across)

    @property
    def summary(self) -> str:
        """What joins the ranks, in a few words."""
        if not self.nodes:
            return f"{len(self.links)} measured links"
        inside = ", ".join(dict.fromkeys(node.inside.name for node in self.nodes))
        across = f", {self.across.name} between them" if self.across else ""
        nodes = f"{len(self.nodes)} nodes" if len(self.nodes) > 1 else "one node"
        return f"{nodes}, {inside} inside{across}"

    def seen_by(self, machine: Machine) -> Machine:
        """The machine with the figures of the slowest link, for decisions before ranks are
        known."""
        if not self.kinds():
            return machine
        slowest = max(self.kinds(), key=_seconds)
        if isinstance(slowest, LinkKind):
            return attrs.evolve(
                machine,
                link_latency=slowest.latency,
                link_bandwidth=slowest.bandwidth,
                overlap=slowest.overlap,
            )
        # The straight line from the smallest to the largest message that was measured.
        taken = max(slowest.sending[-1], slowest.receiving[-1]) / slowest.seconds[-1]
        rising = slowest.seconds[-1] - slowest.seconds[0]
        return attrs.evolve(
            machine,
            link_latency=slowest.seconds[0],
            link_bandwidth=slowest.sizes[-1] / max(rising, 1e-12),
            overlap=min(max(1 - taken, 0.0), 1.0),
        )


def _kind(kind: str | LinkKind) -> LinkKind:
    return link_kind(kind) if isinstance(kind, str) else kind


def _slowest_within(mesh: Mesh, links: Mapping[tuple[int, int], Link | LinkKind]) -> Network:
    """One link between each pair of a pipeline's ranks: the slowest of those that are known of all
    pipelines."""
    # The microbatches of all pipelines end together, so the slowest pipeline's link counts.
    slowest = []
    for a, b in itertools.permutations(range(mesh.ranks), 2):
        pairs = ((pipeline[a], pipeline[b]) for pipeline in mesh.pipelines)
        between = [links[pair] for pair in pairs if pair in links]
        if between:
            slowest.append(_link(max(between, key=_seconds), a, b))
    return Network(tuple(slowest))


def _seconds(link: Link | LinkKind) -> float:
    """Of a large message, by which links are compared."""
    return link.seconds[-1] if isinstance(link, Link) else link.transfer_seconds(_LARGE)


def _link(kind: Link | LinkKind, source: int, destination: int) -> Link:
    """A link of this kind between two ranks."""
    if isinstance(kind, Link):
        return attrs.evolve(kind, source=source, destination=destination)
    sizes = (0, _LARGE)  # a kind's seconds are a straight line, for which two points do
    seconds = tuple(map(kind.transfer_seconds, sizes))
    taken = tuple(map(kind.send_seconds, sizes))
    return Link(source, destination, sizes, seconds, taken, taken, residual=0.0)
