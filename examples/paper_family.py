"""A schedule of a paper as a family: trained with, and held against the paper's formulas.

Qi, Peng, Zhang, Zhu, Li, Ma, Synergistic Tensor and Pipeline Parallelism ("STP"), arXiv 2510.27257,
from its authors' code and table: stp/schedule.py and README of github.com/MICLAB-BUPT/STP. It is of
2025: of the schedules of 2026 that we found only RoundPipe's is to be read in full (2604.27085,
section 3.2), and it runs a stage's forward and backward on different ranks; here a stage has one.

python examples/paper_family.py
"""

import copy
from collections import defaultdict
from itertools import count, product

import torch
from gpt import GPT

import pfeife
from pfeife import report, sched
from pfeife.lowering.lower import chain, insert_actions

RANKS, MICROBATCHES = 2, 8
SECONDS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


def stp(stages, microbatches, ranks=None) -> pfeife.Schedule:
    """Two stages a rank, in a V; fewer than 3p - 1 microbatches run as the first of so many."""
    p = stages // 2
    placed = sched.families.folded(stages, max(p, 1))
    if stages < 2 or stages % 2 or tuple(ranks or placed) != placed:
        raise ValueError(f"{stages} stages on ranks {ranks}: STP is for a V of two stages a rank")
    words = [order(p, rank, max(microbatches, 3 * p - 1)) for rank in range(p)]
    rows = [",".join(cells(words[rank], (rank, 2 * p - 1 - rank))) for rank in range(p)]
    return pfeife.Schedule.from_csv("\n".join(rows)).first(microbatches)


def order(p, rank, microbatches) -> list[str]:
    """What a rank does: F0 is of its first stage, I1 of its second, W of the oldest I. STP braids
    pairs such as "B1 F1" to hide tensor parallelism's all-reduces; here they run in turn."""
    before, after = rank + 1, p - 1 - rank
    turns = 2 * (microbatches - 3 * p + 1 + rank) + 1
    steady = [f"{'IB'[i < turns - rank]}{1 - i % 2} F{1 - i % 2} " for i in range(turns)]
    warm_up = "F0 " * 2 * after + "F0 F1 " * before + "F0 " * before + "I1 F1 F0 W " * after
    drain = "B0 I1 F1 " * (2 * p - 2 - rank) + "B0 B1 " * before + "B0 " + "W W B0 " * after
    return f"{warm_up}{''.join(steady)}{drain}{'W ' * 2 * rank}".split()


def cells(words, stages) -> list[str]:
    """The same with microbatches. A B of a stage that owes a W does that one and owes its own: so
    gradients are added up in the order of the microbatches, and the times stay the paper's."""
    turns, found, owed = defaultdict(count), [], []
    for do, *half in words:
        if do == "W":
            found.append(owed.pop(0))
            continue
        stage = stages[int(half[0])]
        k = next(turns[stage, do == "F"])
        late = [cell for cell in owed if do == "B" and cell.startswith(f"{stage}W")][:1]
        found += [f"{stage}{'I' if late else do}{k}", *late]
        owed = [cell for cell in owed if cell not in late]
        owed += [f"{stage}W{k}"] if late or do == "I" else []
    return found


def simulated(schedule: pfeife.Schedule) -> pfeife.Timeline:
    messages = insert_actions(schedule, chain(schedule))
    return sched.simulate(messages, lambda action: SECONDS.get(action.do, 0.0))


def main() -> None:
    for p, more in product(range(1, 5), range(-3, 4)):
        m = max(1, 3 * p - 1 + more)
        seconds = simulated(sched.verify_schedule(stp(2 * p, m))).seconds
        assert more < 0 or seconds == 6 * m + (p - 1)  # the table: (p - 1)(T_F + T_B - T_W)
    family = pfeife.Family("stp", stp, sched.families.folded, splits=True)
    for each in (family, sched.policy("interleaved")):
        timeline = simulated(each(2 * RANKS, MICROBATCHES, each.placement(2 * RANKS, RANKS)))
        chart = report.timeline_chart(timeline, width=round(2 * timeline.seconds))
        print(f"{each}: {timeline.seconds:.0f} s, {timeline.bubble:.1%} idle\n{chart}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=8, width=16, depth=2)
    plain = copy.deepcopy(model)
    options = {"stages": 2 * RANKS, "devices": ["cpu"] * RANKS, "schedule": family}
    step = pfeife.compile(model.loss, microbatches=MICROBATCHES, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for batch in torch.randint(256, (3, 2, MICROBATCHES, 8)):
        step(*batch).backward()
        for part in zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True):
            (plain.loss(*part) / MICROBATCHES).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print("three steps have the gradients of plain accumulation, bit for bit")


if __name__ == "__main__":
    main()
