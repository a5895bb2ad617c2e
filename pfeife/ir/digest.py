"""Which program this is, in a text: what a plan must find as it was, and what a pass must leave."""

import hashlib
from collections.abc import Iterator
from typing import Any

from torch import fx

from pfeife.ir.absorb import absorb
from pfeife.ir.program import Kind, Program, Role, is_number, is_source


def program_digest(program: Program) -> str:
    """A text that programs of clusters share if a plan of one of them is one of the others.

    It has the names that a plan speaks of, and what they stand for: each cluster's forward
    operations with what these read, and what is put in, comes out and is trained. It has no sizes
    of the batch, no devices and no versions: a plan holds for other ones, as long as these make
    the same clusters of the same operations. Whether backwards are split makes no difference.
    """
    program = absorb(program)
    text = "\n".join([*_ports(program), *_forwards(program)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint(program: Program) -> str:
    """The text of a program and of every body it calls, and of its ports, calls, reductions."""
    bodies = [str(program.body(call).graph) for call in program.calls]
    rest = (program.inputs, program.outputs, program.calls, program.reductions, program.replicas)
    counts = [str(count) for count in program.counts]
    return "\n".join([str(program.module.graph), *bodies, *counts, *map(str, rest)])


def _ports(program: Program) -> Iterator[str]:
    for port in (*program.inputs, *program.outputs):
        if port.role == Role.SIZE:
            continue
        size = f"{port.dtype} {port.shape}" if port.role == Role.PARAMETER else ""
        yield f"{port.role} {','.join(port.names)} {size}"


def _forwards(program: Program) -> Iterator[str]:
    sizes = {port.name for port in program.ports(Role.SIZE)}
    for unit in range(program.units):
        numbers = set[str]()  # that are sizes, or computed of them
        for node in program.body(program.call(Kind.FORWARD, unit)).graph.nodes:
            read = [source.name for source in node.all_input_nodes]
            of_sizes = bool(read) and is_number(node) and numbers.issuperset(read)
            if of_sizes or (is_source(node) and node.name in sizes):
                numbers.add(node.name)
            elif not is_source(node) and node.op != "output":
                others = ",".join(name for name in read if name not in numbers)
                yield f"{unit} {node.name} {_name(node)} {others}"


def _name(node: fx.Node) -> str:
    """The name of what a node runs; a function's own text has its address in this process."""
    target: Any = node.target
    return target.__qualname__ if type(target).__name__ == "function" else str(target)
