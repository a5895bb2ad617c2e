"""The schedule search against every family and torch's generators, under one judge.

A case is a model of 2p clusters on p ranks. A schedule may have the clusters in neighbouring pairs
(linear), or two stages on each rank (looped: r and r + p; v: r and 2p - 1 - r). The rival is the
best schedule of all families and of torch.distributed.pipelining, on any placement, that keeps to
the memory; where one does not, its forwards wait for memory (an in-flight cap) if that helps.

Each case is searched twice, with the rival's families handed in as seeds and alone, for as many
operations as an ordinary core looks at in the seconds: a loaded machine finds the same schedules.

    python benchmarks/planner.py [--quick] [--seconds 6] [--cases 0:10]
"""

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

import attrs
import torch.distributed.pipelining.schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from pfeife.data.schedule import Action, Do, Schedule
from pfeife.lowering.problem import Edge, Problem, StageCosts, fits, makespan, peak_memory
from pfeife.sched.families.policies import POLICIES
from pfeife.sched.search.budget import WORK_PER_SECOND
from pfeife.sched.search.run import SearchResult
from pfeife.sched.search.search import search_placements, search_schedule
from pfeife.sched.search.seeds import fitting, fused


@attrs.frozen
class Case:
    """`clusters` of a chain of 2p; `speeds[rank]` multiplies seconds; `wire` is the seconds of a
    transfer; `skips` are further edges; `memory` is of every rank, None without limit."""

    name: str
    group: str
    clusters: tuple[StageCosts, ...]
    microbatches: int
    wire: float = 0.0
    speeds: tuple[float, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    memory: float | None = None

    @property
    def ranks(self) -> int:
        return len(self.clusters) // 2


PLACEMENTS = ("linear", "looped", "v")


def problem_of(case: Case, placement: str) -> Problem:
    """The case with its clusters placed."""
    p, merged = case.ranks, 2 if placement == "linear" else 1
    stage_ranks = {
        "linear": tuple(range(p)),
        "looped": (*range(p), *range(p)),
        "v": (*range(p), *reversed(range(p))),
    }[placement]
    speeds = case.speeds or (1.0,) * p
    stages = [
        total(case.clusters[s * merged : (s + 1) * merged], speeds[rank])
        for s, rank in enumerate(stage_ranks)
    ]
    wires: dict[tuple[int, int], float] = defaultdict(float)
    for a, b in [*((c, c + 1) for c in range(2 * p - 1)), *case.skips]:
        if a // merged != b // merged:
            wires[a // merged, b // merged] += case.wire
    edges = tuple(Edge(a, b, seconds, seconds) for (a, b), seconds in sorted(wires.items()))
    memory = None if case.memory is None else (case.memory,) * p
    return Problem(tuple(stages), stage_ranks, case.microbatches, edges, memory)


def total(clusters: Sequence[StageCosts], slow: float) -> StageCosts:
    return StageCosts(
        slow * sum(c.forward for c in clusters),
        slow * sum(c.input_backward for c in clusters),
        slow * sum(c.weight_backward for c in clusters),
        sum(c.saved for c in clusters),
        sum(c.kept for c in clusters),
        all(c.splittable for c in clusters),
    )


# --- cases -----------------------------------------------------------------------------------


def layer(scale: float = 1.0, ratio: Sequence[float] = (1.0, 1.1, 0.8)) -> StageCosts:
    """A layer as of a transformer: F, I, W in `ratio`, three quarters of its bytes kept for W."""
    f, i, w = (scale * part for part in ratio)
    return StageCosts(f, i, w, scale, 0.75 * scale)


def equal_layers(p: int) -> list[StageCosts]:
    return [layer() for _ in range(2 * p)]


def big_head(p: int) -> list[StageCosts]:
    """A language model's head of two layers' work, and an embedding that costs little."""
    found = equal_layers(p)
    found[-1] = StageCosts(2.0, 2.0, 2.0, 1.0, 0.5)
    found[0] = StageCosts(0.4, 0.1, 0.6, 0.6, 0.2)
    return found


def big_embedding(p: int) -> list[StageCosts]:
    found = equal_layers(p)
    found[0] = StageCosts(1.8, 0.6, 2.2, 2.0, 1.0)
    return found


def uneven(p: int, seed: int) -> list[StageCosts]:
    """Times and bytes of every cluster drawn apart, within a factor of three."""
    random = Random(seed)
    found = []
    for _ in range(2 * p):
        f, i, w, saved = (random.uniform(0.5, 1.5) for _ in range(4))
        found.append(StageCosts(f, i, w, saved, saved * random.uniform(0.3, 0.9)))
    return found


def frozen_half(p: int) -> list[StageCosts]:
    """The first half is not trained: no backward there, and nothing saved."""
    return [StageCosts(1.0, 0.0, 0.0, 0.0, 0.0)] * p + [layer() for _ in range(p)]


def growing(p: int) -> list[StageCosts]:
    """As of a convolutional network: early layers save the most, late ones have the weights."""
    found = []
    for c in range(2 * p):
        x = c / (2 * p - 1)
        saved = 2.0 - 1.5 * x
        found.append(StageCosts(1.2 - 0.4 * x, 1.1, 0.5 + 0.8 * x, saved, 0.6 * saved))
    return found


def unet_skips(p: int) -> tuple[tuple[int, int], ...]:
    return tuple((c, 2 * p - 1 - c) for c in range(0, p - 1, 2))


def share(clusters: Sequence[StageCosts], part: float) -> float:
    """Bytes of a rank: a part of what 1F1B holds on its first rank if all were equal, but
    enough for one microbatch on any placement."""
    p = len(clusters) // 2
    saved = [c.saved for c in clusters]
    alone = max(
        max(saved[2 * r] + saved[2 * r + 1], saved[r] + saved[r + p], saved[r] + saved[-1 - r])
        for r in range(p)
    )
    return max(part * sum(saved), alone)


def cases() -> list[Case]:
    """Forty-eight cases; seeds are written here."""
    found = []

    def add(name: str, group: str, clusters: Sequence[StageCosts], m: int, **more) -> None:
        found.append(Case(f"{name} p{len(clusters) // 2} m{m}", group, tuple(clusters), m, **more))

    for p, m in ((4, 8), (4, 16), (8, 16), (8, 32)):
        add("equal F=I=W", "ample", [layer(1, (1, 1, 1))] * (2 * p), m)
        add("equal wire .05", "ample", equal_layers(p), m, wire=0.05)
        add("uneven", "ample", uneven(p, 10 * p + m), m, wire=0.05)
    add("equal wire .3", "ample", equal_layers(8), 24, wire=0.3)
    for p, m in ((4, 12), (8, 24)):
        add("head", "ample", big_head(p), m, wire=0.05)
        add("embedding", "ample", big_embedding(p), m, wire=0.05)
        add("frozen half", "ample", frozen_half(p), m, wire=0.05)
        slow = (1.0,) * (p // 2) + (1.4,) + (1.0,) * (p // 2 - 1)
        add("slow device", "ample", equal_layers(p), m, wire=0.05, speeds=slow)
        add("skips", "ample", growing(p), m, wire=0.05, skips=unet_skips(p))
    for p, m, part in ((4, 12, 0.5), (8, 24, 1.0), (8, 24, 0.5), (8, 24, 0.34)):
        clusters = equal_layers(p)
        memory = share(clusters, part)
        add(f"equal mem {part}", "tight equal", clusters, m, wire=0.05, memory=memory)
    for p, m, part, seed in (
        (4, 8, 0.75, 1),
        (4, 16, 0.5, 2),
        (4, 16, 0.9, 3),
        (8, 16, 0.75, 4),
        (8, 16, 0.5, 5),
        (8, 24, 0.4, 6),
        (8, 24, 0.6, 7),
        (8, 32, 0.75, 8),
        (8, 32, 0.9, 9),
    ):
        clusters = uneven(p, seed)
        memory = share(clusters, part)
        add(f"uneven mem {part}", "tight uneven", clusters, m, wire=0.05, memory=memory)
    for p, m, part in ((4, 12, 0.75), (8, 24, 0.6)):
        for name, make in (
            ("head", big_head),
            ("embedding", big_embedding),
            ("growing", growing),
            ("frozen half", frozen_half),
        ):
            memory = share(make(p), part)
            add(f"{name} mem {part}", "tight uneven", make(p), m, wire=0.05, memory=memory)
        slow = (1.0,) * (p // 2) + (1.4,) + (1.0,) * (p // 2 - 1)
        memory = share(uneven(p, 77), part)
        more = {"wire": 0.05, "speeds": slow, "memory": memory}
        add(f"slow, uneven mem {part}", "tight uneven", uneven(p, 77), m, **more)
        memory = share(growing(p), part)
        more = {"wire": 0.05, "skips": unet_skips(p), "memory": memory}
        add(f"skips mem {part}", "tight uneven", growing(p), m, **more)
    return found


# --- rivals ----------------------------------------------------------------------------------


class FakeStage(_PipelineStageBase):
    """As much of a stage as torch's generators ask for."""

    def __init__(self, index: int, count: int, ranks: int):
        self.submod, self.group = None, None
        self.stage_index, self.num_stages = index, count
        self.group_size, self.group_rank = ranks, 0
        self.device, self.has_backward = "cpu", True

    def _create_grad_recv_info(self, *args, **kwargs):
        return None

    def _prepare_forward_infra(self, *args, **kwargs):
        return None

    def _prepare_backward_infra(self, *args, **kwargs):
        return None


THEIRS = {
    "GPipe": "linear",
    "1F1B": "linear",
    "LoopedBFS": "looped",
    "Interleaved1F1B": "looped",
    "InterleavedZeroBubble": "looped",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}


@cache
def generated(name: str, p: int, m: int) -> Schedule | None:
    """What the installed torch generates, microbatches of a stage in ascending order; None
    where it refuses."""
    made = theirs.get_schedule_class(name)
    count = p if THEIRS[name] == "linear" else 2 * p
    try:
        if count == p:
            order = made(FakeStage(0, p, p), m).pipeline_order
        else:
            order = made([FakeStage(0, count, p), FakeStage(p, count, p)], m).pipeline_order
    except ValueError:
        return None
    rows = [[a for action in order[rank] for a in simple(action)] for rank in range(p)]
    return Schedule(tuple(ascending(row) for row in rows))


def simple(action) -> Iterator[tuple[int, Do]]:
    """The actions of computation in one of torch's, overlapped ones one after the other."""
    if action is None:
        return
    for one in action.sub_actions or (action,):
        if one.computation_type.name in ("FORWARD", "FULL_BACKWARD"):
            yield one.stage_index, Do(one.computation_type.name.removeprefix("FULL_")[0])
        elif one.computation_type.name in ("BACKWARD_INPUT", "BACKWARD_WEIGHT"):
            yield one.stage_index, Do(one.computation_type.name.removeprefix("BACKWARD_")[0])


def ascending(row: Sequence[tuple[int, Do]]) -> tuple[Action, ...]:
    """Microbatches are interchangeable: the k-th of a stage is microbatch k."""
    done: dict[tuple[int, Do], int] = defaultdict(int)
    actions = []
    for stage, do in row:
        kind = Do.BACKWARD if do == Do.INPUT_BACKWARD else do  # they count together
        actions.append(Action(stage, do, done[stage, kind]))
        done[stage, kind] += 1
        if do == Do.BACKWARD:
            done[stage, Do.WEIGHT_BACKWARD] += 1
    return tuple(actions)


@cache
def family(name: str, placement: str, p: int, m: int) -> Schedule | None:
    stage_ranks = problem_of(Case("", "", (layer(),) * (2 * p), m), placement).stage_ranks
    try:
        return POLICIES[name](len(stage_ranks), m, stage_ranks)
    except (ValueError, AssertionError, IndexError):
        return None


def families(case: Case, placement: str) -> dict[str, Schedule]:
    made = {name: family(name, placement, case.ranks, case.microbatches) for name in POLICIES}
    return {f"{name}/{placement}": s for name, s in made.items() if s is not None}


def generators(case: Case, placement: str) -> dict[str, Schedule]:
    names = [name for name, at in THEIRS.items() if at == placement]
    made = {name: generated(name, case.ranks, case.microbatches) for name in names}
    return {f"torch {name}": s for name, s in made.items() if s is not None}


def variants(problem: Problem, named: dict[str, Schedule]) -> Iterator[tuple[str, Schedule]]:
    """Schedules that keep to the memory: as they are, or fewer microbatches in flight."""
    for name, schedule in named.items():
        for suffix, one in (("", schedule), (" fused", fused(schedule))):
            for found in fitting(problem, one):
                yield f"{name}{suffix}{'' if found is one else ' capped'}", found


def rivals(case: Case) -> tuple[dict[str, list[Schedule]], list[tuple[float, str, str]]]:
    """Per placement the families that fit; of these and torch's, seconds, name and placement."""
    seeds: dict[str, list[Schedule]] = {}
    judged = []
    for placement in PLACEMENTS:
        problem = problem_of(case, placement)
        ours = list(variants(problem, families(case, placement)))
        seeds[placement] = []
        for name, schedule in [*ours, *variants(problem, generators(case, placement))]:
            try:
                judged.append((makespan(problem, schedule), name, placement))
            except ValueError:
                continue
            if not name.startswith("torch"):
                seeds[placement].append(schedule)
    return seeds, sorted(judged)


# --- tables ----------------------------------------------------------------------------------


@attrs.frozen
class Row:
    case: Case
    rival: float
    rival_name: str
    found: SearchResult
    placement: str
    bound: float  # the least of the placements'
    seconds: float
    alone: SearchResult  # without seeds

    @property
    def ratio(self) -> float:
        return self.found.seconds / self.rival

    @property
    def ratio_alone(self) -> float:
        return self.alone.seconds / self.rival


def run(case: Case, seconds: float) -> Row:
    seeds, judged = rivals(case)
    rival, name, _ = judged[0] if judged else (math.inf, "none", "")
    problems = [problem_of(case, placement) for placement in PLACEMENTS]
    work = int(seconds * WORK_PER_SECOND)
    given = [seeds[placement] for placement in PLACEMENTS]
    start = time.perf_counter()
    at, found = search_placements(problems, work=work, seed=1, seeds=given)
    took = time.perf_counter() - start
    where, alone = search_placements(problems, work=work, seed=1)
    for index, one in ((at, found), (where, alone)):
        assert fits(problems[index], one.schedule)
        assert math.isclose(makespan(problems[index], one.schedule), one.seconds)
    return Row(case, rival, name, found, PLACEMENTS[at], found.bound, took, alone)


def line(row: Row) -> str:
    memory = max(peak_memory(problem_of(row.case, row.placement), row.found.schedule))
    limit = "" if row.case.memory is None else f"/{row.case.memory:.1f}"
    return (
        f"{row.case.name:28} {row.case.group:12} {row.bound:8.2f} {row.found.seconds:8.2f} "
        f"{row.rival:8.2f} {row.ratio:6.3f} {row.ratio_alone:6.3f} "
        f"{100 * (row.found.seconds / row.bound - 1):6.2f}% "
        f"{100 * (row.rival / row.bound - 1):6.2f}% {memory:6.1f}{limit:6} {row.seconds:5.1f} "
        f"{row.placement:7} {row.rival_name}"
    )


HEADER = (
    f"{'case':28} {'group':12} {'bound':>8} {'found':>8} {'rival':>8} {'ratio':>6} {'alone':>6} "
    f"{'found+':>7} {'rival+':>7} {'memory':>12} {'plan':>5} {'on':7} best rival"
)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    for group in dict.fromkeys(row.case.group for row in rows):
        mine = [row for row in rows if row.case.group == group]
        ratios = [row.ratio for row in mine]
        alone = [row.ratio_alone for row in mine]
        gaps = [row.found.seconds / row.bound - 1 for row in mine]
        theirs_ = [row.rival / row.bound - 1 for row in mine]
        yield (
            f"{group}: {len(mine)} cases, time over the rival's "
            f"{statistics.geometric_mean(ratios):.4f} (worst {max(ratios):.4f}, best "
            f"{min(ratios):.4f}), without seeds {statistics.geometric_mean(alone):.4f} (worst "
            f"{max(alone):.4f}); above the bound: median "
            f"{100 * statistics.median(gaps):.2f} %, rival {100 * statistics.median(theirs_):.2f} %"
        )
    worse = [row.case.name for row in rows if row.ratio > 1 + 1e-9]
    alone_worse = [row.case.name for row in rows if row.ratio_alone > 1 + 1e-9]
    yield f"worse than the rival: {worse or 'nowhere'}; without seeds: {alone_worse or 'nowhere'}"
    yield f"planning: {sum(row.seconds for row in rows):.0f} s in all"


def growth(quick: bool) -> Iterator[str]:
    """How planning time grows with ranks and microbatches: for a fixed number of evaluations, and
    what the default budget for a size finds."""
    sizes = [(4, 32, 1), (8, 64, 1), (16, 128, 1), (16, 128, 2), (32, 256, 1)]
    sizes += [] if quick else [(64, 512, 1), (64, 512, 2)]
    yield (
        f"{'ranks':>5} {'microb.':>7} {'chunks':>6} {'operations':>10} {'20 lists':>9} "
        f"{'us/operation':>12} {'budget':>7} {'seconds':>8} {'above bound':>11}"
    )
    for p, m, chunks in sizes:
        clusters = tuple(uneven(p, 5))
        case = Case("", "", clusters, m, wire=0.05, memory=share(clusters, 0.6))
        problem = problem_of(case, "linear" if chunks == 1 else "v")
        operations = 3 * len(problem.stages) * m
        start = time.perf_counter()
        search_schedule(problem, work=20 * 15 * operations)
        fixed = time.perf_counter() - start
        budget = 6.0 if p < 64 else 60.0
        start = time.perf_counter()
        found = search_schedule(problem, seconds=budget)
        took = time.perf_counter() - start
        yield (
            f"{p:5} {m:7} {chunks:6} {operations:10} {fixed:8.2f}s "
            f"{1e6 * fixed / operations:12.1f} {budget:6.0f}s {took:7.1f}s {100 * found.gap:10.2f}%"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one second a case, small sizes")
    parser.add_argument("--seconds", type=float, default=6.0, help="of search for each case")
    parser.add_argument("--cases", default=":", help="a slice such as 0:10")
    parser.add_argument("--no-growth", action="store_true", help="no table of planning times")
    options = parser.parse_args()
    first, last = (int(part) if part else None for part in options.cases.split(":"))
    print(HEADER)
    rows = []
    for case in cases()[first:last]:
        rows.append(run(case, 1.0 if options.quick else options.seconds))
        print(line(rows[-1]), flush=True)
    if rows:
        print(*summary(rows), sep="\n")
    if not options.no_growth:
        for text in growth(options.quick):
            print(text, flush=True)


if __name__ == "__main__":
    main()
