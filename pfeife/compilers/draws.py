"""What no compiler sees of a body: draws, so that their numbers stay the same, what members of a
group tell one another, which the runtime does, and values whose sizes data decide."""

import operator
from collections.abc import Callable

import torch
from torch import fx

from pfeife.ir.editing.copying import Copy, copied_part
from pfeife.ir.members import MEANING, begins
from pfeife.ir.nodes import is_sized_by_data, returned
from pfeife.ir.seeding import seeded


def draws(body: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a body that draw random numbers."""
    return [node for node in body.graph.nodes if node.target is seeded]


def tells(body: fx.GraphModule) -> bool:
    """Whether a body has collectives of members, which a pipeline binds to their group."""
    return any(node.target in MEANING for node in body.graph.nodes)


def around_draws(body: fx.GraphModule, compiled: Callable[[fx.GraphModule], Callable]) -> Callable:
    """A body whose draws and collectives run as they are, and what data decide the size of, as a
    graph of these and of pieces that lie between them, which `compiled` turns into functions. A
    body without them is one piece.

        body     linear  gelu  draw  mul  linear  draw  mul
        level    0       0     0     1    1       1     2
        is       [ piece_0  ]  draw  [ piece_1 ]  draw  [ piece_2 ]

    What comes after a collective that has begun stays behind it, to be computed meanwhile.
    """
    levels, apart = _levels(body)
    if not apart:
        return compiled(body)
    copy = Copy(body)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            copy.keep(node)
    # By levels, not one by one between draws: fewer pieces, and each is larger.
    for level in range(1 + max(levels.values())):
        members = [node for node, at in levels.items() if at == level]
        _add_piece(copy, [node for node in members if node not in apart], level, compiled)
        for node in members:
            if node in apart:
                copy.keep(node)
    copy.graph.output(copy.read(returned(body)))
    return fx.GraphModule(copy.held, copy.graph)


def _levels(body: fx.GraphModule) -> tuple[dict[fx.Node, int], set[fx.Node]]:
    """The level of each operation: a piece runs before what is apart on its level, and after that
    of the level before. And what is: draws, collectives and what is sized by data, or parts of
    those that return several tensors."""
    apart = set(filter(_is_apart, body.graph.nodes))
    levels: dict[fx.Node, int] = {}
    least = 0
    for node in body.graph.nodes:
        if node.op == "call_function":
            sources = [source for source in node.all_input_nodes if source in levels]
            if node.target is operator.getitem and sources[0] in apart:
                apart.add(node)
            later = [levels[source] + (source in apart and node not in apart) for source in sources]
            levels[node] = max([least, *later])
            if node.target is operator.getitem:  # stays with what gives several
                levels[node] = levels[sources[0]]
            if begins(node):
                least = levels[node] + 1
    return levels, apart


def _is_apart(node: fx.Node) -> bool:
    told = node.target is seeded or node.target in MEANING
    of_data = any(map(is_sized_by_data, (node, *node.all_input_nodes)))
    return told or (of_data and node.op == "call_function")


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
        copy.here[node].meta = dict(node.meta)


class _Piece(torch.nn.Module):
    """A function where an fx graph wants a module."""

    def __init__(self, run: Callable):
        super().__init__()
        self.run = run

    def forward(self, *values: torch.Tensor) -> object:
        return self.run(*values)
