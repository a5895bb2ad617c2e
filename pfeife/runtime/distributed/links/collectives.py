"""What members of a group tell one another inside of a body.

member 0    x0 ---allgather---> x0 x1 x2    what `MEANING` says of all of them, of which
member 1    x1 ---------------> x0 x1 x2    each keeps its own: the bits of `evaluate`
member 2    x2 ---------------> x0 x1 x2
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx

from pfeife.ir.copying import Copy, copied
from pfeife.ir.members import MEANING, member, part
from pfeife.ir.nodes import value_of
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
        kind = expected.dtype, expected.shape

        def collective(value: torch.Tensor, *rest: Any) -> torch.Tensor:
            # Gloo would end the process of a member that is sent more than it waits for.
            if (value.dtype, value.shape) != kind:
                raise ValueError(
                    f"{target.__name__}: the program has {kind[0]} {list(kind[1])} here, "
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
        alone = collective in (member, part)  # nothing is sent for these
        values = [value] * members if alone else gathered(group, value)
        return MEANING[collective](values, *rest)[place]


def gathered(group: Group, value: torch.Tensor) -> list[torch.Tensor]:
    """A tensor of each member, in their order (collective)."""
    assert group.group is not None
    value = value.contiguous()
    values = [torch.empty_like(value) for _ in group.group.ranks]
    group.wait(group.group.group.allgather([values], [value]))
    return values
