"""One thread a process (tiny operations on a shared machine), repeatable random cases, and what
rows find on ranks (`rows.py`)."""

import gc
import logging
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from listening import Lines
from long_tests import mark_long
from quick import leave_out
from rows import Item, on_ranks, together
from share import WHOLE

HERE = Path(__file__).parent
leave_out()
settings.register_profile(
    "pfeife",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("pfeife")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """What Dynamo compiled for another test is not found again."""
    torch._dynamo.reset()


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What is logged; the logger is left as it was, which is without handlers."""
    log, handler = logging.getLogger("pfeife"), Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)
    assert not log.handlers


@pytest.fixture
def a_gigabyte() -> Iterator[None]:
    """What may be taken more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    largest = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (largest, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="session")
def found_on_ranks(request, tmp_path_factory) -> Callable[[Item], dict[str, str]]:
    """What every rank found of a row; those of a package that are tested are run at once, when the
    first of them is asked for."""
    known: dict[tuple[str, int], dict[str, dict[str, str]]] = {}

    def found(item: Item) -> dict[str, str]:
        if item.launch not in known:
            report: Path = tmp_path_factory.mktemp("ranks")
            test = os.environ["PYTEST_CURRENT_TEST"].partition("[")[0]
            params = (getattr(one, "callspec", None) for one in request.session.items)
            tested = [one.params["item"] for one in params if one and "item" in one.params]
            names = [one.name for one in tested if one.launch == item.launch]
            known[item.launch] = on_ranks(item.ranks, report, test, names)
        every = known[item.launch]
        return every.get(item.name) or every.get("the processes") or {}

    return found


def pytest_collection_finish():
    """What was imported is there for good: from now on the garbage collector, which every trace
    asks for all generators, leaves it out."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` asks for marks
def pytest_collection_modifyitems(config, items):
    """Leaves out what is not in the gate's share (`share.py`), unless all tests run. Those of the
    whole, which start processes and take long, come first, so that no worker ends with one."""
    left = {one for one in items if not WHOLE and one.get_closest_marker("whole")}
    items[:] = sorted(
        (one for one in items if one not in left), key=lambda one: one.path.parent != HERE
    )
    config.hook.pytest_deselected(items=list(left))
    mark_long(items)


def pytest_terminal_summary(terminalreporter):
    """Says what was done twice: a test that needs it often hides a fault."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties if report.when == "call" else ():
            terminalreporter.write_line(f"{name}: {value}, by {report.nodeid}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share a launch go to one worker. (The marks of pytest-xdist 3.8 for that have no
    effect with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return together(nodeid)

    return Together(config, log)
