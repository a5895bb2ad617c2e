"""Collectives beside what is computed: begun as early as helps, over where they are read.

before   mm    mm_1           all_reduce(mm)   add(all_reduce, ..)
after    mm    all_reduce(mm)   mm_1   arrived(all_reduce, mm)   add(arrived, ..)
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs
from torch import fx

from pfeife.data.plan import Plan
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.members import LASTING, arrived, begins, over_at
from pfeife.ir.nodes import has_effects, node_bytes
from pfeife.ir.program import Program
from pfeife.passes.compose import Pass, Passes

_MOST = 2  # collectives that are under way at one time


@attrs.frozen
class Timing:
    """What nodes of a body take: `computing` are the seconds of a member's own, `sending` those in
    which the first messages of a collective are under way, of which a machine hides the fraction
    `hidden` behind what is computed."""

    computing: Callable[[fx.Node], float]
    sending: Callable[[fx.Node], float]
    hidden: float = 1.0

    def seconds(self, body: fx.GraphModule) -> float:
        """Those of a body, that it computes and that it waits."""
        return sum(self.lanes(body))

    def lanes(self, body: fx.GraphModule) -> tuple[float, float]:
        """The seconds that a body computes, and that it waits for messages. These go one after
        another, beside what is computed up to where they have arrived.

            computes   mm | mm_1 | waits | add
            sends           all_reduce   |
        """
        computed = waited = free = 0.0
        arrivals: dict[fx.Node, float] = {}
        for node in body.graph.nodes:
            now = computed + waited
            if begun := over_at(node):
                waited += max(0.0, arrivals.get(begun, now) - now)
                computed += self.computing(begun)
                continue
            sending = self.sending(node)
            if sending:
                free = arrivals[node] = max(now, free) + sending
                waited += (1 - self.hidden) * sending if begins(node) else free - now
            if not begins(node):
                computed += self.computing(node)
        return computed, waited


def overlap(timing: Timing) -> Pass:
    """A pass over the programs of ranks that are groups of members: what members tell one another
    is under way beside what they compute.

    In each body a collective whose result is smaller than its tensor begins where that is ready;
    others begin so early that they have arrived when they are read, by `timing`, but not before the
    one before is read: a gathered parameter waits for its use in no more memory than that of one
    layer, and keys in a ring are those of two members. What the tensor of a sum does not need is
    computed behind its beginning. At most two are under way at one time. The values are the same
    ones, and the costs of calls (see `annotate`) become less by what is hidden.
    """

    def run(program: Program) -> Program:
        if not timing.hidden or program.members == 1:
            return program
        before = program.bodies
        changed = {id(body): _overlapped(body, timing) for body in before.values()}
        module = copied(program.module)
        module.held.update({at: changed[id(body)] for at, body in before.items()})
        calls = []
        for call in program.calls:
            body = program.body(call)
            less = timing.seconds(body) - timing.seconds(changed[id(body)])
            seconds = None if call.seconds is None else max(call.seconds - less, 0.0)
            calls.append(attrs.evolve(call, seconds=seconds))
        return attrs.evolve(program, module=module.module(), calls=tuple(calls))

    return run


def with_overlap(passes: Passes, members: int, timing: Timing) -> Passes:
    """Passes by their levels, and `overlap` before those of ranks, where there are members."""
    if members == 1:
        return passes
    return {**passes, "ranks": (overlap(timing), *passes.get("ranks", ()))}


def still_bounded(plan: Plan, before: Program, after: Program) -> Plan:
    """The plan of a program `before` its calls took less: whose bound is less by as large a share
    as that of the call which is shortened most."""
    calls, bound = zip(before.calls, after.calls, strict=True), plan.bound_seconds
    shares = [(new.seconds or 0.0) / old.seconds for old, new in calls if old.seconds]
    return attrs.evolve(plan, bound_seconds=bound and bound * min([1.0, *shares]))


def _overlapped(body: fx.GraphModule, timing: Timing) -> fx.GraphModule:
    """The body, or if anything is to be begun earlier another one of the same values."""
    calls = [node for node in body.graph.nodes if node.op == "call_function"]
    if any(node.target is arrived or has_effects(node) for node in calls):
        return body
    nodes = _reordered([*body.graph.nodes])
    spans = _spans(nodes, timing)
    if not spans:
        return body
    copy = Copy(body)
    under_way: dict[fx.Node, fx.Node] = {}

    def end(collective: fx.Node) -> None:
        sent = copy.read(tuple(collective.all_input_nodes))
        over = copy.graph.call_function(arrived, (under_way.pop(collective), *sent))
        over.meta = dict(collective.meta)
        copy.here[collective] = over

    for index, node in enumerate(nodes):
        for collective in [c for c in under_way if spans[c][1] <= index]:
            end(collective)
        for collective in [c for c, (begin, _) in spans.items() if begin == index]:
            if len(under_way) == _MOST:
                end(next(iter(under_way)))
            under_way[collective] = copy.keep(collective)
        if node not in spans:
            copy.keep(node)
    return copy.module()


def _growth(collective: fx.Node) -> int:
    """How many bytes more a collective gives than it is given."""
    return node_bytes(collective) - node_bytes(collective.all_input_nodes[0])


def _reordered(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes of a graph, in which collectives that give less come as soon as what they read is
    there, and what one that gives no more does not need comes behind it."""
    inputs = sum(node.op == "placeholder" for node in nodes)
    places: dict[fx.Node, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        places[node] = index, 0
        if node.target in LASTING and _growth(node) < 0:
            at, behind = max(places[node.all_input_nodes[0]], (inputs - 1, 0))
            places[node] = at, behind + 1
    early = sorted(nodes, key=places.__getitem__)
    ordered = dict.fromkeys(early[:inputs])
    for index, node in enumerate(early):
        if node.target in LASTING and _growth(node) <= 0:
            needed, todo = {node}, [node]
            while todo:
                sources = {*todo.pop().all_input_nodes} - ordered.keys() - needed
                needed |= sources
                todo += sources
            ordered |= dict.fromkeys(each for each in early[: index + 1] if each in needed)
            ordered |= dict.fromkeys(early[:index])
    return [*(ordered | dict.fromkeys(early))]


def _spans(nodes: Sequence[fx.Node], timing: Timing) -> dict[fx.Node, tuple[int, int]]:
    """Of each collective beside which something is computed: before which node it begins, and
    before which one it has arrived."""
    at = {node: index for index, node in enumerate(nodes)}
    computing = [0.0 if node.target in LASTING else timing.computing(node) for node in nodes]
    elapsed = [0.0, *accumulate(computing)]
    inputs = sum(node.op == "placeholder" for node in nodes)
    spans: dict[fx.Node, tuple[int, int]] = {}
    reads: list[int] = []  # where what comes in time is read
    for node in nodes:
        if node.target not in LASTING or not node.users:
            continue
        begin, first = at[node], min(at[user] for user in node.users)
        if _growth(node) >= 0:
            source, time = node.all_input_nodes[0], timing.sending(node)
            _, ready = spans.get(source, (0, at[source] + 1))
            # What is read together, as keys and values are, travels together.
            before = (read for read in reads if elapsed[read] < elapsed[first])
            begin = min(begin, max([ready, inputs, *before]))
            while begin < at[node] and elapsed[first] - elapsed[begin + 1] >= time:
                begin += 1
            reads.append(first)
        if elapsed[first] > elapsed[begin]:
            spans[node] = begin, first
    return spans
