"""The forecast of a plan, from its programs and its predicted timeline, and as a text."""

import csv
import io
from collections.abc import Sequence

import attrs
import torch

from pfeife.data.forecast import Forecast, RankForecast, StageForecast, Wait
from pfeife.data.plan import Plan
from pfeife.data.schedule import RECEIVES, Do
from pfeife.data.timeline import Event, Timeline
from pfeife.data.units import count
from pfeife.ir.batch import rows_and_tokens
from pfeife.ir.flops import flops_of
from pfeife.ir.program import Kind, Program, Role
from pfeife.ir.travel import holders, messages
from pfeife.report.run import Run, Target
from pfeife.report.tables import size, table


def forecast_of(
    plan: Plan, clusters: Program, program: Program, run: Run, target: Target, schedule: str
) -> Forecast:
    """The figures of a plan from the program of the `clusters` that it is for, that of its ranks,
    and the `run` that is `expected` of it on a target; `schedule` is what its schedule is
    called."""
    machine = target.machine
    ranks, replicas = len(plan.schedule.ranks), program.replicas
    count = plan.schedule.microbatches * replicas
    flops = flops_of(clusters)
    peak = sum(number / machine.peak_of(dtype) for dtype, number in flops.items())
    samples, tokens = rows_and_tokens(program)
    step = run.timeline.seconds
    return Forecast(
        machine=machine.name,
        schedule=schedule,
        ranks=ranks,
        replicas=replicas,
        microbatches=count,
        parameters=sum(torch.Size(p.shape).numel() for p in program.ports(Role.PARAMETER)),
        samples=count * samples,
        tokens=count * tokens,
        step_seconds=step,
        bound_seconds=None if plan.bound_seconds is None else min(plan.bound_seconds, step),
        flops=count * sum(flops.values()),
        peak_seconds=count * peak / (ranks * replicas),
        memory_limit=machine.memory if target.limit is None else target.limit,
        stages=tuple(_stages(plan, clusters, program)),
        by_rank=tuple(_ranks(run, ranks)),
        waits=waits_of(run.path or run.timeline, plan.stage_ranks),
    )


def _stages(plan: Plan, clusters: Program, program: Program) -> list[StageForecast]:
    seconds: dict[tuple[int, bool], float] = {}
    for call in program.calls:
        key = call.unit, call.kind == Kind.FORWARD
        seconds[key] = seconds.get(key, 0.0) + (call.seconds or 0.0)
    sent = [0] * plan.stages
    for message in messages(program):
        sent[message.sender.unit] += message.bytes
    held = [0] * plan.stages
    sizes = {port.fqn: torch.Size(port.shape).numel() for port in program.ports(Role.PARAMETER)}
    for name, calls in holders(program).items():
        for unit in {call.unit for call in calls}:
            held[unit] += sizes[name]
    paths = layers_of(clusters, plan)
    return [
        StageForecast(
            stage=stage,
            rank=plan.stage_ranks[stage],
            first=paths[stage][0],
            last=paths[stage][1],
            clusters=plan.stage_of_cluster.count(stage),
            parameters=held[stage],
            forward_seconds=seconds.get((stage, True), 0.0),
            backward_seconds=seconds.get((stage, False), 0.0),
            sent_bytes=sent[stage],
        )
        for stage in range(plan.stages)
    ]


def layers_of(clusters: Program, plan: Plan) -> list[tuple[str, str]]:
    """For every stage of a plan the modules that its first and its last operation are in."""
    found: list[list[str]] = [[] for _ in range(plan.stages)]
    for unit in range(clusters.units):
        for node in clusters.body(clusters.call(Kind.FORWARD, unit)).graph.nodes:
            path = node.meta.get("module_path")
            if node.op == "call_function" and path:
                found[plan.stage_of_cluster[unit]].append(str(path))
    return [(paths[0], paths[-1]) if paths else ("", "") for paths in found]


def _ranks(run: Run, count: int) -> list[RankForecast]:
    whole = run.timeline.seconds
    busy = [0.0] * count
    for event in run.timeline.events:
        if event.action.do.kind:
            busy[event.rank] += event.end - event.start
    return [
        RankForecast(
            rank=curve.rank,
            computing_seconds=busy[curve.rank],
            bubble=min(max(1 - busy[curve.rank] / whole, 0.0), 1.0) if whole else 0.0,
            bytes=curve.held | {word: n for word, n in curve.at_peak.items() if n},
        )
        for curve in run.memory
    ]


