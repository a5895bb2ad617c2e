"""One step as it is shown: its timeline, what it waits for, and the bytes of its ranks."""

import functools
from collections.abc import Iterator, Mapping

import attrs

from pfeife.cost import memory_curves
from pfeife.cost.estimate import telling_seconds
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import MemoryCurve, Timeline
from pfeife.ir.parts import Kind
from pfeife.ir.program import Program
from pfeife.lowering.critical import critical_path
from pfeife.lowering.predict import occupied_seconds, predict


@attrs.frozen
class Run:
    """A step, predicted or measured: when each action ran, what each rank held, and the chain of
    events that takes as long as the step (`sched.critical_path`; of a prediction alone). `telling`
    is the share of a stage's calls, by their kind, in which its members tell one another."""

    timeline: Timeline
    memory: tuple[MemoryCurve, ...] = ()
    path: Timeline | None = None
    telling: Mapping[tuple[int, Kind], float] = attrs.field(factory=dict)

    def moments(self, curve: MemoryCurve) -> Iterator[tuple[float, int]]:
        """When a rank has how many bytes, in the order of time: each until the next one."""
        # A curve has bytes by actions, a timeline has the seconds of these: together they are bytes
        # over time.
        always, last = sum(curve.held.values()), 0
        times = {e.action: (e.start, e.end) for e in self.timeline.events if e.rank == curve.rank}
        yield 0.0, always
        for point in curve.points:
            if point.action in times:
                # The peak of an action counts from its start on, what it leaves from its end.
                for moment, beside in zip(
                    times[point.action], (point.peak, point.after), strict=True
                ):
                    # Most actions leave what was there: a drawing is half as long without them.
                    if beside != last:
                        yield moment, always + beside
                        last = beside
        yield self.timeline.seconds, always + last


@attrs.frozen
class Target:
    """What a step is planned for: the figures of `sched.predict`, and the arguments of
    `memory_curves`."""

    machine: Machine
    network: Network | None = None
    between: Network | None = None
    optimizer: Optimizer | None = None
    limit: int | None = None  # bytes a rank
    apart: bool = False


def expected(program: Program, schedule: Schedule, target: Target) -> Run:
    """What a lowered schedule of a program with costs will take. Raises ValueError if a call has no
    cost.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> core, clusters = machine("cpu-core"), pfeife.fuse()(flat)
    >>> clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    >>> plan = pfeife.Plan((0, 1), sched.families.one_f_one_b(2, 4))
    >>> ranks = pfeife.apply(plan)(clusters)
    >>> run = report.expected(ranks, sched.lower(plan.schedule, ranks), report.Target(core))
    >>> run.timeline.seconds == run.path.seconds, len(run.memory)
    (True, 2)
    """
    links = target.machine, target.network, target.between
    timeline = predict(program, schedule, *links)
    # The critical path asks for the same action again and again.
    occupied = functools.cache(occupied_seconds(program, *links))
    path = critical_path(timeline, occupied, target.machine.action_seconds)
    curves = memory_curves(program, schedule, optimizer=target.optimizer, apart=target.apart)
    return Run(timeline, curves, path, _telling(program, target.machine))


def _telling(program: Program, machine: Machine) -> dict[tuple[int, Kind], float]:
    return {
        (call.unit, call.kind): telling_seconds(program.body(call), machine) / call.seconds
        for call in program.calls
        if call.seconds and program.members > 1
    }
