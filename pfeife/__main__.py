"""The command line: `python -m pfeife`, or `pfeife`.

Each command imports what it needs, so that help and mistakes take no time.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser("pfeife", description="Automatic pipeline parallelism.")
    parser.add_argument("--version", action="version", version=f"pfeife {version('pfeife')}")
    commands = parser.add_subparsers(required=True)
    network = commands.add_parser(
        "bench-network",
        help="measure the links between all ranks, under torchrun",
        description="torchrun --nproc-per-node N -m pfeife bench-network --out network.json",
    )
    network.add_argument("--out", help="where to write the JSON; not written unless given")
    network.add_argument("--repeats", type=_count, default=7, help="runs of each size")
    network.add_argument("--largest", type=_count, help="bytes of a message, 16 MiB unless given")
    network.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    network.set_defaults(run=_bench_network)
    shipped = commands.add_parser("machines", help="machines and links with shipped figures")
    shipped.set_defaults(run=_machines)
    given = parser.parse_args(arguments)
    return given.run(given)


def _count(text: str) -> int:
    """An argument that is a number from 1 on."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _bench_network(given: argparse.Namespace) -> int:
    if given.out and not Path(given.out).absolute().parent.is_dir():  # before minutes of measuring
        print(f"--out {given.out}: there is no such folder", file=sys.stderr)
        return 2
    import torch

    from pfeife import report
    from pfeife.cost.network import SIZES, bench_network
    from pfeife.data import plain
    from pfeife.data.progress import shown
    from pfeife.runtime.distributed.process_group import join_world, leave_world

    device = torch.device(given.device)
    world = join_world(device)
    if world is None:
        print(
            "bench-network measures between processes; start it with torchrun --nproc-per-node 2 "
            "-m pfeife bench-network",
            file=sys.stderr,
        )
        return 2
    first = world.rank == 0
    with shown(logging.getLogger("pfeife"), rank=world.rank).phase("links") as phase:
        found = bench_network(
            sizes=[size for size in SIZES if size <= max(given.largest or SIZES[-1], SIZES[0])],
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
    from pfeife import report
    from pfeife.cost import machine, machines
    from pfeife.data.link import link_kind, link_kinds

    rows = []
    for name in machines():
        one = machine(name)
        rates = ", ".join(f"{dtype} {rate / 1e12:g}" for dtype, rate in one.flops.items())
        rows.append((name, report.size(one.memory), f"{one.memory_bandwidth / 1e9:g}", rates))
    print(report.table(rows, ("machine", "memory", "GB/s", "sustained TFLOP/s")))
    print()
    print(report.links_table(map(link_kind, link_kinds())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
