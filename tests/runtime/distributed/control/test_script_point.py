"""Where a rank is in its script, and where it rests."""

import threading

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfeife.runtime.distributed.control.script_point import (
    CHANGES,
    Now,
    Place,
    Point,
    Rest,
    Script,
    ScriptCollective,
)

CALL, BACKWARD, STEP, LOAD = CHANGES


@given(st.lists(st.sampled_from(CHANGES), max_size=8))
def test_places_follow_one_another(changes):
    """Every one is beyond all that were before it, and none of these beyond it."""
    places = [Place()]
    for change in changes:
        places.append(places[-1].after(change))
        places.append(places[-1].after(change))
    for at, place in enumerate(places):
        assert not place.beyond(place)
        for before in places[:at]:
            assert place.beyond(before) and not before.beyond(place)


def test_a_call_counts_the_others_from_zero():
    """An optimizer that one rank alone has stepped is forgotten."""
    called = Place().after(CALL).after(CALL)
    place = Place().after(STEP).after(STEP).after(CALL).after(CALL)
    assert place == called and place.after(STEP).times(STEP) == 1
    words = "1 calls of compiled steps, 0 backwards, 1 steps of optimizers (the last is not over)"
    assert str(place.after(STEP)).startswith(words)


def at_rest(rest, operations=3):
    script = Script()
    script.now = Now(rest=rest, operations=operations)
    return script


@pytest.mark.parametrize(
    ("script", "beyond"),
    [
        (at_rest(Rest.OPERATION), True),
        (at_rest(Rest.OPERATION, 2), False),  # it has not come out of the last one yet
        (at_rest(Rest.ASKING), False),
        (at_rest(Rest.END), True),
        (at_rest(Rest.NOWHERE), False),
    ],
)
def test_a_rank_that_waits_where_another_has_not_come_to(script, beyond):
    assert script.waits_beyond(Point(Place(), operations=2), None) is beyond


@pytest.mark.parametrize(("begun", "beyond"), [(4, True), (3, False), (5, False)])
def test_so_it_is_with_collectives_of_the_script(begun, beyond):
    inside = ScriptCollective(None, begun)  # type: ignore[arg-type]
    point = Point(Place(), operations=3, collectives=3)
    assert at_rest(Rest.NOWHERE).waits_beyond(point, inside) is beyond


def test_a_rest_and_a_place_end_when_nobody_reads():
    script, order = Script(), []
    reads, done = threading.Event(), threading.Event()

    def read():
        with script.lock:
            reads.set()
            done.wait(10)
            order.append(("read", script.now.rest, script.now.place))

    thread = threading.Thread(target=read)
    with script.resting(Rest.OPERATION, operation=True):
        thread.start()
        reads.wait(10)
        threading.Timer(0.1, done.set).start()
    script.move(STEP)
    order.append(("gone on", script.now.rest, script.now.place))
    thread.join(10)
    assert order == [
        ("read", Rest.OPERATION, Place()),
        ("gone on", Rest.NOWHERE, Place().after(STEP)),
    ]
    assert script.now.operations == 1


def test_another_thread_does_not_rest_for_the_script():
    """One that writes a checkpoint takes part in operations too."""
    script, seen = Script(), []

    def work():
        with script.resting(Rest.OPERATION, operation=True):
            seen.append((script.now.rest, script.now.operations))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [(Rest.NOWHERE, 0)]


def test_who_asks_is_told_from_who_has_asked():
    script = Script()
    with script.asking():
        during = script.point(())
        assert script.now.rest is Rest.ASKING
    assert (during.questions, script.point(()).questions) == (
        1,
        2,
    ) and script.now.rest is Rest.NOWHERE
    script.move(LOAD)
    assert script.point((1,)) == Point(Place().after(LOAD), by_data=(1,))
    assert attrs.evolve(during, questions=0) == Point(Place())
