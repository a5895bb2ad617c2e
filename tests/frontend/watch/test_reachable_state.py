"""What a step has changed is put back as it was."""

from pfeife.frontend.watch.reachable_state import NOTHING, Slot


class Slotted:
    __slots__ = ("cache",)


def cell():
    def inner():
        return value

    if False:
        value = 0
    return inner.__closure__[0]


def test_what_was_not_there_is_not_there_again():
    holder, plain = Slotted(), {}
    closed = cell()
    for container, key in ((holder, "cache"), (plain, "cache"), (closed, "")):
        slot = Slot(container, key, ("cache",))
        assert slot.get() is NOTHING
        slot.put(1)
        assert slot.get() == 1
        slot.put(NOTHING)
        assert slot.get() is NOTHING
    assert not hasattr(holder, "cache") and plain == {}
