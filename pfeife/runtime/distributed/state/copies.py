"""Parameters that one replica trains for all: after its optimizer's step the others copy them.

                    replica 0        replica 1
optimizer.step()    w0 is stepped    w1 is stepped      each has a gradient of its own alone
at its end          w0 --------->    a copy of w0
                    a copy of w1     <--------- w1
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch

from pfeife._torch import is_absent
from pfeife.data.replicas import BUCKET_BYTES
from pfeife.frontend.deferred.remote_batch import take_values
from pfeife.runtime.distributed.control.packing import empty, pack, unpack
from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.state.owned import Owned, parameters_of
from pfeife.runtime.distributed.state.remote_parameters import Arrival, Foreign, Versions

_PLACE = "optimizer.step() of parameters that replicas share out"


class Copies:
    """Keeps the copies of this process those of their owners. `owners` has those of all
    tensors, `shared` counts what is written to those that several ranks have."""

    def __init__(
        self, owners: Mapping[torch.Tensor, Owned], foreign: Foreign, shared: Versions
    ) -> None:
        self.owners, self.foreign, self.shared = owners, foreign, shared
        self.world: Peers | None = None  # the latest
        self.used = False  # whether there are any, on any rank
        self.behind = False  # whether copies have not all come

    def add(self, tensor: torch.Tensor) -> None:
        """A tensor that another replica trains."""
        self.foreign.copies[tensor] = None
        if tensor.requires_grad:
            owned = self.owners[tensor]
            tensor.register_hook(Arrival(f"{owned.name} is trained by rank {owned.first}"))

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rank has stepped (collective, if there are such parameters). Raises CollectiveError
        if ranks are not at a step of the same parameters."""
        world = self.world
        if not self.used or world is None:
            return
        tensors = self._copied(parameters_of(optimizer))
        if tensors:
            with world.busy(lambda: Activity(_PLACE)), self._catching_up():
                world.agreed(" ".join(map(str, tensors)), _PLACE)
                self.renew(world, tensors.values())

    @contextlib.contextmanager
    def _catching_up(self) -> Iterator[None]:
        """While copies come. If this ends half-way, the next call tells all ranks, which then copy
        again."""
        self.behind = True
        yield
        self.behind = False

    def _copied(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those of some tensors that one replica trains for all, by their numbers, in order."""
        by_number = {self.owners[p].number: p for p in tensors if p in self.owners}
        return {
            n: by_number[n]
            for n in sorted(by_number)
            if self.owners[by_number[n]].replica is not None
        }

    def renew(self, world: Peers, tensors: Iterable[torch.Tensor]) -> None:
        """Gives every replica the values of those that others train (collective)."""
        copied = self._copied(tensors)
        if not copied:
            return
        mesh = next(self.owners[tensor].mesh for tensor in copied.values())
        mesh = mesh.of_member(world.rank)
        replica, rank = mesh.place(world.rank)
        columns = [
            [each.in_world(r, k) for r in range(mesh.replicas)]
            for k in range(mesh.ranks)
            for each in mesh.each_member
        ]
        # All ranks make the connections of all columns, in one order; each uses its own.
        connections = [world.connection_of(sorted(ranks), "copies") for ranks in columns]
        connection = connections[rank * mesh.members + mesh.member]
        here = [tensor for tensor in copied.values() if self.owners[tensor].holds(world.rank)]
        pieces = [
            _pieces([tensor for tensor in here if self.owners[tensor].replica == owner])
            for owner in range(mesh.replicas)
        ]
        with self._catching_up():
            # All ranks of a column begin the same broadcasts in one order; then they wait.
            for together in zip_longest(*pieces):  # one of each owner at a time
                under_way = []
                for owner, piece in enumerate(together):
                    if piece:
                        message = (pack if owner == replica else empty)(piece, world.device)
                        root = connection.index(mesh.in_world(owner, rank))
                        work = connection.group.broadcast(message, root)
                        under_way.append((work, message, () if owner == replica else piece))
                for work, message, copies in under_way:
                    world.wait(work)
                    # Absent ones: gradients that are elsewhere were written to them.
                    for tensor in filter(is_absent, copies):
                        take_values(tensor)
                    unpack(message, copies)
            self.shared.mark(tensor for tensor in copied.values() if tensor in self.shared)


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors that travel together."""
    open_: list[torch.Tensor] = []
    for tensor in tensors:
        if open_ and sum(queued.nbytes for queued in open_) + tensor.nbytes > BUCKET_BYTES:
            yield open_
            open_ = []
        open_.append(tensor)
    if open_:
        yield open_
