"""What every door hands on: the forward of a step as a function of its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import fx

from pfeife.frontend.results import Leaf


@attrs.frozen(eq=False)
class Forward:
    """The forward of a step on one microbatch, however it was found.

    `run` takes a value for every argument, in their order, and gives the results. `arguments` and
    `results` are examples of both: fake tensors that share storage where the real ones do, and
    `requires_grad` as these. `leaves` says where each result stands in what the step returns, None
    where that cannot be seen; `asked` are the user's lines that ask for values of tensors. `graph`
    is what `run` runs, if that is nothing but a graph.
    """

    run: Callable[..., Sequence[Any]]
    arguments: tuple[Any, ...]
    results: tuple[Any, ...]
    leaves: tuple[Leaf, ...] | None
    asked: tuple[str, ...] = ()
    graph: fx.GraphModule | None = None

    def shared(self) -> set[int]:
        """The indices of results that look at the storage of another result or of an argument."""
        # Of fake tensors: they share storage where the real ones do, and have none of their own.
        users: dict[int, int] = {}
        for value in (*self.results, *self.arguments):
            if isinstance(value, torch.Tensor):
                users[_storage(value)] = users.get(_storage(value), 0) + 1
        return {i for i, value in enumerate(self.results) if users[_storage(value)] > 1}

    def is_itself(self, argument: int, result: int) -> bool:
        """Whether a result is an argument that the step has changed in place."""
        return _storage(self.arguments[argument]) == _storage(self.results[result])


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)
