"""A schedule of a real program in predicted time."""

from collections.abc import Callable, Iterable

from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.schedule import SENDS, Action, Do, Schedule, received_as
from pfeife.data.timeline import Timeline
from pfeife.ir.messages import holders
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.lowering.buckets import buckets_of, most_told, told_together
from pfeife.lowering.envelope import Travel, travel
from pfeife.lowering.lower import transfer_of
from pfeife.lowering.simulate import simulate
from pfeife.lowering.wiring import Wiring


def predict(
    program: Program,
    schedule: Schedule,
    machine: Machine,
    network: Network | None = None,
    between: Network | None = None,
) -> Timeline:
    """The timeline of a lowered schedule of a program with messages and costs.

    A computation takes the seconds of its calls (see `annotate`), from the second microbatch on
    with the adding up of its gradients. A transfer takes what `travel` says of its envelope, also
    of the two ranks' time, over the measured `network`, else over the machine's link. A reduction
    takes what its buckets say (`Bucket.seconds`) on links that carry nothing else, of the slowest
    one's figures (among those `between` the replicas, where they are given), and of the rank's time
    what the machine does not `overlap`. What members of a group tell one another of parameters and
    gradients (see `kept_seconds`) counts with the first forward. Every action also takes the rank
    the machine's `action_seconds`. Raises ValueError if a call has no cost.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> core, clusters = machine("cpu-core"), pfeife.fuse()(flat)
    >>> clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    >>> plan = pfeife.Plan((0, 1), sched.families.one_f_one_b(2, 4))
    >>> ranks = pfeife.insert_send_recv()(pfeife.partition(plan)(clusters))
    >>> timeline = sched.predict(ranks, sched.lower(plan.schedule, ranks), core)
    >>> len(timeline.events), timeline.seconds < 1
    (32, True)
    """
    seconds = action_seconds(program, machine, network, between)
    occupied = occupied_seconds(program, machine, network, between)
    return simulate(schedule, seconds, machine.action_seconds, occupied)


def check_costs(program: Program) -> None:
    """Raises ValueError if a call of the program has no seconds."""
    missing = [call.node for call in program.calls if call.seconds is None]
    if missing:
        raise ValueError(f"{missing} have no costs; annotate the program first")


def action_seconds(
    program: Program,
    machine: Machine,
    network: Network | None = None,
    between: Network | None = None,
) -> Callable[[Action], float]:
    """How long every action of a program takes; for a send, its transfer."""
    check_costs(program)
    wiring = Wiring(program)
    sent = {_key(send): taken for send, taken in travels(program, machine, network).items()}
    computing: dict[tuple, float] = {}
    reduced = reduction_seconds(program, _slowest(machine, between or network))
    kept = kept_seconds(program, machine)

    def seconds_of(action: Action) -> float:
        if action.do in SENDS:
            return sent[_key(action)].arriving
        if action.do == Do.REDUCE_GRAD:
            return reduced.get(action.stage, 0.0)
        first = action.microbatch == 0  # its gradients are the first of the sums
        key = (action.stage, action.do, first)
        # All microbatches but the first take as long, so a step of thousands asks a few calls.
        if key not in computing:
            computing[key] = sum(
                (call.seconds or 0.0) + (0.0 if first else call.accumulate_seconds)
                for call in wiring.calls(action)
            )
            if first and action.do == Do.FORWARD:
                computing[key] += kept.get(action.stage, 0.0)
        return computing[key]

    return seconds_of


def reduction_seconds(program: Program, machine: Machine) -> dict[int, float]:
    """How long the reductions of an action take, by the stage that it is named after."""
    seconds_of: dict[int, float] = {}
    for bucket in buckets_of(program):
        stage = bucket.first.stages[0]
        seconds_of[stage] = seconds_of.get(stage, 0.0) + bucket.seconds(machine)
    return seconds_of


def kept_seconds(program: Program, machine: Machine) -> dict[int, float]:
    """How long it takes in each stage that the keepers of parameters tell the others their parts,
    and are told those of the gradients: one message after the other, over the machine's link."""
    trained = {port.fqn for port in program.ports(Role.GRADIENT)}
    users = holders(program, Role.PARAMETER)
    ports_of: dict[int, list[Port]] = {}
    for port in program.ports(Role.PARAMETER):
        for stage in sorted({call.unit for call in users[port.fqn]}):
            ports_of.setdefault(stage, []).append(port)

    def seconds(ports: Iterable[Port]) -> float:
        sizes = map(most_told, told_together(ports))
        return (program.members - 1) * sum(map(machine.transfer_seconds, sizes))

    return {
        stage: seconds(ports) + seconds(p for p in ports if p.fqn in trained and p.split)
        for stage, ports in ports_of.items()
    }


def travels(
    program: Program, machine: Machine, network: Network | None = None
) -> dict[Action, Travel]:
    """How long the messages of a program take, by their sends of no microbatch."""
    wiring = Wiring(program)
    return {
        transfer_of(message).send(None): travel(
            wiring.envelope(message).sizes,
            network.link(message.source, message.destination) if network else machine,
        )
        for message in wiring.messages
    }


def _slowest(machine: Machine, network: Network | None) -> Machine:
    return network.seen_by(machine) if network else machine


def occupied_seconds(
    program: Program,
    machine: Machine,
    network: Network | None = None,
    between: Network | None = None,
) -> Callable[[Action], float]:
    """What every send, receive and reduction of a program takes of its rank's time."""
    slowest = _slowest(machine, between or network)
    occupied: dict[tuple, float] = {
        (stage, Do.REDUCE_GRAD, None): (1 - slowest.overlap) * seconds
        for stage, seconds in reduction_seconds(program, slowest).items()
    }
    for sent, times in travels(program, machine, network).items():
        occupied |= {_key(sent): times.sending, _key(received_as(sent)): times.receiving}
    return lambda action: occupied[_key(action)]


def _key(transfer: Action) -> tuple:
    """What the transfers of all microbatches have in common."""
    return transfer.stage, transfer.do, transfer.peer
