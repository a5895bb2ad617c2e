"""Garbage is looked for more seldom, and then as before."""

import gc

import pytest

from pfeife.data.garbage import seldom_collected


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (1_000_000, 5, 5)])
def test_it_is_as_it_was_afterwards(before):
    """Whatever is raised within; what somebody else has decided stays all the time."""
    mine = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyError), seldom_collected(), seldom_collected():
            within = gc.get_threshold()
            raise KeyError
        assert gc.get_threshold() == before
        assert (within == before) == (before[0] != 700)
    finally:
        gc.set_threshold(*mine)
