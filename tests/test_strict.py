"""Every schedule comes to its end where nothing is buffered, as NCCL's messages are not."""

from importlib import import_module
from pathlib import Path

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from orders import placed, shuffled
from programs import CPU_CORE
from share import random_cases
from strict.host import Pace
from strict.programs import on_ranks, skipping
from strict.ranks import on_strict_ranks, steps_of

import pfeife
from pfeife import sched
from pfeife.cost import estimate
from pfeife.sched import families
from pfeife.testing import assert_same

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(schedule, replicas=1, *, pace=Pace.KEPT, queues=None, phases=False, apart=False, **made):
    """A step of a net with skip connections and a tied weight, on ranks of the model."""
    program, lowered = on_ranks(schedule, replicas, **made)
    _, state, batches = skipping(microbatches=schedule.microbatches * replicas)
    job = in_phases if phases else steps_of
    options = {"pace": pace, "queues": queues, "apart": apart}
    found = on_strict_ranks(program, lowered, job(state, batches), **options)
    return program, state, batches, found


def in_phases(state, batches):
    """Forwards of two steps, then their backwards, the other way round."""

    def job(pipeline):
        steps = [pipeline.start(state, batches) for _ in range(2)]
        for one in steps:
            one.run(backward=False)
        for one in reversed(steps):
            one.run(forward=False)
        return [one.result() for one in steps]

    return job


@pytest.mark.parametrize("name", sorted(families.POLICIES))
def test_every_family(name):
    stages = 6 if name == "interleaved" else 4
    ranks = 3 if name == "interleaved" else 2
    placement = families.placement(name, stages, ranks)
    run(families.policy(name)(stages, 4, placement))


def test_a_paper_s_family_and_uneven_stages(monkeypatch):
    """Of HARP's schedule; stages of one layer beside those of several, with links in all ways."""
    monkeypatch.syspath_prepend(EXAMPLES)
    h_1f1b = import_module("paper_family").h_1f1b
    run(h_1f1b(3, 5, slowest=3.0, links=(0.0, 1.5)), cuts=(0, 5))
    run(families.gpipe(4, 4, (0, 2, 1, 0)), cuts=(2, 3, 4))


@pytest.mark.parametrize("apart", [False, True])
def test_replicas_reduce_beside_a_step(apart):
    """The buckets of several ranks and replicas, with a weight that is tied across ranks."""
    run(families.interleaved(4, 2, (0, 1, 0, 1)), 2, apart=apart)


def test_forwards_and_backwards_apart():
    run(families.gpipe(4, 3, (0, 1, 1, 0)), phases=True)


def test_a_searched_schedule():
    fused = pfeife.annotate(estimate(skipping(True)[0], CPU_CORE))(skipping(True)[0])
    plan = sched.plan(
        fused,
        machine=CPU_CORE,
        microbatches=4,
        stages=4,
        ranks=2,
        schedule="search",
        search_work=9999,
    )
    run(plan.schedule)


@random_cases(24)
@given(st.data())
def test_random_schedules(data):
    """Of any placement; some with split backwards and swapped neighbours."""
    schedule = data.draw(st.one_of(placed((families.gpipe, families.one_f_one_b)), shuffled()))
    assume(1 < schedule.stages <= 6 and len(schedule.ranks) > 1)
    try:
        sched.verify_schedule(schedule)
    except ValueError:
        assume(False)
    run(schedule)


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    [
        (families.zb_v(4, 4, (0, 1, 1, 0)), 1),
        (families.one_f_one_b(3, 2), 2),
    ],
)
def test_the_numbers_are_those_of_one_device(schedule, replicas):
    """So each message is that which its receiver means. Reductions come last here: hosts that
    compute wait for them."""
    program, state, batches, found = run(schedule, replicas, pace=Pace.COMPUTING, overlap=False)
    whole = pfeife.evaluate(program, state, batches)
    for one in found:
        mine = {name: whole.gradients[name] for name in one.gradients}
        assert_same(attrs.evolve(whole, gradients=mine), one, ("layers.1.weight",))
