"""What to recompute: the least seconds for every number of bytes."""

import functools
from itertools import combinations, pairwise

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES
from programs import captured, clusters
from recomputing import NO_PRODUCTS, again, chosen, planned
from share import random_cases

import pfeife
from pfeife import sched
from pfeife.cost import machine, stage_memory
from pfeife.cost.estimate import compute_bound, node_seconds
from pfeife.data import plain
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.ir.nodes import is_source
from pfeife.ir.parts import Kind
from pfeife.sched.cutting import choose_recompute, recompute_options
from pfeife.sched.cutting.recompute_choice import _stages
from pfeife.testing import check_pass, nets, plans

CPU_CORE = machine("cpu-core")


def test_wrong_requests_are_refused():
    fused, plan, staged = planned("GPT", 2)
    choose = functools.partial(choose_recompute, staged, machine=CPU_CORE)
    with pytest.raises(
        ValueError, match=r"stage 1 keeps \d+ bytes .* still 1024 .* budget is 1000"
    ):
        choose(1000)
    for budget in (-1, True, 1.5, "most"):
        with pytest.raises(ValueError, match="is not 'none', 'full', 'selective' or a number"):
            choose(budget)
    for program in (pfeife.split_backward()(staged), captured("GPT")[1]):
        with pytest.raises(ValueError, match="before its backward is split"):
            choose_recompute(program, "full", machine=CPU_CORE)
    with pytest.raises(ValueError, match=r"Plan\.recompute: 1 entries for 2 stages"):
        pfeife.partition(attrs.evolve(plan, recompute=(RecomputeOption(),)))(fused)
    full = choose("full", duplicated=plan.duplicated)
    with pytest.raises(ValueError, match="which stage 0 does not make"):
        pfeife.partition(attrs.evolve(plan, recompute=full[::-1]))(fused)


@random_cases(24)
@given(st.data())
def test_no_choice_is_better(data):
    """Against all sets of storages to keep, for every number of bytes that makes a difference."""
    net = data.draw(nets(largest=4, linear=1))
    program = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(3, 4))
    fused = clusters(program)
    plan = data.draw(plans(fused, 1))
    for stage in _stages(pfeife.partition(plan)(fused), CPU_CORE, ()):
        storages = sorted({s for s in stage.storage.values() if s} - stage.held, key=str)
        if len(storages) > 10:
            continue
        found = [
            stage.option(kept)
            for count in range(len(storages) + 1)
            for kept in combinations(storages, count)
        ]
        assert stage.fewest.saved == min(option.saved for option in found)
        for budget in {option.saved for option in found}:
            best = min(option.extra_seconds for option in found if option.saved <= budget)
            mine = stage.fastest(budget)
            assert mine.saved <= budget and mine.extra_seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_options_trade_bytes_for_seconds(name):
    _, plan, staged = planned(name, 2)
    options = recompute_options(staged, CPU_CORE, duplicated=plan.duplicated)
    assert len(options) == 2
    for stage, memory in zip(options, stage_memory(staged), strict=True):
        assert 1 < len(stage) <= 8 and stage[0].extra_seconds == 0
        assert stage[0].saved <= memory.saved
        for one, other in pairwise(stage):
            assert one.extra_seconds < other.extra_seconds and one.saved > other.saved


def test_selective_leaves_heavy_operations_alone():
    """On a machine that is slow at products none of them is done again."""
    fused, plan, staged = planned("GPT", 2)
    slow = NO_PRODUCTS
    choice = choose_recompute(staged, "selective", machine=slow, duplicated=plan.duplicated)
    less = pfeife.partition(attrs.evolve(plan, recompute=choice))(fused)
    for unit in range(2):
        copies = again(less, Kind.BACKWARD, unit)
        assert copies and not any(compute_bound(node, slow) for node in copies)
        assert choice[unit].saved < stage_memory(staged)[unit].saved
        body = staged.body(staged.call(Kind.FORWARD, unit)).graph.nodes
        assert any(compute_bound(node, slow) for node in body)


def test_heavy_operations_with_several_results_keep_them_all():
    """Fused attention keeps its result and the sums that its backward reads."""
    lins = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def step(x):
        q, k, v = (lin(x).view(2, 1, 3, 4) for lin in lins[:3])
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return lins[3](mixed.tanh()).square().mean()

    microbatches = [(torch.randn(2, 3, 4),) for _ in range(2)]
    program = pfeife.capture(step, *microbatches[0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, lins).items()}
    fused = clusters(program)
    plan = Plan((0,) * fused.units, sched.families.gpipe(1, 2))
    staged = pfeife.partition(plan)(fused)
    for speed in (NO_PRODUCTS, CPU_CORE):
        choice = choose_recompute(staged, "selective", machine=speed)
        chosen_plan = attrs.evolve(plan, recompute=choice)
        less = check_pass(pfeife.partition(chosen_plan), fused, state, microbatches)
        assert [stage.saved for stage in stage_memory(less)] == [choice[0].saved]
        attends = any("attention" in name for name in choice[0].names)
        assert attends == (speed is CPU_CORE)


def test_seconds_are_added_to_the_backward():
    """In the forward's own measure: the share of it that is computed again."""
    plan, staged = chosen("UNet", 2, "selective")
    _, _, before = planned("UNet", 2)
    for unit, option in enumerate(plan.recompute):
        forward, backward = (before.call(kind, unit) for kind in (Kind.FORWARD, Kind.BACKWARD))
        nodes = [n for n in before.body(forward).graph.nodes if not is_source(n)]
        parts = {node.name: node_seconds(node, CPU_CORE) for node in nodes}
        share = sum(parts[name] for name in option.names) / sum(parts.values())
        assert 0 < share <= 1 and option.extra_seconds == pytest.approx(forward.seconds * share)
        assert staged.call(Kind.FORWARD, unit) == forward
        took = staged.call(Kind.BACKWARD, unit).seconds - backward.seconds
        assert took == pytest.approx(option.extra_seconds)
    fused, bare, _ = planned("GPT", 2)
    measured = pfeife.annotate(pfeife.Costs("by hand", {call.node: 7.0 for call in fused.calls}))(
        fused
    )
    slow = choose_recompute(pfeife.partition(bare)(measured), "full", machine=CPU_CORE)
    forwards = [sum(u == unit for u in bare.stage_of_cluster) * 7.0 for unit in range(2)]
    for option, seconds in zip(slow, forwards, strict=True):
        assert 0.5 * seconds < option.extra_seconds <= seconds


def test_a_plan_that_recomputes_is_data():
    plan, _ = chosen("UNet", 2, "selective")
    assert any(option.names for option in plan.recompute)
    assert plain.from_json(Plan, plain.to_json(plan)) == plan
    with pytest.raises(ValueError, match=r"RecomputeOption.saved must not be negative"):
        plain.from_json(Plan, plain.to_json(plan).replace('"saved": ', '"saved": -1'))
