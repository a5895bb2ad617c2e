"""Schedules by name: each a small function from stages, ranks and microbatches to actions.

All take the number of `stages` (at least one), the number of `microbatches` (at least one) and, as
`ranks`, the rank of every stage: stage s is on rank s unless it is given. They raise ValueError for
a placement of another number of stages, or one that they are not made for.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from types import MappingProxyType

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.families.family import Family, family_of_one
from pfeife.sched.families.orders import Timed, assign, folded, placed
from pfeife.sched.families.zero_bubble import dual_pipe_v, v_half, v_min, zb_h1, zb_h2, zb_v


def naive(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """One microbatch at a time, forward and backward through all stages: no parallelism."""
    stage_ranks = placed(stages, microbatches, ranks)
    pairs = [(stage, k) for k in range(microbatches) for stage in range(stages)]
    forwards = [((k, 0, stage), Action(stage, Do.FORWARD, k)) for stage, k in pairs]
    backwards = [((k, 1, -stage), Action(stage, Do.BACKWARD, k)) for stage, k in pairs]
    return assign([*forwards, *backwards], stage_ranks)


def gpipe(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3).

    `ranks` places the stages, one stage a rank unless it says otherwise. Every rank runs the
    forwards of its stages in the order of the stages, and the backwards in the opposite order:
    with several stages a rank this is the breadth-first schedule (Lamy-Poirier, Breadth-First
    Pipeline Parallelism, MLSys 2023, section 4).
    """
    stage_ranks = placed(stages, microbatches, ranks)
    pairs = [(stage, k) for stage in range(stages) for k in range(microbatches)]
    forwards = [((0, stage, k), Action(stage, Do.FORWARD, k)) for stage, k in pairs]
    backwards = [((1, -stage, k), Action(stage, Do.BACKWARD, k)) for stage, k in pairs]
    return assign([*forwards, *backwards], stage_ranks)


def one_f_one_b(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """A warm-up of forwards, then one forward and one backward in turn (Narayanan et al.,
    PipeDream-Flush, ICML 2021; "1F1B").

    Stage s has at most `stages - s` microbatches in flight. A rank with several stages runs
    them as if they took turns on a machine each: an action comes in the order of its unit-time
    start.

    >>> print(sched.families.one_f_one_b(2, 4).to_csv(), end="")
    0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3
    1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3
    """
    stage_ranks = placed(stages, microbatches, ranks)
    timed = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, microbatches)
        for k in range(microbatches):
            # Unit times: forward k starts at s + k in the warm-up and at s + 2k after it,
            # backward k at 2 (stages - 1) - s + 2k + 1.
            start = stage + k if k < warm_up else 2 * k + stage
            timed.append((start, Action(stage, Do.FORWARD, k)))
            start = 2 * stages - 1 - stage + 2 * k
            timed.append((start, Action(stage, Do.BACKWARD, k)))
    return assign(timed, stage_ranks)


def eager_one_f_one_b(
    stages: int, microbatches: int, ranks: Sequence[int] | None = None
) -> Schedule:
    """1F1B with twice the warm-up: stage s has up to `2 (stages - s) - 1` microbatches in flight.

    The additional forwards hide the transfers (Zhuang et al., On Optimizing the Communication of
    Model Parallelism, MLSys 2023, section 4: "eager-1F1B").
    """
    stage_ranks = placed(stages, microbatches, ranks)
    return assign(_in_rounds(stages, microbatches, stages), stage_ranks)


