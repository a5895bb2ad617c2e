"""Draws apart from the rest of a body: no compiler sees them, so their numbers stay the same."""

import operator
from collections.abc import Callable

import torch
from torch import fx

from pfeife.ir.copying import Copy, copied_part
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
    copy = Copy(body)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copy.keep(node)
    levels, drawn = _levels(body)
    # By levels, not one by one between draws: fewer pieces, and each is larger.
    for level in range(1 + max(levels.values())):
        members = [node for node, at in levels.items() if at == level]
        _add_piece(copy, [node for node in members if node not in drawn], level, compiled)
        for node in members:
            if node in drawn:
                copy.keep(node)
    copy.graph.output(copy.read(returned(body)))
    return fx.GraphModule(copy.held, copy.graph).forward


def _levels(body: fx.GraphModule) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """The level of each operation: a piece runs before the draws of its level, and after those of
    the level before. And which are draws, or parts of draws that return several tensors."""
    drawn = set(draws(body))
    levels: dict[fx.Node, int] = {}
    for node in body.graph.nodes:
        if node.op == "call_function":
            sources = [source for source in node.all_input_nodes if source in levels]
            if node.target is operator.getitem and sources[0] in drawn:
                drawn.add(node)
            later = [levels[source] + (source in drawn and node not in drawn) for source in sources]
            levels[node] = max(later, default=0)
    return levels, drawn


def _add_piece(
    copy: Copy, members: list[fx.Node], level: int, compiled: Callable[[fx.GraphModule], Callable]
) -> None:
    """Writes a call of the piece that some operations are, if anybody reads them."""
    inside = set(members)
    results = [node for node in members if any(user not in inside for user in node.users)]
    if not results:
        return
    sources = dict.fromkeys(s for node in members for s in node.all_input_nodes if s not in inside)
    reads = tuple(source for source in sources if source.op != "get_attr")
    held = [source for source in sources if source.op == "get_attr"]  # each piece has its own
    name = f"piece_{level}"
    piece = copied_part(copy.owner, reads, (*held, *members), results, name)
    copy.held[name] = _Piece(compiled(piece))
    call = copy.graph.call_module(name, copy.read(reads))
    for index, node in enumerate(results):
        copy.here[node] = copy.graph.call_function(operator.getitem, (call, index))


class _Piece(torch.nn.Module):
    """A function where an fx graph wants a module."""

    def __init__(self, run: Callable):
        super().__init__()
        self.run = run

    def forward(self, *values: torch.Tensor) -> object:
        return self.run(*values)
