"""Long work shows itself: bars on terminals, and nothing where nobody looks."""

import io
import logging
import sys

import pytest
from listening import Terminal

from pfeife.data.progress import Shown, shown

LOG = logging.getLogger("pfeife")
QUICK = {"after": 0.0, "every": 0.0}


def screen(text: str) -> list[str]:
    """What a terminal shows of what was written to it."""
    shown_lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        shown_lines.append("".join(cells).rstrip())
    return shown_lines


def test_a_phase_on_a_terminal():
    terminal = Terminal()
    with Shown(LOG, terminal=terminal, **QUICK).phase("working") as phase:
        assert screen(terminal.getvalue()) == ["pfeife: working ..."]
        phase.progress(1, 2)
        assert screen(terminal.getvalue()) == [f"pfeife: working [{'#' * 15}{'.' * 15}] 1/2"]
        phase.progress(2, 2)
    assert screen(terminal.getvalue()) == [f"pfeife: working [{'#' * 30}] 2/2 0.0 s", ""]


def test_a_short_phase_leaves_nothing():
    terminal = Terminal()
    with Shown(LOG, terminal=terminal).phase("working") as phase:
        phase.progress(1, 1)
    assert screen(terminal.getvalue()) == [""] and terminal.getvalue().endswith("\r")


def test_a_bar_is_not_drawn_more_often_than_it_can_be_seen():
    terminal = Terminal()
    with Shown(LOG, terminal=terminal, every=60.0).phase("working") as phase:
        for done in range(1, 1001):
            phase.progress(done, 1000)
        phase.progress(1000, 1000)
    assert terminal.getvalue().count("/1000") == 1 and "1000/1000" in terminal.getvalue()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_ends_the_line(lines, error):
    terminal = Terminal()
    with pytest.raises(error), Shown(LOG, terminal=terminal).phase("working") as phase:
        phase.progress(3, 3)
        raise error
    assert screen(terminal.getvalue()) == [f"pfeife: working [{'#' * 30}] 3/3 failed", ""]
    assert not lines.records, "the error says it"


def test_who_is_shown_what(monkeypatch):
    """A bar needs a terminal, rank 0 and to be wanted; a log needs no one."""
    for stream, options in (
        (io.StringIO(), {}),
        (None, {}),
        (Terminal(), {"progress": False}),
        (Terminal(), {"rank": 1}),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        assert shown(LOG, **options).terminal is None
        with shown(LOG, **options).phase("working") as phase:
            assert phase.progress is None
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert shown(LOG).terminal is sys.stderr