def interleaved(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """1F1B over several stages a rank (Narayanan et al., Megatron-LM, SC 2021, section 2.2.2).

    The microbatches go through the model in rounds of one for every rank, or some more where
    they do not divide: a rank runs a round's forwards on its first stage, then on its second, and
    so on, and takes turns with the backwards after a warm-up of (v - 1) p + 2 (p - 1 - r)
    forwards, for v stages on each of p ranks and rounds of p. Made for `looped` stages; on other
    placements the actions keep their order in time.
    """
    stage_ranks = placed(stages, microbatches, ranks)
    return assign(_in_rounds(stages, microbatches, len(set(stage_ranks))), stage_ranks)


def _in_rounds(stages: int, microbatches: int, ranks: int) -> Timed:
    """Times of an interleaved schedule of looped stages.

    A rank's i-th forward starts at 2 i + 2 r, and its i-th backward just after the forward
    i + (v - 1) p + 2 (p - 1 - r), so that ranks differ in their warm-up alone. A round takes
    at least as many places as there are ranks; with that every action comes after what it reads.
    """
    loops = -(-stages // ranks)
    rounds = max(1, microbatches // ranks)
    # The largest round comes first: the warm-up is made for it, and must do for all.
    sizes = [(microbatches + i) // rounds for i in reversed(range(rounds))]
    warm_up = (loops - 1) * max(sizes[0], ranks)
    first, place = 0, 0
    for size in sizes:
        width = max(size, ranks)
        for stage in range(stages):
            loop, rank = divmod(stage, ranks)
            for j in range(size):
                start = 2 * (place + loop * width + j) + 2 * rank
                yield start, Action(stage, Do.FORWARD, first + j)
                turn = place + (loops - 1 - loop) * width + j
                start = 2 * (turn + warm_up) + 4 * (ranks - 1) - 2 * rank + 1
                yield start, Action(stage, Do.BACKWARD, first + j)
        first, place = first + size, place + loops * width


def loops(
    stages: int,
    microbatches: int,
    ranks: Sequence[int] | None = None,
    *,
    loop_batch: int | None = None,
    prefetch: int | Sequence[int] = 0,
) -> Schedule:
    """The family (Nl, Bl, Bf) of Jhoo, Hur and Lopes, Pfeife (ICML 2025).

    Nl, the loops over the model, is the number of stages on a rank. The microbatches go through
    it `loop_batch` (Bl) at a time, all unless given. A rank takes turns between forwards and
    backwards after a warm-up of the forwards that must precede its first backward, (Nl - 1) Bl
    plus one for every stage after its last, and of `prefetch` (Bf) more: one number for all
    ranks, of which a rank uses no more than there are stages after its last, or one number for
    each rank, used as given. So 1F1B is loops(), and with p ranks eager 1F1B prefetches p - 1,
    interleaved 1F1B too with a loop_batch of p, and GPipe prefetches all on every rank.
    Raises ValueError for combinations in which ranks would wait for one another.
    """
    stage_ranks = placed(stages, microbatches, ranks)
    loop_batch = microbatches if loop_batch is None else loop_batch
    if loop_batch < 1:
        raise ValueError(f"loop_batch={loop_batch}: a loop has at least one microbatch")
    count = 1 + max(stage_ranks)
    if not isinstance(prefetch, int) and len(prefetch) != count:
        raise ValueError(f"prefetch={list(prefetch)} for {count} ranks")
    batches = [
        range(k, min(k + loop_batch, microbatches)) for k in range(0, microbatches, loop_batch)
    ]
    orders = []
    for rank in range(count):
        rank_stages = [stage for stage in range(stages) if stage_ranks[stage] == rank]
        forwards = [Action(s, Do.FORWARD, k) for ks in batches for s in rank_stages for k in ks]
        backwards = [
            Action(s, Do.BACKWARD, k) for ks in batches for s in rank_stages[::-1] for k in ks
        ]
        after = stages - 1 - rank_stages[-1] if rank_stages else 0
        more = min(prefetch, after) if isinstance(prefetch, int) else prefetch[rank]
        warm_up = (len(rank_stages) - 1) * loop_batch + after + more
        # On a rank without stages the warm-up comes out below 0.
        orders.append(_alternating(forwards, backwards, max(warm_up, 0)))
    try:
        return verify_schedule(Schedule(tuple(orders)))
    except ValueError as error:
        raise ValueError(
            f"loop_batch={loop_batch}, prefetch={prefetch}: {stages} stages on ranks "
            f"{list(stage_ranks)} cannot run {microbatches} microbatches like this: {error}"
        ) from None


def _alternating(
    forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int
) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and a backward in turn, then what is left."""
    turns = zip(forwards[warm_up:], backwards, strict=False)
    done = len(forwards[warm_up:])
    return (*forwards[:warm_up], *chain.from_iterable(turns), *backwards[done:])


def forward_only(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """All forwards of all microbatches in order: inference."""
    stage_ranks = placed(stages, microbatches, ranks)
    pairs = [(k, stage) for k in range(microbatches) for stage in range(stages)]
    return assign([((k, stage), Action(stage, Do.FORWARD, k)) for k, stage in pairs], stage_ranks)


# The families that have a name. Somebody's own is passed as a `Family`, not entered here. Those
# that start a search come first, the best of them before the others: it has not time for all.
POLICIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            Family("zb-v", zb_v, folded, splits=True, seeds=True),
            Family("zb-h1", zb_h1, splits=True, seeds=True),
            Family("v-half", v_half, folded, splits=True, seeds=True),
            Family("v-min", v_min, folded, splits=True, seeds=True),
            Family("interleaved", interleaved, seeds=True),
            Family("dualpipe-v", dual_pipe_v, folded, splits=True, seeds=True),
            Family("1f1b", one_f_one_b, seeds=True),
            Family("zb-h2", zb_h2, splits=True, seeds=True),
            Family("eager-1f1b", eager_one_f_one_b, seeds=True),
            Family("gpipe", gpipe, seeds=True),
            Family("naive", naive),
            Family("breadth-first", gpipe),
            Family("loops", loops),
        )
    }
)


def policy(schedule: str | Family | Schedule) -> Family:
    """The family of a name, that of one schedule, or the family itself.

    Raises ValueError for a name that is not known, with those that are.
    """
    if isinstance(schedule, Family):
        return schedule
    if isinstance(schedule, Schedule):
        return family_of_one(schedule)
    if schedule not in POLICIES:
        near = get_close_matches(str(schedule), [*POLICIES, "search"], n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"schedule={schedule!r} is not known; there are {sorted(POLICIES)} and 'search'{meant}"
        )
    return POLICIES[schedule]


def placement(schedule: str | Family | Schedule, stages: int, ranks: int) -> tuple[int, ...]:
    """The stages' ranks that a family is made for, such as a V. Raises as `policy` does."""
    return policy(schedule).placement(stages, ranks)
