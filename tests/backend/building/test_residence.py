"""Where the state of one process lives: on two devices, neither of which is a GPU."""

from pathlib import Path

from processes import bounded

TESTS = Path(__file__).parents[2]


def test_state_lives_with_the_stage_that_uses_it():
    """In a process of its own, for which the second device is registered."""
    code, _, error = bounded([str(TESTS / "on_two_devices.py")], 200)
    assert code == 0, error[-4000:]
