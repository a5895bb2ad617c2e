"""`pfeife bench-network`: the links between all ranks, measured under torchrun."""

import argparse
import logging

from pfeife.commands.answers import writable
from pfeife.commands.arguments import count

HELP = "measure the links between all ranks, under torchrun"
EXAMPLES = """\
example:
  torchrun --nproc-per-node 8 -m pfeife bench-network --out network.json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife bench-network`."""
    parser.add_argument("--out", help="where to write the JSON; not written unless given")
    parser.add_argument("--repeats", type=count, default=7, help="runs of each size")
    parser.add_argument("--largest", type=count, help="bytes of a message, 16 MiB unless given")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))


def run(options: argparse.Namespace) -> str:
    """The links, on the first rank; nothing on the others."""
    writable(options.out)
    import torch

    from pfeife import report
    from pfeife.cost.network import SIZES, bench_network
    from pfeife.data import plain
    from pfeife.data.progress import shown
    from pfeife.runtime.distributed.process_group import join_world, leave_world

    device = torch.device(options.device)
    # Collective: all ranks come here, also those that print nothing.
    world = join_world(device)
    if world is None:
        raise ValueError(
            "bench-network measures between processes; start it with torchrun --nproc-per-node 2 "
            "-m pfeife bench-network"
        )
    with shown(logging.getLogger("pfeife"), rank=world.rank).phase("links") as phase:
        network = bench_network(
            # At least the smallest size, whatever was asked for: there is something to measure.
            sizes=[size for size in SIZES if size <= max(options.largest or SIZES[-1], SIZES[0])],
            repeats=options.repeats,
            device=device,
            progress=phase.progress,
        )
    if world.rank == 0 and options.out:
        plain.save(network, options.out)
    leave_world()
    return report.network_table(network) if world.rank == 0 else ""
