"""What all steps of a backend share: options, what builds, the clock, and all that was built."""

import functools
import os
from pathlib import Path

import attrs

from pfeife.backend.building.builder import Builder
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.graphs.graph_breaks import Parts
from pfeife.backend.settings.option_table import Batch
from pfeife.backend.settings.options import Options, versions
from pfeife.backend.shared.meter import Meter
from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.runtime.distributed.world.world import World


class Context:
    """What steps share. `compiled` lists what was built and is kept."""

    def __init__(self, options: Options):
        self.options = options
        self.compiled: list[Compiled] = []
        # Of a step that Dynamo has broken: with gradients, and without.
        # Dynamo compiles a step anew without gradients: its graphs are others then.
        self.parts = {True: Parts(), False: Parts()}
        target, network = options.machine, options.network
        target = target if isinstance(target, Machine | None) else machine(target)
        network = network if isinstance(network, Network | None) else _measured(network)
        self.builder = Builder(options, target, network)
        self.alike = [*versions(), self.builder.asked]  # on every rank
        self.meter = Meter(options.log_every, options.on_step, target, options.optimizer)
        self._options_for = functools.cache(self._made_options)

    def options_for(self, world: World | None, microbatches: int | None = None) -> Options:
        """The options of a call, which may be cut into fewer microbatches than others. One process
        is given the batch of all replicas."""
        count = self.options.microbatches if microbatches is None else microbatches
        return self._options_for(count, self.options.batch if world else "global")

    def _made_options(self, count: int, batch: Batch) -> Options:
        # The options themselves where nothing differs: what is built by them is told by identity.
        if (count, batch) == (self.options.microbatches, self.options.batch):
            return self.options
        return attrs.evolve(self.options, microbatches=count, batch=batch)


def _measured(path: str | os.PathLike[str]) -> Network:
    try:
        return plain.load(Network, Path(path))
    except OSError as error:
        raise ValueError(
            f"option network={str(path)!r}: {error.strerror}; `pfeife bench-network` writes one"
        ) from None
