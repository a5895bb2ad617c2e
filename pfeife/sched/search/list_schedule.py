"""List scheduling by a rule: input-backwards, then forwards, then weight-backwards.

`first_rules` has the rules to start with, `mutated` changes of them.
"""

from collections.abc import Iterator
from random import Random

import attrs

from pfeife.sched.search.dispatch import NEVER, Chooser, Dispatched, Floor, dispatch
from pfeife.sched.search.job_shop import JobShop


@attrs.frozen
class Rule:
    """How ranks choose. Input-backwards go first, then forwards, then weight-backwards.

    `gap`: a W fills idle time that is at least `gap` times its own length. `hold`: no F if an I
    will be there in less than `hold` times its length. `caps[rank]`: microbatches between F and I
    on the rank's first stage. `owed`: more W than this on a rank go before F. `ahead[token]`:
    among the stages of a rank the least of microbatch + ahead goes first. `memory[rank]`: bytes,
    where less than all are to be used.
    """

    caps: tuple[int, ...]
    ahead: tuple[float, ...]
    gap: float = 1.0
    hold: float = 0.0
    owed: int = 1 << 30
    memory: tuple[float, ...] | None = None


def list_schedule(shop: JobShop, rule: Rule) -> Dispatched | None:
    """What a rule gives, nothing left; None if one microbatch alone is too big somewhere."""
    floor = Floor(shop)
    memory = rule.memory or shop.memory
    if any(need > limit for need, limit in zip(floor.alone, memory, strict=True)):
        return None
    return dispatch(floor, _chooser(floor, rule, memory))


# A rank that is free at `now` looks at the next I, W and F of each of its stages, and takes the
# first of these lines that holds (an I frees memory and is waited for, so it never waits itself):
#
#     I   if one is there
#     F   if one is there, has room and is under the cap; no more than `owed` W lie behind;
#         and the next I comes no sooner than `hold` x F        now [--- F ---]    I
#     W   if the next I or F comes no sooner than `gap` x W,    now [- W -]    I or F
#         or an F is stuck without room, or too many W lie behind
#     -   else it sleeps until the next I or F is there
#
# This runs for every operation of every schedule that a search tries, hence one plain loop over the
# rank's stages: the best I, W and F that may start now, and when the next I and F will be there.
def _chooser(floor: Floor, rule: Rule, memory: tuple[float, ...]) -> Chooser:
    shop = floor.shop
    m, count, seconds, whole = shop.microbatches, shop.stages, shop.seconds, shop.whole
    ready, done, room, caps, ahead = floor.ready, floor.done, floor.room, rule.caps, rule.ahead
    gap, hold, owed = rule.gap, rule.hold, rule.owed

    def choose(rank: int, now: float) -> tuple[int, float]:
        best_f = best_i = best_w = -1
        key_f = key_i = key_w = soon_f = soon_i = NEVER
        waiting, stuck = 0, False
        stages = floor.stages[rank]
        for s in stages:
            # Backwards first: they go on when all forwards of the stage are through (`k == m`), and
            # the checks of F below leave the loop.
            k = done[s]
            i, w = s + count, s + 2 * count
            back = done[i]
            if back < k:
                at = ready[i][back]
                if at > now:
                    if at < soon_i:
                        soon_i = at
                elif back + ahead[i] < key_i:
                    key_i, best_i = back + ahead[i], i
            # A backward that is whole has done its W, so it owes none.
            if done[w] < back and not whole[s]:
                waiting += back - done[w]
                if done[w] + ahead[w] < key_w:
                    key_w, best_w = done[w] + ahead[w], w
            if k == m:
                continue
            at = ready[s][k]
            if at > now:
                if at < soon_f:
                    soon_f = at
                continue
            # What enters the rank's first stage comes through all of its others, so the cap is on
            # that one; a W would not help here, so the F is not stuck.
            if s == stages[0] and k - back >= caps[rank]:
                continue
            # Asked last, because it goes over the stages of the rank: only of an F that could
            # start.
            if not room(rank, s, memory[rank]):
                stuck = True
            elif k + ahead[s] < key_f:
                key_f, best_f = k + ahead[s], s
        if best_i >= 0:
            return best_i, now
        # An F may run into the arrival of an I, for which an earlier rank waits: `hold` says by how
        # much, and `owed` how many W may pile up behind forwards.
        if best_f >= 0 and waiting <= owed and soon_i - now >= hold * seconds[best_f]:
            return best_f, now
        # No rank waits for a W: it goes where the wait for the next I or F is long enough for it.
        soon = soon_i if soon_i < soon_f else soon_f
        if best_w >= 0 and (stuck or waiting > owed or soon - now >= gap * seconds[best_w]):
            return best_w, now  # also where an F finds no memory: the W may make room
        return -1, soon

    return choose


