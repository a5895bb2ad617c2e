"""Cuts and schedule decided together: a `Plan`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pfeife.plan import SENDS, Action, Do, Kind, Machine, Plan, Schedule
from pfeife.program import Program, Role
from pfeife.sched.cuts import balanced, borders, cheap_to_recompute, clusters_of, marked, split_at
from pfeife.sched.lower import chain, insert_actions
from pfeife.sched.policies import forward_only, policy
from pfeife.sched.simulate import simulate
from pfeife.sched.verify import verify_schedule


def plan(
    program: Program,
    *,
    machine: Machine,
    microbatches: int,
    stages: int | None = None,
    ranks: int | None = None,
    schedule: str = "1f1b",
    split: Mapping[str, str] | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """A plan for a fused and annotated program.

    With `split` (see `split_at`) or `stage_boundary` markers in the model the cuts are those;
    otherwise they minimise the seconds of the slowest stage under `memory_limit` bytes a rank
    (the machine's memory unless given). There are as many ranks as stages unless `ranks` says
    otherwise; more stages than ranks are dealt to them in turn.
    Raises ValueError if the wishes contradict each other or the program.
    """
    duplicated = cheap_to_recompute(program, machine)
    clusters = clusters_of(program, duplicated)
    by_hand = split_at(program, split) if split else marked(program)
    manual = split or by_hand[-1] > 0
    if manual and stages not in (None, by_hand[-1] + 1):
        raise ValueError(f"stages={stages}, but the cuts by hand make {by_hand[-1] + 1} stages")
    count = by_hand[-1] + 1 if manual else stages or 1
    trained = bool(program.ports(Role.TANGENT))
    placed = _dealt(count, ranks or count)
    order = (policy(schedule) if trained else forward_only)(count, microbatches, placed)
    stage_of = (
        by_hand
        if manual
        else balanced(
            clusters,
            count,
            machine=machine,
            in_flight=in_flight(order),
            memory_limit=memory_limit,
        )
    )
    seconds = _stage_seconds(program, stage_of)
    cuts = borders(stage_of)

    def action_seconds(action: Action) -> float:
        if action.do in SENDS:
            assert action.peer is not None
            both = clusters.crossing[cuts[max(action.stage, action.peer) - 1]]
            return machine.transfer_seconds(both // 2 if trained else both)
        kind = action.do.kind
        return seconds.get((action.stage, kind), 0.0) if kind else 0.0

    lowered = insert_actions(order, chain(order))
    return Plan(
        stage_of_cluster=stage_of,
        schedule=verify_schedule(order),
        duplicated=duplicated,
        stage_seconds=tuple(
            sum(s for (stage, _), s in seconds.items() if stage == one) for one in range(count)
        ),
        step_seconds=simulate(lowered, action_seconds).seconds,
    )


def _dealt(stages: int, ranks: int) -> tuple[int, ...]:
    if stages < ranks:
        raise ValueError(
            f"{stages} stages for {ranks} ranks: every rank needs a stage; start fewer processes "
            f"(torchrun --nproc-per-node {stages}), or ask for more stages or replicas"
        )
    return tuple(stage % ranks for stage in range(stages))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For every stage the most microbatches that are between forward and last backward."""
    peak = [0] * schedule.stages
    for actions in schedule.ranks:
        flying: Counter[int] = Counter()
        for action in actions:
            if action.do == Do.FORWARD:
                flying[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], flying[action.stage])
            elif action.do in (Do.BACKWARD, Do.WEIGHT_BACKWARD):
                flying[action.stage] -= 1
    return tuple(peak)


def _stage_seconds(program: Program, stage_of: Sequence[int]) -> dict[tuple[int, Kind], float]:
    seconds: dict[tuple[int, Kind], float] = {}
    for call in program.calls:
        key = (stage_of[call.unit], call.kind)
        seconds[key] = seconds.get(key, 0.0) + (call.seconds or 0.0)
    return seconds
