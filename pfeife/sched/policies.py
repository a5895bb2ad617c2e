"""Schedules by name: each a small function from stages, ranks and microbatches to actions."""

from collections.abc import Callable, Sequence

from pfeife.plan import Action, Do, Schedule


def gpipe(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, NeurIPS 2019, section 2.3).

    `ranks` places the stages, one stage a rank unless it says otherwise. Every rank runs the
    forwards of its stages in the order of the stages, and the backwards in the opposite order.
    """
    forwards = [(stage, k) for stage in range(stages) for k in range(microbatches)]
    backwards = [(stage, k) for stage in reversed(range(stages)) for k in range(microbatches)]
    return _placed(
        stages,
        ranks,
        lambda mine: _actions(forwards, Do.FORWARD, mine) + _actions(backwards, Do.BACKWARD, mine),
    )


def one_f_one_b(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """A warm-up of forwards, then one forward and one backward in turn (Narayanan et al.,
    PipeDream-Flush, ICML 2021; "1F1B").

    Stage s has at most `stages - s` microbatches in flight. A rank with several stages runs
    them as if they took turns on a machine each: an action comes in the order of its unit-time
    start.
    """
    placed = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, microbatches)
        for k in range(microbatches):
            # Unit times: forward k starts at s + k in the warm-up and at s + 2k after it,
            # backward k at 2 (stages - 1) - s + 2k + 1.
            start = stage + k if k < warm_up else 2 * k + stage
            placed.append((start, stage, Action(stage, Do.FORWARD, k)))
            start = 2 * stages - 1 - stage + 2 * k
            placed.append((start, stage, Action(stage, Do.BACKWARD, k)))
    ordered = [action for _, _, action in sorted(placed, key=lambda item: (item[0], -item[1]))]
    return _placed(stages, ranks, lambda mine: [a for a in ordered if a.stage in mine])


def forward_only(stages: int, microbatches: int, ranks: Sequence[int] | None = None) -> Schedule:
    """All forwards of all microbatches in order: inference."""
    forwards = [(stage, k) for k in range(microbatches) for stage in range(stages)]
    return _placed(stages, ranks, lambda mine: _actions(forwards, Do.FORWARD, mine))


POLICIES: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def policy(name: str) -> Callable[..., Schedule]:
    """A policy by its name. Raises ValueError that lists the names."""
    if name not in POLICIES:
        raise ValueError(f"schedule={name!r} is not known; there are {sorted(POLICIES)}")
    return POLICIES[name]


def _actions(order: list[tuple[int, int]], do: Do, mine: set[int]) -> list[Action]:
    return [Action(stage, do, k) for stage, k in order if stage in mine]


def _placed(
    stages: int, ranks: Sequence[int] | None, actions: Callable[[set[int]], list[Action]]
) -> Schedule:
    ranks = range(stages) if ranks is None else ranks
    if len(ranks) != stages:
        raise ValueError(f"{len(ranks)} placements for {stages} stages")
    if not stages or min(ranks) < 0:
        raise ValueError(f"stages on ranks {list(ranks)}: there is a stage, and ranks begin at 0")
    return Schedule(
        tuple(
            tuple(actions({stage for stage, at in enumerate(ranks) if at == rank}))
            for rank in range(1 + max(ranks))
        )
    )
