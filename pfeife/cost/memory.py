"""The account of bytes that a rank holds through a schedule.

The interpreter itself runs, over values that have a size and nothing in it: bodies that take what
they are known to take (`Body`), and a transport that has buffers but sends nothing. What the
runtime drops, keeps or lets go is so counted because it does, and when it does.

    RankRunner  ->  values     Value: a part of a Storage, which counts until nobody has it
                ->  bodies     SizedBody: notes the body's peak, gives values of its results' sizes
                ->  transport  SizedMessages: what has been posted, or sent and not yet acknowledged
"""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

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
from pfeife.lowering.buckets import owned_bytes, told_together
from pfeife.lowering.clocks import Acknowledged, acknowledged
from pfeife.lowering.wiring import Wiring
from pfeife.runtime.interpret import RankRunner
from pfeife.runtime.step import Part

_WHOLE = "whole gradients"  # of which a member computes a part
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
    ranks = range(len(schedule.ranks))
    # Replicas differ in what they own alone, so the worst of them stands for all.
    places = [(_owning_most(program, r) if replica is None else replica, r) for r in ranks]
    arrivals = acknowledged(schedule)
    held = _held(program, schedule, optimizer, rounding, places, apart)
    return tuple(
        _curve(program, schedule, place, arrivals, held[place[1]], rounding) for place in places
    )


def _owning_most(program: Program, rank: int) -> int:
    """The replica that owns the most bytes on a rank."""
    owned = owned_bytes(program, rank)
    return max(owned, key=owned.__getitem__)


def trained_parameters(program: Program) -> set[str]:
    """The parameters for which an optimizer keeps state: those with a gradient; all of them where
    the program has no backward, since what trains them is another."""
    role = Role.GRADIENT if program.ports(Role.TANGENT) else Role.PARAMETER
    return {port.fqn for port in program.ports(role)}


def _held(
    program: Program,
    schedule: Schedule,
    optimizer: Optimizer | None,
    rounding: int,
    places: Sequence[tuple[int, int]],
    apart: bool,
) -> list[dict[str, int]]:
    """What every rank holds all the time: state, the optimizer's state, the batch. `places` are
    their replicas and themselves."""
    trained = trained_parameters(program)
    state = optimizer_bytes(optimizer) if optimizer is not None else None
    microbatch = sum(port.bytes for port in program.ports(Role.BATCH))
    batch = microbatch * schedule.microbatches * (1 if apart else program.replicas)
    words = {Role.PARAMETER: "parameters", Role.BUFFER: "buffers"}
    # A step in float16 whose gradients underflow runs again, with its buffers as they were before.
    may = program.ports(Role.LOSS) and underflows(program)
    again = {port.fqn for port in program.ports(Role.BUFFER_UPDATE) if may}
    more = {"optimizer": state is not None, _AGAIN: bool(again)}
    zeros = dict.fromkeys([*words.values(), *(word for word, there in more.items() if there)], 0)
    accounts = [{**zeros, "batch": batch} for _ in schedule.ranks]
    owners = {reduction.name: reduction.owner for reduction in program.reductions}
    users = holders(program, *words)
    kept: dict[int, list[Port]] = {}  # parameters of which members have parts, by their ranks
    for port in program.ports(*words):
        for rank in {call.rank for call in users.get(port.fqn, ()) if call.rank is not None}:
            account = accounts[rank]
            account[words[port.role]] += rounded(port.part_bytes, rounding)
            if port.fqn in again:
                account[_AGAIN] += rounded(port.bytes, rounding)
            if port.keeper is not None:
                kept.setdefault(rank, []).append(port)
                continue
            # Of state that replicas share, each keeps the optimizer's for what it owns.
            is_owned = owners.get(port.fqn) in (None, places[rank][0])
            if state and port.fqn in trained and is_owned:
                account["optimizer"] += state(port.shape, port.given_dtype)
    for rank, ports in kept.items():
        _add_kept(accounts[rank], _most(ports, program.members), trained, rounding, state)
    return accounts


def _most(ports: Iterable[Port], members: int) -> list[Port]:
    """What that member keeps which keeps most bytes: it stands for all."""
    by_member: list[list[Port]] = [[] for _ in range(members)]
    for port in ports:
        by_member[port.keeper or 0].append(port)
    return max(by_member, key=lambda kept: sum(port.given_bytes for port in kept))


def _add_kept(
    account: dict[str, int],
    ports: Sequence[Port],
    trained: Container[str],
    rounding: int,
    state: Callable[[Iterable[int], torch.dtype], int] | None,
) -> None:
    """What a rank holds of parameters that it keeps for its group."""
    account["parameters"] += sum(rounded(port.given_bytes, rounding) for port in ports)
    own = [port for port in ports if port.fqn in trained]
    if state:
        account["optimizer"] += sum(state(port.given_shape, port.given_dtype) for port in own)

    def size(ports: Iterable[Port]) -> int:
        return sum(rounded(port.given_bytes, rounding) for port in ports)

    if own:
        # They are gathered a few at a time: of these there are the parts beside them.
        account[_WHOLE] = size(own) + max(map(size, told_together(own)))


def _curve(
    program: Program,
    schedule: Schedule,
    place: tuple[int, int],
    arrivals: Acknowledged,
    held: dict[str, int],
    rounding: int,
) -> MemoryCurve:
    replica, rank = place
    ledger, wiring = Ledger(rounding), Wiring(program)
    transport: Any = SizedMessages(ledger, replica)
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
