"""What rank 0 has, told to all ranks: the structure as JSON, once for each that there is, and the
bytes of its tensors.

    rank 0        {"x": float32 [8, 4], "n": 3}    number 0, new    JSON for all     bytes
    rank 0        {"x": float32 [8, 4], "n": 3}    number 0         (all know it)    bytes
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife.data import plain
from pfeife.frontend.deferred.remote_batch import RankZeroBatch, absent
from pfeife.runtime.distributed.control.packing import empty, pack, unpack
from pfeife.runtime.distributed.control.questions import Shaped, decoded, encoded, shaped
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError

_MOST = 256  # structures that ranks keep
_END = -1


@attrs.frozen
class Structure:
    """A value without its tensors' bytes, `encoded`. `places` has for each tensor in it, in order,
    which of `tensors` that is; the type of its device is in `devices`."""

    value: str
    places: tuple[int, ...]
    tensors: tuple[Shaped, ...]
    devices: tuple[str, ...]

    def empty(self, device: torch.device, *, values: bool = True) -> list[torch.Tensor]:
        """Room for the tensors, on the CPU or on this rank's device, as they are laid out on rank
        0; or tensors without values. Raises ValueError for what is no dtype or shape."""
        return [
            _room(layout, torch.device("cpu") if kind == "cpu" else device, values)
            for layout, kind in zip(self.tensors, self.devices, strict=True)
        ]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The value with these tensors."""
        return decoded(self.value, [tensors[place] for place in self.places])


def _room(layout: Shaped, device: torch.device, values: bool) -> torch.Tensor:
    kind = layout.empty("meta").dtype
    if values:
        return torch.empty_strided(layout.shape, layout.stride, dtype=kind, device=device)
    like = torch.empty_strided(layout.shape, layout.stride, dtype=kind, device="meta")
    return absent(like, device, RankZeroBatch())


def structure_of(value: Any) -> tuple[Structure, list[torch.Tensor]]:
    """The structure of a value, and its tensors, each once. Raises CollectiveError for what has
    none that other ranks could be told: with tensors that want gradients, or whose elements share
    memory."""
    occurrences: list[torch.Tensor] = []
    text = encoded(_with_dicts(value), occurrences)
    tensors = list({id(tensor): tensor for tensor in occurrences}.values())
    at = {id(tensor): index for index, tensor in enumerate(tensors)}
    for tensor in tensors:
        if tensor.requires_grad:
            raise CollectiveError(
                f"a tensor that wants a gradient ({list(tensor.shape)}) is not sent to others"
            )
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CollectiveError(
                f"an expanded tensor ({list(tensor.shape)}) is not sent: pass a copy of it"
            )
    return Structure(
        text,
        tuple(at[id(tensor)] for tensor in occurrences),
        tuple(map(shaped, tensors)),
        tuple(tensor.device.type for tensor in tensors),
    ), tensors


def _with_dicts(value: Any) -> Any:
    """The same with dicts for all mappings."""
    if isinstance(value, Mapping):
        return {key: _with_dicts(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_dicts, value))
    return value


@attrs.frozen
class _Told:
    """What ranks have told one another at one place since they have met for the `generation`th
    time: in how many calls, and which structures, by whose numbers they call them."""

    generation: int = -1
    calls: int = 0
    structures: tuple[Structure, ...] = ()

    def before(self, world: World) -> "_Told":
        """What counts at the next call. All ranks know as many structures, and so forget them at
        the same call; how many calls they have made may differ by one where a failure has ended one
        of them, until they meet anew."""
        if self.generation != world.generation:
            return _Told(world.generation)
        return attrs.evolve(self, structures=()) if len(self.structures) == _MOST else self


Announcement = tuple[Structure, Sequence[torch.Tensor]]  # the tensors on rank 0 alone


class Announced:
    """What rank 0 announces at one place of the script."""

    def __init__(self, place: str):
        self.place, self.told = place, _Told()

    def __call__(self, world: World, give: Callable[[], Any]) -> Announcement | None:
        """The structure of what `give` gives on rank 0, on every rank, and its tensors there; None
        for the end, where it raises StopIteration (collective). If it raises anything else, all
        ranks raise a CollectiveError that tells of it, rank 0 with the exception as its cause."""
        before, structure, refused = self.told.before(world), None, None
        tensors: Sequence[torch.Tensor] = ()
        if world.rank == 0:
            try:
                structure, tensors = structure_of(give())
            except StopIteration:
                pass
            except Exception as error:
                refused = error
        # Most batches are like one before: then a number is all that travels beside the bytes.
        structures = before.structures
        # The next number is that of a new one.
        number = [*structures, structure].index(structure) if structure else _END
        with world.building(self.place):
            where = f"{self.place}: {before.calls} before, {len(structures)} of them new"
            number = world.agreed(where, self.place, number=number, refused=refused).numbers[0]
            if number == len(structures):  # rank 0 alone has it
                text = world.from_rank_zero(plain.to_json(structure) if structure else "")
                structures = (*structures, plain.from_json(Structure, text))
        self.told = _Told(before.generation, before.calls + 1, structures)
        return None if number == _END else (structures[number], tensors)


def share(world: World, tensors: Sequence[torch.Tensor]) -> None:
    """Writes rank 0's values of some tensors to those that the other ranks have in their places
    (collective)."""
    packed = pack(tensors) if world.rank == 0 else empty(tensors)
    shared = packed.to(world.device)
    world.broadcast(shared, 0)
    if world.rank:
        unpack(shared.cpu(), tensors)
