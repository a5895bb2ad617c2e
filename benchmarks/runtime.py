"""The distributed runtime side by side with torch.distributed.pipelining.

    python benchmarks/runtime.py [tiny gpt inductor skip uneven virtual eager] [--quick]

Worlds of 2 and 4 Gloo ranks (of sleeping ones 4 and 8), a thread each, one world after another.
In each the two sides run the same split, schedule and microbatches (but for `uneven`, where
Pfeife plans), a step of one after a step of the other; that loss and gradients agree is checked
first. A step's time is that of the slowest rank.

`--only "zb-v 4MB"` runs the cases whose names have both words, `--ranks 4` worlds of 4 alone;
`--profile` prints where rank 0 spends the time of Pfeife's steps; `--no-peer` times Pfeife only.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import comparing
import harness
import models
import splits
import tables
import torch
import torch.distributed as dist
import virtual
from comparing import Options, Record, side_by_side

import pfeife
from pfeife import sched
from pfeife.cost import machine, measure
from pfeife.cost.network import bench_network
from pfeife.data.progress import shown

LOG = logging.getLogger(__name__)

Case = Callable[[Options], Record]
Cases = Iterator[tuple[str, Case]]


def _case(make: Callable[[], splits.Split], schedule: str, microbatches: int, **more) -> Case:
    return lambda options: side_by_side(make, schedule, microbatches, options, **more)


def tiny(ranks: int) -> Cases:
    """Many stages with next to nothing to compute."""
    for name, stages in (("1f1b", ranks), ("interleaved", 4 * ranks), ("zb-v", 2 * ranks)):
        yield f"tiny {name}", _case(partial(splits.tiny, stages), name, 64, alone=True)


def gpt(ranks: int) -> Cases:
    """Some milliseconds an action."""
    for name, stages in (("1f1b", ranks), ("interleaved", 2 * ranks), ("zb-v", 2 * ranks)):
        make = partial(lambda s: splits.language(models.gpt(8), s), stages)
        yield f"gpt {name}", _case(make, name, 8)


def inductor(ranks: int) -> Cases:
    """The same with stages that Inductor compiles, which the peer's ZB-V refuses."""
    for name, stages in (("1f1b", ranks), ("interleaved", 2 * ranks)):
        make = partial(lambda s: splits.language(models.gpt(8), s), stages)
        yield f"inductor {name}", _case(make, name, 8, inductor=True, note="Inductor on both sides")


def skip(ranks: int) -> Cases:
    """Values that are read many stages later."""
    for name, stages in (("1f1b", ranks), ("interleaved", 2 * ranks)):
        yield f"skip {name}", _case(partial(splits.skips, stages), name, 8)


def uneven(ranks: int) -> Cases:
    """A large head: Pfeife plans, the peer has its blocks assigned evenly. Real ranks are no more
    than there are cores here, sleeping ones four."""
    for name, stages in (("1f1b", ranks), ("interleaved", 2 * ranks)):
        if ranks == 2:
            make = partial(lambda s: splits.language(models.large_head(16000, 8), s), stages)
        else:
            make = partial(splits.sleeping_gpt, stages)
        yield f"uneven {name}", _case(make, name, 8, plan=planned)


def planned(split: splits.Split, microbatches: int = 8) -> harness.Ready:
    """Cuts, placement and schedule by Pfeife's own search over measured costs."""
    case = split.case
    clusters = pfeife.split_backward()(pfeife.fuse()(pfeife.capture(case.step, *case.draw())))
    clusters = pfeife.annotate(harness.mean_costs(measure(clusters, repeats=27)))(clusters)
    plan = sched.plan(
        clusters,
        machine=attrs.evolve(machine("cpu-core"), action_seconds=2e-5),
        microbatches=microbatches,
        ranks=dist.get_world_size(),
        schedule="search",
        network=bench_network(),
        search_seconds=10.0,
    )
    return harness.ready(harness.of_rank_zero(plan), clusters, case)


def sleeping(ranks: int) -> Cases:
    """Virtual accelerators: a layer a stage, small and large values between them."""
    for size, rows in (("4KB", 4), ("4MB", 4096)):
        for count in (8, 16):
            for name, stages in (("1f1b", ranks), ("interleaved", 2 * ranks), ("zb-v", 2 * ranks)):
                make = partial(splits.sleeping, stages, rows)
                case = _case(make, name, count, ideal=partial(virtual_ideal, rows), note=size)
                yield f"virtual {name} {size} of {count}", case


def virtual_ideal(rows: int, one: harness.Ready) -> tuple[float, float]:
    """The schedule's own time if nothing took any but the sleeping operations, which take what
    they do on all ranks together at rest; and if messages took what one does at rest, and nothing
    of their ranks' time."""
    unit = torch.tensor(virtual.seconds_alone(rows), dtype=torch.float64)
    dist.all_reduce(unit)
    each = float(unit) / dist.get_world_size()
    sleeps = {(c.unit, c.kind): virtual.units(one.program.body(c)) for c in one.program.calls}

    def seconds(action: pfeife.Action, message: float) -> float:
        if action.do.kind is None:
            return message
        return each * sum(sleeps[s, k] for s, k in sleeps if s == action.stage and action.runs(k))

    message = harness.message_seconds(rows * virtual.WIDTH * 4)
    free = sched.simulate(one.schedule, partial(seconds, message=0.0))
    carried = sched.simulate(one.schedule, partial(seconds, message=message))
    return free.seconds, carried.seconds


