"""What a plan is to keep to."""

import attrs

from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.data.optimizers import Optimizer
from pfeife.sched.cutting.border_links import Machines


@attrs.frozen
class Constraints:
    """What a plan is to keep to: the machine and its links, microbatches, ranks, bytes a rank, the
    optimizer, stages if their number is given, cuts and the stages' ranks likewise, and what the
    account of bytes leaves out of every rank (negative where it says too much). `of_ranks` are the
    machines of the ranks where they differ; `tolerance` is how much longer (a fraction) a step may
    take whose messages are smaller (see `Score`)."""

    machine: Machine
    microbatches: int
    ranks: int
    memory_limit: float
    network: Network | None = None
    optimizer: Optimizer | None = None
    stages: int | None = None
    cuts: tuple[int, ...] | None = None
    placement: tuple[int, ...] | None = None
    left_out: tuple[int, ...] = ()
    of_ranks: tuple[Machine, ...] = ()
    tolerance: float = 0.0

    @property
    def machines(self) -> Machines:
        """One for all ranks, or one a rank."""
        return self.of_ranks or self.machine

    @property
    def count(self) -> int:
        """How many stages there are, or one a rank where that is left open."""
        return 1 + max(self.cuts) if self.cuts else self.stages or self.ranks
