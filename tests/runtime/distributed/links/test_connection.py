"""What there is of connections beside Gloo's, as far as a machine without GPUs can tell."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pfeife.runtime.distributed.links.connection import Connection, wait_for_queued


class Queued(dist.Work):
    """As NCCL's work: a wait with a time aborts the communicator if that is over before."""

    def __init__(self, asked):
        super().__init__()
        self.asked, self.waits = asked, []

    def is_completed(self):
        self.asked -= 1
        return self.asked < 0

    def wait(self, timeout=timedelta(0)):
        self.waits.append(timeout)
        return True


def test_what_is_queued_is_asked_and_waited_for_without_a_time():
    work = Queued(3)
    wait_for_queued(work, lambda: None)
    assert work.waits == [timedelta(0)] and work.asked == -1


@pytest.mark.parametrize("asked", [0, 10**9], ids=["aborted", "never done"])
def test_a_failure_ends_the_wait_for_what_is_queued(asked):
    """What was aborted is over as well, and has brought nothing."""
    work = Queued(asked)

    def check():
        raise RuntimeError("rank 1 has failed")

    with pytest.raises(RuntimeError, match="rank 1 has failed"):
        wait_for_queued(work, check)
    assert not work.waits


def test_who_is_not_in_a_group_has_nothing_to_cut():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    try:
        theirs = Connection([1, 2], torch.device("cuda"), 5.0, None, "down")
        assert not theirs.mine
        theirs.cut()
        theirs.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("given", [None, "1"])
def test_the_watchdog_of_a_group_of_ours_leaves_the_process_alone(given, monkeypatch):
    """Unless its user has said what it should do; other groups are made as before."""
    variable, made = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []

    class Group:
        class Options:
            pass

        def __init__(self, *given):
            made.append((os.environ[variable], given))

        def set_timeout(self, timeout):
            pass

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv(variable, raising=False)
    if given:
        monkeypatch.setenv(variable, given)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        for _ in range(2):  # no number in a list of groups, on which ranks may not agree
            Connection([1, 2], torch.device("cuda"), 5.0, dist.HashStore(), "down")
    finally:
        dist.destroy_process_group()
    assert [(said, rest[1:3]) for said, rest in made] == [(given or "0", (0, 2))] * 2
    assert os.environ.get(variable) == given
