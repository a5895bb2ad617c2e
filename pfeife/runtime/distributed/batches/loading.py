"""Data for ranks: each replica's share of a data set, or what the loader of rank 0 gives."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from pfeife.data.machine import Mesh
from pfeife.runtime.distributed.batches.meshes import mesh_of
from pfeife.runtime.distributed.batches.rank0_broadcast import (
    Announced,
    Announcement,
    Structure,
    share,
)
from pfeife.runtime.distributed.process_group import join_world, number_of
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError


def data_sampler(
    dataset: Dataset,
    replicas: int = 1,
    *,
    mesh: Any = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler:
    """torch's DistributedSampler for the share of this process's replica: all ranks of a pipeline
    get the same samples, in the same order. For a step with `batch="replica"`.

    `replicas` and `mesh` are those of the step. In one process it is the whole data set, in the
    order in which the replicas' shares are taken from it. Call its `set_epoch` before each epoch.
    Where the replicas' shares would not be equal, samples are repeated, or left out with
    `drop_last`. Raises ValueError for processes that `replicas` do not divide, or for those of
    another mesh.
    """
    world = (
        dist.get_world_size() if dist.is_initialized() else number_of("WORLD_SIZE", 1, None, "1")
    )
    rank = dist.get_rank() if dist.is_initialized() else number_of("RANK", 0, None, "0")
    step_mesh = mesh_of(mesh) or Mesh(max(1, world // replicas), replicas)
    if world == 1:
        return DistributedSampler(dataset, 1, 0, shuffle, seed, drop_last)
    if step_mesh.size != world:
        raise ValueError(
            f"data_sampler: {step_mesh.replicas} replicas of {step_mesh.ranks} ranks, and there "
            f"are {world} processes: give it the replicas, or the mesh, of the step"
        )
    return DistributedSampler(
        dataset, step_mesh.replicas, step_mesh.place(rank)[0], shuffle, seed, drop_last
    )


def from_rank0(
    loader: Iterable[Any] | None,
    *,
    values: bool = True,
    device: torch.device | str | None = None,
) -> "RankZeroLoader":
    """A loader that gives on every rank what rank 0's gives: `for batch in from_rank0(loader)`.

    On the other ranks `loader` is not looked at (None will do). Batches are tensors, numbers, texts
    and None, or lists, tuples and dicts of them; other mappings become dicts. In one process they
    are those of the loader. The end of the loader, and an error in it, reach all ranks. Iterating
    is collective: every rank takes as many batches as the others.

    With `values=False` the tensors of other ranks have no values, and reading them is an error: the
    step, of `batch="rank0"`, sends them to the ranks that need them. `device` is that of the steps:
    of this process's GPU if there is one, or the CPU, unless given.
    """
    return RankZeroLoader(loader, values, torch.device(device) if device else _default_device())


class RankZeroLoader:
    """See `from_rank0`."""

    def __init__(self, loader: Iterable[Any] | None, values: bool, device: torch.device):
        self.loader, self.values, self.device = loader, values, device
        self.announced = Announced("the next batch of from_rank0")

    def __iter__(self) -> Iterator[Any]:
        world = join_world(self.device)
        if world is None:
            yield from self._given()
            return
        batches = self._each()
        while True:
            # After a failure there is another world.
            world = join_world(self.device) or world
            announcement = _announced(self.announced, world, batches.__next__)
            if announcement is None:
                return
            yield announcement[0].filled(self._tensors(world, *announcement))

    def __len__(self) -> int:
        """That of rank 0's loader (collective). Raises TypeError if it has none, on every rank:
        `list` asks for it, and goes on without one."""
        world = join_world(self.device)
        if world is None:
            return len(self._given())  # type: ignore[arg-type]

        def count() -> int:
            try:
                return len(self._given())  # type: ignore[arg-type]
            except TypeError:
                raise StopIteration from None

        announcement = _announced(Announced("the length of from_rank0"), world, count)
        if announcement is None:
            raise TypeError("the loader that rank 0 has given to from_rank0 has no length")
        return int(announcement[0].filled(()))

    def _each(self) -> Iterator[Any]:
        yield from self._given()

    def _given(self) -> Iterable[Any]:
        if self.loader is None:
            raise ValueError("from_rank0 wants a loader on rank 0, where it is None")
        return self.loader

    def _tensors(
        self, world: World, structure: Structure, sent: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Rank 0's tensors, on every rank (collective if they have values there)."""
        tensors = sent if world.rank == 0 else structure.empty(world.device, values=self.values)
        if self.values and tensors:
            with world.building("a batch of rank 0"):
                share(world, tensors)
        return tensors


def _announced(announced: Announced, world: World, give: Callable[[], Any]) -> Announcement | None:
    """What rank 0 is given; its own exception there."""
    try:
        return announced(world, give)
    except CollectiveError as refusal:
        if world.rank == 0 and refusal.__cause__ is not None:
            raise refusal.__cause__ from None
        raise


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", number_of("LOCAL_RANK", 0, torch.cuda.device_count() - 1, "0"))
