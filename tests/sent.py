"""What members of a group send one another in a program, and prices with which they do."""

from collections import Counter

import attrs

import pfeife
from pfeife.ir.members import ALONE, MEANING, messages
from pfeife.ir.nodes import node_bytes, value_of
from pfeife.passes.member_ways import Prices

SENT = MEANING.keys() - ALONE
# With these each operation is computed on parts that can be.
DEAR_TO_COMPUTE = Prices(
    compute=lambda node: float(node_bytes(node) + 1), send=lambda size: 1e-3 * size, copy=float
)
CHEAP_TO_COPY = attrs.evolve(DEAR_TO_COMPUTE, copy=lambda size: 1e-3 * size)


def collectives(program: pfeife.Program) -> Counter[str]:
    """How often each is there."""
    nodes = program.module.graph.nodes
    return Counter(node.target.__name__ for node in nodes if node.target in SENT)


def bytes_sent(program: pfeife.Program) -> int:
    """By each member to each other one."""
    total = 0
    for node in program.module.graph.nodes:
        if node.target in SENT:
            value = value_of(node.all_input_nodes[0])
            size = value.numel() * value.dtype.itemsize
            total += sum(messages(node.target, size, program.members))
    return total
