"""The lower bound on the length of a step."""

from pfeife.sched.search.bound import preemptive


def test_preemptive_schedule_of_one_machine():
    # The short job with the long tail interrupts the long one: 0-2, 2-3 (+ 8), 3-6 (+ 1).
    assert preemptive([(0, 5, 1), (2, 1, 8)]) == 11
    assert preemptive([(0, 5, 1), (2, 1, 8), (20, 2, 3)]) == 25
