"""`state_dict()` of an optimizer on one rank: with the state that others keep."""

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.watch.gc_objects import living
from pfeife.runtime.distributed.control.questions import (
    Named,
    Question,
    StateEntry,
    copied,
    encoded,
)
from pfeife.runtime.distributed.served.state_client import Asking
from pfeife.runtime.distributed.state.owned import parameters_of
from pfeife.runtime.failure import CollectiveError


class Optimizers:
    """The optimizers of what ranks train, in the order of their first steps: before that, none has
    state that others lack. Steps within a backward are no change by themselves: ranks make other
    ones there, each where its parameters are, and all make the backward."""

    def __init__(self, asking: Asking):
        self.asking = asking
        self.known: list[weakref.ref[torch.optim.Optimizer]] = []
        self.loaded: set[int] = set()  # by id those given state since the ranks have compared

    def steps(self) -> int:
        """How many there have been since the last call."""
        return self.asking.service.script.now.place.times("steps of optimizers")

    def compare(self, counts: Sequence[int], loaded: Collection[int]) -> None:
        """Notes it where ranks have not stepped equally often, by the `counts` of each: then these
        do not tell whether they are at one point of the script. Raises CollectiveError where some
        ranks have `loaded` an optimizer's state, and others none."""
        uneven_rank = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
        self.loaded.clear()
        if uneven_rank is not None:
            self.asking.service.uneven = (
                f"before the last call there were {counts[0]} steps of optimizers on rank 0 and "
                f"{counts[uneven_rank]} on rank {uneven_rank}, so that nobody knows when the "
                "ranks are at one point"
            )
        if 0 < len(loaded) < len(counts):
            raise CollectiveError(
                f"an optimizer has been given state on ranks {sorted(loaded)}, and on the others "
                "none: call optimizer.load_state_dict on every rank, or on none, and begin again "
                "from the last checkpoint if it has stepped since"
            )

    def _ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has anything that ranks train."""
        return any(parameter in self.asking.owners for parameter in parameters_of(optimizer))

    def _listed(self) -> list[torch.optim.Optimizer]:
        optimizers = [reference() for reference in self.known]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """When any optimizer is about to step."""
        # Of a model that no rank trains together: its steps are no concern of the other ranks.
        if not self._ours(optimizer):
            return
        if not any(listed is optimizer for listed in self._listed()):
            self._add(optimizer)
            if any(optimizer.state.get(parameter) for parameter in parameters_of(optimizer)):
                self.loaded.add(id(optimizer))
            if _torch.is_in_backward():  # those of what other ranks train do not step here
                self._add_living()
        if not _torch.is_in_backward():
            self.asking.service.begin("steps of optimizers")
        self._let_go(optimizer)  # what was loaded, or made before anybody trained it

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        # Without those that have gone: a loop may make one for each step.
        self.known[:] = [weakref.ref(listed) for listed in (*self._listed(), optimizer)]
        self.asking.keep(optimizer)
        optimizer.register_state_dict_post_hook(self.saved)
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    def _add_living(self) -> None:
        """Those of this process that nobody has seen to step."""
        listed = set(map(id, self._listed()))
        for optimizer in living(torch.optim.Optimizer):
            if id(optimizer) not in listed and self._ours(optimizer):
                self._add(optimizer)

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """When it has stepped."""
        if self._ours(optimizer):
            self._let_go(optimizer)  # what it makes where there is no gradient
            trained = [p for p in parameters_of(optimizer) if p in self.asking.owners]
            if _torch.is_in_backward():
                self.asking.writes.forget(trained)
            else:
                self.asking.service.end_of("steps of optimizers", trained)

    def _let_go(self, optimizer: torch.optim.Optimizer) -> None:
        """Of the state for what other ranks train."""
        for parameter in [p for p in parameters_of(optimizer) if p in self.asking.foreign]:
            optimizer.state.pop(parameter, None)

    def _before_load(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        self.asking.service.copies.release(state)
        self.asking.service.begin("loads of state")

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        self.loaded.add(id(optimizer))
        self.asking.service.end_of("loads of state", ())

    def saved(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> dict[str, Any] | None:
        """A hook: the state_dict() with the state of what other ranks train, which replaces what
        may be there for these, and by the indices that it has on one device; all are copies on the
        CPU. Raises as `Service.states`."""
        if self.asking.foreign.reading or not self.asking.is_asked_for(parameters_of(optimizer)):
            return None
        # torch names parameters in a state_dict() by indices, which are the same on every rank.
        groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
        pairs = [
            pair
            for group, packed in groups
            for pair in zip(group["params"], packed["params"], strict=True)
        ]
        missing = {index: p for p, index in pairs if p in self.asking.foreign}
        numbers = {index: self.asking.number(p) for p, index in pairs if p in self.asking.owners}

        def by_number(states: Mapping[Any, Any]) -> dict[int, Any]:
            return {numbers[index]: state for index, state in states.items() if index in numbers}

        here = {
            index: state for index, state in state_dict["state"].items() if index not in missing
        }
        remote = self.asking.states(self._named(optimizer), missing.values(), by_number(here))
        copies = pytree.tree_map_only(torch.Tensor, copied, here)
        whole = copies | {i: remote[numbers[i]] for i in missing if numbers[i] in remote}
        self.asking.watch_copies(by_number(whole), "the state of ")
        # As on one device: the parameters in their order, then what else an optimizer keeps.
        order = sorted(index for index in whole if isinstance(index, int))
        ordered = {index: whole[index] for index in order}
        return state_dict | {
            "state": ordered | {key: whole[key] for key in whole if key not in ordered}
        }

    def _named(self, optimizer: torch.optim.Optimizer) -> Named:
        """What all ranks call it. An optimizer that has not stepped here comes last."""
        kind, groups = self._described(optimizer)
        alike = [listed for listed in self._listed() if self._described(listed) == (kind, groups)]
        place = next((at for at, listed in enumerate(alike) if listed is optimizer), len(alike))
        return Named(kind, groups, place)

    def _described(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[str, tuple[tuple[int, ...], ...]]:
        owners = self.asking.owners
        groups = (
            (
                *(
                    owners[parameter].number if parameter in owners else -1
                    for parameter in group["params"]
                ),
            )
            for group in optimizer.param_groups
        )
        return type(optimizer).__name__, (*groups,)

    def find(self, question: Question) -> StateEntry | None:
        """What answers a question of another rank, None if that is of copies which this one has not
        made. Raises CollectiveError if there is no such thing."""
        numbered = self.asking.numbered
        if not all(number in numbered for number in question.tensors):
            return None
        tensors = [numbered[number] for number in question.tensors]
        wanted = [(self.asking.owners[tensor], tensor) for tensor in tensors]
        if question.optimizer is None:
            names = (owned.name for owned, _ in wanted)
            return StateEntry((*(tensor for _, tensor in wanted),), (*names,))
        named = question.optimizer
        # By what all ranks see of it: its class, its parameters, and which one of those it is.
        listed = (optimizer for optimizer in self._listed() if self._named(optimizer) == named)
        optimizer = next(listed, None)
        if optimizer is None:
            raise CollectiveError(f"no {named.kind} with the same parameters has stepped there")
        state: Mapping[torch.Tensor, Any] = optimizer.state
        parts, of, states = list[torch.Tensor](), list[str](), list[str | None]()
        for owned, parameter in wanted:
            states.append(encoded(state[parameter], parts) if parameter in state else None)
            of += [f"the state of {owned.name}"] * (len(parts) - len(of))
        return StateEntry(tuple(parts), tuple(of), tuple(states))
