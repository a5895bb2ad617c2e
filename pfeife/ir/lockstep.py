"""Runs the graph of a member for all members of a group, in one process."""

from collections.abc import Sequence
from typing import Any

import attrs
from torch import fx

from pfeife.ir.members import MEANING


@attrs.frozen(eq=False)
class Each:
    """One value for every member, in their order."""

    values: tuple[Any, ...]


def lockstep(module: fx.GraphModule, arguments: Sequence[Each]) -> Each:
    """What every member's run of a graph gives, node by node for all of them."""
    return Lockstep(module, len(arguments[0].values)).run(*arguments)


class Lockstep(fx.Interpreter):
    """Runs each node once for every member, and a collective once for all of them."""

    def __init__(self, module: fx.GraphModule, members: int):
        super().__init__(module)
        self.members = members

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An operation of each member, a collective of all of them."""
        if target in MEANING:
            own = (value.values if isinstance(value, Each) else value for value in args)
            return Each(tuple(MEANING[target](*own)))
        return Each(
            tuple(target(*self._of(i, args), **self._of(i, kwargs)) for i in range(self.members))
        )

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A body, in lockstep too."""
        return lockstep(self.fetch_attr(target), args)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What all members have alike."""
        return Each((super().get_attr(target, args, kwargs),) * self.members)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The results of each member."""
        return Each(tuple(self._of(i, args[0]) for i in range(self.members)))

    def _of(self, member: int, value: Any) -> Any:
        """A member's own of a tree of values."""
        if isinstance(value, Each):
            return value.values[member]
        if isinstance(value, dict):
            return {name: self._of(member, inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._of(member, inner) for inner in value])
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            return slice(*(self._of(member, end) for end in ends))
        return value
