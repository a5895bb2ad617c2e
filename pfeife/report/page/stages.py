"""The graph of stages: where each runs, how its seconds compare, what it sends."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.cost import stage_memory
from pfeife.data.plan import Plan
from pfeife.data.units import count, duration, size
from pfeife.ir.messages import holders, messages
from pfeife.ir.nodes import node_bytes, source_line
from pfeife.ir.parts import Call, Kind, Role
from pfeife.ir.program import Program
from pfeife.passes.compose import Recorded
from pfeife.passes.fuse import module_path
from pfeife.report.page.elements import Figure, Html, table

_LINES = 3  # of the model, that a stage shows


@attrs.frozen
class Stage:
    """What is known of a stage: its parameters counted and in bytes, and the seconds of one
    microbatch."""

    index: int
    rank: int
    clusters: int
    modules: tuple[str, ...]
    lines: tuple[str, ...]
    parameters: str
    seconds: Mapping[Kind, float]

    @property
    def total(self) -> float:
        """Seconds of all its calls."""
        return sum(self.seconds.values())

    @property
    def between(self) -> str:
        """Its first module and its last."""
        if not self.modules:
            return ""
        first, last = self.modules[0], self.modules[-1]
        return first if first == last else f"{first} .. {last}"


def stages_of(history: Sequence[Recorded], plan: Plan) -> tuple[Stage, ...]:
    """The stages of the last program with ranks; none if there is no such program."""
    program = ranked(history)
    if program is None:
        return ()
    held = _parameters(program)
    stages = []
    for index in range(program.units):
        calls = [call for call in program.calls if call.unit == index]
        forward = [
            node for call in calls if call.kind == Kind.FORWARD for node in _nodes(program, call)
        ]
        seconds = {call.kind: call.seconds or 0.0 for call in calls}
        stages.append(
            Stage(
                index,
                next((call.rank or 0 for call in calls), 0),
                plan.stage_of_cluster.count(index),
                tuple(dict.fromkeys(path for node in forward if (path := module_path(node)))),
                _heaviest(forward),
                held[index],
                seconds,
            )
        )
    return tuple(stages)


def _parameters(program: Program) -> list[str]:
    """By stages, their parameters: how many, and their bytes."""
    counts = [0] * program.units
    numbers = {port.fqn: torch.Size(port.shape).numel() for port in program.ports(Role.PARAMETER)}
    for name, calls in holders(program).items():
        for unit in {call.unit for call in calls}:
            counts[unit] += numbers[name]
    pairs = zip(counts, stage_memory(program), strict=True)
    return [f"{count(number)} ({size(memory.parameters)})" for number, memory in pairs]


def ranked(history: Sequence[Recorded]) -> Program | None:
    """The last program whose calls have ranks."""
    programs = (record.program for record in reversed(history) if record.program.calls)
    return next((p for p in programs if all(c.rank is not None for c in p.calls)), None)


def _nodes(program: Program, call: Call) -> list[fx.Node]:
    return [node for node in program.body(call).graph.nodes if node.op == "call_function"]


def _heaviest(nodes: Sequence[fx.Node]) -> tuple[str, ...]:
    """The lines of the model that make the most bytes."""
    bytes_: dict[str, int] = {}
    for node in nodes:
        if node.meta.get("stack_trace"):
            line = source_line(node)
            bytes_[line] = bytes_.get(line, 0) + node_bytes(node)
    return tuple(sorted(bytes_, key=lambda line: -bytes_[line])[:_LINES])


def _sent(program: Program) -> dict[tuple[int, int], dict[Kind, int]]:
    """By two stages, what goes from one to the other in the forward and in the backward: messages,
    and values that stay on their rank; each once, however many read it."""
    sent: dict[tuple[int, int], dict[Kind, int]] = {}

    def add(source: Call, target: int, size: int) -> None:
        ways = sent.setdefault((source.unit, target), {})
        way = Kind.FORWARD if source.kind == Kind.FORWARD else Kind.BACKWARD
        ways[way] = ways.get(way, 0) + size

    for message in messages(program):
        add(message.sender, message.reader, message.bytes)
    calls = {call.node: call for call in program.calls}
    seen: set[tuple[fx.Node, int]] = set()
    for node in program.module.graph.nodes:
        reader = calls.get(node.name)
        for value in node.all_input_nodes if reader else ():
            # A call gives several values; each is taken out by a node of its own.
            maker = calls.get(value.all_input_nodes[0].name) if value.all_input_nodes else None
            if reader and maker and maker.unit != reader.unit and (value, reader.unit) not in seen:
                seen.add((value, reader.unit))
                add(maker, reader.unit, node_bytes(value))
    return sent


def stage_table(stages: Sequence[Stage]) -> Html | None:
    """A row a stage."""
    if not stages:
        return None
    rows = [
        (
            stage.index,
            stage.rank,
            stage.clusters or "",
            stage.between,
            stage.parameters,
            duration(stage.total),
            *(duration(stage.seconds[kind]) if kind in stage.seconds else "" for kind in Kind),
        )
        for stage in stages
    ]
    head = ("stage", "rank", "clusters", "modules", "parameters", "time of a microbatch")
    return table(rows, (*head, *(kind.value for kind in Kind)), "Stages")


def stage_figure(stages: Sequence[Stage], program: Program | None) -> Figure | None:
    """Stages from left to right, each in the row of its rank."""
    if not stages or program is None:
        return None
    ranks = 1 + max(stage.rank for stage in stages)
    places = {stage.index: (stage.index, stage.rank) for stage in stages}
    mean = statistics.fmean(stage.total for stage in stages) or 1.0
    shares = [stage.total / mean for stage in stages]
    # Where all stages take about as long, none shall stand out.
    spread = max(0.1, *(abs(share - 1) for share in shares))
    edges = _edges(places, _sent(program))
    bar = {"tickformat": ".2f", "thickness": 10, "orientation": "h", "len": 0.5, "x": 1}
    bar |= {"xanchor": "right", "y": 1, "yanchor": "bottom"}
    bar["title"] = {"text": "time over the mean", "side": "top"}
    nodes = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [stage.index for stage in stages],
        "y": [stage.rank for stage in stages],
        "text": [str(stage.index) for stage in stages],
        "textfont": {"color": "#000000"},
        "hovertext": [_hover(stage, mean) for stage in stages],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {
            "size": 30,
            "symbol": "square",
            "color": [round(share, 4) for share in shares],
            "cmin": round(1 - spread, 4),
            "cmax": round(1 + spread, 4),
            "colorscale": [[0, "#56b4e9"], [0.5, "#ffffff"], [1, "#e69f00"]],
            "colorbar": bar,
            "line": {"width": 1.2, "color": "#333333"},
        },
        "showlegend": False,
    }
    layout = {
        "height": 200 + 44 * ranks,
        "margin": {"l": 70, "r": 20, "t": 70, "b": 50},
        "xaxis": {
            "title": {"text": "stage", "standoff": 34},
            "range": [-0.9, len(stages) - 0.1],
            "zeroline": False,
            "showgrid": False,
            "dtick": max(1, len(stages) // 16),
        },
        "yaxis": {
            "range": [ranks - 0.4, -0.6],
            "tickvals": list(range(ranks)),
            "ticktext": [f"rank {rank}" for rank in range(ranks)],
            "zeroline": False,
            "gridcolor": "rgba(128,128,128,.2)",
        },
        "hovermode": "closest",
        "showlegend": False,
    }
    return Figure("stages", f"{len(stages)} stages on {ranks} ranks", [*edges, nodes], layout)


def _hover(stage: Stage, mean: float) -> str:
    """plotly's own markup; it leaves out what it does not know."""
    parts = [
        f"<b>stage {stage.index}</b> on rank {stage.rank}",
        f"{stage.clusters} clusters: {plain(stage.between)}"
        if stage.clusters
        else plain(stage.between),
        f"{stage.parameters} of parameters",
        f"{duration(stage.total)} a microbatch, {stage.total / mean:.2f} of the mean: "
        + ", ".join(f"{kind.value} {duration(seconds)}" for kind, seconds in stage.seconds.items()),
        *map(plain, stage.lines),
    ]
    return "<br>".join(part for part in parts if part)


