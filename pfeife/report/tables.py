"""Results as people read them: text tables of programs, plans and timelines."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise

from pfeife.cost import stage_memory
from pfeife.data.link import LinkKind
from pfeife.data.network import Network
from pfeife.data.plan import Plan
from pfeife.data.schedule import RECEIVES
from pfeife.data.timeline import MemoryCurve, Timeline
from pfeife.data.units import size
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.nodes import receive, send
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.report.by_stage import held_names, sent_bytes
from pfeife.report.compare import Compared


def table(rows: Sequence[Sequence[object]], head: Sequence[str]) -> str:
    """Columns under their heads, numbers to the right."""
    cells = [list(map(str, row)) for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, cells)])


def calls_table(program: Program) -> str:
    """A row a call of a graph of clusters or stages: where it runs, and its seconds."""
    rows = [
        (
            call.node,
            call.kind.name.lower().replace("_", " "),
            call.unit,
            "" if call.rank is None else call.rank,
            "" if call.seconds is None else f"{1e3 * call.seconds:.3f} ms",
        )
        for call in program.calls
    ]
    return table(rows, ("call", "kind", "unit", "rank", "time"))


def rank_part(program: Program, rank: int) -> str:
    """What one rank does for a microbatch, from a program with messages: its calls, sends and
    receives, a line each."""
    # A plain node between calls has no rank of its own; in the call that reads it, it has.
    program = absorb(program)
    calls = {call.node for call in program.calls if call.rank == rank}
    lines = [
        node.format_node()
        for node in program.module.graph.nodes
        if node.name in calls
        or (node.target is send and node.args[1] == rank)
        or (node.target is receive and node.args[2] == rank)
    ]
    return "\n".join(map(str, lines))


def plan_table(plan: Plan, program: Program) -> str:
    """A plan's stages: where they run, what they hold, what they cost and send.

    `program` is the partitioned program, with messages where transfers are to be shown. Raises
    ValueError for another, such as that of the clusters.
    """
    if program.units > plan.stages:
        raise ValueError(
            f"the plan has {plan.stages} stages, and the program {program.units} units: it must be "
            "what `partition(plan)` makes, or a later one"
        )
    # Bytes are those of the program, not of the plan: what a stage holds depends on all passes.
    memory = stage_memory(program)
    names, sent = held_names(program, plan.stages), sent_bytes(program, plan.stages)
    seconds = plan.stage_seconds or (None,) * plan.stages
    rows = [
        (
            stage,
            plan.stage_ranks[stage],
            plan.stage_of_cluster.count(stage),
            _between(names[stage]),
            size(memory[stage].parameters),
            size(memory[stage].saved),
            size(sent[stage]),
            "" if seconds[stage] is None else f"{1e3 * seconds[stage]:.2f} ms",  # type: ignore[operator]
        )
        for stage in range(plan.stages)
    ]
    head = ("stage", "rank", "clusters", "parameters", "bytes", "saved/mb", "sent/mb", "time/mb")
    return table(rows, head)


def _between(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def timeline_chart(timeline: Timeline, width: int = 80) -> str:
    """A row a rank: the digit of the microbatch while it computes, upper-case letters for
    backwards (A is microbatch 0), dots while it waits."""
    rows = {rank: ["."] * width for rank in sorted({event.rank for event in timeline.events})}
    whole = timeline.seconds or 1.0
    for event in timeline.events:
        kind = event.action.do.kind
        if kind is None or event.action.microbatch is None:
            continue
        mark = "0123456789" if kind.value == "F" else "ABCDEFGHIJ"
        first, last = (int(t * width / whole) for t in (event.start, event.end))
        # However short it is, an action has a column.
        for column in range(first, max(last, first + 1)):
            rows[event.rank][min(column, width - 1)] = mark[event.action.microbatch % 10]
    return "\n".join(f"rank {rank}  {''.join(row)}" for rank, row in rows.items())


def critical_table(path: Timeline) -> str:
    """What a step waits for (see `critical_path`): a row for what a rank computes and for the
    messages on their way to it, a share of the step each."""
    seconds: dict[tuple[int, str], list[float]] = {}
    for event in path.events:
        do = event.action.do
        # What takes no time is no part of what the step waits for.
        if event.end == event.start:
            continue
        word = "computes" if do.kind else "is sent" if do in RECEIVES else do.name.lower()
        seconds.setdefault((event.rank, word), []).append(event.end - event.start)
    whole = path.seconds or 1.0
    rows = [
        (f"rank {rank}", word, len(each), f"{1e3 * sum(each):.3f} ms", f"{sum(each) / whole:.1%}")
        for (rank, word), each in sorted(seconds.items())
    ]
    return table(rows, ("rank", "what it does", "actions", "time", "of the step"))


def summary(plan: Plan, program: Program) -> str:
    """One line: how much is cut into what, and the expected step."""
    parameters = sum(port.bytes for port in program.ports(Role.PARAMETER))
    expected = "" if plan.step_seconds is None else f", {1e3 * plan.step_seconds:.1f} ms a step"
    if plan.step_seconds and plan.bound_seconds:
        gap = 100 * (plan.step_seconds / plan.bound_seconds - 1)
        best = "proven best" if gap < 0.05 else f"proven to be at most {gap:.1f} % over the best"
        expected += f" ({best} for these stages)"
    return (
        f"{size(parameters)} of parameters, {len(plan.stage_of_cluster)} clusters in "
        f"{plan.stages} stages on {len(plan.schedule.ranks)} ranks, "
        f"{plan.schedule.microbatches} microbatches{expected} expected"
    )


def network_table(network: Network) -> str:
    """The links: latency, bandwidth of the largest message, and what overlaps with computing."""
    if network.nodes:
        return _nodes_table(network)
    rows = []
    for link in network.links:
        largest = link.sizes[-1]
        # The smallest message takes the latency; what the largest takes beside it is bandwidth.
        taken = link.seconds[-1] - link.seconds[0]
        rows.append(
            (
                f"{link.source} -> {link.destination}",
                f"{1e6 * link.seconds[0]:.0f} us",
                f"{largest / max(taken, 1e-12) / 1e9:.2f} GB/s",
                f"{1e6 * link.sending[0]:.0f} us",
                f"{100 * link.sending[-1] / link.seconds[-1]:.0f} %",
                f"{100 * link.receiving[-1] / link.seconds[-1]:.0f} %",
                f"{100 * link.residual:.1f} %",
            )
        )
    head = ("link", "latency", "bandwidth", "send call", "taken by sending", "by receiving")
    return table(rows, (*head, "residual of the fit"))


def _nodes_table(network: Network) -> str:
    """What joins the ranks of each node, and the nodes."""
    pairs = [(str(list(node.ranks)), node.inside) for node in network.nodes]
    pairs += [("across", network.across)] if network.across else []
    return table([(ranks, *_figures(kind)) for ranks, kind in pairs], ("ranks", *_FIGURES))


_FIGURES = ("link", "GB/s", "latency", "overlap")


def links_table(kinds: Iterable[LinkKind]) -> str:
    """Kinds of links with their figures."""
    return table([_figures(kind) for kind in kinds], _FIGURES)


def _figures(kind: LinkKind) -> tuple[str, ...]:
    rate, latency = f"{kind.bandwidth / 1e9:g}", f"{1e6 * kind.latency:g} us"
    return (kind.name, rate, latency, f"{100 * kind.overlap:g} %")


def comparison_table(compared: Sequence[Compared]) -> str:
    """Totals one by one, actions of the same kind and stage together (medians)."""
    groups: dict[tuple, list[Compared]] = {}
    for comparison in compared:
        what = (
            None if comparison.action is None else (comparison.action.stage, comparison.action.do)
        )
        groups.setdefault((comparison.rank, what), []).append(comparison)
    # Bytes are whole numbers, seconds hardly ever.
    in_seconds = any(comparison.predicted != int(comparison.predicted) for comparison in compared)
    rows = []
    for (rank, what), members in groups.items():
        figures = [
            statistics.median(getattr(comparison, side) for comparison in members)
            for side in ("predicted", "measured")
        ]
        shown = [f"{1e3 * figure:.2f} ms" if in_seconds else size(figure) for figure in figures]
        ratio = Compared(rank, None, figures[0], figures[1]).ratio
        label = "total" if what is None else f"{what[0]}{what[1]} x {len(members)}"
        rows.append(("all" if rank is None else rank, label, *shown, f"{ratio:.3f}"))
    return table(rows, ("rank", "what", "predicted", "measured", "ratio"))


def memory_table(curves: Sequence[MemoryCurve]) -> str:
    """A row a rank: what it holds all the time, what is there at its peak, and the peak."""
    held = list(dict.fromkeys(word for curve in curves for word in curve.held))
    beside = list(dict.fromkeys(word for curve in curves for word in curve.at_peak))
    rows = []
    for curve in curves:
        action = max(curve.points, key=lambda point: point.peak).action if curve.points else ""
        figures = [
            *(curve.held.get(w, 0) for w in held),
            *(curve.at_peak.get(w, 0) for w in beside),
        ]
        rows.append((curve.rank, *map(size, figures), size(curve.peak), action))
    return table(rows, ("rank", *held, *beside, "peak", "in action"))


def memory_chart(curve: MemoryCurve, width: int = 80, height: int = 8) -> str:
    """The bytes of a rank over its actions, as columns; the bottom is what it always holds."""
    peaks = [point.peak for point in curve.points] or [0]
    shown = min(width, len(peaks))
    # Several actions share a column where there are more than columns: the highest counts.
    edges = [len(peaks) * column // shown for column in range(shown + 1)]
    columns = [max(peaks[low:high]) for low, high in pairwise(edges)]
    top = max(*columns, 1)
    lines = [
        "".join("#" if value * height >= top * (level - 0.5) else " " for value in columns)
        for level in range(height, 0, -1)
    ]
    always = size(sum(curve.held.values()))
    return "\n".join([f"rank {curve.rank}: {size(curve.peak)} at the peak", *lines, f"on {always}"])
