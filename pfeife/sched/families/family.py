"""A family of schedules as a value: what makes them, and where their stages go."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from pfeife.data.schedule import Do, Schedule
from pfeife.sched.families.orders import looped


def _takes_three(instance: "Family", attribute: attrs.Attribute, make: Any) -> None:
    try:
        # partially: arguments without defaults may still come, by `Family.bind`
        inspect.signature(make).bind_partial(2, 4, None)
    except TypeError as error:
        raise ValueError(
            f"the family {instance.name} is made by {make!r}, which is called with (stages, "
            f"microbatches, ranks, **arguments): {error}"
        ) from None


@attrs.frozen
class Family:
    """Schedules by one formula, for any number of stages and microbatches.

    `make(stages, microbatches, ranks, **arguments)` gives the schedule of stages of which stage s
    is placed on `ranks[s]`, one rank a stage if `ranks` is None; it raises ValueError for what it
    is not for. Every stage runs its forwards in the order of the microbatches, and its backwards
    too; the first stages have the first forwards, and nobody writes sends and receives.
    `placement(stages, ranks)` places the stages where nobody else does. `splits` says whether
    backwards are in two parts (I and W), `seeds` whether `schedule="search"` starts with the
    schedules of this family too.

    >>> import pfeife
    >>> pairs = pfeife.Family("pairs", pfeife.sched.families.loops).bind(loop_batch=2, prefetch=1)
    >>> print(pairs, len(pairs(2, 4).ranks))
    pairs(loop_batch=2, prefetch=1) 2
    """

    name: str
    make: Callable[..., Schedule] = attrs.field(validator=_takes_three)
    placement: Callable[[int, int], tuple[int, ...]] = looped
    splits: bool = False
    seeds: bool = False
    arguments: Mapping[str, Any] = attrs.field(factory=dict)

    def __call__(
        self, stages: int, microbatches: int, ranks: Sequence[int] | None = None
    ) -> Schedule:
        """The schedule of so many stages and microbatches, with stage s on `ranks[s]`."""
        made = self.make(stages, microbatches, ranks, **self.arguments)
        if not isinstance(made, Schedule):
            raise ValueError(f"the family {self.name} made a {type(made).__name__}, not a Schedule")
        return made

    def bind(self, **arguments: Any) -> "Family":
        """The family with some of its arguments given. Raises ValueError for those that `make`
        does not take."""
        taken = list(inspect.signature(self.make).parameters.values())
        # The first three are stages, microbatches and ranks.
        names = [
            parameter.name
            for parameter in taken[3:]
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        unknown = sorted(set(arguments) - set(names))
        if unknown and all(parameter.kind != parameter.VAR_KEYWORD for parameter in taken):
            raise ValueError(f"the family {self.name} has no arguments {unknown}; it has {names}")
        return attrs.evolve(self, arguments={**self.arguments, **arguments})

    def __str__(self) -> str:
        bound = ", ".join(f"{name}={value!r}" for name, value in sorted(self.arguments.items()))
        return f"{self.name}({bound})" if bound else self.name


def family_of_one(schedule: Schedule) -> Family:
    """The family that has one schedule, and what the schedule is with fewer microbatches."""
    # Whoever asks for other stages or another placement means another schedule: no formula is here
    # to make it.
    stage_ranks = schedule.stage_ranks

    def make(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
        wanted = stage_ranks if ranks is None else tuple(ranks)
        if stages != len(stage_ranks) or wanted != stage_ranks:
            raise ValueError(
                f"the given schedule has {len(stage_ranks)} stages on ranks {list(stage_ranks)}, "
                f"but {stages} stages on ranks {list(wanted)} were asked for"
            )
        if microbatches > schedule.microbatches:
            raise ValueError(
                f"the given schedule runs {schedule.microbatches} microbatches, not {microbatches}"
            )
        return schedule.first(microbatches)

    def placement(stages: int, ranks: int) -> tuple[int, ...]:
        if ranks < len(schedule.ranks):
            raise ValueError(f"the given schedule is for {len(schedule.ranks)} ranks, not {ranks}")
        return stage_ranks

    return Family("given", make, placement, splits=splits_backwards(schedule))


def splits_backwards(schedule: Schedule) -> bool:
    """Whether some backwards of a schedule are in two parts."""
    return any(a.do == Do.INPUT_BACKWARD for actions in schedule.ranks for a in actions)
