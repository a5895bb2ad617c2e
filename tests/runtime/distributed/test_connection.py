"""What there is of connections beside Gloo's, as far as a machine without GPUs can tell."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pfeife.runtime.distributed.connection import Connection, wait_for_queued


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
