"""A schedule of a paper as a family: trained with, and held against the paper's estimate and run.

Liang et al., HARP: Orchestrating Automated Parallel Training on Heterogeneous GPU Clusters, EuroSys
2026, doi 10.1145/3767295.3803603: its H-1F1B is 1F1B with a longer warm-up where a slow link lies
between two clusters. We could read the abstract and the authors' code, not the paper's other text:
`ManualSchedule` and `training_dp_hetero_impl`, and the README's run, of github.com/Lssyes/harp.

python examples/paper_family.py
"""

from itertools import product

import torch
from gpt import GPT

import pfeife
from pfeife import report, sched
from pfeife.lowering.lower import chain, insert_actions

RANKS, MICROBATCHES, SLOWEST, LINKS = 4, 8, 3.0, (0.0, 1.5, 0.0)  # two clusters of two ranks


def launched(slowest, links) -> list[int]:
    """The forwards that each stage starts before its first backward: 1 on the last stage; 1, 2 or 3
    more than the next where the link is below slowest / 10, below slowest / 2, or not below.
    Why (our reading): a microbatch is back at a stage of t seconds after 2 (t + link), and for so
    long the stage has 1 + 2 microbatches to run, or 1 + 3 over the slower link."""
    counts = [1]
    for link in reversed(links):
        counts.append(counts[-1] + (1 if link < slowest / 10 else 2 if link < slowest / 2 else 3))
    return counts[::-1]


def h_1f1b(stages, microbatches, ranks=None, *, slowest, links) -> pfeife.Schedule:
    """`slowest`: forward and backward of the slowest stage; `links`: one way from each stage to the
    next, 0 within a cluster, where HARP starts no more than 1F1B. Both in seconds a microbatch."""
    placed = tuple(range(stages)) if ranks is None else tuple(ranks)
    if placed != tuple(range(stages)) or len(links) + 1 != stages or max((0.0, *links)) > slowest:
        wanted = f"stage s on rank s, not {placed}; {stages - 1} links of at most {slowest} s"
        raise ValueError(f"H-1F1B: {wanted}, not {links}")
    rows = []
    for stage, count in enumerate(launched(slowest, links)):
        forwards, backwards = ([f"{stage}{do}{k}" for k in range(microbatches)] for do in "FB")
        turns = sum(zip(forwards[count - 1 :], backwards, strict=False), ())
        rows.append([*forwards[: count - 1], *turns, *backwards[len(turns) // 2 :]])
    return pfeife.Schedule.from_csv("\n".join(map(",".join, rows)))


def estimate(stages, links, microbatches) -> float:
    """HARP's seconds of a step. A link counts once, although gradients go back over it."""
    return sum(stages) + sum(links) + (microbatches - 1) * max([*stages, *links])


def simulated(schedule, stages, links) -> pfeife.Timeline:
    seconds = {f"SEND_{do}": lambda a: links[min(a.stage, a.peer)] for do in "FB"}
    seconds |= {"F": lambda a: stages[a.stage] / 3, "B": lambda a: stages[a.stage] * 2 / 3}
    actions = insert_actions(schedule, chain(schedule))
    return sched.simulate(actions, lambda a: seconds[a.do](a) if a.do in seconds else 0.0)


def agrees() -> None:
    """Holds the simulator against the estimate, and the estimate against the README's run."""
    for m, p in product((1, 5, 16), (1, 2, 3, 4)):
        for links in product((0.0, 0.75, 1.5, 2.25), repeat=p - 1):
            schedule = sched.verify_schedule(h_1f1b(p, m, slowest=3.0, links=links))
            found = simulated(schedule, [3.0] * p, links).seconds
            assert abs(found - estimate([3.0] * p, links, m) - sum(links)) < 1e-9
    stages, link = [0.2143, 0.2202], [0.0760]  # of 64 microbatches, each rounded by at most 5e-5
    assert launched(max(stages), link) == [3, 1]  # its "Launch MB"
    assert abs(estimate(stages, link, 64) - 14.3811) < (63 + 3) * 5e-5  # its "Cost"


def main() -> None:
    agrees()
    family = pfeife.Family("h-1f1b", h_1f1b).bind(slowest=SLOWEST, links=LINKS)
    for each in (family, sched.policy("1f1b")):
        timeline = simulated(each(RANKS, MICROBATCHES), [SLOWEST] * RANKS, LINKS)
        print(f"{each}: {timeline.seconds:g} s, {timeline.bubble:.1%} idle")
        print(report.timeline_chart(timeline, width=round(2 * timeline.seconds)))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, plain = (GPT(context=8, width=16, depth=2) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    options = {"stages": RANKS, "devices": ["cpu"] * RANKS, "schedule": family}
    step = pfeife.compile(model.loss, microbatches=MICROBATCHES, **options)
    optimizer = torch.optim.SGD([*model.parameters(), *plain.parameters()], lr=0.1)
    for batch in torch.randint(256, (3, 2, MICROBATCHES, 8)):
        step(*batch).backward()
        for part in batch.chunk(MICROBATCHES, dim=1):
            (plain.loss(*part) / MICROBATCHES).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        optimizer.step()
        optimizer.zero_grad()
    print("three steps have the gradients of plain accumulation, bit for bit")


if __name__ == "__main__":
    main()
