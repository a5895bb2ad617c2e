"""What builds steps with some options, and what they have in common."""

import logging
from collections.abc import Sequence
from typing import Any

import attrs

from pfeife.backend.building.compiled import Compiled
from pfeife.backend.building.layout import laid_out
from pfeife.backend.building.planning import Planning
from pfeife.backend.settings.option_checks import described
from pfeife.backend.settings.options import Options
from pfeife.data.machine import Machine, Mesh
from pfeife.data.network import Network
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError

log = logging.getLogger("pfeife")


@attrs.frozen(eq=False)
class Builder:
    """Builds steps with some options. `home` is the rank where state goes that no rank trains yet,
    None where the cuts decide that; `layouts`, one list for the builders of all of a backend's
    options, has the mesh once one was chosen."""

    options: Options
    machine: Machine | None
    network: Network | None
    home: int | None = None
    layouts: list[Mesh] = attrs.field(factory=list)

    @property
    def asked(self) -> str:
        """All options that every rank must be given alike; files by what is in them."""
        target, links = described(self.machine), described(self.network)
        options = [f"option {name}={text}" for name, text in self.options.texts.items()]
        return "\n".join([*options, f"option machine: {target}", f"option network: {links}"])

    def mesh(self, world: World) -> Mesh:
        """Raises CollectiveError for a mesh of another number of ranks."""
        mesh, replicas = self.options.mesh, self.options.replicas
        if mesh is not None and mesh.size != world.size:
            raise CollectiveError(
                f"option mesh: {mesh.replicas} pipelines of {mesh.ranks} ranks, and there are "
                f"{world.size} processes: start {mesh.size} (torchrun --nproc-per-node)"
            )
        if mesh is None:
            members = self.options.members
            ranks = max(1, world.size // (replicas * members))
            mesh = self.layouts[0] if self.layouts else Mesh(ranks, replicas, members=members)
        # Each replica is given rows of its own: a rank without a replica would be given rows that
        # nobody trains with.
        if self.options.batch == "replica" and mesh.size != world.size:
            raise CollectiveError(
                f"options batch='replica' and replicas={replicas}: the {world.size} processes are "
                f"not divided by {replicas}; start {mesh.size} (torchrun --nproc-per-node)"
            )
        return mesh

    def unless_outdated(
        self, compiled: Compiled | None, args: Sequence[Any], world: World
    ) -> Compiled | None:
        """What was built, if it may run on the mesh that the state has by now: another step may
        have been the first to train state that it reads, elsewhere."""
        if compiled is None:
            return None
        self.follow(world, args)
        slots = dict(zip(compiled.captured.arguments, args, strict=True))
        mesh, pipeline = self.mesh(world), compiled.pipeline
        moved = isinstance(pipeline, DistributedPipeline) and pipeline.mesh.order != mesh.order
        outdated = moved or world.ownership.outdated(compiled.program, slots, mesh)
        return None if outdated else compiled

    def lay_out(self, world: World, args: Sequence[Any], planning: Planning) -> None:
        """Chooses the mesh of the ranks where none was given (collective): that of the state which
        is trained already; else the one on whose links a step that trains is estimated to take
        less."""
        self.follow(world, args)
        options, network, mesh = self.options, self.network, self.mesh(world)
        # Who has said how ranks are laid out, or gives each replica its batch by its number, keeps
        # that.
        free = options.mesh is None and options.batch != "replica" and not self.layouts
        several = mesh.ranks > 1 and mesh.replicas > 1 and mesh.size == world.size
        several &= mesh.members == 1
        trains = planning.clusters.ports(Role.GRADIENT) and not world.ownership.owns_any(args)
        if network and free and several and trains and network.joins(world.size):
            self.layouts.append(laid_out(planning, world, network, mesh))

    def follow(self, world: World, args: Sequence[Any]) -> None:
        """Takes the mesh of a call's state, if one of so many ranks trains it."""
        meshes = world.ownership.meshes(args)
        mesh = self.mesh(world)
        # Another step has come to train this state, on ranks of another mesh: it stays where it is,
        # and this step goes there.
        if len(meshes) == 1 and self.options.mesh is None and self.options.batch != "replica":
            (trained,) = meshes
            sizes = [(each.ranks, each.replicas, each.members) for each in (trained, mesh)]
            if sizes[0] == sizes[1]:
                self.layouts[:] = [trained]
