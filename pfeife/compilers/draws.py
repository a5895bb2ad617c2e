"""Draws apart from the rest of a body: no compiler sees them, so their numbers stay the same."""

import operator
from collections.abc import Callable

import torch
from torch import fx

from pfeife.ir.nodes import returned
from pfeife.ir.seeding import seeded


def draws(body: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a body that draw random numbers."""
    return [node for node in body.graph.nodes if node.target is seeded]


def around_draws(body: fx.GraphModule, compiled: Callable[[fx.GraphModule], Callable]) -> Callable:
    """A body whose draws run as they are, and what lies between them as pieces that `compiled`
    turns into functions. A body without draws is one piece.

        body     linear  gelu  draw  mul  linear  draw  mul
        level    0       0     0     1    1       1     2
        is       [ piece_0  ]  draw  [ piece_1 ]  draw  [ piece_2 ]
    """
    if not draws(body):
        return compiled(body)
    stitcher = _Stitcher(body, compiled)
    for level in range(1 + max(stitcher.levels.values())):
        stitcher.add_piece(level)
        stitcher.add_draws(level)
    results = tuple(stitcher.here[node] for node in returned(body))
    stitcher.graph.output(results)
    return fx.GraphModule(stitcher.root, stitcher.graph).forward


class _Stitcher:
    def __init__(self, body: fx.GraphModule, compiled: Callable[[fx.GraphModule], Callable]):
        self.body, self.compiled = body, compiled
        self.kept = set(draws(body))  # with the parts of draws that return several tensors
        self.levels: dict[fx.Node, int] = {}
        self.graph, self.root = fx.Graph(), torch.nn.Module()
        self.here: dict[fx.Node, fx.Node] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                self.here[node] = self.graph.node_copy(node)
            elif node.op == "call_function":
                self._place(node)

    def _place(self, node: fx.Node) -> None:
        """A piece runs before the draws of its level, and after those of the level before."""
        sources = [source for source in node.all_input_nodes if source in self.levels]
        if node.target is operator.getitem and sources[0] in self.kept:
            self.kept.add(node)
        drawn = node in self.kept
        after = [self.levels[source] + (source in self.kept and not drawn) for source in sources]
        self.levels[node] = max(after, default=0)

    def add_draws(self, level: int) -> None:
        for node, at in self.levels.items():
            if at == level and node in self.kept:
                self.here[node] = self.graph.node_copy(node, self.here.__getitem__)

    def add_piece(self, level: int) -> None:
        members = [n for n, at in self.levels.items() if at == level and n not in self.kept]
        inside = set(members)
        results = [node for node in members if any(user not in inside for user in node.users)]
        if not results:
            return
        piece, reads = self._piece(members, results)
        name = f"piece_{level}"
        setattr(self.root, name, _Piece(self.compiled(piece)))
        call = self.graph.call_module(name, tuple(self.here[node] for node in reads))
        for index, node in enumerate(results):
            self.here[node] = self.graph.call_function(operator.getitem, (call, index))

    def _piece(
        self, members: list[fx.Node], results: list[fx.Node]
    ) -> tuple[fx.GraphModule, list[fx.Node]]:
        """The graph of some nodes, and the nodes whose values it reads."""
        graph = fx.Graph()
        sources = dict.fromkeys(s for node in members for s in node.all_input_nodes)
        outside = [source for source in sources if source not in set(members)]
        reads = [source for source in outside if source.op != "get_attr"]
        copies: dict[fx.Node, fx.Node] = {}
        for node in reads:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in (*(source for source in outside if source.op == "get_attr"), *members):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in results))
        return fx.GraphModule(self.body, graph), reads


class _Piece(torch.nn.Module):
    """A function where an fx graph wants a module."""

    def __init__(self, run: Callable):
        super().__init__()
        self.run = run

    def forward(self, *values: torch.Tensor) -> object:
        return self.run(*values)
