"""Simulated annealing of a schedule's orders, by moves of operations on a longest path.

A proposal is judged by the longest path through the operations that it moves, as job-shop searches
do (Taillard, Parallel taboo search techniques for the job shop, ORSA J. Comp. 1994; Balas and
Vazacopoulos, Guided local search with shifting bottleneck, Man. Sci. 1998): heads before and tails
after them stay, so it costs a few operations, not a whole evaluation. To put X behind B:

    rank   ... P | X A B | Q ...        head of P, ready of A, B, X
                                        tail of Q, after of A, B, X
           ... P | A B X | Q ...        -> the longest path through A, B or X

Only what is accepted is timed again, from the moved operations on.
"""

import math
from collections.abc import Callable
from random import Random

import attrs

from pfeife.sched.search.job_shop import JobShop, Orders
from pfeife.sched.search.timing import Timing


@attrs.frozen
class Annealed:
    """The best orders seen, their seconds, the operations looked at (the unit of the budget) and
    the evaluations."""

    seconds: float
    orders: Orders
    work: int
    evaluations: int


@attrs.frozen
class Cooling:
    """The temperature falls from `hot` to `cold` times the mean seconds of an operation. Moves go
    at most `reach` places."""

    hot: float = 0.25
    cold: float = 0.005
    reach: int = 12


def anneal(
    shop: JobShop,
    orders: Orders,
    *,
    work: int,
    random: Random,
    bound: float = 0.0,
    cooling: Cooling = Cooling(),
    over: Callable[[], bool] = lambda: False,
) -> Annealed:
    """Improves orders until `work` operations were looked at, `bound` is reached, or it is `over`.

    The same random state gives the same result unless `over` cuts it short.
    """
    timing, uniform = Timing(shop, orders), random.random
    best, best_orders = timing.length, timing.copy()
    goal = bound * (1 + 1e-9)
    hottest = cooling.hot * sum(timing.seconds) / max(1, shop.operations)
    falling = math.log(cooling.cold / cooling.hot)
    spent = evaluations = tries = 0
    path, temperature = timing.critical(random), hottest
    # The temperature falls with the work that is spent, so that any budget ends cold. Only a move
    # of what lies on a longest path can make the step shorter; near places are tried more often.
    while spent < work and best > goal:
        tries += 1
        if tries % 64 == 0:
            if over():
                break
            temperature = hottest * math.exp(falling * spent / work)
        operation = path[int(uniform() * len(path))]
        distance = 1 + int(uniform() * uniform() * cooling.reach)
        move = propose(timing, operation, distance if uniform() < 0.5 else -distance)
        spent += 12  # operations that a proposal looks at, about
        if move is None:
            continue
        seconds, at, to = move
        # Metropolis, the random number first: what is d longer passes with exp(-d / temperature).
        # So most moves are refused by the path through them, before anything is changed.
        limit = timing.length - temperature * math.log(1 - uniform())
        if seconds > limit:
            continue
        passed = timing.move(at, to, timing.rank_of[operation])
        if passed and shop.contended and timing.length > limit:
            passed += timing.move(to, at, timing.rank_of[operation])  # transfers wait too long
        if not passed:
            continue
        spent += passed + len(path)
        evaluations += 1
        path = timing.critical(random)
        if timing.length < best * (1 - 1e-12):
            best, best_orders = timing.length, timing.copy()
    return Annealed(best, best_orders, spent, evaluations)


def propose(timing: Timing, operation: int, distance: int) -> tuple[float, int, int] | None:
    """The longest path through what a move changes, and the move from a place of the operation's
    rank to another one: as far as it may go. None if it may not."""
    order = timing.sequences[timing.rank_of[operation]]
    at = timing.position[operation]
    to = min(max(at + distance, 0), len(order) - 1)
    if to > at:
        others = _later(timing, operation, order[at + 1 : to + 1])
        to, sequence = at + len(others), [*others, operation]
        low, high = at, to
    else:
        others = _sooner(timing, operation, order[to:at])
        to, sequence = at - len(others), [operation, *others]
        low, high = to, at
    if to == at:
        return None
    return _longest(timing, sequence, order[low], order[high]), at, to


def _later(timing: Timing, operation: int, others: list[int]) -> list[int]:
    """The operations of its rank behind which an operation may go: none waits for it, and what it
    frees is not missing to any."""
    level, takes, change = timing.level, timing.takes, timing.change[operation]
    then, memory = timing.then[operation], timing.shop.memory[timing.rank_of[operation]]
    # What waits by way of other ranks is not looked at: `Timing.move` refuses what closes a circle.
    for index, neighbour in enumerate(others):
        if neighbour in then or (
            change < 0 and takes[neighbour] and level[neighbour] - change > memory
        ):
            return others[:index]
    return others


def _sooner(timing: Timing, operation: int, others: list[int]) -> list[int]:
    """The operations of its rank before which an operation may go: it waits for none, and finds
    memory before each and leaves enough."""
    level, takes, change = timing.level, timing.takes, timing.change[operation]
    then, memory = timing.then, timing.shop.memory[timing.rank_of[operation]]
    # Put before others, it adds its bytes to what they find. That is too much only at one that
    # takes bytes itself: any other finds no more than one before it.
    for index in range(len(others) - 1, -1, -1):
        neighbour = others[index]
        here = level[neighbour]
        if operation in then[neighbour] or (
            change > 0
            and (
                (takes[neighbour] and here + change > memory)
                or here - takes[neighbour] + takes[operation] > memory
            )
        ):
            return others[index + 1 :]
    return others


def _longest(timing: Timing, sequence: list[int], first: int, last: int) -> float:
    """The longest path through a rank's operations from `first` to `last` in another sequence.

        ready:             b1    b2    b3             of other ranks, as it was
                            v     v     v
        end[before] -> now [ x1 ][ x2 ][ x3 ] left <- tail[behind]
                            v     v     v
        after:             b1    b2    b3

    Ends are added up from the left, tails from the right. What other ranks make of the moved
    operations is taken as it was (Balas and Vazacopoulos, Guided Local Search with Shifting
    Bottleneck, Management Science 1998): `Timing.move` then tells the truth.
    """
    seconds, ready, after = timing.seconds, timing.ready, timing.after
    now = timing.end[timing.before[first]]
    ends = []
    for operation in sequence:
        b = ready[operation]
        now = (now if now > b else b) + seconds[operation]
        ends.append(now)
    left = timing.tail[timing.behind[last]]
    longest = 0.0
    for operation in reversed(sequence):
        b = after[operation]
        left = left if left > b else b
        through = ends.pop() + left
        if through > longest:
            longest = through
        left += seconds[operation]
    return longest
