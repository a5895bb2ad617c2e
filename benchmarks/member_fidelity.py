"""Predicted against measured: steps of sleeping ranks that share the work of their stages.

    python benchmarks/member_fidelity.py [--repeats 9]

Four Gloo ranks. What a member computes is not computed: between two collectives its body sleeps as
long as `estimate` says of the operations there, as if another device had worked. Collectives and
messages between stages are real; those that have begun are under way while it sleeps (`overlap`).
Each collective of the program is measured again and again after a sleep, by turns with steps, and
messages by `bench_network`; the step is predicted by `sched.predict`, as any other.

`by the link` is what is predicted where nothing but the latency and the bandwidth of the machine's
link is known, by which `estimate` prices collectives: two numbers that are fitted to all of them.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import harness
import models
import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import fx

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, member_prices, timing_of
from pfeife.cost.estimate import node_seconds
from pfeife.cost.network import bench_network
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.members import ALONE, MEANING, arrived
from pfeife.ir.program import Program
from pfeife.passes.overlap import Timing
from pfeife.runtime.distributed.links.collectives import Collectives
from pfeife.runtime.distributed.pipeline import DistributedPipeline

RANKS, MICROBATCHES = 4, 4
# A slow device on this machine's links: some milliseconds from one collective to the next.
VIRTUAL = Machine(
    "virtual",
    flops=2e9,
    memory_bandwidth=4e9,
    memory=2**34,
    link_bandwidth=5e8,
    link_latency=2e-4,
    action_seconds=2e-5,
)
SHAPES = (  # members, stages, schedule
    (2, 2, "gpipe"),
    (2, 2, "1f1b"),
    (2, 4, "interleaved"),
    (2, 4, "zb-v"),
    (4, 1, "1f1b"),
)
MODELS = {"gpt": models.gpt, "large_head": models.large_head}
TELLING = MEANING.keys() - ALONE


@attrs.frozen(eq=False)
class Side:
    """A plan that can run, whose ranks sleep."""

    program: Program
    schedule: pfeife.Schedule
    pipeline: DistributedPipeline
    state: dict
    batch: list

    def __call__(self) -> None:
        self.pipeline.start(self.state, self.batch).run()

    def predicted(self, costs: pfeife.Costs, machine: Machine, network: Network | None) -> float:
        """Seconds of a step."""
        priced = pfeife.annotate(costs)(self.program)
        return sched.predict(priced, self.schedule, machine, network).seconds

    def costs(self, told: Mapping[tuple, float]) -> tuple[pfeife.Costs, float]:
        """What a body sleeps, and takes for the collectives of which it was measured what each
        takes; and the seconds of these in a step of the rank that has most."""
        priced = estimate(self.program, VIRTUAL)
        seconds, telling = dict(priced.seconds), dict.fromkeys(range(RANKS), 0.0)
        for call in self.program.calls:
            body = self.program.body(call)
            nodes = [node for node in body.graph.nodes if node.target in TELLING]
            telling[call.rank or 0] += MICROBATCHES * sum(told[kind(node)] for node in nodes)
            seconds[call.node] = measured_timing(told).seconds(body)
        return attrs.evolve(priced, seconds=seconds), max(telling.values())


def measured_timing(told: Mapping[tuple, float]) -> Timing:
    """What nodes take if they sleep, and collectives as long as was measured: of this a part is
    under way beside a sleep, as large as by the link."""
    link = timing_of(VIRTUAL)

    def sending(node: fx.Node) -> float:
        if node.target not in TELLING:
            return 0.0
        beside, behind = link.sending(node), link.computing(node)
        return told[kind(node)] * beside / (beside + behind)

    def computing(node: fx.Node) -> float:
        is_told = node.target in TELLING
        return told[kind(node)] - sending(node) if is_told else link.computing(node)

    return Timing(computing, sending)


def sleeping(body: fx.GraphModule, sleep: Callable[[float], None]) -> fx.GraphModule:
    """A body that sleeps where it would compute, and tells what it would tell."""
    seconds = 0.0  # of what has been left out since the last sleep

    def change(node: fx.Node, copy: Copy) -> fx.Node | None:
        nonlocal seconds
        if node.op == "output" or node.target in TELLING | {arrived}:
            copy.graph.call_function(sleep, (seconds,))
            seconds = 0.0
        if node.op != "call_function" or node.target in MEANING:
            return None
        seconds += node_seconds(node, VIRTUAL)
        stand_in = copy.graph.call_function(empty, (_shapes(node.meta.get("val")),))
        stand_in.meta = dict(node.meta)
        return stand_in

    module = copied(body, change).module()
    module.graph.eliminate_dead_code(lambda node: node.target in (sleep, *MEANING) or _is_end(node))
    module.recompile()
    return module


def _is_end(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _shapes(value: Any) -> Any:
    """Shape and type of a tensor, a list of them of several."""
    if isinstance(value, list | tuple):
        return [_shapes(part) for part in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def empty(shapes: Any) -> Any:
    """Memory for what would be computed, which nobody writes."""
    if isinstance(shapes, list):
        return [empty(shape) for shape in shapes]
    return None if shapes is None else torch.empty(shapes[0], dtype=shapes[1])


def exact_sleep() -> Callable[[float], None]:
    """Sleeps as long as it is told in the mean: what it has slept too long it takes off the next
    time."""
    late = 0.0

    def sleep(seconds: float) -> None:
        nonlocal late
        start = time.perf_counter()
        time.sleep(max(seconds - late, 0.0))
        late += time.perf_counter() - start - seconds

    return sleep


def side(case: models.Case, members: int, stages: int, family: str) -> Side:
    """A case on all ranks, in groups of members."""
    ranks = RANKS // members
    flat = pfeife.capture(case.step, *case.draw())
    local = pfeife.compose(
        pfeife.shard("cut", members, unknown="gather", prices=member_prices(VIRTUAL)),
        pfeife.fuse(),
        pfeife.split_backward(),
    )(flat)
    local = pfeife.annotate(estimate(local, VIRTUAL))(local)
    plan = sched.plan(
        local,
        machine=VIRTUAL,
        microbatches=MICROBATCHES,
        stages=stages,
        ranks=ranks,
        schedule=family,
    )
    program = pfeife.compose(pfeife.apply(plan), pfeife.overlap(timing_of(VIRTUAL)))(local)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, program))
    sleep = exact_sleep()
    bodies = {call.node: sleeping(program.body(call), sleep) for call in program.calls}
    mesh = pfeife.Mesh(ranks, members=members)
    pipeline = DistributedPipeline(program, schedule, bodies=bodies, mesh=mesh)
    state = pfeife.state_of(program, case.model, member=pipeline.mesh.member)
    return Side(program, schedule, pipeline, state, [case.draw() for _ in range(MICROBATCHES)])


def collectives_of(program: Program) -> dict[tuple, fx.Node]:
    """The first node of each collective that its members tell one another in, by what it is."""
    nodes = (node for call in program.calls for node in program.body(call).graph.nodes)
    distinct: dict[tuple, fx.Node] = {}
    for node in nodes:
        if node.target in TELLING:
            distinct.setdefault(kind(node), node)
    return distinct


def kind(node: fx.Node) -> tuple:
    """What a collective is, of which tensor."""
    value = node.all_input_nodes[0].meta["val"]
    return node.target, tuple(value.shape), value.dtype, node.args[1:]


@attrs.frozen(eq=False)
class Told:
    """How long each collective takes a member, measured again and again.

    As in a step: members do not wake at one time and find nothing in their caches, one collective
    comes behind another one, and groups are not at theirs together, for which each sleeps as its
    own numbers say.
    """

    ready: Sequence[tuple[fx.GraphModule, torch.Tensor]]
    order: random.Random
    pauses: random.Random
    sleep: Callable[[float], None] = attrs.field(factory=exact_sleep)

    @staticmethod
    def of(runner: Side, nodes: Iterable[fx.Node]) -> "Told":
        """That of some collectives of a program."""
        group = runner.pipeline.mesh.place(dist.get_rank())
        ready = [alone(runner, node) for node in nodes]
        return Told(ready, random.Random(0), random.Random(str(group)))

    def seconds(self, repeats: int) -> list[float]:
        """The mean of some rounds on this rank, of each collective."""
        taken = [0.0] * len(self.ready)
        dist.barrier()
        for repeat in range(repeats + 1):  # the first one comes behind something else
            for place in self.order.sample(range(len(taken)), len(taken)):
                run, tensor = self.ready[place]
                self.sleep(self.pauses.uniform(2e-3, 8e-3))
                start = time.perf_counter()
                run(tensor)
                taken[place] += (time.perf_counter() - start) * (repeat > 0)
        return [seconds / repeats for seconds in taken]


def measured(
    runner: Side, nodes: Iterable[fx.Node], repeats: int
) -> tuple[list[float], list[float]]:
    """The seconds of steps, and by turns those of collectives: the mean of all members."""
    told, steps, collectives = Told.of(runner, nodes), [], []
    for repeat in range(repeats + 1):
        taken, seconds = told.seconds(12), harness.timed(runner)[0]
        if repeat:
            collectives.append(taken)
            steps.append(seconds)
    means = torch.tensor(collectives, dtype=torch.float64).mean(0)
    dist.all_reduce(means)
    return (means / RANKS).tolist(), steps


def alone(runner: Side, node: fx.Node) -> tuple[fx.GraphModule, torch.Tensor]:
    """A body of one collective, and what it is given."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    value.meta = dict(node.all_input_nodes[0].meta)
    told = graph.call_function(node.target, (value, *node.args[1:]))
    told.meta = dict(node.meta)
    graph.output(told)
    collectives = Collectives(lambda: runner.pipeline.transport)
    fake = value.meta["val"]
    tensor = torch.zeros(tuple(fake.shape), dtype=fake.dtype)
    return collectives.bound(fx.GraphModule({}, graph)), tensor


