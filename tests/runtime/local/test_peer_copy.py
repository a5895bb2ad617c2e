"""Values that are brought to a device, as far as a machine without GPUs can tell: what is copied,
and the order of streams and events, by a model of them (see `happens`)."""

import functools
import re

import pytest
import torch
from happens import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import CPU_CORE, captured, clusters, for_ranks
from seeded import seed

import pfeife
from pfeife import sched
from pfeife.data.schedule import Do
from pfeife.runtime import LocalPipeline
from pfeife.runtime.local import peer_copy
from pfeife.testing.strategies import plans, recomputing


@functools.cache
def clustered(name):
    return clusters(captured(name)[1])


def two_steps(name, plan, gpus, *, split=False, pool=32) -> Recorder:
    """Two steps in a row, with nothing between them that waits."""
    sent, schedule = for_ranks(clustered(name), plan, split)
    devices = [torch.device("cuda", gpu) for gpu in gpus]
    sent = pfeife.place(devices)(sent)
    _, _, state, microbatches = captured(name)
    with Recorder(pool) as recorder:
        state, microbatches = recorder.on("cuda:0", (state, microbatches[: schedule.microbatches]))
        run = LocalPipeline(sent, schedule, devices)
        run(state, microbatches)
        first = recorder.taken
        run(state, microbatches)
    assert recorder.taken == first, "each step takes streams, and the memory that is kept for them"
    return recorder


@settings(derandomize=True, database=None, deadline=None, max_examples=8)
@given(st.data())
def test_every_value_is_there_before_it_is_read_and_until_it_has_been(data):
    name = data.draw(st.sampled_from(["UNet", "TiedGPT"]))
    names = "gpipe", "1f1b", "zb-h1"
    plan = data.draw(plans(clustered(name), 3, largest=5, ranks=3, names=names))
    split = any(action.do == Do.WEIGHT_BACKWARD for rank in plan.schedule.ranks for action in rank)
    if not split:
        plan = data.draw(recomputing(plan, clustered(name)))
    gpus = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
    recorder = two_steps(name, plan, gpus, split=split, pool=data.draw(st.integers(1, 5)))
    assert not recorder.found, recorder.found[0]


def test_only_what_is_elsewhere_is_copied():
    here, there = torch.ones(2, device="meta"), torch.ones(3)
    stayed, came = peer_copy.PeerCopies(torch.device("meta"))((here, there), None)
    assert stayed is here and came.device.type == "meta" and came.shape == there.shape


SEEDED = {
    "no wait for what makes the value": (
        "away.wait_event(ready)",
        "pass",
        "read: by aten._to_copy",
    ),
    "no wait for the copy": ("computing.wait_stream(here)", "pass", "read: by"),
    "the copy waits for its reader": (
        "computing.wait_stream(here)",
        "here.wait_stream(computing)",
        "read: by",
    ),
    "the stream of the wrong GPU waits": (
        "computing = torch.cuda.current_stream(self.device)",
        "computing = torch.cuda.current_stream(value.device)",
        "read: by",
    ),
    "the value is freed under the copy": (
        "value.record_stream(away)",
        "pass",
        "freed: a memory of cuda:0's default stream before its read by aten._to_copy",
    ),
    "the copy is freed under its reader": (
        "copy.record_stream(computing)",
        "pass",
        r"freed: a memory of cuda:1's \d+ before its read by",
    ),
}


@pytest.mark.parametrize("bug", SEEDED)
def test_seeded(monkeypatch, bug):
    right, wrong, found = SEEDED[bug]
    seed(monkeypatch, peer_copy, right, wrong)
    plan = sched.plan(clustered("UNet"), machine=CPU_CORE, microbatches=3, stages=2)
    recorder = two_steps("UNet", plan, [0, 1])
    assert recorder.copies
    assert any(re.search(found, one) for one in recorder.found), recorder.found
