"""A compiler of one's own: a pass, a cost model and a family of schedules, a function each.

Run `python examples/own_compiler.py`: it trains a GPT with them and checks every loss.
"""

import sys

import attrs
import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife
from pfeife import report, sched

MICROBATCHES, RESHAPE = 8, torch.ops.aten.reshape.default


def straight(program: pfeife.Program) -> pfeife.Program:
    """A pass: a reshape of a reshape is one reshape."""

    def once(operation):
        if operation.target is RESHAPE and operation.args[0].target is RESHAPE:
            return operation.make(RESHAPE, operation.args[0].args[0], *operation.args[1:])
        return None

    return program.rewrite(once).edit(lambda module: module.graph.eliminate_dead_code())


def by_flops(program: pfeife.Program) -> pfeife.Costs:
    """A cost model: ten microseconds for a call, and fifty billion operations a second."""
    flops = program.graph().nodes(data="flops")
    return pfeife.Costs("by FLOPs", {call: 1e-5 + count / 50e9 for call, count in flops})


def in_rounds(stages, microbatches, ranks=None, *, size: int = 2) -> pfeife.Schedule:
    """A family: GPipe again and again, so that no more than `size` microbatches are in flight."""
    orders: list[tuple[pfeife.Action, ...]] = [()] * (1 + max(ranks or range(stages)))
    for first in range(0, microbatches, size):
        small = sched.families.gpipe(stages, min(size, microbatches - first), ranks)
        for rank, actions in enumerate(small.ranks):
            orders[rank] += tuple(attrs.evolve(a, microbatch=a.microbatch + first) for a in actions)
    return pfeife.Schedule(tuple(orders))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(context=16, width=32, depth=2)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss_fn(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    own = {"passes": {"flat": [straight]}, "costs": by_flops}
    own["schedule"] = pfeife.Family("rounds", in_rounds).bind(size=4)
    devices = ["cpu", "cpu"]  # a rank each
    step = pfeife.compile(loss_fn, microbatches=MICROBATCHES, stages=4, devices=devices, **own)
    same = 0
    for _ in range(3):
        batch = torch.randint(256, (2, 16, 16))
        parts = zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True)
        expected = sum(loss_fn(*part) / MICROBATCHES for part in parts)
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        same += torch.equal(loss, expected)
    built = step.backend.compiled[0]
    print(report.plan_table(built.plan, built.program), built.plan.schedule.to_csv(), sep="\n")
    print(*(one.maker for one in built.history), sep=" -> ")
    print(f"{same} of 3 losses are the same, bit for bit")
    sys.exit(same != 3)


if __name__ == "__main__":
    main()