def link_of(nodes: Mapping[tuple, fx.Node], told: Mapping[tuple, float]) -> Machine:
    """The machine with the link of its members that fits best."""
    free = attrs.evolve(VIRTUAL, link_latency=0.0, link_bandwidth=1e30)
    latency = attrs.evolve(free, link_latency=1.0)
    bandwidth = attrs.evolve(free, link_bandwidth=1.0)
    rows, taken = [], []
    for key, node in nodes.items():
        base = node_seconds(node, free)
        parts = [node_seconds(node, link) - base for link in (latency, bandwidth)]
        rows.append([part / told[key] for part in parts])
        taken.append(1 - base / told[key])
    (fixed, a_byte), _ = nnls(np.array(rows), np.array(taken))
    speed = 1 / max(float(a_byte), 1e-15)
    return attrs.evolve(VIRTUAL, link_latency=float(fixed), link_bandwidth=speed)


def rows(names: Iterable[str], repeats: int) -> Iterator[tuple[str, ...]]:
    """What was predicted and measured of each case and shape."""
    network = bench_network()
    for name, shape in itertools.product(names, SHAPES):
        members, stages, family = shape
        torch.manual_seed(0)
        runner = side(MODELS[name](), members, stages, family)
        nodes = collectives_of(runner.program)
        seconds_told, taken = measured(runner, nodes.values(), repeats)
        told = dict(zip(nodes, seconds_told, strict=True))
        within = network.within(runner.pipeline.mesh) if members < RANKS else None
        costs, telling = runner.costs(told)
        seconds = runner.predicted(costs, VIRTUAL, within)
        link = link_of(nodes, told)
        by_link = runner.predicted(estimate(runner.program, link), link, within)
        low, median, high = statistics.quantiles(taken, n=4)
        yield (
            name,
            f"{members} x {RANKS // members}",
            family,
            f"{100 * telling / seconds:.0f} %",
            f"{1e3 * seconds:.1f} ms",
            f"{1e3 * median:.1f} ms",
            f"{1e3 * (high - low):.1f} ms",
            f"{seconds / median:.3f}",
            f"{by_link / median:.3f}",
        )


HEAD = ("model", "members x ranks", "schedule", "collectives", "predicted", "measured", "spread",
        "ratio", "by the link")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", choices=MODELS, help="a model")
    asked = parser.parse_args()
    table = []
    for row in rows([asked.only] if asked.only else MODELS, asked.repeats):
        table.append(row)
        if dist.get_rank() == 0:
            print(*row, sep="  ", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        print(report.table(table, HEAD))


if __name__ == "__main__":
    harness.run(__file__, main, RANKS)
