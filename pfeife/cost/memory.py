"""The account of bytes that a rank holds through a schedule.

The interpreter itself runs, over values that have a size and nothing in it: bodies that take what
they are known to take (`Body`), and a transport that has buffers but sends nothing. What the
runtime drops, keeps or lets go is so counted because it does, and when it does.

    RankRunner  ->  values     Value: a part of a Storage, which counts until nobody has it
                ->  bodies     SizedBody: notes the body's peak, gives values of its results' sizes
                ->  transport  SizedMessages: what has been posted, or sent and not yet acknowledged
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import product
from typing import Any

import attrs
import torch

from pfeife.cost.body import CUDA_BLOCK, rounded
from pfeife.cost.sized import Ledger, SizedBody, SizedMessages, Value
from pfeife.data.optimizers import Optimizer, optimizer_bytes
from pfeife.data.schedule import Action, Schedule
from pfeife.data.timeline import MemoryCurve, MemoryPoint
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.flops import underflows
from pfeife.ir.messages import holders
from pfeife.ir.parts import STATE_ROLES, Port, Role, captured_sizes
from pfeife.ir.program import Program
from pfeife.lowering.clocks import Acknowledged, acknowledged
from pfeife.lowering.wiring import Wiring
from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.step import Part

_AGAIN = "buffers of before"  # for a step that may run again


def memory_curves(
    program: Program,
    schedule: Schedule,
    *,
    optimizer: Optimizer | None = None,
    rounding: int | None = None,
    replica: int | None = None,
    apart: bool = False,
) -> tuple[MemoryCurve, ...]:
    """For every rank the bytes of a step of a lowered schedule, each rank a process, in one of its
    replicas: each rank's is that which owns most unless it is given. With `apart` a rank is given
    the batch of its own replica alone.

    The interpreter runs with all that it does about memory: values are dropped after their last
    use, messages have their buffers before they arrive (see `posted_ahead`), what is sent is kept
    until it has surely arrived (see `acknowledged`), small values travel together (see `Envelope`),
    large ones arrive in buffers that stay (those are what all steps but the first find), gradients
    are added in place where that is possible, master weights have a copy that is computed with. A
    step in float16 keeps what the buffers were that it updates, since it may run again with another
    gradient of its loss; the gradients that it has then are gone.
    `optimizer` is the real one, its class, or bytes for each element of a parameter (see
    `optimizer_bytes`); every allocation is rounded up to a multiple of `rounding` bytes: those of
    torch's allocator unless given, 512 for a program of a CUDA device. What operations need
    inside of themselves counts where `measure` has seen it, which is on a GPU.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> plan = pfeife.Plan((0, 1), sched.families.one_f_one_b(2, 4))
    >>> ranks = pfeife.insert_send_recv()(pfeife.partition(plan)(pfeife.fuse()(flat)))
    >>> curves = memory_curves(ranks, sched.lower(plan.schedule, ranks), optimizer="adamw")
    >>> [curve.peak for curve in curves]  # bytes
    [664, 768]
    """
    program = absorb(program)
    if rounding is None:
        on_cuda = any(port.device.type == "cuda" for port in program.inputs)
        rounding = CUDA_BLOCK if on_cuda else 1
    # Replicas, and members, differ in what they own and keep alone: the worst stands for all.
    chosen = range(program.replicas) if replica is None else (replica,)
    holdings = _holdings(program, len(schedule.ranks), optimizer)
    places = [holding.heaviest(chosen) for holding in holdings]
    arrivals = acknowledged(schedule)
    microbatch = sum(port.bytes for port in program.ports(Role.BATCH))
    batch = microbatch * schedule.microbatches * (1 if apart else program.replicas)
    return tuple(
        _curve(
            *(program, schedule, rank, (replica, member), arrivals),
            {**holding.account(replica, member, rounding), "batch": batch},
            rounding,
        )
        for rank, (holding, (replica, member)) in enumerate(zip(holdings, places, strict=True))
    )


def trained_parameters(program: Program) -> set[str]:
    """The parameters for which an optimizer keeps state: those with a gradient; all of them where
    the program has no backward, since what trains them is another."""
    role = Role.GRADIENT if program.ports(Role.TANGENT) else Role.PARAMETER
    return {port.fqn for port in program.ports(role)}


_WORDS = {Role.PARAMETER: "parameters", Role.BUFFER: "buffers"}


@attrs.frozen
class _Holding:
    """What a rank of a pipeline holds all the time: its `ports`, of which some are `trained`, with
    so many bytes of optimizer `state`. `owners` are the replicas that train them alone. `again` are
    buffers that are kept as they were before a step."""

    program: Program
    ports: list[Port]
    owners: Mapping[str, int | None]
    trained: Container[str]
    again: Container[str]
    state: Callable[[Iterable[int], torch.dtype], int] | None

    def heaviest(self, replicas: Iterable[int]) -> tuple[int, int]:
        """Which one of the replicas and members holds most."""
        kept: Counter[int | None] = Counter()
        owned: Counter[tuple[int | None, int | None]] = Counter()
        for port in self.ports:
            kept[port.keeper] += port.given_bytes if port.split else 0
            if port.fqn in self.trained:
                place = self.owners.get(port.fqn), port.keeper
                owned[place] += port.given_bytes + self._state_bytes(port)

        def size(place: tuple[int, int]) -> int:
            replica, member = place
            shares = product((None, replica), (None, member))
            return kept[member] + sum(owned[share] for share in shares)

        return max(product(replicas, range(self.program.members)), key=size)

    def account(self, replica: int, member: int, rounding: int) -> dict[str, int]:
        """Bytes by what they are, of one of these."""
        more = {"optimizer": self.state, _AGAIN: self.again}
        words = [*_WORDS.values(), *(word for word, there in more.items() if there)]
        account = Counter(dict.fromkeys(words, 0))
        own: list[Port] = []
        for port in self.ports:
            if port.fqn in self.again:
                account[_AGAIN] += rounded(port.bytes, rounding)
            if port.keeper not in (None, member):
                continue
            account[_WORDS[port.role]] += rounded(port.given_bytes, rounding)
            # Of state that replicas share out, each keeps the optimizer's for what it owns.
            if port.fqn in self.trained and self.owners.get(port.fqn) in (None, replica):
                own.append(port)

        if self.state:
            account["optimizer"] = sum(map(self._state_bytes, own))
        return account

    def _state_bytes(self, port: Port) -> int:
        return self.state(port.given_shape, port.given_dtype) if self.state else 0


def _holdings(program: Program, ranks: int, optimizer: Optimizer | None) -> list[_Holding]:
    """What each rank of a pipeline holds."""
    users = holders(program, *_WORDS)
    ports: list[list[Port]] = [[] for _ in range(ranks)]
    for port in program.ports(*_WORDS):
        for rank in {call.rank for call in users.get(port.fqn, ()) if call.rank is not None}:
            ports[rank].append(port)
    # A step in float16 whose gradients underflow runs again, with its buffers as they were before.
    may = program.ports(Role.LOSS) and underflows(program)
    again = {port.fqn for port in program.ports(Role.BUFFER_UPDATE) if may}
    owners = {reduction.name: reduction.owner for reduction in program.reductions}
    state = optimizer_bytes(optimizer) if optimizer is not None else None
    trained = trained_parameters(program)
    return [_Holding(program, held, owners, trained, again, state) for held in ports]


def _curve(
    program: Program,
    schedule: Schedule,
    rank: int,
    place: tuple[int, int],
    arrivals: Acknowledged,
    held: dict[str, int],
    rounding: int,
) -> MemoryCurve:
    ledger, wiring = Ledger(rounding), Wiring(program)
    transport: Any = SizedMessages(ledger, *place, program.members)
    stages = {action.stage for action in schedule.ranks[rank] if action.do.kind}
    bodies = {
        call.node: SizedBody(ledger, wiring, call) for call in program.calls if call.unit in stages
    }
    # The very interpreter that runs the step: what it keeps or drops need not be said here again.
    runner = RankRunner(program, schedule, rank, bodies, arrivals)
    ports = [port for port in program.inputs if port.name in runner.handlers.reads]
    inputs: dict[str, Any]  # values instead of tensors
    inputs = {port.name: Value(ledger, None, port.bytes) for port in ports}
    inputs |= {
        name: Value(ledger, None, constant.nbytes) for name, constant in runner.constants.items()
    }
    inputs |= captured_sizes(program)
    state = {port.fqn: inputs[port.name] for port in ports if port.role in STATE_ROLES}
    step = runner.start(state, Part(0, [inputs] * schedule.microbatches, ()), transport)
    points: list[MemoryPoint] = []

    # The peak of every action by itself: the next one starts from what lives now.
    def observe(action: Action) -> None:
        points.append(MemoryPoint(action, ledger.peak, ledger.live))
        ledger.peak = ledger.live

    runner.run(step, observe=observe)
    held = {**held, "receive buffers": transport.bytes}
    return MemoryCurve(rank, held, tuple(points), {w: n for w, n in ledger.at_peak.items() if n})
