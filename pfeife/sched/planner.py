"""Cuts and schedule decided together: a `Plan`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pfeife.plan import SENDS, Action, Do, Kind, Machine, Network, Plan, Schedule
from pfeife.program import Program, Role
from pfeife.sched.cuts import (
    Clusters,
    balanced,
    borders,
    cheap_to_recompute,
    clusters_of,
    marked,
)
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
    cuts: Sequence[int] | None = None,
    memory_limit: int | None = None,
    network: Network | None = None,
) -> Plan:
    """A plan for a fused and annotated program.

    `cuts` has the stage of every cluster (see `split_at` and `follow`). Without it the cuts are
    the `stage_boundary` markers in the model; without those they minimise the seconds of the
    slowest stage under `memory_limit` bytes a rank (the machine's memory unless given). There are
    as many ranks as stages unless `ranks` says otherwise; more stages than ranks are dealt to
    them in turn and share the limit equally.
    A measured `network` takes the place of the machine's figures for links.
    Raises ValueError if the wishes contradict each other or the program.
    """
    machine = network.seen_by(machine) if network else machine
    duplicated = cheap_to_recompute(program, machine)
    clusters = clusters_of(program, duplicated)
    by_hand = _cuts_by_hand(program, cuts, stages)
    count = by_hand[-1] + 1 if by_hand else stages or 1
    placed = _dealt(count, ranks or count)
    trained = bool(program.ports(Role.TANGENT))
    order = (policy(schedule) if trained else forward_only)(count, microbatches, placed)
    stage_of = by_hand or balanced(
        clusters,
        count,
        machine=machine,
        in_flight=in_flight(order),
        memory_limit=(memory_limit or machine.memory) // max(Counter(placed).values()),
    )
    seconds = _stage_seconds(program, stage_of)
    return Plan(
        stage_of_cluster=stage_of,
        schedule=verify_schedule(order),
        duplicated=duplicated,
        stage_seconds=tuple(
            sum(s for (stage, _), s in seconds.items() if stage == one) for one in range(count)
        ),
        step_seconds=_step_seconds(order, seconds, clusters, stage_of, machine),
    )


def _cuts_by_hand(
    program: Program, cuts: Sequence[int] | None, stages: int | None
) -> tuple[int, ...] | None:
    found = tuple(cuts) if cuts else marked(program)
    if not cuts and found[-1] == 0:
        return None
    if len(found) != program.units:
        raise ValueError(f"cuts for {len(found)} clusters, the program has {program.units}")
    if stages not in (None, found[-1] + 1):
        raise ValueError(f"stages={stages}, but the cuts by hand make {found[-1] + 1} stages")
    return found


def _step_seconds(
    order: Schedule,
    seconds: Mapping[tuple[int, Kind], float],
    clusters: Clusters,
    stage_of: Sequence[int],
    machine: Machine,
) -> float:
    """The simulated step, what crosses a border going half forwards and half backwards."""
    cuts = borders(stage_of)
    ways = 2 if any(kind != Kind.FORWARD for _, kind in seconds) else 1

    def action_seconds(action: Action) -> float:
        if action.do in SENDS:
            assert action.peer is not None
            crossing = clusters.crossing[cuts[max(action.stage, action.peer) - 1]]
            return machine.transfer_seconds(crossing // ways)
        kind = action.do.kind
        return seconds.get((action.stage, kind), 0.0) if kind else 0.0

    return simulate(insert_actions(order, chain(order)), action_seconds).seconds


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
