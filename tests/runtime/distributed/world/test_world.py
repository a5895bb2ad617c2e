"""What becomes of ranks when NCCL fails, hangs or ends a process: real processes, whose process
groups stand in for NCCL's (benchmarks/nccl_like.py)."""

import json
from pathlib import Path

import pytest
from processes import bounded

ROOT = Path(__file__).parents[4]
SOON = 15.0  # seconds in which all ranks have come out of all faults, on a busy machine


@pytest.fixture(scope="module")
def tried():
    code, out, error = bounded([str(ROOT / "benchmarks" / "nccl_like.py")], 120)
    assert code == 0, error[-4000:]
    return json.loads(out)


def failures(found):
    return [one["failure"] for one in found["reports"] if "failure" in one]


@pytest.mark.parametrize(
    "fault",
    [
        "a message that hangs, a shutdown that blocks",
        "a message that hangs, the host ahead",
        "an error in a wait, an abort that raises",
    ],
)
def test_all_ranks_come_out_with_one_failure_and_go_on(tried, fault):
    """It names the rank, the action and its microbatch. Groups are aborted once each, never by the
    thread that trains; the next step connects anew and gives the same loss; no process is kept at
    its end."""
    found = tried[fault]
    assert set(found["codes"].values()) == {0}, found["log"]
    first, second = failures(found)
    assert first == second and first["rank"] in (0, 1)
    assert "microbatch" in first["where"] + first["cause"]
    assert "of stage" in first["where"] + first["cause"]
    if fault.endswith("ahead"):
        assert first["where"].startswith("sharing the results of a step, its device in action")
    if "an error in a wait" in fault:
        assert "remote process exited" in first["cause"]
    assert "Exception in thread" not in found["log"]
    heard = [one for one in found["reports"] if "failure" in one]
    assert [(one["aborts"], one["main"]) for one in heard] == [(3, False)] * 2
    assert [one["same"] for one in found["reports"] if one["event"] == "again"] == [True] * 2


def test_who_is_kept_by_a_blocked_abort_is_ended(tried):
    """The other one has its error; the next step says that a rank is missing."""
    found = tried["an abort that blocks"]
    assert set(found["codes"].values()) == {1}
    assert "rank 1 ends: rank 1, action 1RECV_F" in found["log"], found["log"]
    assert "did not come out of it" in found["log"]
    assert len(failures(found)) == 1 and "of 2 ranks it is missing" in found["log"]


def test_a_process_that_the_watchdog_ends_is_named_long_before_the_timeout(tried):
    found = tried["a watchdog that ends its process"]
    assert found["codes"] == {"0": 1, "1": -6}, found["log"]
    (failure,) = failures(found)
    assert failure["rank"] == 1 and failure["cause"].startswith("its process is gone while rank 0")
    assert "microbatch" in failure["cause"]


def test_connecting_that_hangs_ends_all(tried):
    """In the call itself, where nothing can be aborted."""
    found = tried["connecting that hangs"]
    assert set(found["codes"].values()) == {1}
    assert found["log"].count("building: the connections and did not come out of it") == 2


def test_all_end_within_seconds(tried):
    late = {
        name: one["seconds"] for name, one in tried.items() if max(one["seconds"].values()) > SOON
    }
    assert not late
