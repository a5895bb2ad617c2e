"""What a script has written to tensors by hand since their last change that all ranks know of.

                       rank 0, which asks      rank 1, which trains 1.weight
    optimizer.step()   1.weight    0 writes    1.weight    0 writes
    1.weight.mul_(.9)              1                       0           not yet: rank 0 waits for it
    state_dict()                   1                       1           the same point: it answers

Autograd counts what is written to a tensor, also to one that is absent. What is written to
`tensor.data` it does not; that is known of absent tensors alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from pfeife.runtime.distributed.state.remote_parameters import Foreign, Versions, version_of

_MOMENT = "a state_dict() has asked for it: what that gave may be of another moment"
_INSTEAD = "or call pfeife.full_state_dict(model) on every rank instead"
BY_DATA = (
    f"was written to by its .data after {_MOMENT}. Write to parameters under torch.no_grad(), "
    f"which is counted, {_INSTEAD}"
)
STATE_BY_HAND = (
    f"was written to outside of step() and load_state_dict() after {_MOMENT}. Write to it after "
    f"the next step, {_INSTEAD}"
)
A_COPY = (
    "in what state_dict() has given was written to, which is a copy of what ranks train together: "
    "write to the parameters, or give load_state_dict() what was changed; to change a copy alone, "
    "clone it first"
)


class Writes:
    """Counts what is written to the tensors that ranks train (`owners` has who) between
    two changes; `foreign` are those that this rank has no values of."""

    def __init__(self, owners: Mapping[torch.Tensor, Any], foreign: Foreign):
        self.owners, self.foreign = owners, foreign
        # Since the last change, and since all ranks were together before that.
        self.counts, self.data_counts = Versions(), Versions(foreign.data_writes)
        self.earlier: Counter[int] = Counter()

    def collect(self) -> None:
        """Before a change: what was written until then."""
        self.earlier.update(self._since())

    def _since(self) -> dict[int, int]:
        """How often tensors were written to since the last change, by their numbers, if at all."""
        pairs = self.counts.written()
        return {
            self.owners[tensor].number: count for tensor, count in pairs if tensor in self.owners
        }

    def told(self, numbers: Iterable[int]) -> dict[int, int]:
        """How often each of some tensors was written to since the ranks have last used it, if at
        all; for those of earlier changes once."""
        since = self._since()
        counts = {n: self.earlier.pop(n, 0) + since.get(n, 0) for n in numbers}
        return {number: count for number, count in counts.items() if count}

    def forget(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """After a change of some tensors, all unless given: counts from zero."""
        changed = list(self.owners if tensors is None else tensors)
        self.counts.mark(changed)
        self.data_counts.mark(changed)

    def counted(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """How often each of some tensors was written to."""
        return (*map(self.counts.since, tensors),)

    def by_data(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        """How often any of some tensors of other ranks was written to by its `data`, each number
        once."""
        return tuple(sorted({*map(self.data_counts.since, tensors)} - {0}))


@attrs.frozen(eq=False)
class _Watched:
    tensor: torch.Tensor
    count: Callable[[torch.Tensor], int]
    before: int

    @property
    def is_written(self) -> bool:
        """Whether the script has written to it since it is watched."""
        return self.count(self.tensor) != self.before


class LateWrites:
    """Notices writes to what may not be written to any more before the next change: then nobody
    knows whether what a rank was given is of the moment of its question."""

    def __init__(self) -> None:
        self.watched: dict[tuple[str, int], _Watched] = {}
        self.wrong: list[str] = []  # what was written to too late, which nobody has been told

    def watch(
        self,
        what: str,
        tensors: Iterable[tuple[str, torch.Tensor]],
        count: Callable[[torch.Tensor], int] = version_of,
    ) -> None:
        """Watches tensors, with names, by a `count` of the writes to each; it is `what` is wrong
        with one that is written to. The last ones of the same name are watched."""
        for at, (name, tensor) in enumerate(tensors):
            key = f"{name} {what}", at
            before = self.watched.get(key)
            # The same tensor again keeps its count: what was written in between is not forgotten.
            if before is None or before.tensor is not tensor:
                self._check(key)
                self.watched[key] = _Watched(tensor, count, count(tensor))

    def release(self, values: Any) -> None:
        """Watches the tensors among some values no more."""
        released = set(map(id, pytree.tree_leaves(values)))
        for key in [k for k, entry in self.watched.items() if id(entry.tensor) in released]:
            del self.watched[key]

    def close(self) -> None:
        """Before the next change: what is written to from now on is no matter."""
        for key in list(self.watched):
            self._check(key)

    def _check(self, key: tuple[str, int]) -> None:
        watched = self.watched.pop(key, None)
        if watched is not None and watched.is_written:
            self.wrong.append(key[0])

    def taken(self) -> str:
        """What was written to too late, once; "" if nothing was."""
        self.close()
        first = self.wrong[0] if self.wrong else ""
        self.wrong.clear()
        return first
