"""What is to be built, and where."""

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from pfeife.backend.building.artifacts import Artifacts
from pfeife.backend.building.builder import Builder
from pfeife.backend.building.planning import Planned
from pfeife.backend.graphs.step_graph import Graph
from pfeife.backend.settings.options import Options
from pfeife.cost import default_machine
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.data.progress import Shown
from pfeife.frontend.captured import Captured
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.passes.compose import Passes
from pfeife.report import Target
from pfeife.runtime.distributed.world.world import World


@attrs.frozen(eq=False)
class Task:
    """A graph and the arguments of its first call, to be built by some options: for the ranks of a
    `world`, or for this process. `device` is where the arguments are, `passes` are the caller's
    own, and `earlier` what was built before."""

    builder: Builder
    graph: Graph
    args: Sequence[Any]
    world: World | None
    device: torch.device
    show: Shown
    artifacts: Artifacts
    passes: Passes
    earlier: Sequence[Planned] = ()

    @property
    def options(self) -> Options:
        """Those of the builder."""
        return self.builder.options

    @functools.cached_property
    def has_values(self) -> bool:
        """Whether this rank has values of all that the step reads: state that is trained already
        has them on the ranks that train it."""
        return self.world is None or not self.world.ownership.owns_any(self.args)

    @property
    def mesh(self) -> Mesh | None:
        """How the ranks are pipelines, by now: what is built first decides. None where nobody has
        said that, in one process."""
        return self.builder.mesh(self.world) if self.world else self.options.mesh

    @property
    def network(self) -> Network | None:
        """What was measured, by the ranks of a pipeline."""
        network, mesh = self.builder.network, self.mesh
        return network.within(mesh) if network and mesh else network

    @property
    def place(self) -> int | None:
        """Which rank of its pipeline this process is, None where it is all of them."""
        return self.builder.mesh(self.world).place(self.world.rank)[1] if self.world else None

    def machine(self, program: Program) -> Machine:
        """What a program is planned for, with the links between members."""
        # Without a machine it is planned for the kind that it will run on.
        machine = self.builder.machine or default_machine(self.device_of(program))
        network, mesh = self.builder.network, self.mesh
        return network.for_members(machine, mesh) if network and mesh else machine

    def target(self, machine: Machine) -> Target:
        """What the step is planned for."""
        options, links, mesh = self.options, self.builder.network, self.mesh
        between = links.between(mesh) if links and mesh else None
        limit = machine.memory if options.memory_limit is None else options.memory_limit
        return Target(machine, self.network, between, options.optimizer, limit, options.apart > 1)

    def device_of(self, program: Program) -> torch.device:
        """The device of the parameters; a batch may still come from another one."""
        return next((port.device for port in program.ports(Role.PARAMETER)), self.device)

    def slots(self, captured: Captured) -> dict[str | None, Any]:
        """The call's arguments by the names of their ports, None for those that have none."""
        return dict(zip(captured.arguments, self.args, strict=True))

    def devices(self, ranks: int) -> list[torch.device] | None:
        """The device of every rank in this process, None to leave all where it is."""
        devices = self.options.devices
        if devices is None:
            return None
        if self.world or len(devices) != ranks:
            raise ValueError(
                f"devices={devices}: this is for one process that runs all ranks of a pipeline, "
                f"one device a rank; there are {ranks} ranks"
                + (", a process each" if self.world else "")
            )
        return [with_index(torch.device(name)) for name in devices]


def with_index(device: torch.device) -> torch.device:
    """The device as its tensors have it: "cuda" is one of several."""
    meant = device.type != "cpu" and device.index is None
    return torch.empty(0, device=device).device if meant else device
