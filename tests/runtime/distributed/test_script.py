"""Where a rank is in its script, and who reads its state there."""

import contextlib
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pfeife.runtime.distributed.script import CHANGES, Place, Script
from pfeife.runtime.failure import Refusal

CALL, STEP, LOAD = CHANGES


def script():
    waits = []

    def waiting(reader):
        waits.append(reader)
        return contextlib.nullcontext()

    return Script(waiting), waits


@given(st.lists(st.sampled_from(CHANGES), max_size=8))
def test_places_follow_one_another(changes):
    """Every one is beyond all that were before it, and none of these beyond it."""
    places = [Place()]
    for change in changes:
        places += [places[-1].begins(change)]
        places += [places[-1].ends(change)]
    for at, one in enumerate(places):
        assert not one.beyond(one)
        for before in places[:at]:
            assert one.beyond(before) and not before.beyond(one)


def test_a_call_counts_the_others_from_zero():
    """An optimizer that one rank alone has stepped is forgotten."""
    place = Place().begins(STEP).ends(STEP).begins(CALL).ends(CALL)
    assert place == Place().begins(CALL).ends(CALL)
    words = "1 calls of compiled steps, 1 steps of optimizers (0 of them over), 0 loads of state"
    assert str(place.begins(STEP)) == words


def later(work):
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_who_reads_waits_for_the_place():
    one, _ = script()
    wanted = Place().begins(STEP).ends(STEP)
    seen = []

    def read():
        with one.reading(1, wanted, lambda: None):
            seen.append(one.place)

    thread = later(read)
    one.begin(STEP)
    assert not seen
    one.end(STEP)
    thread.join(10)
    assert seen == [wanted]


def test_a_change_waits_for_who_reads():
    one, waits = script()
    order = []
    with one.reading(3, Place(), lambda: None):
        thread = later(lambda: (one.begin(LOAD), order.append("changed")))
        while not waits:
            time.sleep(0.001)
        order.append("read")
    thread.join(10)
    assert order == ["read", "changed"] and waits[0] == 3


@pytest.mark.parametrize("rests", ["", "its end"])
def test_a_rank_that_does_not_come_to_the_place(rests):
    """It is beyond, or stays where it is."""
    one, _ = script()
    with one.resting(rests):
        one.begin(STEP)
        wanted = Place().begins(STEP).ends(STEP) if rests else Place()
        with (
            pytest.raises(Refusal, match=r"1 steps of optimizers \(0 of them over\)"),
            one.reading(1, wanted, lambda: None),
        ):
            raise AssertionError("there was nothing to read")


def test_who_waits_looks_for_failures():
    one, _ = script()

    def check():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), one.reading(1, Place().begins(STEP), check):
        raise AssertionError("there was nothing to read")


def test_a_change_after_all_have_asked():
    """As often as the one that wants to go on; or they have gone on themselves."""

    def asks(one):
        with one.asking():
            assert one.stays

    for done in (asks, lambda one: one.begin(LOAD)):
        one, _ = script()
        thread = later(lambda one=one: one.wait_until_asked(Place(), 1, 60.0, lambda: None))
        assert thread.is_alive()
        done(one)
        thread.join(10)
        assert not thread.is_alive()
    one.wait_until_asked(one.place, 1, 0.0, lambda: None)  # not for ever
