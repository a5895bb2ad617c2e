"""What becomes of a wait: who is blamed, or that it goes on."""

import attrs
import pytest

from pfeife.runtime.distributed.liveness.diagnosis import Wait
from pfeife.runtime.distributed.liveness.heartbeat import ALL, COLLECTIVE, OUTSIDE, Heartbeat

STEP, BUILD = "action 0F1", "building: a step"


def waiting(awaited, beats, before=None, size=3):
    """Rank 0 has waited 10 s for another one, or for all; `beats` has those of the others."""
    given = {rank: Heartbeat(8, *beat) for rank, beat in enumerate(beats, start=1)}
    early = {rank: attrs.evolve(beat, count=2) for rank, beat in given.items()} | (before or {})
    return Wait(0, size, awaited, 10.0, 4.0, early, {0: Heartbeat(1, STEP, 10.0, awaited), **given})


@pytest.mark.parametrize(
    ("wait", "blamed"),
    [
        # Who lives may be outside of a step for as long as it likes, and build for long.
        (waiting(1, [(OUTSIDE, 500.0), (STEP, 1.0)]), None),
        (waiting(ALL, [(OUTSIDE, 500.0), (STEP, 9.0, ALL)]), None),
        (waiting(ALL, [(BUILD, 39.0), (BUILD, 9.0, ALL)]), None),
        (waiting(ALL, [(BUILD, 41.0), (BUILD, 9.0, ALL)]), 1),
        # In a step it must come on, wherever it stands among those that wait for one another.
        (waiting(1, [(STEP, 3.0), (OUTSIDE, 9.0)]), None),
        (waiting(1, [(STEP, 5.0), (OUTSIDE, 9.0)]), 1),
        (waiting(1, [(STEP, 9.0, 2), (STEP, 5.0)]), 2),
        (waiting(ALL, [(STEP, 9.0, ALL), (STEP, 5.0)]), 2),
        # A dead one is blamed, also if another one is busy.
        (waiting(1, [(OUTSIDE, 9.0), (STEP, 1.0)], {2: Heartbeat(8, STEP, 1.0)}), 2),
        (waiting(2, [(OUTSIDE, 9.0)]), 2),
        # All wait: for one that waits for all, in a circle, or in other operations of all.
        (waiting(1, [(BUILD, 9.0, ALL), (STEP, 9.0, 0)]), 1),
        (waiting(1, [(BUILD, 3.0, ALL), (STEP, 9.0, 0)]), None),
        (waiting(1, [(STEP, 9.0, 2), (STEP, 9.0, 1)]), 2),
        (waiting(ALL, [(STEP, 9.0, ALL), (STEP, 9.0, ALL)]), 0),
        (waiting(ALL, [(STEP, 9.0, 0), (STEP, 9.0, ALL)]), 0),
        # A script's own collective that nobody comes to, as long as no other rank is busy.
        (waiting(ALL, [(STEP, 9.0, ALL), (COLLECTIVE, 5.0, ALL)]), 2),
        (waiting(2, [(STEP, 9.0, ALL), (COLLECTIVE, 3.0, ALL)]), None),
        (waiting(ALL, [(OUTSIDE, 500.0), (COLLECTIVE, 500.0, ALL)]), None),
        (attrs.evolve(waiting(ALL, [(STEP, 9.0), (STEP, 9.0)]), now=None), 0),
    ],
)
def test_what_becomes_of_a_wait(wait, blamed):
    failure = wait.failure()
    assert (failure and failure.rank) == blamed, failure
    assert failure is None or "rank 0 has waited 10 s (timeout=4)" in failure.cause


@pytest.mark.parametrize(
    ("wait", "ranks"),
    [
        (waiting(2, [(STEP, 9.0, 0), (STEP, 9.0, 1)]), [0, 1, 2]),
        (waiting(ALL, [(STEP, 9.0, 2), (STEP, 9.0, 1)]), [1, 2]),
        (waiting(ALL, [(STEP, 9.0, ALL), (STEP, 9.0, ALL)]), [0, 1, 2]),
    ],
)
def test_ranks_that_wait_for_one_another_are_named_in_their_order(wait, ranks):
    failure = wait.failure()
    assert failure and f"the ranks {ranks} wait for one another" in failure.cause
