"""The forecast of a plan, from its programs and its predicted timeline."""

from collections.abc import Mapping, Sequence

import torch

from pfeife.cost.estimate import telling_seconds
from pfeife.data.forecast import Forecast, RankForecast, StageForecast, Wait
from pfeife.data.machine import Machine
from pfeife.data.plan import Plan
from pfeife.data.schedule import RECEIVES, SENDS, Do
from pfeife.data.timeline import Event, Timeline
from pfeife.ir.flops import flops_of
from pfeife.ir.microbatch import rows_and_tokens
from pfeife.ir.parts import Kind, Port, Role
from pfeife.ir.program import Program
from pfeife.report.by_stage import held_names, sent_bytes
from pfeife.report.run import Run, Target


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
    # Each type has a peak of its own: a step in bfloat16 may have its loss in float32.
    peak = sum(number / machine.peak_of(dtype) for dtype, number in flops.items())
    samples, tokens = rows_and_tokens(program)
    step = run.timeline.seconds
    return Forecast(
        machine=machine.name,
        schedule=schedule,
        ranks=ranks,
        replicas=replicas,
        microbatches=count,
        parameters=sum(map(_elements, program.ports(Role.PARAMETER))),
        samples=count * samples,
        tokens=count * tokens,
        step_seconds=step,
        # The bound is of the planner's own costs, the step of the program's: it may be the lesser.
        bound_seconds=None if plan.bound_seconds is None else min(plan.bound_seconds, step),
        flops=count * sum(flops.values()) * program.members,
        peak_seconds=count * peak / (ranks * replicas),
        memory_limit=machine.memory if target.limit is None else target.limit,
        stages=tuple(_stages(plan, clusters, program, machine)),
        by_rank=tuple(_ranks(run, ranks)),
        # Without a critical path all that ranks do is looked at, which is still the longest first.
        waits=waits_of(run.path or run.timeline, plan.stage_ranks, run.telling),
        parameter_bytes=sum(map(_bytes, program.ports(Role.PARAMETER))),
        members=program.members,
        shared_out=any(reduction.owner is not None for reduction in program.reductions),
    )


def _elements(port: Port) -> int:
    """Those of a parameter, on all members of a group."""
    return torch.Size(port.split.whole(port.shape) if port.split else port.shape).numel()


def _bytes(port: Port) -> int:
    return _elements(port) * port.dtype.itemsize


def _stages(
    plan: Plan, clusters: Program, program: Program, machine: Machine
) -> list[StageForecast]:
    seconds: dict[tuple[int, bool], float] = {}
    adding, telling = ([0.0] * plan.stages for _ in range(2))
    for call in program.calls:
        telling[call.unit] += telling_seconds(program.body(call), machine)
        key = call.unit, call.kind == Kind.FORWARD
        seconds[key] = seconds.get(key, 0.0) + (call.seconds or 0.0)
        adding[call.unit] += call.accumulate_seconds
    sent = sent_bytes(program, plan.stages)
    ports = {port.fqn: port for port in program.ports(Role.PARAMETER)}
    held = [[ports[name] for name in names] for names in held_names(program, plan.stages)]
    # A plan without recomputation has no options at all.
    again = [option.extra_seconds for option in plan.recompute] or [0.0] * plan.stages
    paths = layers_of(clusters, plan)
    return [
        StageForecast(
            stage=stage,
            rank=plan.stage_ranks[stage],
            first=paths[stage][0],
            last=paths[stage][1],
            clusters=plan.stage_of_cluster.count(stage),
            parameters=sum(map(_elements, held[stage])),
            forward_seconds=seconds.get((stage, True), 0.0),
            backward_seconds=seconds.get((stage, False), 0.0),
            sent_bytes=sent[stage],
            parameter_bytes=sum(map(_bytes, held[stage])),
            again_seconds=again[stage],
            adding_seconds=adding[stage],
            telling_seconds=telling[stage],
        )
        for stage in range(plan.stages)
    ]


def layers_of(clusters: Program, plan: Plan) -> list[tuple[str, str]]:
    """For every stage of a plan the modules that its first and its last operation are in."""
    paths_of: list[list[str]] = [[] for _ in range(plan.stages)]
    for unit in range(clusters.units):
        for node in clusters.body(clusters.call(Kind.FORWARD, unit)).graph.nodes:
            path = node.meta.get("module_path")
            if node.op == "call_function" and path:
                paths_of[plan.stage_of_cluster[unit]].append(str(path))
    return [(paths[0], paths[-1]) if paths else ("", "") for paths in paths_of]


def _ranks(run: Run, count: int) -> list[RankForecast]:
    whole = run.timeline.seconds
    busy = [0.0] * count
    for event in run.timeline.events:
        # Messages and reductions run beside computing: a rank that only does these has a bubble.
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


def waits_of(
    path: Timeline,
    stage_ranks: Sequence[int],
    telling: Mapping[tuple[int, Kind], float] | None = None,
) -> tuple[Wait, ...]:
    """The critical path of a step by who does what, the longest part first; `telling` as in
    `Run`."""
    seconds_of: dict[tuple[str, str], list[float]] = {}
    for event in path.events:
        for what, kind, share in _doing(event, stage_ranks, telling or {}):
            if event.end > event.start:
                seconds = share * (event.end - event.start)
                seconds_of.setdefault((what, kind), []).append(seconds)
    # An empty step has no parts, and so no division.
    whole = path.seconds or 1.0
    parts = [
        Wait(what, len(each), sum(each), min(sum(each) / whole, 1.0), kind)
        for (what, kind), each in seconds_of.items()
    ]
    return tuple(sorted(parts, key=lambda wait: -wait.seconds))


def _doing(
    event: Event, stage_ranks: Sequence[int], telling: Mapping[tuple[int, Kind], float]
) -> list[tuple[str, str, float]]:
    """What is done, of which kind that is, and for which share of the event."""
    action, rank = event.action, event.rank
    if action.do in RECEIVES and action.peer is not None:
        source = stage_ranks[action.peer]
        return [(f"the link from rank {source} to rank {rank} carries messages", "messages", 1.0)]
    if action.do == Do.REDUCE_GRAD:
        return [(f"rank {rank} reduces gradients", "reduces", 1.0)]
    if action.do == Do.UNSHARD:
        return [(f"members of rank {rank} tell one another parameters", "reduces", 1.0)]
    if action.do in SENDS:
        return [(f"rank {rank} sends", "messages", 1.0)]
    if not action.do.kind:
        return [(f"rank {rank}: {action.do.words}", "computes", 1.0)]
    told = telling.get((action.stage, action.do.kind), 0.0)
    computes = (f"rank {rank} computes", "computes", 1.0 - told)
    members = (f"members of rank {rank} tell one another", "members", told)
    return [computes, members] if told else [computes]
