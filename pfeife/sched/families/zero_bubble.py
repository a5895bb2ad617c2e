"""Schedules that split the backward: weight-backwards fill the waits for input-backwards.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 ("ZB"); Qi et al., Pipeline
Parallelism with Controllable Memory, NeurIPS 2024 ("CM"); DeepSeek, DualPipe (2025).
Each is made for a placement of its own, one stage a rank or a V; on any other one the actions
keep their order in time (see `assign`).
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.sched.families.orders import Timed, assign, folded, halves, placed, unit_times

# Seconds from a stage's forward or input-backward to that of the next stage, by the stage.
Hops = Callable[[int], int]
# When a building block starts an action, its stage and microbatch.
_Place = tuple[int, int, int]


def zb_h1(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """ZB-H1: the memory of 1F1B, a third of its bubble (ZB, section 2.1)."""
    return _zb_h(stages, microbatches, ranks, back=2, limit=stages)


def zb_h2(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """ZB-H2: no bubble between a rank's first and last action, up to 2p - 1 microbatches in
    flight (ZB, section 2.2)."""
    return _zb_h(stages, microbatches, ranks, back=5, limit=2 * stages - 1)


def _zb_h(
    stages: int, microbatches: int, ranks: Sequence[int] | None, *, back: int, limit: int
) -> Schedule:
    stage_ranks = placed(stages, microbatches, ranks)
    block = _block(stages, lambda s: 1, lambda s: back)
    return assign(_listed(block, range(stages), microbatches, limit), stage_ranks)


def v_half(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """V-Half: about half of 1F1B's memory and half of its bubble (CM, section 3).

    p ranks of two stages in a V hold (p + 2) // 2 microbatches.
    """
    stage_ranks, p = _on_v(stages, microbatches, ranks), halves(stages)
    # From the first rank to the last it takes two seconds a stage, from the last to the first one.
    block = _block(stages, lambda s: 2 if s < p - 1 else 1, lambda s: 1 if s < p - 1 else 2)
    return assign(_listed(block, folded(stages, p), microbatches, 2 * ((p + 2) // 2)), stage_ranks)


def v_min(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """V-Min: about a third of 1F1B's memory and two thirds of its bubble (CM, section 3).

    p ranks of two stages in a V hold (p + 4) // 3 microbatches.
    """
    stage_ranks, p = _on_v(stages, microbatches, ranks), halves(stages)
    pause = 2 if p % 3 == 0 else 0  # else a rank would have two actions at the same time
    block = _block(stages, lambda s: 1, lambda s: 1, pause)
    return assign(_listed(block, folded(stages, p), microbatches, 2 * ((p + 4) // 3)), stage_ranks)


def _on_v(stages: int, microbatches: int, ranks: Sequence[int] | None) -> tuple[int, ...]:
    natural = folded(stages, halves(stages)) if stages else ()
    return placed(stages, microbatches, natural if ranks is None else ranks)


def _block(stages: int, down: Hops, up: Hops, pause: int = 0) -> list[tuple[int, int]]:
    """When one microbatch's forward and input-backward start on every stage (CM, section 2).

    stage 0   F . . . . . . I       down(s): seconds from F of stage s to F of the next one
    stage 1     F . . . I           up(s): from I of the next one to I of stage s, here 2
    stage 2       F I               pause: before the turn
    """
    forwards = [sum(map(down, range(stage))) for stage in range(stages)]
    turn = forwards[-1] + 1 + pause
    return [(forwards[s], turn + sum(map(up, range(s, stages - 1)))) for s in range(stages)]


def _listed(
    block: Sequence[tuple[int, int]], ranks: Sequence[int], microbatches: int, limit: int
) -> Timed:
    """Building blocks, one after the other, pushed together by a list scheduler.

    The blocks follow each other at the pace of the rank with the most stages. A rank runs its
    forwards in the order of the blocks, as long as no more than `limit` of its (stage,
    microbatch) pairs are between forward and weight-backward; input-backwards as they come,
    before a forward if their block says so; and weight-backwards, the oldest first, when there is
    nothing else to do. Every action takes a second.

    It never waits for ever if the blocks themselves keep to `limit`: the first action, in the
    blocks' order, of those that are left is never held back.
    """
    run = _Blocks(block, ranks, microbatches, limit)
    now, left = 0, 3 * len(ranks) * microbatches
    while left:
        started = [action for rank in range(1 + max(ranks)) if (action := run.choose(rank))]
        assert started, "the blocks do not keep to the limit"
        for action in started:
            yield now, action
            run.finish(action)
        now, left = now + 1, left - len(started)


class _Blocks:
    """What every rank has left to do of the building blocks."""

    def __init__(
        self,
        block: Sequence[tuple[int, int]],
        stage_ranks: Sequence[int],
        microbatches: int,
        limit: int,
    ):
        self.block, self.stage_ranks, self.limit = block, stage_ranks, limit
        self.interval = 3 * max(Counter(stage_ranks).values())
        self.forwards: list[deque[_Place]] = [deque() for _ in range(1 + max(stage_ranks))]
        for place in sorted(
            (start + self.interval * k, stage, k)
            for stage, (start, _) in enumerate(block)
            for k in range(microbatches)
        ):
            self.forwards[stage_ranks[place[1]]].append(place)
        self.inputs = [microbatches] + [0] * (len(stage_ranks) - 1)  # that have come to a stage
        self.gradients: list[list[_Place]] = [[] for _ in self.forwards]
        self.owed: list[deque[Action]] = [deque() for _ in self.forwards]
        self.held = [0] * len(self.forwards)

    def choose(self, rank: int) -> Action | None:
        """What the rank starts now."""
        forwards, gradients = self.forwards[rank], self.gradients[rank]
        ready = False
        if forwards and self.held[rank] < self.limit:
            _, stage, k = forwards[0]
            ready = self.inputs[stage] > k
        # A forward goes first only where its block has it earlier, and room for it.
        if gradients and not (ready and forwards[0] < gradients[0]):
            _, stage, k = heappop(gradients)
            return Action(stage, Do.INPUT_BACKWARD, k)
        if ready:
            _, stage, k = forwards.popleft()
            return Action(stage, Do.FORWARD, k)
        return self.owed[rank].popleft() if self.owed[rank] else None

    def finish(self, action: Action) -> None:
        """What an action that is done lets start."""
        stage, k, rank = action.stage, action.microbatch, self.stage_ranks[action.stage]
        assert k is not None
        if action.do == Do.WEIGHT_BACKWARD:
            self.held[rank] -= 1
        elif action.do == Do.INPUT_BACKWARD:
            self.owed[rank].append(Action(stage, Do.WEIGHT_BACKWARD, k))
            self._gradient(stage - 1, k)
        else:
            self.held[rank] += 1
            if stage + 1 < len(self.stage_ranks):
                self.inputs[stage + 1] += 1
            else:
                self._gradient(stage, k)

    def _gradient(self, stage: int, k: int) -> None:
        if stage >= 0:
            start = self.block[stage][1] + self.interval * k
            heappush(self.gradients[self.stage_ranks[stage]], (start, stage, k))


def zb_v(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """ZB-V: no bubble between a rank's first and last action with the memory of 1F1B (Zero
    Bubble's first version, arXiv 2401.10241v1, section 6; in CM it is "V-ZB").

    p ranks of two stages in a V hold p microbatches. Up to p are held all at once, and their
    building blocks pushed together by the list scheduler; fewer than 2p - 1 run as the first ones
    of so many.
    """
    stage_ranks, p = _on_v(stages, microbatches, ranks), halves(stages)
    if microbatches <= p:
        block = _block(stages, lambda s: 1 if s < p else 5, lambda s: 5 if s < p - 1 else 1)
        return assign(_listed(block, folded(stages, p), microbatches, 2 * p), stage_ranks)
    orders = [_zb_v_words(p, rank, max(microbatches, 2 * p - 1)) for rank in range(p)]
    return assign(_spelled(orders, stages, microbatches), stage_ranks)


def _zb_v_words(p: int, rank: int, microbatches: int) -> list[str]:
    after = p - rank
    both = microbatches - 2 * p + rank + 1  # turns that still have a forward of the first stage
    return [
        *["F0"] * (2 * after - 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W"] * after,
        *["F0", "I0", "W", "F1", "I1", "W"] * both,
        *["I0", "W", "F1", "I1", "W"] * (after - 1),
        *["I0", "I1"] * rank,
        *["I0", "W"] * after,
        *["W"] * 2 * rank,
    ]


def dual_pipe_v(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """DualPipeV: forwards of one half of the V next to backwards of the other, to be run side by
    side (DeepSeek, github.com/deepseek-ai/DualPipe, 2025).

    p ranks of two stages in a V hold p + 1/2 microbatches. Fewer than 2p microbatches run as the
    first ones of 2p.
    """
    stage_ranks, p = _on_v(stages, microbatches, ranks), halves(stages)
    orders = [_dual_pipe_v_words(p, rank, max(microbatches, 2 * p)) for rank in range(p)]
    return assign(_spelled(orders, stages, microbatches), stage_ranks)


def _dual_pipe_v_words(p: int, rank: int, microbatches: int) -> list[str]:
    after, done = p - 1 - rank, rank + 1
    return [
        *["F0"] * (2 * after),
        *["F0", "F1"] * done,
        *["I1", "W", "F1"] * after,
        *["F0", "B1", "F1", "B0"] * (microbatches - 2 * p + done),
        *["B1", "F1", "B0"] * after,
        # of the last 2 x `done` backwards the first half are whole, the others leave W for the end
        *(["B1", "B0"] * done)[:done],
        *(["I1", "I0"] * done)[done:],
        *["W", "I0"] * after,
        *["W"] * done,
    ]


def _spelled(orders: Sequence[Iterable[str]], stages: int, microbatches: int) -> Timed:
    """Unit times of a schedule on a V that has words for every rank.

    A word such as F0, I1 or B0 is of the rank's first or second stage, whose microbatches come in
    order; W belongs to the oldest I that has had none. Actions of stages and microbatches beyond
    those that there are drop out: what is left needs nothing of them.
    """
    last = 2 * len(orders) - 1
    actions_by_rank = [
        [
            action
            for action in _actions(words, (rank, last - rank))
            if action.stage < stages and (action.microbatch or 0) < microbatches
        ]
        for rank, words in enumerate(orders)
    ]
    return unit_times(actions_by_rank, stages)


def _actions(words: Iterable[str], stages: Sequence[int]) -> Iterator[Action]:
    owed: deque[tuple[int, int]] = deque()
    done: Counter[tuple[int, bool]] = Counter()
    for word in words:
        do = word[0]
        if do == "W":
            stage, k = owed.popleft()
        else:
            stage = stages[int(word[1])]
            k = done[stage, do == "F"]
            done[stage, do == "F"] += 1
        if do == "I":
            owed.append((stage, k))
        yield Action(stage, Do(do), k)
