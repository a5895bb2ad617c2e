"""What all steps of a backend share: options, what builds, the clock, and all that was built."""

import os
from pathlib import Path

import attrs

from pfeife.backend.building.builder import Builder
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.calls.meter import Meter
from pfeife.backend.graph_breaks import Parts
from pfeife.backend.settings.options import Options, versions
from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.machine import Machine
from pfeife.data.network import Network
from pfeife.runtime.distributed.world import World


class Context:
    """What steps share. `compiled` lists what was built and is kept."""

    def __init__(self, options: Options):
        self.options = options
        self.compiled: list[Compiled] = []
        # Of a step that Dynamo has broken: with gradients, and without.
        self.parts = {True: Parts(), False: Parts()}
        given = options.machine
        target = given if isinstance(given, Machine | None) else machine(given)
        links = options.network
        network = links if isinstance(links, Network | None) else _measured(links)
        self.builder = Builder(options, target, network)
        self.alike = [*versions(), self.builder.asked]  # on every rank
        self.meter = Meter(options.log_every, options.on_step, target, options.optimizer)
        self.known: dict[tuple[bool, int], Options] = {}

    def options_for(self, world: World | None, microbatches: int | None = None) -> Options:
        """The options of a call, which may be cut into fewer microbatches than others. One process
        is given the batch of all replicas."""
        count = self.options.microbatches if microbatches is None else microbatches
        key = world is None, count
        if key not in self.known:
            batch = self.options.batch if world else "global"
            same = (count, batch) == (self.options.microbatches, self.options.batch)
            made = attrs.evolve(self.options, microbatches=count, batch=batch)
            self.known[key] = self.options if same else made
        return self.known[key]


def _measured(path: str | os.PathLike[str]) -> Network:
    try:
        return plain.load(Network, Path(path))
    except OSError as error:
        raise ValueError(
            f"option network={str(path)!r}: {error.strerror}; `pfeife bench-network` writes one"
        ) from None
