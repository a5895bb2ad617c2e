"""What ranks are told of an exception."""

from pfeife.runtime.failure import failure_of


def test_an_error_is_told_with_its_first_lines_and_without_notes():
    error = ValueError("too large:\n  4 rows\n\n  3 wanted\n  a line too many")
    error.add_note("a note")
    told = failure_of(error, 1, "1F0")
    assert (told.rank, told.where) == (1, "1F0")
    assert told.cause == "ValueError: too large: 4 rows  3 wanted"
    assert failure_of(KeyError("x"), 0, "").cause == "KeyError: 'x'"
