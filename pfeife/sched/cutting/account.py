"""The additive account of bytes: what all who plan count by, before there is a plan.

    a rank = what it has all the time       state, sums of gradients, the most that one of its
                                            calls needs beside, messages that are posted ahead
           + microbatches in flight         what each saves for its backward, or has sent

Each storage counts once a stage, each parameter once a rank. The account of every byte
(`memory_curves`) is the judge of what comes out: it knows the order of what a step does, and so
what is kept until it has surely arrived, the copies in which small values travel, and outputs.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import attrs

from pfeife.data.plan import RecomputeOption
from pfeife.ir.parts import Kind
from pfeife.lowering.channel import window
from pfeife.sched.cutting.workload import Flow, Workload


@attrs.frozen
class Footprint:
    """Bytes of clusters that are together, on a stage or on a rank.

    `state`: parameters with their optimizer state, buffers, and sums of gradients. Of one
    microbatch: `late` is what it saves for its backward; `saved` that and what is sent to others,
    which has surely arrived when a gradient comes back; `for_weights` what it needs from its
    input- to its weight-backward; `ahead` what its forward receives of others, `back` what its
    backward does. `temporaries` is the most that a call needs beside what is saved: what its
    clusters leave, such as gradients that are not yet added up, and what the largest cluster takes
    for itself.
    """

    state: int
    temporaries: int
    late: int
    saved: int
    for_weights: int
    ahead: int
    back: int


_NOTHING = Footprint(state=0, temporaries=0, late=0, saved=0, for_weights=0, ahead=0, back=0)


@attrs.frozen
class Relief:
    """What clusters compute again in their backward, and how many bytes of a microbatch each saves
    by it."""

    options: Mapping[int, RecomputeOption] = attrs.Factory(dict)
    bytes: Mapping[int, int] = attrs.Factory(dict)

    def of(self, units: Iterable[int]) -> int:
        """Bytes that clusters save."""
        return sum(self.bytes.get(unit, 0) for unit in units)


NO_RELIEF = Relief()


class Account:
    """The sums of a workload. What was counted of clusters that are together is kept, since a
    planner asks for the same stages again and again."""

    def __init__(self, work: Workload):
        self.work = work
        self._footprints: dict[tuple[int, ...], Footprint] = {}

    def held(self, units: Iterable[int]) -> Footprint:
        """Bytes of these clusters."""
        key = tuple(units)
        if key not in self._footprints:
            *_, self._footprints[key] = (_NOTHING, *growing(self.work, key))
        return self._footprints[key]

    def always(
        self, stage_of: Sequence[int], stage_ranks: Sequence[int], microbatches: int
    ) -> list[int]:
        """For every rank the bytes that it needs however few microbatches are in flight."""
        units = units_of(stage_of, len(stage_ranks))
        totals = []
        for rank in range(1 + max(stage_ranks)):
            rank_stages = [units[stage] for stage, at in enumerate(stage_ranks) if at == rank]
            together = self.held(sorted(itertools.chain(*rank_stages)))
            most = max((self.held(stage).temporaries for stage in rank_stages), default=0)
            totals.append(together.state + most + posted(together, len(rank_stages), microbatches))
        return totals

    def saved(self, units: Sequence[int], relief: Relief = NO_RELIEF) -> int:
        """Bytes of a microbatch from a stage's forward to its backward."""
        footprint, less = self.held(units), relief.of(units)
        return max(footprint.saved - less, footprint.for_weights - less, 0)

    def needed(
        self,
        stage_of: Sequence[int],
        stage_ranks: Sequence[int],
        microbatches: int,
        in_flight: Sequence[int],
    ) -> list[int]:
        """For every rank the bytes with `in_flight[stage]` microbatches between the forward and the
        backward of each of its stages."""
        totals = self.always(stage_of, stage_ranks, microbatches)
        for stage, units in enumerate(units_of(stage_of, len(stage_ranks))):
            totals[stage_ranks[stage]] += in_flight[stage] * self.saved(units)
        return totals


def growing(work: Workload, units: Iterable[int]) -> Iterator[Footprint]:
    """Bytes of the first of some clusters alone, with the next one, with the next two, ..."""
    together: set[int] = set()
    seen: set[int] = set()  # entries of the state
    state, made, most = 0, Counter[Kind](), dict.fromkeys(work.temporaries, 0)
    roles: dict[int, frozenset[str]] = {}  # of flows
    users = Counter[tuple[str, Hashable]]()
    totals = dict.fromkeys(("late", "for_weights", "saved", "ahead", "back"), 0)
    for unit in units:
        together.add(unit)
        new = set(work.state_at[unit]) - seen
        seen |= new
        state += work.gradients[unit] + sum(work.state[index][0] for index in new)
        for kind, sizes in work.temporaries.items():
            made[kind] += work.made[kind][unit]
            most[kind] = max(most[kind], sizes[unit])
        for index in work.flows_at[unit]:
            flow, before = work.flows[index], roles.get(index, frozenset())
            now = roles[index] = _roles(flow, together)
            # With another cluster beside it a value may lose a role, too: it is not sent to its
            # reader any more.
            for role in before ^ now:
                key, size = _counted(index, flow, role)
                there = users[role, key] > 0
                users[role, key] += 1 if role in now else -1
                totals[role] += size * ((users[role, key] > 0) - there)
        temporaries = max((made[kind] + most[kind] for kind in most), default=0)
        yield Footprint(state=state, temporaries=temporaries, **totals)


def _counted(index: int, flow: Flow, role: str) -> tuple[Hashable, int]:
    """What a flow counts as in a role, once however often, and its bytes."""
    # Values are sent one by one; what is saved counts once, however many look at its storage.
    if role in ("ahead", "back"):
        return index, flow.bytes
    return flow.storage, flow.storage.bytes if flow.storage else 0


def _roles(flow: Flow, units: set[int]) -> frozenset[str]:
    """What a value is for clusters that are together."""
    forward, made = flow.kind == Kind.FORWARD, flow.unit in units
    kinds = {kind for unit, kind in flow.readers if unit in units}
    roles = set()
    if forward and kinds - {Kind.FORWARD}:
        roles |= {"late", "saved"}
    if Kind.WEIGHT_BACKWARD in kinds:
        roles |= {"for_weights"}
    if forward and made and any(k == Kind.FORWARD and u not in units for u, k in flow.readers):
        roles |= {"saved"}
    if not made and (Kind.FORWARD in kinds if forward else kinds):
        roles |= {"ahead" if forward else "back"}
    return frozenset(roles)


def posted(footprint: Footprint, stages: int, microbatches: int) -> int:
    """Bytes of the messages that have buffers before they arrive, as many for each microbatch as
    there are stages: as if forwards received of one rank alone, and backwards of another."""
    sizes = (size for size in (footprint.ahead, footprint.back) if size)
    return sum(window([size // stages] * stages, microbatches) for size in sizes)


def with_left_out(figures: Iterable[int], left_out: Sequence[int]) -> list[int]:
    """Bytes of ranks with those that are in no sum, of as many ranks as these are known of."""
    less = dict(enumerate(left_out))
    return [figure + less.get(rank, 0) for rank, figure in enumerate(figures)]


def units_of(stage_of: Sequence[int], stages: int) -> list[list[int]]:
    """The clusters of every stage."""
    units: list[list[int]] = [[] for _ in range(stages)]
    for unit, stage in enumerate(stage_of):
        units[stage].append(unit)
    return units
