"""The schedule search against the judge, against brute force, and against its own bound."""

import math
from collections.abc import Iterator
from itertools import product
from random import Random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfeife.data.schedule import Do, Schedule
from pfeife.lowering.lower import insert_actions
from pfeife.lowering.problem import (
    Edge,
    Problem,
    StageCosts,
    chain_edges,
    fits,
    makespan,
    peak_memory,
    seconds_of,
    transfers,
)
from pfeife.lowering.simulate import simulate
from pfeife.lowering.verify import verify_schedule
from pfeife.sched import folded, gpipe, one_f_one_b, v_min
from pfeife.sched.search.anneal import Cooling, anneal, propose
from pfeife.sched.search.bound import lower_bound, preemptive
from pfeife.sched.search.budget import Budget
from pfeife.sched.search.job_shop import (
    JobShop,
    compile_problem,
    length_of,
    orders_of,
    respects,
    schedule_of,
    starts_of,
)
from pfeife.sched.search.list_schedule import list_schedule
from pfeife.sched.search.pattern import neighbour, pattern_of, pattern_schedule
from pfeife.sched.search.placements import _shares
from pfeife.sched.search.pool import Candidate, Origin, Pool
from pfeife.sched.search.rules import first_rules, mutated
from pfeife.sched.search.run import Search
from pfeife.sched.search.search import search_placements, search_schedule
from pfeife.sched.search.seeds import patterns
from pfeife.sched.search.timing import Timing

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


@pytest.mark.parametrize("chunks", [1, 2])
def test_tiny_problems_are_solved_to_the_optimum_or_are_impossible(chunks):
    impossible = 0
    for seed in range(24):
        problem = tiny(seed, chunks=chunks)
        best = optimum(problem)
        if math.isinf(best):
            impossible += 1
            with pytest.raises(ValueError, match="does not fit: rank"):
                search_schedule(problem, work=WORK)
            continue
        found = search_schedule(problem, work=WORK)
        assert found.bound <= best * (1 + 1e-9)
        assert found.seconds == pytest.approx(best), f"seed {seed}"
        assert fits(problem, found.schedule)
    assert 0 < impossible < 12


@given(problems(), st.integers(0, 99))
@settings(max_examples=100)
def test_what_is_found_is_valid_in_memory_and_above_the_bound(problem, seed):
    found = search_schedule(problem, work=WORK // 3, seed=seed)
    verify_schedule(insert_actions(found.schedule, transfers(problem)))
    assert found.seconds == pytest.approx(simulated(problem, found.schedule))
    assert fits(problem, found.schedule)
    assert found.memory == peak_memory(problem, found.schedule)
    assert found.bound <= found.seconds * (1 + 1e-9)
    assert not found.interrupted


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=100)
def test_every_rule_gives_a_schedule_in_memory(problem, seed):
    random, shop = Random(seed), compile_problem(problem)
    rule = next(first_rules(shop))
    bound = lower_bound(problem)
    for _ in range(12):
        rule = mutated(shop, rule, random)
        made = list_schedule(shop, rule)
        assert made is not None and not made.left
        seconds, orders = made.seconds, made.orders
        starts = starts_of(shop, orders)
        assert starts is not None and respects(shop, orders)
        assert bound <= length_of(shop, starts, orders) * (1 + 1e-9)
        assert length_of(shop, starts, orders) <= seconds * (1 + 1e-9)
        assert fits(problem, schedule_of(shop, orders))


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=100)
def test_annealing_keeps_orders_possible_and_times_them_right(problem, seed):
    random, shop = Random(seed), compile_problem(problem)
    made = list_schedule(shop, next(first_rules(shop)))
    assert made is not None
    result = anneal(shop, made.orders, work=20_000, random=random, cooling=Cooling(2.0, 0.5))
    starts = starts_of(shop, result.orders)
    assert starts is not None and respects(shop, result.orders)
    assert result.seconds == pytest.approx(length_of(shop, starts, result.orders))
    assert result.seconds <= made.seconds * (1 + 1e-9)


