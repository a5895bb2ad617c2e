"""Which program this is, in a text: what a plan must find as it was, and what a pass must leave."""

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from pfeife.ir.editing.absorb import absorb
from pfeife.ir.nodes import is_source
from pfeife.ir.parts import Kind, ProgramBase, Role
from pfeife.ir.sizes import numbers_of_sizes


def program_digest(program: ProgramBase) -> str:
    """A text that programs of clusters share if a plan of one of them is one of the others.

    It has the names that a plan speaks of, and what they stand for: each cluster's forward
    operations with what these read, and what is put in, comes out and is trained. It has no sizes
    of the batch, no devices and no versions: a plan holds for other ones, as long as these make
    the same clusters of the same operations. Whether backwards are split makes no difference.
    """
    program = absorb(program)
    text = "\n".join([*_ports(program), *_forwards(program)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint(program: ProgramBase) -> str:
    """The text of a program, of every body it calls, of its ports, calls, reductions and limits."""
    bodies = [str(program.body(call).graph) for call in program.calls]
    rest = (program.inputs, program.outputs, program.calls, program.reductions, program.replicas)
    texts = map(str, (*program.counts, *program.limits, *rest))
    return "\n".join([str(program.module.graph), *bodies, *texts])


def _ports(program: ProgramBase) -> Iterator[str]:
    for port in (*program.inputs, *program.outputs):
        if port.role == Role.SIZE:
            continue
        size = f"{port.dtype} {port.shape}" if port.role == Role.PARAMETER else ""
        yield f"{port.role} {','.join(port.names)} {size}"


def _forwards(program: ProgramBase) -> Iterator[str]:
    for unit in range(program.units):
        graph = program.body(program.call(Kind.FORWARD, unit)).graph
        # A plan for other sizes is one for this program too, so what is computed of sizes is left
        # out.
        numbers = numbers_of_sizes(program, graph)
        for node in graph.nodes:
            if node.name not in numbers and not is_source(node) and node.op != "output":
                read = (source.name for source in node.all_input_nodes)
                operands = ",".join(name for name in read if name not in numbers)
                yield f"{unit} {node.name} {_name(node)} {operands}"


def _name(node: fx.Node) -> str:
    """The name of what a node runs; a function's own text has its address in this process."""
    target: Any = node.target
    return target.__qualname__ if type(target).__name__ == "function" else str(target)