def waits_of(path: Timeline, stage_ranks: Sequence[int]) -> tuple[Wait, ...]:
    """The critical path of a step by who does what, the longest part first."""
    found: dict[str, list[float]] = {}
    for event in path.events:
        if event.end > event.start:
            found.setdefault(_doing(event, stage_ranks), []).append(event.end - event.start)
    whole = path.seconds or 1.0
    parts = [
        Wait(what, len(each), sum(each), min(sum(each) / whole, 1.0))
        for what, each in found.items()
    ]
    return tuple(sorted(parts, key=lambda one: -one.seconds))


def _doing(event: Event, stage_ranks: Sequence[int]) -> str:
    action = event.action
    if action.do in RECEIVES and action.peer is not None:
        return (
            f"the link from rank {stage_ranks[action.peer]} to rank {event.rank} carries messages"
        )
    if action.do == Do.REDUCE_GRAD:
        return f"rank {event.rank} reduces gradients"
    return f"rank {event.rank} computes" if action.do.kind else f"rank {event.rank} sends"


def forecast_table(found: Forecast) -> str:
    """A row a stage, a row a rank, and what it comes to."""
    stages = [
        (
            one.stage,
            one.rank,
            one.first,
            one.last,
            count(one.parameters),
            f"{1e3 * one.forward_seconds:.2f} ms",
            f"{1e3 * one.backward_seconds:.2f} ms",
            size(one.sent_bytes),
        )
        for one in found.stages
    ]
    head = ("stage", "rank", "from", "to", "parameters", "forward", "backward", "sends")
    words = list(dict.fromkeys(word for one in found.by_rank for word in one.bytes))
    ranks = [
        (
            one.rank,
            f"{one.computing_seconds:.3g} s",
            f"{one.bubble:.1%}",
            *(size(one.bytes.get(word, 0)) for word in words),
            size(one.peak_bytes),
        )
        for one in found.by_rank
    ]
    return "\n\n".join(
        [
            table(stages, head),
            table(ranks, ("rank", "computes", "bubble", *words, "peak")),
            forecast_summary(found),
        ]
    )


def forecast_summary(found: Forecast) -> str:
    """Step, rates, utilization, bound, memory and what limits the step, a line each."""
    rate = f"{count(found.samples_per_second)} samples/s"
    if found.tokens:
        each = found.tokens_per_second / found.world
        rate = f"{count(found.tokens_per_second)} tokens/s ({count(each)} a rank), {rate}"
    of = f"{found.replicas} x {found.ranks}" if found.replicas > 1 else f"{found.ranks}"
    lines = [
        ("plan", f"{found.schedule}, {of} ranks of {found.machine}, {len(found.stages)} stages, "
         f"{found.microbatches} microbatches, {count(found.parameters)} parameters"),
        *([("network", found.network)] if found.network else []),
        ("step", f"{found.step_seconds:.4g} s: {rate}"),
        ("MFU", f"{found.utilization:.1%} = {count(found.flops)}FLOP / ({found.world} ranks x "
         f"{count(_peak(found))}FLOP/s x {found.step_seconds:.4g} s)"),
        ("bubble", f"{found.bubble:.1%} of the ranks' time"),
    ]  # fmt: skip
    if found.gap is not None:
        lines.append(("bound", f"{found.bound_seconds:.4g} s for these stages, the step is "
                      f"{found.gap:.1%} over it"))  # fmt: skip
    lines.append(("memory", f"{size(found.peak_bytes)} on the fullest rank, of "
                  f"{size(found.memory_limit)}"))  # fmt: skip
    lines.append(("limit", found.limited_by))
    return "\n".join(f"{word:7} {text}" for word, text in lines)


def _peak(found: Forecast) -> float:
    """Operations per second of a rank at its peak, over the dtypes of the step."""
    return found.flops / (found.world * found.peak_seconds) if found.peak_seconds else 0.0


def forecast_csv(found: Forecast) -> str:
    """A row a stage, with the figures of its rank beside it."""
    by_rank = {one.rank: one for one in found.by_rank}
    words = list(dict.fromkeys(word for one in found.by_rank for word in one.bytes))
    names = [field.name for field in attrs.fields(StageForecast)]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*names, "computing_seconds", "bubble", "peak_bytes", *words])
    for one in found.stages:
        rank = by_rank[one.rank]
        rows.writerow(
            [
                *(getattr(one, name) for name in names),
                rank.computing_seconds,
                rank.bubble,
                rank.peak_bytes,
                *(rank.bytes.get(word, 0) for word in words),
            ]
        )
    return text.getvalue()
