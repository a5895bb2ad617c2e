"""A network of two nodes."""

from itertools import permutations

from pfeife.data.link import Link
from pfeife.data.network import Network

FAST, SLOW = 1e9, 1e6  # bytes a second


def two_nodes(ranks: int = 4) -> Network:
    """Half of the ranks in each; links within a node are fast."""
    half = ranks // 2

    def link(source: int, destination: int) -> Link:
        rate = FAST if source // half == destination // half else SLOW
        sizes = (0, 2**20)
        seconds = tuple(1e-5 + size / rate for size in sizes)
        return Link(source, destination, sizes, seconds, (0.0, 0.0), (0.0, 0.0), 0.0)

    return Network(tuple(link(*ends) for ends in permutations(range(ranks), 2)))
