"""What members of a group tell one another inside of a body.

    all_gather, small sums                  reduce_scatter, all_to_all
    member 0    x0 -----> x0 x1 x2          member 0    x00 x01 x02 -----> x00 x10 x20
    member 1    x1 -----> x0 x1 x2          member 1    x10 x11 x12 -----> x01 x11 x21
    member 2    x2 -----> x0 x1 x2          member 2    x20 x21 x22 -----> x02 x12 x22

Each then does with them, in the order of members, what `MEANING` says: the bits of `evaluate`. A
large sum is scattered and then gathered.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx

from pfeife.ir.copying import Copy, copied
from pfeife.ir.members import ALONE, MEANING, Split, all_to_all, messages, reduce_scatter, reduced
from pfeife.ir.nodes import sizes_of, value_of
from pfeife.runtime.distributed.links.connection import Connection


class Group(Protocol):
    """Who has the connection of a group, and waits for one of torch.distributed's collectives as
    all waits of the world are: bounded, and ended by a failure."""

    @property
    def group(self) -> Connection | None:
        """The connection of the members, in their order."""

    def wait(self, work: dist.Work) -> None:
        """Raises PipelineError if any rank has failed meanwhile."""


class Collectives:
    """The collectives of one member; `now` tells the group, which is another one after a
    failure."""

    def __init__(self, now: Callable[[], Group]):
        self.now = now

    def bound(self, body: fx.GraphModule) -> fx.GraphModule:
        """A body whose collectives are this member's."""
        return copied(body, self._bound).module()

    def _bound(self, node: fx.Node, copy: Copy) -> fx.Node | None:
        target: Any = node.target
        if node.op != "call_function" or target not in MEANING:
            return None

        expected = value_of(node.all_input_nodes[0])
        assert expected is not None
        dtype, sizes = expected.dtype, sizes_of(node.all_input_nodes[0])

        def collective(value: torch.Tensor, *rest: Any) -> torch.Tensor:
            # Gloo would end the process of a member that is sent more than it waits for. Sizes that
            # are open are those of the call, about which ranks have agreed.
            known = [
                n for n, size in zip(value.shape, sizes, strict=False) if isinstance(size, int)
            ]
            closed = [size for size in sizes if isinstance(size, int)]
            if value.dtype != dtype or value.dim() != len(sizes) or known != closed:
                raise ValueError(
                    f"{target.__name__}: the program has {dtype} {list(sizes)} here, "
                    f"this is {value.dtype} {list(value.shape)}"
                )
            return self._run(target, value, *rest)

        collective.__name__ = target.__name__  # fx writes it where the graph's code is shown
        own = copy.keep(node)
        own.target = collective
        return own

    def _run(self, collective: Callable[..., Any], value: torch.Tensor, *rest: Any) -> torch.Tensor:
        group = self.now()
        assert group.group is not None
        place, members = group.group.place, len(group.group.ranks)
        if collective in ALONE:
            return MEANING[collective]([value] * members, *rest)[place]
        if collective is reduce_scatter:
            dim, before, _ = rest
            return reduced(_exchanged(group, Split(dim, members, before).parts(value)))
        if collective is all_to_all and rest[0] != rest[2]:
            old, old_before, new, new_before, _ = rest
            parts = Split(new, members, new_before).parts(value)
            return Split(old, members, old_before).join(_exchanged(group, parts))
        size = value.numel() * value.dtype.itemsize
        if len(messages(collective, size, members)) > 1:
            return _reduced_in_parts(group, value, *rest[1:])
        return MEANING[collective](gathered(group, value), *rest)[place]


def _reduced_in_parts(group: Group, value: torch.Tensor, by: str = "sum") -> torch.Tensor:
    """A sum of which each member adds up a part."""
    assert group.group is not None
    members = len(group.group.ranks)
    padded = F.pad(value.flatten(), (0, -value.numel() % members))
    own = reduced(_exchanged(group, padded.chunk(members)), by)
    return torch.cat(gathered(group, own))[: value.numel()].view(value.shape)


def _exchanged(group: Group, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What each member has for this one, of one shape (collective)."""
    assert group.group is not None
    sent = torch.stack([*parts])
    received = torch.empty_like(sent)
    as_bytes = [tensor.flatten().view(torch.uint8) for tensor in (received, sent)]
    group.wait(group.group.group.alltoall_base(*as_bytes, [], []))
    return received.unbind()


def gathered(group: Group, value: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each member, in their order (collective)."""
    assert group.group is not None
    value = value.contiguous()
    values = [torch.empty_like(value) for _ in group.group.ranks]
    group.wait(group.group.group.allgather([values], [value]))
    return values
