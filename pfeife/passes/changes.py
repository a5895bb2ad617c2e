"""What a pass has changed: figures of a program, and the difference of two printed ones."""

import difflib
import operator
import re
from collections import Counter
from itertools import accumulate

import attrs
from torch import fx

from pfeife.data.units import duration, flops, size
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.flops import flops_of
from pfeife.ir.messages import messages, origins
from pfeife.ir.nodes import node_bytes, receive, send
from pfeife.ir.program import Program


@attrs.frozen
class Totals:
    """Figures of a program for one microbatch.

    `operations` are those of the graph and of all bodies, `calls` counts the calls of each kind in
    the letters of a schedule, `cuts` are the bytes that cross each border between two neighbouring
    clusters or stages in either direction, `sent` those of the messages from one rank to another,
    `seconds` is None where a call has no costs yet.
    """

    operations: int
    flops: int
    calls: dict[str, int]
    cuts: tuple[int, ...]
    sent: dict[tuple[int, int], int]
    seconds: float | None

    def __str__(self) -> str:
        parts = [f"{self.operations} operations", flops(self.flops)]
        if self.calls:
            parts.append("calls " + " ".join(f"{n}{kind}" for kind, n in self.calls.items()))
        if self.cuts:
            shown = ", ".join(map(size, self.cuts[:_MOST]))
            more = f", ... (most {size(max(self.cuts))})" if len(self.cuts) > _MOST else ""
            parts.append(f"across cuts {shown}{more}")
        if self.sent:
            pairs = [f"{a} to {b} {size(n)}" for (a, b), n in self.sent.items()][:_MOST]
            more = ", ..." if len(self.sent) > _MOST else ""
            parts.append(f"sent from {', '.join(pairs)}{more}")
        if self.seconds is not None:
            parts.append(duration(self.seconds))
        return "; ".join(parts)


_MOST = 8  # of a kind in a line


def totals(program: Program) -> Totals:
    """The figures of a program of any level.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> print(pfeife.totals(pfeife.fuse()(flat)))
    20 operations; 320 FLOP; calls 2F 2B; across cuts 64 B
    """
    graphs = [program.module.graph, *(program.body(call).graph for call in program.calls)]
    sent: Counter[tuple[int, int]] = Counter()
    for message in messages(program):
        sent[message.source, message.destination] += message.bytes
    seconds = [call.seconds for call in program.calls]
    costs = [cost for cost in seconds if cost is not None]
    return Totals(
        operations=sum(_computes(node) for graph in graphs for node in graph.nodes),
        flops=sum(flops_of(program).values()),
        calls=dict(Counter(call.kind.value for call in program.calls)),
        cuts=_cuts(program),
        sent=dict(sorted(sent.items())),
        seconds=sum(costs) if costs and len(costs) == len(seconds) else None,
    )


def difference(before: Program, after: Program, context: int = 3) -> str:
    """What has changed in a printed program, as `diff -u` writes it with so many lines of
    `context`; empty where nothing has. Lines of the model, and where values are dropped, are left
    out: they change with every node."""
    old, new = (_lines(program) for program in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm="", n=context))


def _lines(program: Program) -> list[str]:
    bare = (re.sub(r";  (\w+ = )+None$", "", line) for line in str(program).splitlines())
    return [line for line in bare if line.strip() and not line.lstrip().startswith(_NOTES)]


_NOTES = ("# File:", "# No stacktrace found")


def _computes(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target not in (send, receive, operator.getitem)


def _cuts(program: Program) -> tuple[int, ...]:
    """The bytes of the values that cross the border below unit 1, 2 and so on, each once."""
    program = absorb(program)
    units = {call.node: call.unit for call in program.calls}
    origin_of = origins(program)
    ends: dict[fx.Node, set[int]] = {}
    for node in program.module.graph.nodes:
        for source in node.all_input_nodes if node.name in units else ():
            if source in origin_of and origin_of[source].maker.name in units:
                value = origin_of[source].value
                ends.setdefault(value, {units[origin_of[source].maker.name]}).add(units[node.name])
    steps = [0] * (program.units + 1)
    for value, met in ends.items():
        # it crosses every border between the lowest and the highest unit that have to do with it
        # A sum over borders of what begins to cross less what ends, rather than a loop over all
        # borders of each value: a skip connection crosses most of them.
        steps[min(met)] += node_bytes(value)
        steps[max(met)] -= node_bytes(value)
    return tuple(accumulate(steps))[: max(0, program.units - 1)]
