"""A schedule of a real program in predicted time."""

from collections.abc import Callable

from pfeife.plan import SENDS, Action, Do, Machine, Network, Schedule, Timeline
from pfeife.program import Program, Role, messages
from pfeife.sched.lower import transfer_of
from pfeife.sched.simulate import simulate


def predict(
    program: Program, schedule: Schedule, machine: Machine, network: Network | None = None
) -> Timeline:
    """The timeline of a lowered schedule of a program with messages and costs.

    A computation takes the seconds of its calls (see `annotate`), a transfer what the measured
    `network` says, else the machine's latency and its bytes over the link; a reduction over n
    ranks takes 2 (n - 1) / n of its bytes (ring all-reduce; Patarasuk and Yuan, JPDC 2009) and
    2 (n - 1) latencies of the machine's link. Every action also takes the rank the machine's
    `action_seconds`. Raises ValueError if a call has no cost.
    """
    seconds = action_seconds(program, machine, network)
    return simulate(schedule, seconds, machine.action_seconds)


def action_seconds(
    program: Program, machine: Machine, network: Network | None = None
) -> Callable[[Action], float]:
    """How long every action of a program takes; for a send, its transfer."""
    missing = [call.node for call in program.calls if call.seconds is None]
    if missing:
        raise ValueError(f"{missing} have no costs; annotate the program first")
    transfers = {}
    for message in messages(program):
        one = transfer_of(program, message)
        transfers[one.send(None)] = (
            network.transfer_seconds(message.source, message.destination, message.bytes)
            if network
            else machine.transfer_seconds(message.bytes)
        )
    sizes = {port.fqn: port.bytes for port in program.ports(Role.GRADIENT)}
    reduced: dict[int, float] = {}
    for reduction in program.reductions:
        count = len(reduction.ranks) * reduction.replicas
        bytes_ = 2 * (count - 1) / count * sizes[reduction.name]
        seconds = 2 * (count - 1) * machine.link_latency + bytes_ / machine.link_bandwidth
        bucket = reduction.stages[0]
        reduced[bucket] = reduced.get(bucket, 0.0) + seconds

    def seconds_of(action: Action) -> float:
        if action.do in SENDS:
            return transfers[Action(action.stage, action.do, None, action.peer)]
        if action.do == Do.REDUCE_GRAD:
            return reduced.get(action.stage, 0.0)
        first = action.microbatch == 0  # its gradients are the first of the sums
        return sum(
            (call.seconds or 0.0) + (0.0 if first else call.accumulate_seconds)
            for call in program.calls
            if call.unit == action.stage and action.runs(call.kind)
        )

    return seconds_of