def first_rules(shop: JobShop) -> Iterator[Rule]:
    """A grid, the most promising first: any rule gives a schedule if there is one at all."""
    ranks, m = shop.ranks, shop.microbatches
    free = (m,) * ranks
    falling = tuple(min(m, ranks - r) for r in range(ranks))
    double = tuple(min(m, 2 * (ranks - r) - 1) for r in range(ranks))
    level = (min(m, ranks),) * ranks
    flat = (0.0,) * (3 * shop.stages)
    orders = [flat, *(_by_chunk(shop, step) for step in (0.5, ranks, -0.5))]
    # With one stage a rank there is nothing to put before another.
    if shop.stages == ranks:
        orders = [flat]
    for gap in (1.0, 0.5, 0.0):
        for hold in (0.0, 0.5, 1.0):
            for ahead in orders:
                for caps in (free, level, falling, double):
                    yield Rule(caps, ahead, gap, hold)


def _by_chunk(shop: JobShop, step: float) -> tuple[float, ...]:
    """Later stages of a rank come `step` microbatches later in the forward, earlier back."""
    chunk: list[int] = []
    for s in range(shop.stages):
        chunk.append(sum(shop.rank_of[o] == shop.rank_of[s] for o in range(s)))
    last = max(chunk)
    forward = [step * c for c in chunk]
    backward = [step * (last - c) for c in chunk]
    return (*forward, *backward, *backward)


def mutated(shop: JobShop, rule: Rule, random: Random) -> Rule:
    """The rule with one to three things changed."""
    for _ in range(1 + int(3 * random.random() ** 2)):
        rule = random.choice(_CHANGES)(shop, rule, random)
    return rule


def _caps(shop: JobShop, rule: Rule, random: Random) -> Rule:
    caps = list(rule.caps)
    for rank in random.sample(range(shop.ranks), 1 + int(random.random() ** 2 * shop.ranks)):
        cap = min(caps[rank], 2 * shop.ranks, shop.microbatches)
        caps[rank] = max(1, cap + random.choice((-2, -1, 1, 2)))
    return attrs.evolve(rule, caps=tuple(caps))


def _uncapped(shop: JobShop, rule: Rule, random: Random) -> Rule:
    caps = list(rule.caps)
    caps[random.randrange(shop.ranks)] = shop.microbatches
    return attrs.evolve(rule, caps=tuple(caps))


def _gap(shop: JobShop, rule: Rule, random: Random) -> Rule:
    return attrs.evolve(rule, gap=max(0.0, random.choice((rule.gap, 0.7)) + random.gauss(0, 0.3)))


def _hold(shop: JobShop, rule: Rule, random: Random) -> Rule:
    return attrs.evolve(rule, hold=max(0.0, random.choice((rule.hold, 0.3)) + random.gauss(0, 0.3)))


def _owed(shop: JobShop, rule: Rule, random: Random) -> Rule:
    return attrs.evolve(rule, owed=random.choice((0, 1, 2, 3, 4, 6, shop.ranks, 1 << 30)))


def _ahead(shop: JobShop, rule: Rule, random: Random) -> Rule:
    ahead = list(rule.ahead)
    for _ in range(1 + int(random.random() * 3)):
        ahead[random.randrange(len(ahead))] += random.gauss(0, random.choice((0.6, 2.0)))
    return attrs.evolve(rule, ahead=tuple(ahead))


def _memory(shop: JobShop, rule: Rule, random: Random) -> Rule:
    if shop.problem.memory is None:
        return _caps(shop, rule, random)
    memory = list(rule.memory or shop.memory)
    rank = random.randrange(shop.ranks)
    alone = shop.problem.smallest_memory(rank)
    free = shop.memory[rank] - alone
    memory[rank] = alone + free * min(1.0, 0.5 + random.random())
    return attrs.evolve(rule, memory=tuple(memory))


_CHANGES = (_caps, _caps, _uncapped, _gap, _hold, _owed, _ahead, _memory)
