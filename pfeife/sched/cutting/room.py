"""A limit of memory that a plan keeps to, by the account of every byte."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from pfeife.cost.memory import memory_curves
from pfeife.data.machine import Mesh
from pfeife.data.optimizers import Optimizer
from pfeife.data.plan import Plan
from pfeife.data.timeline import MemoryCurve
from pfeife.ir.program import Kind, Program
from pfeife.lowering.lower import lower
from pfeife.passes import dp_wrap, insert_send_recv, join_backward, partition, split_backward
from pfeife.passes.compose import Pass, Passes, compose

log = logging.getLogger("pfeife")
_TRIES = 6
_AMPLE = 2**62


class NoRoom(ValueError):
    """By a planner's rough figures nothing fits into the memory that it was given."""


def rank_passes(
    program: Program,
    plan: Plan,
    replicas: int = 1,
    owners: Mapping[str, frozenset[int]] | None = None,
    more: Passes | None = None,
) -> tuple[Pass, ...]:
    """The passes from a program of clusters to that of the ranks, as a plan has it; `owners` are
    the ranks that train some of the state already, and `more` has what else the programs of
    "stages" and "ranks" become."""
    split = any(call.kind == Kind.INPUT_BACKWARD for call in program.calls)
    cut: tuple[Pass, ...] = (partition(plan),)
    if split and plan.recompute:  # which part repeats what is known of whole backwards
        cut = (join_backward(), partition(plan), split_backward())
    mesh = Mesh(len(plan.schedule.ranks), replicas)
    stages, ranks = ((more or {}).get(level, ()) for level in ("stages", "ranks"))
    return (*cut, *stages, insert_send_recv(owners=owners), dp_wrap(mesh), *ranks)


def curves_of(
    program: Program,
    plan: Plan,
    optimizer: Optimizer | None = None,
    replicas: int = 1,
    owners: Mapping[str, frozenset[int]] | None = None,
    more: Passes | None = None,
) -> tuple[MemoryCurve, ...]:
    """The bytes of every rank, for a plan of a program of clusters."""
    ranks = compose(*rank_passes(program, plan, replicas, owners, more))(program)
    return memory_curves(ranks, lower(plan.schedule, ranks), optimizer=optimizer)


def kept_within(
    limit: int,
    limited_by: str,
    make: Callable[[int, int], Plan],
    curves: Callable[[Plan], Iterable[MemoryCurve]],
    counted: Callable[[Plan], Sequence[int]],
) -> Plan:
    """A plan whose ranks need no more than `limit` bytes by their `curves`.

    `make(bytes, tries)` is a planner that counts in sums, and `counted` what it has counted for
    each rank of a plan. A plan that needs too much is made again for the limit without what these
    figures have left out of its worst rank, so that the next one fits where as much is left out
    again. Where other cuts or another order leave out more there are further ones; so there are
    where the planner sees no room at all, which may be wrong too (an evaluation has no gradients).
    Raises ValueError with what the best plan needs, if it is too much after all.
    """
    asked, refused, over = limit, 0, 0
    first: NoRoom | None = None
    found: list[tuple[Plan, MemoryCurve]] = []
    for tries in range(_TRIES + 1):
        try:
            plan = make(asked, tries)
        except NoRoom as error:
            first = first or error
            if asked == _AMPLE:  # it is not the memory
                raise ValueError(str(first)) from error
            refused = asked
            asked = (asked + over) // 2 if over else 2 * asked
            asked = asked if found or tries + 1 < _TRIES else _AMPLE
            continue
        if found and plan == found[-1][0]:
            break  # less memory changes nothing, as with cuts by hand
        curve = max(curves(plan), key=lambda one: one.peak)
        if curve.peak <= limit:
            return plan
        found.append((plan, curve))
        over = counted(plan)[curve.rank]
        log.debug("a plan for %d bytes a rank needs %d, counted as %d", asked, curve.peak, over)
        asked = over - (curve.peak - limit)
        asked = asked if asked > refused else (over + refused) // 2
    least = min((curve for _, curve in found), key=lambda curve: curve.peak)
    raise ValueError(refusal(least, limited_by))


_ACTIVATIONS = ("saved", "passed back", "temporaries", "received", "receive buffers", "leaving")


def refusal(curve: MemoryCurve, limited_by: str) -> str:
    """What to say of a plan whose worst rank needs too much."""
    bytes_of = {**curve.held, **curve.at_peak}
    parts = {word: bytes_of.pop(word, 0) for word in ("parameters", "gradients", "optimizer")}
    parts["activations"] = sum(bytes_of.pop(word, 0) for word in _ACTIVATIONS)
    parts["buffers, batch and results"] = sum(bytes_of.values())
    account = ", ".join(f"{word} {size}" for word, size in parts.items())
    return (
        f"{limited_by}: the best plan found needs {curve.peak} bytes on rank {curve.rank} "
        f"({account}); use more stages on more ranks, more and so smaller microbatches, "
        "schedule='search', which recomputes where memory is short, or a larger limit"
    )
