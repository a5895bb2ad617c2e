"""A compiler of one's own: a pass, a cost model and a family of schedules, a function each.

Run `python examples/own_compiler.py`: it trains a GPT with them and checks every loss.
"""

import sys

import attrs
import torch
import torch.nn.functional as F
from gpt import GPT
from torch import fx

import pfeife
from pfeife import report, sched
from pfeife.cost.estimate import node_flops

MICROBATCHES, RESHAPE = 8, torch.ops.aten.reshape.default


def straight(program: pfeife.Program) -> pfeife.Program:
    """A pass: a reshape of a reshape is one reshape."""
    graph, here = fx.Graph(), {}
    for node in program.module.graph.nodes:
        here[node] = graph.node_copy(node, here.__getitem__)
        if node.target is RESHAPE and node.args[0].target is RESHAPE:
            here[node].args = (here[node].args[0].args[0], *here[node].args[1:])
    graph.eliminate_dead_code()
    return attrs.evolve(program, module=fx.GraphModule(program.module, graph))


def by_flops(program: pfeife.Program) -> pfeife.Costs:
    """A cost model: ten microseconds for a call, and fifty billion operations a second."""
    flops = {c.node: sum(map(node_flops, program.body(c).graph.nodes)) for c in program.calls}
    return pfeife.Costs("by FLOPs", {node: 1e-5 + found / 50e9 for node, found in flops.items()})


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
