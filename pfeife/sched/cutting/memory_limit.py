"""A limit of memory that a plan keeps to, by the account of every byte."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

import attrs

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
_Curves = Callable[[Plan], Iterable[MemoryCurve]]  # the bytes of a plan's ranks
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


def counted_once(
    curves: Callable[[Plan], tuple[MemoryCurve, ...]],
) -> Callable[[Plan], tuple[MemoryCurve, ...]]:
    """The same curves, counted once for plans that differ in what they expect alone."""
    of_decisions = cache(curves)
    return lambda plan: of_decisions(
        attrs.evolve(plan, stage_seconds=None, step_seconds=None, bound_seconds=None)
    )


# Each plan is counted twice: by the sums with which it was made, and by the account of every byte.
# What to do next goes by what they say of the limit:
#
#     the planner         the account    next
#     has a plan          fits           it; a first one near the limit may get a faster one
#     has a plan          is over        again, with what the sums have left out
#     sees no room        -              once more, with what it lacks as if it were there
#     sees none again     -              the refusal, with the best plan so far
def kept_within(
    limit: float,
    limited_by: str,
    make: Callable[[tuple[int, ...], bool], Plan],
    curves: _Curves,
    counted: Callable[[Plan], Sequence[int]],
    left_out: tuple[int, ...],
    reserved: tuple[int, ...] = (),
) -> Plan:
    """A plan whose ranks need no more than `limit` bytes by their `curves`, less what is `reserved`
    on a rank that has less.

    `make(left_out, again)` is a planner that counts in sums (`counted` has those of a plan) and
    adds what they leave out of every rank, as far as that is known; `again` says that it has made a
    plan before. A plan that needs too much says how much that is, and another one is made, which
    fits where as much is left out again. There are further ones where other cuts or another order
    leave out more; and where the planner then sees no room, which may be wrong too, one with all
    that it lacks. Where the sums say too much, a first plan that they kept back is made once more.
    Raises OutOfMemory with what the best plan needs, if it is too much after all.
    """
    reserved_on = dict(enumerate(reserved))
    left_out = tuple(omitted + reserved_on.get(rank, 0) for rank, omitted in enumerate(left_out))
    refused: OutOfMemory | None = None
    tried: list[_Counted] = []
    for _ in range(_TRIES + 1):
        try:
            plan = make(left_out, bool(tried))
        except OutOfMemory as error:
            if tried and refused:
                break
            # The sums may be wrong: once more as if there were what they lacked; the account
            # judges.
            refused, left_out = error, tuple(omitted - error.lacks for omitted in left_out)
            continue
        if any(plan == earlier.plan for earlier in tried):
            break  # less memory changes nothing, as with cuts by hand
        candidate = _Counted.of(plan, curves, reserved_on)
        # A first plan that nearly fills the limit may have been kept back by sums that say too
        # much: more of that below. One far below the limit was not.
        if candidate.most <= limit and (tried or refused or candidate.most < limit / 2):
            return plan
        sums = dict(enumerate(counted(plan)))
        beyond = tuple(peak - sums.get(rank, 0) for rank, peak in candidate.peaks.items())
        if candidate.most <= limit:
            with_left_out = [sums.get(rank, 0) + omitted for rank, omitted in enumerate(left_out)]
            if not _kept_back(with_left_out, list(candidate.peaks.values()), limit):
                return plan
            return _faster(plan, partial(make, beyond, True), curves, reserved_on, limit)
        worst = candidate.worst
        log.debug("a plan needs %d bytes, counted as %d", worst.peak, sums[worst.rank])
        # The most that any plan has left out, so that it does not go back and forth between two.
        left_out = tuple(map(max, left_out, beyond)) if tried else beyond
        tried.append(candidate)
    if not tried:
        raise OutOfMemory(str(refused), refused.lacks if refused else 0) from refused
    best = min(tried, key=lambda candidate: candidate.most).worst
    raise no_room(best, limited_by, limit - reserved_on.get(best.rank, 0))


@attrs.frozen
class _Counted:
    """A plan, what its ranks need by the account of every byte, with what is reserved on each, and
    the curve of the one that needs most."""

    plan: Plan
    peaks: dict[int, int]
    worst: MemoryCurve

    @staticmethod
    def of(plan: Plan, curves: _Curves, reserved_on: Mapping[int, int]) -> "_Counted":
        by_rank = {curve.rank: curve for curve in curves(plan)}
        peaks = {rank: curve.peak + reserved_on.get(rank, 0) for rank, curve in by_rank.items()}
        return _Counted(plan, peaks, by_rank[max(peaks, key=peaks.__getitem__)])

    @property
    def most(self) -> int:
        """What the worst rank needs."""
        return self.peaks[self.worst.rank]


def _kept_back(counted: Sequence[float], real: Sequence[float], limit: float) -> bool:
    """Whether sums that say too much of a rank were near the limit; a plan of which they say more
    than that was made without one."""
    ranks = zip(counted, real, strict=False)
    return max(counted) <= limit and any(sums > _NEAR * limit > peak for sums, peak in ranks)


def _faster(
    plan: Plan,
    again: Callable[[], Plan],
    curves: _Curves,
    reserved_on: Mapping[int, int],
    limit: float,
) -> Plan:
    """Another plan, of one that was kept back by sums that say too much, if it fits as well."""
    try:
        candidate = again()
    except OutOfMemory:
        return plan
    if candidate.step_seconds is None or plan.step_seconds is None:
        return plan
    shorter = candidate.step_seconds < plan.step_seconds
    fits = shorter and _Counted.of(candidate, curves, reserved_on).most <= limit
    return candidate if fits else plan


_ACTIVATIONS = ("saved", "passed back", "temporaries", "received", "receive buffers", "leaving")


def no_room(curve: MemoryCurve, limited_by: str, limit: float) -> OutOfMemory:
    """What to raise for a plan whose worst rank needs more than a limit."""
    bytes_of = {**curve.held, **curve.at_peak}
    parts = {word: bytes_of.pop(word, 0) for word in ("parameters", "gradients", "optimizer")}
    parts["parameters"] += bytes_of.pop("members' parameters", 0)
    parts["activations"] = sum(bytes_of.pop(word, 0) for word in _ACTIVATIONS)
    parts["buffers, batch and results"] = sum(bytes_of.values())
    account = ", ".join(f"{word} {size(count)}" for word, count in parts.items())
    return OutOfMemory(
        f"{limited_by}: the best plan found needs {size(curve.peak)} of {size(limit)} on rank "
        f"{curve.rank} ({account}); use more stages on more ranks, more and so smaller "
        "microbatches, recompute='auto', which computes again where memory is short (as "
        "schedule='search' does), or a larger limit",
        curve.peak - limit,
    )