@given(problems(most_microbatches=9), st.integers(0, 10**6))
@settings(max_examples=60)
def test_moves_leave_heads_and_tails_as_a_fresh_start_has_them(problem, seed):
    random, shop = Random(seed), compile_problem(problem)
    made = list_schedule(shop, next(first_rules(shop)))
    assert made is not None
    state = Timing(shop, made.orders)
    for _ in range(60):
        operation = random.choice(state.critical(random))
        move = propose(state, operation, random.choice((-4, -2, -1, 1, 2, 4)))
        rank = shop.rank_of[operation // shop.microbatches]
        if move is not None and state.move(move[1], move[2], rank):
            fresh = Timing(shop, state.copy())
            assert (state.end, state.tail, state.length) == (fresh.end, fresh.tail, fresh.length)
            assert (state.before, state.behind) == (fresh.before, fresh.behind)
            assert state.level == pytest.approx(fresh.level)
            assert respects(shop, state.copy())


@given(problems(), st.integers(0, 10**6))
@settings(max_examples=60)
def test_patterns_give_schedules_in_memory_or_none(problem, seed):
    random, shop = Random(seed), compile_problem(problem)
    made = list_schedule(shop, next(first_rules(shop)))
    assert made is not None
    starts = starts_of(shop, made.orders)
    assert starts is not None
    pattern, count = pattern_of(shop, starts), 0
    for _ in range(12):
        found = pattern_schedule(shop, pattern)
        count += not found.left
        if not found.left:
            assert respects(shop, found.orders) and starts_of(shop, found.orders) is not None
        pattern = neighbour(shop, pattern, random)
    # What leaves memory for what has started, and lets all that is there go, never gets stuck.
    assert not pattern_schedule(shop, attrs.evolve(pattern, safe=True, loose=1e9)).left


@given(problems(), st.sampled_from([0.0, 0.2, 1.5]), st.integers(0, 99))
def test_transfers_wait_for_one_another_as_the_judge_has_it(problem, lag, at):
    edges = tuple(Edge(e.source, e.destination, lag, 0.7 * lag) for e in problem.edges)
    problem = attrs.evolve(problem, edges=edges)
    shop = compile_problem(problem)
    rules = list(first_rules(shop))
    made = list_schedule(shop, rules[at % len(rules)])
    assert made is not None
    seconds = makespan(problem, schedule_of(shop, made.orders, whole=False))
    starts = starts_of(shop, made.orders)
    assert starts is not None
    assert length_of(shop, starts, made.orders) == pytest.approx(seconds)
    assert Timing(shop, made.orders).length == pytest.approx(seconds)


def test_channels_are_contended_where_transfers_take_longer_than_what_sends():
    for lag, contended in ((0.9, False), (1.1, True)):
        problem = attrs.evolve(equal(3, 4), edges=chain_edges(3, lag))
        assert compile_problem(problem).contended == contended
    twice = attrs.evolve(
        equal(3, 4), stage_ranks=(0, 1, 1), edges=(Edge(0, 1, 0.1), Edge(0, 2, 0.1))
    )
    assert compile_problem(twice).contended


@given(problems(skips=False), st.integers(0, 9))
def test_fusing_backwards_costs_nothing(problem, seed):
    shop = compile_problem(problem)
    for rule in list(first_rules(shop))[seed::10]:
        made = list_schedule(shop, rule)
        assert made is not None
        starts = starts_of(shop, made.orders)
        assert starts is not None
        free = Problem(problem.stages, problem.stage_ranks, problem.microbatches, problem.edges)
        schedule = schedule_of(shop, made.orders)
        # The judge has transfers wait for one another, so take it without seconds of transfers.
        if all(e.forward_seconds == 0 == e.backward_seconds for e in problem.edges):
            assert makespan(free, schedule) <= length_of(shop, starts, made.orders) * (1 + 1e-9)
        assert orders_of(shop, schedule) == made.orders


@given(problems(most_chunks=1, tight=False))
def test_the_judge_agrees_with_the_simulator_on_families(problem):
    problem = Problem(
        problem.stages, problem.stage_ranks, problem.microbatches, problem.edges, None
    )
    for family in (gpipe, one_f_one_b):
        schedule = family(len(problem.stages), problem.microbatches)
        assert makespan(problem, schedule) == pytest.approx(simulated(problem, schedule))
        assert lower_bound(problem) <= makespan(problem, schedule) * (1 + 1e-9)


def test_the_judge_refuses_what_does_not_belong_to_the_problem():
    problem = equal(2, 2)
    with pytest.raises(ValueError, match="2 microbatches of every stage"):
        makespan(problem, gpipe(2, 3))
    with pytest.raises(ValueError, match="on rank"):
        makespan(problem, gpipe(2, 2, ranks=(1, 0)))
    whole = Problem((StageCosts(1, 1, 1, splittable=False),) * 2, (0, 1), 2, chain_edges(2))
    with pytest.raises(ValueError, match="cannot be split"):
        makespan(whole, Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1B1"))
    with pytest.raises(ValueError, match=r"deadlocks: rank 0 waits at \[0B0\]"):
        makespan(problem, Schedule.from_csv("0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1"))


def test_equal_stages_reach_the_published_optimum():
    # Zero Bubble (ICLR 2024): with F = I = W and memory for p microbatches, (p - 1) units idle.
    for ranks, m in ((2, 4), (4, 8), (4, 12)):
        found = search_schedule(equal(ranks, m, memory=float(ranks)), work=10 * WORK)
        assert found.seconds == 3 * m + ranks - 1 == found.bound


def test_little_memory_costs_time_but_is_kept_to():
    lengths = [
        search_schedule(equal(4, 8, memory=limit), work=4 * WORK).seconds
        for limit in (1.0, 2.0, 3.0, 4.0, None)
    ]
    assert lengths == sorted(lengths, reverse=True)
    # One at a time: nobody works while another does, but for the last W (1 s on each of 4 ranks).
    assert lengths[0] <= 8 * (4 * 2 + 4) and lengths[-1] == 27


@given(problems(), st.integers(0, 99))
@settings(max_examples=12)
def test_the_same_seed_gives_the_same_schedule(problem, seed):
    first, again = (search_schedule(problem, work=WORK // 3, seed=seed) for _ in range(2))
    assert first == again


def on_a_v(ranks: int, microbatches: int, memory: float) -> Problem:
    """Two equal stages a rank, little memory, some seconds for transfers."""
    return Problem(
        (StageCosts(1.0, 1.1, 0.8, 1.0, 0.75),) * (2 * ranks),
        folded(2 * ranks, ranks),
        microbatches,
        chain_edges(2 * ranks, 0.05),
        (memory,) * ranks,
    )


def test_families_and_their_patterns_are_part_of_a_search():
    """By rules alone this case takes 5 % longer than V-Min does."""
    problem = on_a_v(4, 12, 4.0)
    best = makespan(problem, v_min(8, 12, problem.stage_ranks))
    found = search_schedule(problem, work=20 * WORK)
    assert found.seconds <= best * (1 + 1e-9)
    search = Search(problem, Budget.of(None, 20 * WORK), 0)
    search.run(20 * WORK)
    origins = {one.origin for one in search.pool.of()}
    assert origins == set(Origin)
    repeated = [pattern_schedule(search.shop, pattern) for pattern in patterns(problem)]
    assert sum(not made.left for made in repeated) >= 2


@pytest.mark.parametrize("seed", range(3))
def test_a_pattern_that_gets_stuck_is_changed_until_it_runs(seed):
    problem, random = on_a_v(4, 12, 4.0), Random(seed)
    search = Search(problem, Budget.of(None, 10 * WORK), seed)
    search.run(1)
    stuck = next(patterns(problem))
    while not pattern_schedule(search.shop, stuck).left:
        stuck = neighbour(search.shop, stuck, random)
    search.first, search.last = search.spent, search.spent + 10 * WORK
    seconds, changed = search._changed_pattern((search._try_pattern(stuck), stuck), 1.0)
    made = pattern_schedule(search.shop, changed)
    assert not made.left and made.seconds == seconds


def test_the_pool_keeps_the_best_of_every_origin():
    pool = Pool()
    for index in range(50):
        pool.keep(Candidate(1.0 + index / 100, [], Origin.RULE))
    pool.keep(Candidate(9.0, [], Origin.PATTERN))
    pool.keep(Candidate(9.0, [], Origin.PATTERN))
    assert [one.seconds for one in pool.of(Origin.PATTERN)] == [9.0]
    assert [one.seconds for one in pool.varied(3)] == [1.0, 9.0, 1.01]


def test_a_search_goes_on_where_it_stopped():
    problem = on_a_v(4, 8, 4.0)
    search = Search(problem, Budget.of(None, 6 * WORK), 0)
    lengths, evaluations = [], []
    for _ in range(3):
        search.run(2 * WORK)
        lengths.append(search.best)
        evaluations.append(search.evaluations)
    assert lengths == sorted(lengths, reverse=True) and evaluations == sorted(set(evaluations))
    whole = search_schedule(problem, work=2 * WORK)
    assert whole.seconds == pytest.approx(lengths[0])


def test_placements_have_more_time_the_nearer_they_are():
    searches = [Search(equal(4, 8), Budget.of(None, WORK), 0) for _ in range(4)]
    for search, seconds in zip(searches, (100.0, 102.0, 130.0, 101.0), strict=True):
        search.pool.keep(Candidate(seconds, [], Origin.RULE))
    searches[3].bound = 100.0  # cannot become better than the best
    parts = {searches.index(search): part for search, part in _shares(searches)}
    assert parts == {0: pytest.approx(3 / 4), 1: pytest.approx(1 / 4)}


def test_the_best_placement_is_found_and_the_bound_is_of_all():
    near, far = on_a_v(4, 8, 4.0), attrs.evolve(on_a_v(4, 8, 4.0), microbatches=24)
    first, again = (search_placements([far, near], work=4 * WORK) for _ in range(2))
    assert first == again and first[0] == 1 and not first[1].interrupted
    assert first[1].bound == lower_bound(near)


def test_searches_side_by_side_are_those_of_their_seeds():
    problem = attrs.evolve(on_a_v(4, 8, 5.0), memory=(5.0, 4.0, 5.0, math.inf))
    alone = [search_schedule(problem, work=WORK, seed=seed) for seed in (3, 4)]
    together = search_schedule(problem, work=WORK, seed=3, jobs=2)
    best = min(alone, key=lambda found: found.seconds)
    assert together.schedule == best.schedule and together.seconds == best.seconds
    assert together.evaluations == sum(found.evaluations for found in alone)


def test_the_clock_cuts_a_search_short_and_says_so():
    problem = Problem(
        tuple(StageCosts(1 + s % 3, 1.5, 0.7, 1.0) for s in range(8)),
        tuple(range(8)),
        32,
        chain_edges(8, 0.1),
        (3.0,) * 8,
    )
    found = search_schedule(problem, seconds=0.05, work=10**9)
    assert found.interrupted and fits(problem, found.schedule)


@given(problems(), st.integers(0, 9))
@settings(max_examples=15)
def test_a_seed_is_never_made_worse(problem, seed):
    good = search_schedule(problem, work=WORK // 2, seed=seed)
    again = search_schedule(problem, work=1, seed=seed + 1, seeds=(good.schedule,))
    assert again.seconds <= good.seconds


def test_seeds_that_do_not_fit_are_left_out():
    problem = equal(2, 4, memory=2.0)
    found = search_schedule(problem, work=WORK, seeds=(gpipe(2, 4), one_f_one_b(2, 4)))
    assert fits(problem, found.schedule) and not fits(problem, gpipe(2, 4))
    assert found.seconds <= makespan(problem, one_f_one_b(2, 4))


def test_stages_that_cannot_be_split_keep_their_backward_whole():
    stages = tuple(StageCosts(1.0, 1.0, 1.0, 1.0, 0.5, s != 1) for s in range(3))
    problem = Problem(stages, (0, 1, 2), 6, chain_edges(3))
    found = search_schedule(problem, work=WORK)
    assert {a.do for a in found.schedule.ranks[1]} == {Do.FORWARD, Do.BACKWARD}


def test_preemptive_schedule_of_one_machine():
    # The short job with the long tail interrupts the long one: 0-2, 2-3 (+ 8), 3-6 (+ 1).
    assert preemptive([(0, 5, 1), (2, 1, 8)]) == 11
    assert preemptive([(0, 5, 1), (2, 1, 8), (20, 2, 3)]) == 25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_ranks": (0,)}, "2 stages on ranks"),
        ({"microbatches": 0}, "at least one"),
        ({"edges": (Edge(1, 0),)}, "edge 1 -> 0"),
        ({"edges": (Edge(0, 1), Edge(0, 1))}, "twice"),
        ({"memory": (1.0,)}, "1 memory limits for 2 ranks"),
        ({"memory": (1.0, -1.0)}, r"memory\[1\] must not be negative, but is -1"),
        ({"memory": (math.nan, 1.0)}, r"memory\[0\] .* is nan"),
        ({"memory": ("1", 1.0)}, r"memory\[0\] must be a number, not '1'"),
        ({"microbatches": 1.5}, r"Problem.microbatches=1.5"),
        ({"stage_ranks": (0, 0.5)}, "Problem.stage_ranks"),
        (
            {"stages": (StageCosts(1e12, 1, 1),) * 2, "microbatches": 10**300},
            "the seconds of .* microbatches add up",
        ),
        ({"stages": (StageCosts(1, 1, 1, 1e308),) * 2}, "the saved bytes of 1 microbatches"),
        ({"stages": (StageCosts(1, 1, 1, 1, 2),) * 2}, "keeps 2 of 1"),
    ],
)
def test_problems_that_make_no_sense_are_refused(change, message):
    good = {
        "stages": (StageCosts(1, 1, 1),) * 2,
        "stage_ranks": (0, 1),
        "microbatches": 1,
        "edges": chain_edges(2),
    }
    with pytest.raises(ValueError, match=message):
        Problem(**(good | change))
    with pytest.raises(ValueError, match="must not be negative, but is -1"):
        StageCosts(-1.0, 0, 0)
    with pytest.raises(ValueError, match=r"StageCosts.forward must be a number, not '1'"):
        StageCosts("1", 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"seconds": 0.0}, "seconds=0.0"),
        ({"seconds": math.inf}, "seconds=inf"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"seconds": "1"}, "seconds='1'"),
        ({"work": 0}, "work=0"),
        ({"work": 1.5}, "work=1.5"),
        ({"work": 9, "jobs": 0}, "jobs=0"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(budget, message):
    with pytest.raises(ValueError, match=message):
        search_schedule(equal(2, 2), **budget)


def test_placements_that_are_none_are_refused():
    with pytest.raises(ValueError, match="no placement"):
        search_placements([], work=WORK)
    with pytest.raises(ValueError, match="2 lists for 1 problems"):
        search_placements([equal(2, 2)], work=WORK, seeds=[[], []])
