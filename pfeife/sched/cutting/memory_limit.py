"""A limit of memory that a plan keeps to, by the account of every byte."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from pfeife.cost.memory import memory_curves
from pfeife.data.optimizers import Optimizer
from pfeife.data.plan import Plan
from pfeife.data.replicas import Replicas, replicas_of
from pfeife.data.timeline import MemoryCurve
from pfeife.data.units import size
from pfeife.ir.program import Program
from pfeife.lowering.lower import lower
from pfeife.passes.apply import apply
from pfeife.passes.compose import Passes

log = logging.getLogger("pfeife")
_TRIES = 6
_NEAR = 0.97  # of the limit, from which on the sums may have kept a plan back


class OutOfMemory(ValueError):
    """Nothing fits into the memory that a planner was given; so many bytes more on the worst rank,
    and something would."""

    def __init__(self, text: str, lacks: float):
        super().__init__(text)
        self.lacks = math.ceil(lacks)


class TooManyStages(ValueError):
    """A program has fewer clusters than it is to have stages."""


def curves_of(
    program: Program,
    plan: Plan,
    optimizer: Optimizer | None = None,
    replicas: int | Replicas = 1,
    owners: Mapping[str, frozenset[int]] | None = None,
    more: Passes | None = None,
) -> tuple[MemoryCurve, ...]:
    """The bytes of every rank, for a plan of a program of clusters."""
    ranks = apply(plan, replicas, owners, more)(program)
    schedule, apart = lower(plan.schedule, ranks), replicas_of(replicas).apart
    return memory_curves(ranks, schedule, optimizer=optimizer, apart=apart)


def kept_within(
    limit: float,
    limited_by: str,
    make: Callable[[tuple[int, ...], bool], Plan],
    curves: Callable[[Plan], Iterable[MemoryCurve]],
    counted: Callable[[Plan], Sequence[int]],
    left_out: tuple[int, ...],
    reserved: tuple[int, ...] = (),
) -> Plan:
    """A plan whose ranks need no more than `limit` bytes by their `curves`, less what is `reserved`
    on a rank that has less.

    `make(left_out, again)` is a planner that counts in sums (`counted` has those of a plan) and
    adds what they leave out of every rank, as far as that is known; `again` says that it has made a
    plan before. A plan that needs too much says
    how much that is, and another one is made, which fits where as much is left out again. There
    are further ones where other cuts or another order leave out more; and where the planner then
    sees no room, which may be wrong too, one with all that it lacks. Where the sums say too much, a
    first plan that they kept back is made once more. Raises OutOfMemory with what the best plan
    needs, if it is too much after all.
    """
    reserved_on = dict(enumerate(reserved))

    def peak(curve: MemoryCurve) -> int:
        return curve.peak + reserved_on.get(curve.rank, 0)

    left_out = tuple(one + reserved_on.get(rank, 0) for rank, one in enumerate(left_out))
    refused: OutOfMemory | None = None
    found: list[tuple[Plan, MemoryCurve]] = []
    for _ in range(_TRIES + 1):
        try:
            plan = make(left_out, bool(found))
        except OutOfMemory as error:
            if found and refused:
                break
            refused, left_out = error, tuple(one - error.lacks for one in left_out)
            continue
        if any(plan == other for other, _ in found):
            break  # less memory changes nothing, as with cuts by hand
        each = list(curves(plan))
        curve = max(each, key=peak)
        if peak(curve) <= limit and (found or refused or peak(curve) < limit / 2):
            return plan
        sums = dict(enumerate(counted(plan)))
        now = tuple(peak(one) - sums.get(one.rank, 0) for one in each)
        if peak(curve) <= limit:
            said = [sums.get(rank, 0) + less for rank, less in enumerate(left_out)]
            if not _kept_back(said, list(map(peak, each)), limit):
                return plan
            again = partial(make, now, True)
            return _faster(plan, again, lambda other: max(map(peak, curves(other))) <= limit)
        log.debug("a plan needs %d bytes, counted as %d", curve.peak, sums[curve.rank])
        left_out = tuple(map(max, left_out, now)) if found else now
        found.append((plan, curve))
    if not found:
        raise OutOfMemory(str(refused), refused.lacks if refused else 0) from refused
    best = min((curve for _, curve in found), key=peak)
    raise no_room(best, limited_by, limit - reserved_on.get(best.rank, 0))


def _kept_back(said: Sequence[float], real: Sequence[float], limit: float) -> bool:
    """Whether sums that say too much of a rank were near the limit; a plan of which they say more
    than that was made without one."""
    ranks = zip(said, real, strict=False)
    return max(said) <= limit and any(sums > _NEAR * limit > peak for sums, peak in ranks)


def _faster(
    plan: Plan,
    again: Callable[[], Plan],
    fits: Callable[[Plan], bool],
) -> Plan:
    """Another plan, of one that was kept back by sums that say too much, if it fits as well."""
    try:
        other = again()
    except OutOfMemory:
        return plan
    if other.step_seconds is None or plan.step_seconds is None:
        return plan
    shorter = other.step_seconds < plan.step_seconds
    return other if shorter and fits(other) else plan


_ACTIVATIONS = ("saved", "passed back", "temporaries", "received", "receive buffers", "leaving")


def no_room(curve: MemoryCurve, limited_by: str, limit: float) -> OutOfMemory:
    """What to raise for a plan whose worst rank needs more than a limit."""
    bytes_of = {**curve.held, **curve.at_peak}
    parts = {word: bytes_of.pop(word, 0) for word in ("parameters", "gradients", "optimizer")}
    parts["activations"] = sum(bytes_of.pop(word, 0) for word in _ACTIVATIONS)
    parts["buffers, batch and results"] = sum(bytes_of.values())
    account = ", ".join(f"{word} {size(count)}" for word, count in parts.items())
    return OutOfMemory(
        f"{limited_by}: the best plan found needs {size(curve.peak)} of {size(limit)} on rank "
        f"{curve.rank} ({account}); use more stages on more ranks, more and so smaller "
        "microbatches, schedule='search', which recomputes where memory is short, or a larger "
        "limit",
        curve.peak - limit,
    )
