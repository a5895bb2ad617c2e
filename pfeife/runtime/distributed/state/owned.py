"""A tensor that ranks train, and what a program says of that."""

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from pfeife.data.machine import Mesh
from pfeife.ir.messages import holders
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.runtime.failure import CollectiveError
from pfeife.runtime.memory_spans import overlapping

Slots = Mapping[str | None, Any]  # tensors by the names of ports


@attrs.frozen
class Owned:
    """One tensor, and the ranks of a pipeline that train it, in their order: its owners. Those of a
    frozen parameter alone read it.

    `number` is the same for a tensor in all processes, and so is `name`: what the first program
    that trains it calls it. `alike` says whether all have the same values; statistics of replicas
    are not. `replica` is the one that trains it, the others have copies; None: all of them do.
    `member` is the one of each group that has it; None: all of them do.
    """

    number: int
    name: str
    ranks: tuple[int, ...]
    mesh: Mesh
    alike: bool = True
    replica: int | None = None
    member: int | None = None

    @property
    def first(self) -> int:
        """The rank of the world whose values count."""
        return self._of_members.in_world(self.replica or 0, self.ranks[0])

    def nearest(self, rank: int) -> int:
        """The rank of the world to ask for the values: of the pipeline of the one that asks."""
        replica = self.mesh.place(rank)[0] if self.replica is None else self.replica
        return self._of_members.in_world(replica, self.ranks[0])

    @property
    def _of_members(self) -> Mesh:
        return self.mesh.each_member[self.member or 0]

    @property
    def everywhere(self) -> tuple[int, ...]:
        """The ranks of the world that train the tensor, those of all replicas or of one."""
        return tuple(rank for rank in range(self.mesh.size) if self.trains(rank))

    @property
    def is_divided(self) -> bool:
        """Whether some rank of the world does not train the tensor."""
        some = len(self.ranks) < self.mesh.ranks
        return some or self.replica is not None or self.member is not None

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks of the world that have its values."""
        return tuple(rank for rank in range(self.mesh.size) if self.holds(rank))

    def trains(self, rank: int) -> bool:
        """Whether a rank of the world trains the tensor."""
        return self.holds(rank) and self.replica in (None, self.mesh.place(rank)[0])

    def holds(self, rank: int) -> bool:
        """Whether a rank of the world has the tensor's values, its own or those of another
        replica."""
        of_member = self.member in (None, self.mesh.of_member(rank).member)
        return of_member and self.mesh.place(rank)[1] in self.ranks


def least_loaded(owners: Mapping[torch.Tensor, Owned], ranks: int) -> int:
    """The rank of a pipeline of so many that trains the fewest bytes."""
    bytes_of = [0] * ranks
    for tensor, owned in owners.items():
        for rank in owned.ranks:
            bytes_of[rank % ranks] += tensor.nbytes
    # The first of several: all ranks must choose the same.
    return bytes_of.index(min(bytes_of))


def ranks_of(program: Program) -> dict[str, frozenset[int]]:
    """By canonical name the ranks that read a parameter or buffer, or make a part of its gradient
    or update."""
    users = holders(program, Role.PARAMETER, Role.BUFFER).items()
    return {name: frozenset(c.rank for c in calls if c.rank is not None) for name, calls in users}


def check_memory(pairs: Iterable[tuple[torch.Tensor, Owned]]) -> None:
    """Raises CollectiveError for tensors in one memory that are trained on different ranks."""
    owned_by = {id(tensor): (tensor, owned) for tensor, owned in pairs}
    for tensors in overlapping(tensor for tensor, _ in owned_by.values()):
        left, right = (owned_by[id(tensor)][1] for tensor in tensors)
        if left.everywhere != right.everywhere:
            first, second = sorted((left, right), key=lambda owned: owned.number)
            raise CollectiveError(
                f"{first.name} and {second.name} share memory, but are two tensors, trained on "
                f"ranks {list(first.everywhere)} and {list(second.everywhere)}: tie them by being "
                "one parameter (b.weight = a.weight)"
            )


def owners_of(
    program: Program, ports: Iterable[Port], slots: Slots, mesh: Mesh, number: int
) -> list[tuple[torch.Tensor, Owned]]:
    """The tensors at some ports that shall have owners, with these, numbered from `number` on: what
    the program trains, and what is frozen if there is any of that."""
    ranks = ranks_of(program)
    trained = {port.fqn for port in trained_by(program) if slots[port.name].is_leaf}
    used = [port for port in ports if port.fqn in ranks]
    chosen = [port for port in used if port.fqn in trained]
    # A program that trains nothing owns nothing: frozen parameters stay everyone's.
    if chosen:
        chosen += [port for port in used if is_frozen(port, slots[port.name])]
    replica_of = {reduction.name: reduction.owner for reduction in program.reductions}
    owners = []
    for at, port in enumerate(chosen, number):
        alike = mesh.replicas == 1 or port.role == Role.PARAMETER
        places, replica = tuple(sorted(ranks[port.fqn])), replica_of.get(port.fqn)
        owned = Owned(at, port.fqn, places, mesh, alike, replica, port.keeper)
        owners.append((slots[port.name], owned))
    return owners


def trained_by(program: Program) -> list[Port]:
    """State that the program has a gradient or an update of."""
    changed = {port.fqn for port in program.ports(Role.GRADIENT, Role.BUFFER_UPDATE)}
    return [p for p in program.ports(Role.PARAMETER, Role.BUFFER) if p.fqn in changed]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Those of all its groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_frozen(port: Port, value: torch.Tensor) -> bool:
    """Whether a port is a parameter that is not to be trained."""
    return port.role == Role.PARAMETER and value.is_leaf and not value.requires_grad
