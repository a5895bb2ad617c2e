"""A schedule of a real program in predicted time."""

from collections.abc import Callable

from pfeife.data.machine import Machine, Network
from pfeife.data.schedule import SENDS, Action, Do, Schedule
from pfeife.data.timeline import Timeline
from pfeife.ir.program import Message, Program, Role, find_node, messages, node_bytes
from pfeife.lowering.lower import transfer_of
from pfeife.lowering.simulate import simulate


def predict(
    program: Program, schedule: Schedule, machine: Machine, network: Network | None = None
) -> Timeline:
    """The timeline of a lowered schedule of a program with messages and costs.

    A computation takes the seconds of its calls (see `annotate`), from the second microbatch on
    with the adding up of its gradients. A transfer takes what the measured `network` says, also
    of the two ranks' time; else the machine's latency and its bytes over the link, and as much of
    the ranks' time as the machine does not overlap. A reduction over n
    ranks takes 2 (n - 1) / n of its bytes (ring all-reduce; Patarasuk and Yuan, JPDC 2009) and
    2 (n - 1) latencies of the machine's link. Every action also takes the rank the machine's
    `action_seconds`. Raises ValueError if a call has no cost.
    """
    seconds = action_seconds(program, machine, network)
    occupied = occupied_seconds(program, machine, network)
    return simulate(schedule, seconds, machine.action_seconds, occupied)


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
            _transfer_seconds(program, message, network)
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


def _sizes(program: Program, message: Message) -> list[int]:
    """Bytes of the values of a message, which travel one by one."""
    return [node_bytes(find_node(program.module, name)) for name in message.values]


def _transfer_seconds(program: Program, message: Message, network: Network) -> float:
    """Until the last value has arrived, each being sent when the rank is done with the one
    before."""
    link = network.link(message.source, message.destination)
    *before, last = _sizes(program, message)
    return sum(map(link.send_seconds, before)) + link.transfer_seconds(last)


def occupied_seconds(
    program: Program, machine: Machine, network: Network | None = None
) -> Callable[[Action], float]:
    """What every send and receive of a program takes of its rank's time."""
    found: dict[Action, float] = {}
    for message in messages(program):
        one = transfer_of(program, message)
        if network:
            link = network.link(message.source, message.destination)
            sizes = _sizes(program, message)
            found[one.send(None)] = sum(map(link.send_seconds, sizes))
            found[one.receive(None)] = sum(map(link.receive_seconds, sizes))
        else:
            share = (1 - machine.overlap) * machine.transfer_seconds(message.bytes)
            found[one.send(None)] = found[one.receive(None)] = share

    def seconds_of(action: Action) -> float:
        return found[Action(action.stage, action.do, None, action.peer)]

    return seconds_of
