"""What a traced step reads: tensors of the call, and those that it finds by itself, each once."""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from pfeife.frontend.arguments import Argument, Inputs, Kept, aliases
from pfeife.frontend.batch import Arguments
from pfeife.frontend.trace.traced import Read
from pfeife.frontend.watch.reachable_state import Places, Slot
from pfeife.ir.parts import Role


def of_the_call(
    call: Arguments, batch: Sequence[torch.Tensor], used: Collection[int]
) -> list[tuple[Argument, Read]]:
    """The leaves of a call whose fake tensors in the `batch` are `used`, given by identity, as
    arguments; a tensor that is several leaves by the first one."""
    arguments: dict[int, tuple[Argument, Read]] = {}
    for position, (leaf, fake) in enumerate(zip(call.leaves, batch, strict=True)):
        # What the step never reads is no argument: it has no place in the program.
        if id(fake) in used and id(fake) not in arguments:
            role = Role.CONSTANT if leaf.dim is None else Role.BATCH
            argument = Argument(leaf.name, role, (leaf.name,), fake, leaf.dim, position, given=True)
            arguments[id(fake)] = argument, (leaf,)
    return [*arguments.values()]


def of_the_step(
    places: Places,
    values: Mapping[Slot, torch.Tensor],
    used: Collection[int],
    call_names: Collection[str],
) -> Iterator[tuple[Argument, Read]]:
    """The tensors in the slots of a step whose fake ones (`values`) are `used`, as arguments, in
    the order of their use. Raises ValueError for one that lies inside of an argument of the call,
    one of `call_names`, and may have rows of the batch."""
    slots: dict[int, list[Slot]] = {}
    for slot, fake in values.items():
        slots.setdefault(id(fake), []).append(slot)
    reads = [tuple(slots[at]) for at in used if at in slots]
    roots = roots_of(places, reads)
    # Names are those of `state_dict()`, by which checkpoints are read. Only a step of several
    # outermost modules needs the words that tell them apart.
    names: dict[int, tuple[str, ...]] = {}
    for root, outer in roots.items():
        prefix = f"{root}." if len(roots) > 1 else ""
        for at, several in aliases(outer).items():
            names[at] = (*names.get(at, ()), *(prefix + name for name in several))
    modules = [module for outer in roots.values() for module in outer.modules()]
    buffers = {id(module._buffers) for module in modules}
    inside = {id(module._parameters) for module in modules} | buffers
    for read in reads:
        first, tensor = read[0], read[0].get()
        # Parameters and buffers of a module that is an argument have no rows, whatever they are.
        if first.words[0] in call_names and id(first.container) not in inside:
            raise ValueError(
                f"{first.name} is a tensor inside of an argument that Pfeife does not look "
                "into, so it cannot be cut into microbatches: pass tensors, or lists, tuples, "
                "dicts, mappings or dataclasses of them"
            )
        if isinstance(tensor, nn.Parameter):
            role = Role.PARAMETER
        elif any(id(slot.container) in buffers for slot in read):
            role = Role.BUFFER
        else:
            role = Role.CONSTANT
        tensor_names = names.get(id(tensor), (first.name,))
        yield Argument(tensor_names[0], role, tensor_names, values[first]), read


def roots_of(places: Places, reads: Sequence[Read]) -> dict[str, nn.Module]:
    """The outermost modules of a step that have some of the tensors that it reads."""
    ids = {id(slot.get()) for read in reads for slot in read if isinstance(slot, Slot)}
    return {
        root: outer
        for root, outer in places.roots.items()
        if any(id(tensor) in ids for tensor in (*outer.parameters(), *outer.buffers()))
    }


def inputs_of(
    places: Places,
    arguments: list[Argument],
    reads: Sequence[Read],
    written: Mapping[int, Slot],
    flags: tuple[int, ...],
) -> Inputs:
    """The arguments as a capture takes them; `written` has the slots that the step writes to, by
    the indices of the results."""
    roots = roots_of(places, reads)
    slots = {
        index: Kept(slot.name, tuple(at for at, read in enumerate(reads) if slot in read))
        for index, slot in written.items()
    }
    return Inputs(
        arguments,
        {f"@{root}": root for root in roots},
        weakref.WeakSet(roots.values()),
        slots,
        moved={},
        numbers={},
        flags=flags,
    )
