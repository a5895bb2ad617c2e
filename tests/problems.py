"""Problems of scheduling that tests draw, and their optimum."""

import math
from collections.abc import Iterator
from itertools import product
from random import Random

from hypothesis import strategies as st

from pfeife.data.schedule import Schedule
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import (
    Edge,
    Problem,
    StageCosts,
    chain_edges,
    seconds_of,
    transfers,
)
from pfeife.lowering.simulate import simulate
from pfeife.sched.families import folded
from pfeife.sched.search.dispatch import Dispatched
from pfeife.sched.search.job_shop import JobShop, compile_problem, length_of, starts_of
from pfeife.sched.search.list_schedule import first_rules, list_schedule

WORK = 60_000  # operations that a search in a test looks at


def equal(ranks: int, microbatches: int, memory: float | None = None) -> Problem:
    """One stage a rank, F = I = W = 1 second, 1 byte saved, half of it kept."""
    return Problem(
        (StageCosts(1.0, 1.0, 1.0, 1.0, 0.5),) * ranks,
        tuple(range(ranks)),
        microbatches,
        chain_edges(ranks),
        None if memory is None else (memory,) * ranks,
    )


@st.composite
def problems(
    draw,
    *,
    most_ranks: int = 4,
    most_microbatches: int = 6,
    most_chunks: int = 2,
    skips: bool = True,
    tight: bool = True,
) -> Problem:
    """Uneven stages in any placement, with memory for at least one microbatch."""
    ranks = draw(st.integers(1, most_ranks))
    chunks = draw(st.integers(1, most_chunks))
    count = ranks * chunks
    stage_ranks = list(range(ranks)) * chunks
    if draw(st.booleans()):
        stage_ranks = [
            r if c % 2 == 0 else ranks - 1 - r for c in range(chunks) for r in range(ranks)
        ]
    seconds = st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.7])
    stages = []
    for _ in range(count):
        saved = draw(st.sampled_from([0.0, 1.0, 1.0, 2.5]))
        kept = saved * draw(st.sampled_from([0.0, 0.5, 1.0]))
        times = [draw(seconds) for _ in range(3)]
        stages.append(StageCosts(*times, saved, kept, draw(st.integers(0, 4)) > 0))
    edges = list(chain_edges(count, draw(st.sampled_from([0.0, 0.2])), 0.1))
    if skips and count > 2 and draw(st.booleans()):
        edges.append(Edge(0, count - 1, 0.3, 0.3))
    problem = Problem(
        tuple(stages), tuple(stage_ranks), draw(st.integers(1, most_microbatches)), tuple(edges)
    )
    if not tight or draw(st.booleans()):
        return problem
    limits = tuple(
        problem.smallest_memory(rank) * draw(st.sampled_from([1.0, 1.4, 2.0, 3.1]))
        for rank in range(ranks)
    )
    return Problem(problem.stages, problem.stage_ranks, problem.microbatches, tuple(edges), limits)


def by_first_rule(problem: Problem) -> tuple[JobShop, Dispatched]:
    """A shop, and what the first of its rules makes."""
    shop = compile_problem(problem)
    made = list_schedule(shop, next(first_rules(shop)))
    assert made is not None
    return shop, made


def simulated(problem: Problem, schedule: Schedule) -> float:
    return simulate(insert_actions(schedule, transfers(problem)), seconds_of(problem)).seconds


def every_order(shop: JobShop, rank: int) -> Iterator[list[int]]:
    """All orders of a rank's operations that keep to F, I, W and to the memory."""
    tokens, m, count = shop.tokens_of(rank), shop.microbatches, shop.stages

    def extend(order: list[int], done: dict[int, int], held: float) -> Iterator[list[int]]:
        if len(order) == len(tokens) * m:
            yield list(order)
        for token in tokens:
            k = done[token]
            if k == m or (token >= count and done[token - count] <= k):
                continue
            if held + shop.takes[token] > shop.memory[rank]:
                continue
            order.append(token * m + k)
            now = held + shop.takes[token] - shop.frees[token]
            yield from extend(order, {**done, token: k + 1}, now)
            order.pop()

    yield from extend([], dict.fromkeys(tokens, 0), 0.0)


def optimum(problem: Problem) -> float:
    """The least makespan over all orders, transfers not waiting for one another; infinite if
    there is no schedule."""
    shop = compile_problem(problem)
    best = math.inf
    for orders in product(*(list(every_order(shop, r)) for r in range(shop.ranks))):
        starts = starts_of(shop, list(orders))
        if starts is not None:
            best = min(best, length_of(shop, starts, list(orders)))
    return best


def tiny(seed: int, *, chunks: int = 1) -> Problem:
    """Two or three ranks, two or three microbatches, often short of memory."""
    random = Random(seed)
    ranks = 2 if chunks == 2 else random.choice([2, 2, 3])
    m = 2 if ranks == 3 or chunks == 2 else random.choice([2, 3])
    count = ranks * chunks
    # In a V the two stages of a rank would make too many orders; leave their backwards whole.
    stages = tuple(
        StageCosts(
            random.choice([0.5, 1.0, 2.0]),
            random.choice([0.5, 1.0, 2.0]),
            random.choice([0.0, 0.5, 1.0, 2.0]),
            random.choice([1.0, 2.0]),
            random.choice([0.0, 1.0]),
            chunks == 1,
        )
        for _ in range(count)
    )
    stage_ranks = tuple([*range(ranks), *reversed(range(ranks))][:count])
    plain = Problem(stages, stage_ranks, m, chain_edges(count, random.choice([0.0, 0.25])))
    memory = tuple(
        plain.smallest_memory(r) * random.choice([0.9, 1.0, 1.0, 1.5, 2.0, 9.0])
        for r in range(ranks)
    )
    return Problem(stages, stage_ranks, m, plain.edges, memory)


def on_a_v(ranks: int, microbatches: int, memory: float) -> Problem:
    """Two equal stages a rank, little memory, some seconds for transfers."""
    return Problem(
        (StageCosts(1.0, 1.1, 0.8, 1.0, 0.75),) * (2 * ranks),
        folded(2 * ranks, ranks),
        microbatches,
        chain_edges(2 * ranks, 0.05),
        (memory,) * ranks,
    )
