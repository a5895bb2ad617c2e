"""The graph of stages: where each runs, how its seconds compare, what it sends."""

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.cost import stage_memory
from pfeife.data.plan import Plan
from pfeife.data.units import count, duration, size
from pfeife.ir.messages import messages
from pfeife.ir.nodes import node_bytes, source_line
from pfeife.ir.parts import Call, Kind, Role
from pfeife.ir.program import Program
from pfeife.passes.compose import Recorded
from pfeife.passes.fuse import module_path
from pfeife.report.by_stage import held_names
from pfeife.report.page.elements import Html, table
from pfeife.report.page.figures import figure, line, points

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
    # From the last program with ranks: passes after the plan may have moved what a stage holds.
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
    numbers = {port.fqn: torch.Size(port.shape).numel() for port in program.ports(Role.PARAMETER)}
    pairs = zip(held_names(program, program.units), stage_memory(program), strict=True)
    return [
        f"{count(sum(numbers[name] for name in names))} ({size(memory.parameters)})"
        for names, memory in pairs
    ]


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

    # Between ranks a value is a message, which goes once to a rank however many stages read it;
    # between stages of one rank it is read where it lies.
    #
    #     rank 0   stage 0 --message--> rank 1   stage 1
    #                 \-- value ------> rank 0   stage 2
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


def stage_figure(stages: Sequence[Stage], program: Program | None) -> Any:
    """A figure of the stages from left to right, each in the row of its rank; None without."""
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
    nodes = points(
        [stage.index for stage in stages],
        [stage.rank for stage in stages],
        [_hover(stage, mean) for stage in stages],
        size=30,
        symbol="square",
        color=[round(share, 4) for share in shares],
        cmin=round(1 - spread, 4),
        cmax=round(1 + spread, 4),
        colorscale=[[0, "#56b4e9"], [0.5, "#ffffff"], [1, "#e69f00"]],
        colorbar=bar,
        line={"width": 1.2, "color": "#333333"},
    )
    numbers = {"mode": "markers+text", "text": [str(stage.index) for stage in stages]}
    return figure(
        [*edges, nodes | numbers | {"textfont": {"color": "#000000"}}],
        f"{len(stages)} stages on {ranks} ranks",
        height=200 + 44 * ranks,
        margin={"l": 70, "r": 20, "t": 70, "b": 50},
        xaxis={
            "title": {"text": "stage", "standoff": 34},
            "range": [-0.9, len(stages) - 0.1],
            "showgrid": False,
            "dtick": max(1, len(stages) // 16),
        },
        yaxis={
            "range": [ranks - 0.4, -0.6],
            "tickvals": list(range(ranks)),
            "ticktext": [f"rank {rank}" for rank in range(ranks)],
            "gridcolor": "rgba(128,128,128,.2)",
        },
        showlegend=False,
    )


def _hover(stage: Stage, mean: float) -> str:
    """plotly's own markup, in which names and lines of the model are text."""
    modules = escape(stage.between, quote=False)
    seconds = (f"{kind.value} {duration(each)}" for kind, each in stage.seconds.items())
    parts = [
        f"<b>stage {stage.index}</b> on rank {stage.rank}",
        f"{stage.clusters} clusters: {modules}" if stage.clusters else modules,
        f"{stage.parameters} of parameters",
        f"{duration(stage.total)} a microbatch, {stage.total / mean:.2f} of the mean: "
        + ", ".join(seconds),
        *(escape(code, quote=False) for code in stage.lines),
    ]
    return "<br>".join(part for part in parts if part)


def _edges(
    places: Mapping[int, tuple[int, int]], sent: Mapping[tuple[int, int], Mapping[Kind, int]]
) -> list[dict[str, Any]]:
    """Lines between stages, and the bytes on them."""
    forward = {pair: ways for pair, ways in sorted(sent.items()) if Kind.FORWARD in ways}
    curve_x, curve_y, middle_x, middle_y = (list[Any]() for _ in range(4))
    labels, hover = list[str](), list[str]()
    for (source, target), ways in forward.items():
        (x, y), (to_x, to_y) = places[source], places[target]
        bend = 0.0 if to_x - x == 1 else -0.28  # past the stages between
        shares = [step / 12 for step in range(13)]
        bent = [y + share * (to_y - y) + 4 * share * (1 - share) * bend for share in shares]
        curve_x += [*(round(x + share * (to_x - x), 4) for share in shares), None]
        curve_y += [*(round(height, 4) for height in bent), None]
        middle_x.append((x + to_x) / 2)
        middle_y.append(round((y + to_y) / 2 + bend, 4))
        goes, back = size(ways[Kind.FORWARD]), sent.get((target, source), {}).get(Kind.BACKWARD, 0)
        labels.append(goes.replace(".0 ", " "))
        hover.append(f"stage {source} to {target}: {goes} a microbatch, back {size(back)}")
    # More texts would lie on one another; all can be pointed at.
    mode = "markers+text" if len(forward) <= 24 else "markers"
    text = {"mode": mode, "text": labels, "textposition": "middle right", "cliponaxis": False}
    return [
        line("", curve_x, curve_y, width=1.2, color="#888888"),
        points(middle_x, middle_y, hover, size=6, color="#888888") | text,
    ]