def eager(ranks: int) -> Cases:
    """Against one process with as many threads, and as many processes without a pipeline."""

    def run(options: Options, microbatches: int = 16) -> Record:
        torch.manual_seed(0)
        split, other = splits.language(models.gpt(8), ranks), models.gpt(8)
        order = sched.families.one_f_one_b(ranks, microbatches)
        one = comparing.cut_as(split, order)
        one = attrs.evolve(one, batch=[split.case.draw() for _ in range(microbatches)])
        sides = {
            "ours": comparing.steps_of(one),
            "a thread": comparing.eager(split.case, one.batch),
            "threads": comparing.eager(split.case, one.batch, threads=ranks),
            "apart": comparing.eager(other, one.batch, all_ranks=True),
        }
        times = comparing.in_turn(sides, options)
        return Record(ranks, "1f1b", ranks, microbatches, 2 * ranks * microbatches, times)

    yield "eager 1f1b", run


# By part: its cases in a world of some ranks, the worlds, the repeats, and its table.
PARTS = {
    "tiny": (tiny, (2, 4), 15, tables.overhead),
    "gpt": (gpt, (2, 4), 9, tables.throughput),
    "inductor": (inductor, (2,), 9, tables.throughput),
    "skip": (skip, (2, 4), 9, tables.throughput),
    "uneven": (uneven, (2, 4), 9, tables.throughput),
    "virtual": (sleeping, (4, 8), 5, tables.efficiency),
    "eager": (eager, (2,), 7, tables.speed_up),
}


# Options that the ranks get too.
FLAGS = {
    "--profile": "where rank 0 of Pfeife's steps spends its time, on standard error",
    "--no-peer": "do not time the peer",
    "--default-malloc": "leave glibc's malloc as it is",
}


def chosen(part: str, ranks: int, only: str) -> list[tuple[str, Case]]:
    words = only.split()
    return [(n, c) for n, c in PARTS[part][0](ranks) if all(word in n.split() for word in words)]


def in_world(arguments: argparse.Namespace) -> None:
    """One part's cases in this world; rank 0 writes what was measured."""
    (part,), ranks = arguments.parts, dist.get_world_size()
    virtual.Device.seconds = arguments.sleep
    options = Options(arguments.repeats, arguments.profile, not arguments.no_peer)
    cases = chosen(part, ranks, arguments.only)
    with shown(LOG, rank=dist.get_rank()).phase(f"{part}, {ranks} ranks") as phase:
        for done, (_, case) in enumerate(cases):
            record = case(options)
            if dist.get_rank() == 0:
                with Path(arguments.record).open("a") as file:
                    file.write(json.dumps(attrs.asdict(record)) + "\n")
            if phase.progress:
                phase.progress(done + 1, len(cases))


def measured(part: str, arguments: argparse.Namespace, failed: list[str]) -> list[Record]:
    """All worlds of a part, each started for itself; what has failed is added to a list."""
    _, worlds, repeats, _ = PARTS[part]
    repeats = 3 if arguments.quick else repeats
    rest = ["--only", arguments.only, "--sleep", str(arguments.sleep)]
    rest += [flag for flag in FLAGS if getattr(arguments, flag[2:].replace("-", "_"))]
    with tempfile.NamedTemporaryFile("r") as file:
        own = ["--record", file.name, "--repeats", str(repeats)]
        for ranks in worlds:
            if arguments.ranks in (None, ranks) and chosen(part, ranks, arguments.only):
                try:
                    harness.world(__file__, ranks, [part, *own, *rest])
                except RuntimeError as error:
                    failed.append(str(error))
        return [Record(**json.loads(line)) for line in file]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="part")
    parser.add_argument("--quick", action="store_true", help="three repeats")
    parser.add_argument("--only", default="", help="words that a case's name must have")
    parser.add_argument("--ranks", type=int, help="worlds of this size alone")
    parser.add_argument("--sleep", type=float, default=0.01, help="seconds of a virtual operation")
    for flag, meaning in FLAGS.items():
        parser.add_argument(flag, action="store_true", help=meaning)
    parser.add_argument("--repeats", type=int, default=3, help=argparse.SUPPRESS)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    found = parser.parse_args()
    unknown = [part for part in found.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return found


def main() -> None:
    arguments = parsed()
    if "RANK" in os.environ:
        harness.run(__file__, partial(in_world, arguments))
        return
    failed: list[str] = []
    found = {part: measured(part, arguments, failed) for part in arguments.parts}
    for part, records in found.items():
        print(f"{part}. {PARTS[part][3](records)}\n")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
