"""Rules of list scheduling to start with, and changes of them."""

from collections.abc import Iterator
from random import Random

import attrs

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
