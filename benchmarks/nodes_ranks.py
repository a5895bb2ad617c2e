"""The ranks of benchmarks/nodes.py: sleeping layers, wide values everywhere but at one place."""

import json
import statistics
import sys
from collections import Counter

import attrs
import torch
import torch.distributed as dist
import virtual
from harness import DEVICE, mean_costs, of_rank_zero, ready, timed
from models import Case
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import machine, measure
from pfeife.cost.network import bench_network
from pfeife.data.network import Network
from pfeife.ir.parts import Kind
from pfeife.runtime.distributed.process_group import join_world, leave_world

LAYERS, NARROW = 12, 5  # after so many layers values are narrow: an even cut is elsewhere
WIDE, THIN = 4096, 32  # rows of 1 KB
MICROBATCHES, REPEATS = 8, 5
NODES = ((0, 1), (2, 3))


class Narrowing(nn.Module):
    """Sleeping layers; the values that come out of one of them have few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(virtual.Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for done, layer in enumerate(self.layers):
            if done == NARROW:
                x = nn.functional.pad(x, (0, 0, 0, WIDE - THIN))
            x = layer(x)
            if done == NARROW - 1:
                x = x[:THIN] * 2
        return virtual.OPS.mean_square(x)


def case() -> Case:
    torch.manual_seed(0)
    model = Narrowing()
    return Case("narrowing", model, model, lambda: (torch.rand(WIDE, virtual.WIDTH),))


def alike(network: Network) -> Network:
    """The same, if all links were as the median of those inside a node."""
    inside = [link for link in network.links if _inside(link.source, link.destination)]
    one = sorted(inside, key=lambda link: link.transfer_seconds(2**20))[len(inside) // 2]
    ends = [{"source": link.source, "destination": link.destination} for link in network.links]
    return Network(tuple(attrs.evolve(one, **each) for each in ends))


def _inside(source: int, destination: int) -> bool:
    return any(source in node and destination in node for node in NODES)


def bandwidths(network: Network) -> dict[str, list[float]]:
    """GB/s of the slowest, the median and the fastest link of a kind, for messages of 1 MiB."""
    found: dict[str, list[float]] = {"inside": [], "border": []}
    for link in network.links:
        kind = "inside" if _inside(link.source, link.destination) else "border"
        found[kind].append(2**20 / link.transfer_seconds(2**20) / 1e9)
    return {kind: [min(some), statistics.median(some), max(some)] for kind, some in found.items()}


def measured() -> dict:
    """The links, and both plans' steps, measured in turn."""
    network = bench_network(sizes=(2**10, 2**16, 2**18, 2**20), repeats=5)
    one = case()
    clusters = pfeife.split_backward()(pfeife.fuse()(pfeife.capture(one.step, *one.draw())))
    clusters = pfeife.annotate(mean_costs(measure(clusters, repeats=5)))(clusters)
    batch = [one.draw() for _ in range(MICROBATCHES)]
    whole = pfeife.evaluate(clusters, pfeife.state_of(clusters, one.model), batch)
    sides = {}
    for name, belief in (("knows the border", network), ("all links alike", alike(network))):
        plan = of_rank_zero(
            sched.plan(
                clusters,
                machine=attrs.evolve(machine("cpu-core"), action_seconds=2e-5),
                microbatches=MICROBATCHES,
                stages=4,
                ranks=4,
                schedule="1f1b",
                network=belief,
            )
        )
        sides[name] = plan, attrs.evolve(ready(plan, clusters, one), batch=batch)
    times: dict[str, list[float]] = {name: [] for name in sides}
    same = dict.fromkeys(sides, True)
    for _ in range(REPEATS + 1):
        for name, (_, made) in sides.items():
            step = made.pipeline.start(made.state, batch)
            times[name].append(timed(step.run)[0])
            same[name] &= _same(step.result(), whole)
    plans = [
        {
            "name": name,
            "cut": _layers(clusters, plan),
            "predicted": plan.step_seconds,
            "measured": statistics.median(times[name][1:]),
            "same": _on_all(same[name]),
        }
        for name, (plan, _) in sides.items()
    ]
    return {"links": bandwidths(network), "plans": plans}


def _layers(clusters: pfeife.Program, plan: pfeife.Plan) -> str:
    """How many layers each stage has."""
    counted = Counter[int]()
    for call in clusters.calls:
        if call.kind == Kind.FORWARD:
            counted[plan.stage_of_cluster[call.unit]] += virtual.units(clusters.body(call))
    return " ".join(str(counted[stage]) for stage in sorted(counted))


def _same(found: pfeife.Result, whole: pfeife.Result) -> bool:
    """Bit for bit: the loss, and the gradients that this rank has."""
    mine = found.gradients.items()
    return torch.equal(found.loss, whole.loss) and all(
        torch.equal(value, whole.gradients[name]) for name, value in mine
    )


def _on_all(one: bool) -> bool:
    told = torch.tensor(int(one))
    dist.all_reduce(told, dist.ReduceOp.MIN)
    return bool(told)


def train() -> None:
    """Steps without end."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    step = pfeife.compile(lambda x: net(x).square().mean(), microbatches=4)
    while True:
        optimizer.zero_grad()
        step(torch.ones(16, 64)).backward()
        optimizer.step()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if sys.argv[1] == "train":
        train()
    join_world(DEVICE)
    found = measured()
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)
    dist.barrier()
    leave_world()


if __name__ == "__main__":
    main()
