"""Every schedule comes to its end where nothing is buffered, as NCCL's messages are not."""

from functools import partial
from importlib import import_module
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import on_several
from programs import CPU_CORE
from share import random_cases
from strict.host import Pace
from strict.programs import Case, on_ranks, skipping
from strict.ranks import given_by_rank_zero, on_strict_ranks, steps_of

import pfeife
from pfeife import sched
from pfeife.cost import estimate
from pfeife.sched import families
from pfeife.testing import assert_same

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(
    schedule,
    replicas=1,
    *,
    pace=Pace.KEPT,
    queues=None,
    job=steps_of,
    apart=False,
    case=Case.TRAINING,
    members=1,
    **made,
):
    """A step of a net with skip connections and a tied weight, on ranks of the model. Reductions
    come last where hosts compute: these wait for them."""
    overlap = pace != Pace.COMPUTING
    made |= {"members": members}
    program, lowered = on_ranks(schedule, replicas, case=case, overlap=overlap, **made)
    count = schedule.microbatches * replicas
    _, state, batches = skipping(case, microbatches=count, members=members)
    options = {"pace": pace, "queues": queues, "apart": apart}
    found = on_strict_ranks(program, lowered, job(state, batches), **options)
    if pace == Pace.COMPUTING:
        as_evaluated(program, state, batches, found)
    return found


def as_evaluated(program, state, batches, found):
    """Whatever a rank has is what one device has: each message is that which its receiver means."""
    whole = pfeife.evaluate(program, state, batches)
    trained = {name for one in found for name in one.gradients}
    updated = {name for one in found for name in one.buffers}
    assert (trained, updated) == ({*whole.gradients}, {*whole.buffers})
    for one in found:
        mine = attrs.evolve(
            whole,
            gradients={name: whole.gradients[name] for name in one.gradients},
            buffers={name: whole.buffers[name] for name in one.buffers},
            outputs=tuple(
                {name: theirs[name] for name in here}
                for here, theirs in zip(one.outputs, whole.outputs, strict=True)
            ),
        )
        assert_same(mine, one, ("layers.1.weight",))


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


@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize("replicas", [1, 2])
def test_members_tell_one_another_beside_a_step(pace, replicas):
    """Parameters, parts of gradients, and what is computed, in groups of their own."""
    run(families.interleaved(4, 2, (0, 1, 0, 1)), replicas, members=2, pace=pace)


def test_forwards_and_backwards_apart():
    run(families.gpipe(4, 3, (0, 1, 1, 0)), job=in_phases)


def test_a_searched_schedule():
    fused = pfeife.annotate(estimate(skipping(split=True)[0], CPU_CORE))(skipping(split=True)[0])
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


@st.composite
def steps(draw):
    """Any placement; some with split backwards and swapped neighbours, some that only evaluate."""
    policies = families.gpipe, families.one_f_one_b, families.forward_only
    schedule = draw(on_several(policies))
    trains = any(action.do != "F" for rank in schedule.ranks for action in rank)
    cases = [case for case in Case if trains == (case != Case.EVALUATION)]
    return schedule, draw(st.sampled_from(cases))


@random_cases(40)
@given(steps(), st.sampled_from([1, 2]), st.booleans(), st.booleans(), st.sampled_from(Pace))
def test_random_steps(step, replicas, shard, apart, pace):
    schedule, case = step
    apart &= replicas > 1
    run(schedule, replicas, case=case, shard=shard, apart=apart, pace=pace)


@random_cases(60)
@given(steps(), st.sampled_from([1, 2]), st.booleans(), st.integers(4, 9))
def test_random_steps_with_few_hardware_queues(step, replicas, ahead, queues):
    """They come to their end, or are refused before they begin."""
    schedule, case = step
    try:
        pace = Pace.AHEAD if ahead else Pace.KEPT
        run(schedule, replicas, case=case, pace=pace, queues=queues)
    except ValueError as refusal:
        assert "hardware queues" in str(refusal)


TWO_EACH = families.interleaved(4, 4, (0, 1, 0, 1))


@pytest.mark.parametrize("pace", Pace)
@pytest.mark.parametrize(
    ("case", "schedule", "replicas", "options"),
    [
        (Case.TRAINING, families.zb_v(4, 4, (0, 1, 1, 0)), 1, {}),
        (Case.TRAINING, families.one_f_one_b(3, 2), 2, {}),
        (Case.TRAINING, TWO_EACH, 2, {"shard": True}),
        (Case.EVALUATION, families.forward_only(4, 4, (0, 1, 1, 0)), 1, {}),
        (Case.EVALUATION, families.forward_only(4, 2, (0, 1, 0, 1)), 2, {"apart": True}),
        (Case.SIZED, TWO_EACH, 1, {}),
        (Case.SIZED, families.zb_h1(3, 2), 2, {"apart": True}),
        (Case.COUNTED, families.one_f_one_b(3, 2), 2, {"apart": True}),
        (Case.COUNTED, TWO_EACH, 1, {"job": given_by_rank_zero}),
        (Case.NORMED, TWO_EACH, 2, {"job": partial(given_by_rank_zero, everything=True)}),
        (Case.NORMED, families.one_f_one_b(3, 3), 2, {"shard": True, "apart": True}),
    ],
)
def test_every_kind_of_step(case, schedule, replicas, options, pace):
    """Where hosts compute, the numbers are those of one device."""
    run(schedule, replicas, case=case, pace=pace, **options)
