"""A schedule of a real program in predicted time."""

from collections import defaultdict
from collections.abc import Callable

from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.schedule import BESIDE, SENDS, Action, Do, Schedule, received_as
from pfeife.data.timeline import Timeline
from pfeife.ir.program import Program
from pfeife.lowering.buckets import buckets_of
from pfeife.lowering.envelope import Travel, travel
from pfeife.lowering.lower import transfer_of
from pfeife.lowering.simulate import simulate
from pfeife.lowering.telling import kept_by_stage, tellings
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
    what the machine does not `overlap`; so does what members of a group tell one another of
    parameters and gradients, over the machine's link (`Network.for_members`). Every action also
    takes the rank the machine's `action_seconds`. Raises ValueError if a call has no cost.

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
    beside = beside_seconds(program, machine, _slowest(machine, between or network))

    def seconds_of(action: Action) -> float:
        if action.do in SENDS:
            return sent[_key(action)].arriving
        if action.do in BESIDE:
            return beside.get((action.stage, action.do), 0.0)
        first = action.microbatch == 0  # its gradients are the first of the sums
        key = (action.stage, action.do, first)
        # All microbatches but the first take as long, so a step of thousands asks a few calls.
        if key not in computing:
            computing[key] = sum(
                (call.seconds or 0.0) + (0.0 if first else call.accumulate_seconds)
                for call in wiring.calls(action)
            )
        return computing[key]

    return seconds_of


def beside_seconds(
    program: Program, machine: Machine, slowest: Machine
) -> dict[tuple[int, Do], float]:
    """How long it takes what runs beside the computing, by the stage that it is named after:
    reductions over links of the `slowest` figures, and what members tell one another of parameters
    and gradients over the machine's."""
    seconds_of: defaultdict[tuple[int, Do], float] = defaultdict(float)
    for bucket in buckets_of(program):
        seconds_of[bucket.first.stages[0], Do.REDUCE_GRAD] += bucket.seconds(slowest, machine)
    for kept in kept_by_stage(program):
        told = (telling.most for telling in tellings(kept.ports, program.members))
        seconds = (program.members - 1) * sum(map(machine.transfer_seconds, told))
        seconds_of[kept.stage, Do.UNSHARD] = seconds
    return seconds_of


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
    """What all that a program sends takes of its rank's time."""
    slowest = _slowest(machine, between or network)
    occupied: dict[tuple, float] = {
        (*key, None): (1 - slowest.overlap) * seconds
        for key, seconds in beside_seconds(program, machine, slowest).items()
    }
    for sent, times in travels(program, machine, network).items():
        occupied |= {_key(sent): times.sending, _key(received_as(sent)): times.receiving}
    return lambda action: occupied[_key(action)]


def _key(transfer: Action) -> tuple:
    """What the transfers of all microbatches have in common."""
    return transfer.stage, transfer.do, transfer.peer