def plain(text: str) -> str:
    """A text in which plotly sees no markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _edges(
    places: Mapping[int, tuple[int, int]], sent: Mapping[tuple[int, int], Mapping[Kind, int]]
) -> list[dict[str, Any]]:
    """Lines between stages, and the bytes on them."""
    forward = {pair: ways for pair, ways in sent.items() if Kind.FORWARD in ways}
    lines: dict[str, list[Any]] = {"x": [], "y": []}
    marks: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "hovertext": []}
    for (source, target), ways in sorted(forward.items()):
        (x, y), (to_x, to_y) = places[source], places[target]
        bend = 0.0 if to_x - x == 1 else -0.28  # past the stages between
        middle = (x + to_x) / 2, (y + to_y) / 2 + bend
        for share in (step / 12 for step in range(13)):
            curve = 4 * share * (1 - share) * bend
            lines["x"].append(round(x + share * (to_x - x), 4))
            lines["y"].append(round(y + share * (to_y - y) + curve, 4))
        lines["x"].append(None)
        lines["y"].append(None)
        back = sent.get((target, source), {}).get(Kind.BACKWARD, 0)
        marks["x"].append(middle[0])
        marks["y"].append(round(middle[1], 4))
        marks["text"].append(size(ways[Kind.FORWARD]).replace(".0 ", " "))
        marks["hovertext"].append(
            f"stage {source} to {target}: {size(ways[Kind.FORWARD])} a microbatch, "
            f"back {size(back)}"
        )
    drawn = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", **lines}
    # More texts would lie on one another; all can be pointed at.
    labels = {"type": "scatter", "mode": "markers+text" if len(forward) <= 24 else "markers"}
    return [
        {**drawn, "line": {"width": 1.2, "color": "#888888"}},
        {
            **labels,
            **marks,
            "hovertemplate": "%{hovertext}<extra></extra>",
            "textposition": "middle right",
            "cliponaxis": False,
            "textfont": {"size": 12},
            "marker": {"size": 6, "color": "#888888"},
        },
    ]
