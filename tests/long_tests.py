"""Which tests are long: `make test` leaves them to `make test-long`; the gate runs both.

Those are long that take more than a second on a quiet machine (`long_tests.txt`: a test a line, a
function whose cases take that in the mean, or a file whose tests share what takes long), and of
rows on ranks all but the first one of each module, which needs the fewest ranks. A test that is not
in the list is not long.

    python -m pytest -q -n 2 --durations=0 > LOG; python tests/long_tests.py LOG

writes the list anew.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 1.0
SHARED = 5.0  # seconds of a fixture


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Gives long tests the mark `long`."""
    listed = set(LIST.read_text().splitlines())
    started: set[str] = set()  # modules of rows on ranks
    for item in items:
        row = item.callspec.params.get("item") if hasattr(item, "callspec") else None
        if row and row.ranks > 1:
            is_long = row.module in started
            started.add(row.module)
        else:
            function = function_of(item.nodeid)
            is_long = not listed.isdisjoint({item.nodeid, function, file_of(function)})
        if is_long:
            item.add_marker(pytest.mark.long)


def function_of(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def long_tests(log: str) -> Iterator[str]:
    """The lines of the list, by a log of `pytest --durations=0`."""
    files = {file_of(test) for test, time in seconds_in(log, "setup").items() if time > SHARED}
    yield from files
    functions: dict[str, dict[str, float]] = defaultdict(dict)
    for test, time in seconds_in(log, "call").items():
        if file_of(test) not in files:
            functions[function_of(test)][test] = time
    for function, cases in functions.items():
        if sum(cases.values()) > SECONDS * len(cases):
            yield function
        else:
            yield from (test for test, time in cases.items() if time > SECONDS)


def seconds_in(log: str, phase: str) -> dict[str, float]:
    """The seconds of each test but of rows on ranks, in a phase of pytest's."""
    lines = re.findall(rf"^([\d.]+)s {phase} +(.+?)\s*$", log, re.M)
    return {test: float(time) for time, test in lines if "::test_on_ranks[" not in test}


if __name__ == "__main__":
    tests = sorted(long_tests(Path(sys.argv[1]).read_text()))
    LIST.write_text("".join(f"{test}\n" for test in tests))
