"""The command line: `python -m pfeife`, or `pfeife`."""

import argparse
import logging
import sys
from collections.abc import Sequence

import torch

from pfeife import plain, report
from pfeife.cost import machine, machines
from pfeife.cost.network import SIZES, bench_network
from pfeife.progress import shown
from pfeife.runtime.distributed import join_world, leave_world, world_rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser("pfeife", description="Automatic pipeline parallelism.")
    commands = parser.add_subparsers(required=True)
    network = commands.add_parser(
        "bench-network",
        help="measure the links between all ranks, under torchrun",
        description="torchrun --nproc-per-node N -m pfeife bench-network --out network.json",
    )
    network.add_argument("--out", help="where to write the JSON; not written unless given")
    network.add_argument("--repeats", type=int, default=7, help="runs of each size")
    network.add_argument("--largest", type=int, default=SIZES[-1], help="bytes of a message")
    network.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    network.set_defaults(run=_bench_network)
    shipped = commands.add_parser("machines", help="the machine profiles that ship with pfeife")
    shipped.set_defaults(run=_machines)
    given = parser.parse_args(arguments)
    return given.run(given)


def _bench_network(given: argparse.Namespace) -> int:
    device = torch.device(given.device)
    if join_world(device) < 2:
        print(
            "bench-network measures between processes; start it with torchrun --nproc-per-node 2 "
            "-m pfeife bench-network",
            file=sys.stderr,
        )
        return 2
    first = world_rank() == 0
    with shown(logging.getLogger("pfeife"), rank=world_rank()).phase("links") as phase:
        found = bench_network(
            sizes=[size for size in SIZES if size <= max(given.largest, SIZES[0])],
            repeats=given.repeats,
            device=device,
            progress=phase.progress,
        )
    if first:
        print(report.network_table(found))
        if given.out:
            plain.save(found, given.out)
    leave_world()
    return 0


def _machines(given: argparse.Namespace) -> int:
    rows = []
    for name in machines():
        one = machine(name)
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in one.flops.items())
        rows.append((name, report.size(one.memory), f"{one.memory_bandwidth / 1e9:g}", rates))
    print(report.table(rows, ("machine", "memory", "GB/s", "sustained TFLOP/s")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
