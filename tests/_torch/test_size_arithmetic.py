"""Sizes that divide one another whatever the open ones are."""

from pfeife._torch import expanded, name_of_size, quotient

S, T = map(name_of_size, ("s", "t"))


def test_a_quotient_is_whole_for_all_sizes():
    assert quotient(12, 4) == 3 and quotient(12, 5) is None
    assert quotient(12 * S, S) == 12 and quotient(12 * S, 4) == 3 * S
    assert quotient(S * (T + 1), T + 1) == S and quotient(6 * S + 4, 2) == 3 * S + 2
    # Each of these is a whole number for some sizes, and not for all.
    assert quotient(S, 2) is None and quotient(S, T) is None and quotient(12, S) is None
    assert quotient(S * (S + 1), 2) is None and quotient(2 * S + 1, 2) is None


def test_one_form_for_what_is_the_same():
    assert expanded(16 * (S + 1)) == expanded(16 + 16 * S) and expanded(7) == 7
