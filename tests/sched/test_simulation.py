"""Simulated time at the door: what is warned of there, and nowhere else."""

import warnings

import pytest
import torch
from orders import unit
from small import CORE
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate


def test_a_schedule_without_messages_is_warned_of():
    with pytest.warns(UserWarning, match="no sends and receives, so that no rank waits"):
        sched.simulate(sched.families.gpipe(2, 2), unit)


def test_ranks_that_are_independent():
    """A lowered schedule of two towers has no messages either, and is not warned of."""
    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    flat = pfeife.capture(lambda x, y: (one(x), other(y)), *torch.ones(2, 2, 4))
    clusters = pfeife.fuse()(flat)
    clusters = pfeife.annotate(estimate(clusters, CORE))(clusters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = sched.plan(clusters, machine=CORE, microbatches=4, stages=2)
        ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
        timeline = sched.predict(ranks, sched.lower(plan.schedule, ranks), CORE)
    assert len({event.rank for event in timeline.events}) == 2
    assert all(event.action.do.kind for event in timeline.events)
