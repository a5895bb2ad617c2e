"""What stages compute again: the numbers stay, the bytes fall as decided, the time is the least."""

import functools
import operator
from itertools import combinations, pairwise

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES
from programs import captured, clusters, lowered
from share import crossed, random_cases

import pfeife
from pfeife import sched
from pfeife.cost import machine, memory_curves, stage_memory
from pfeife.cost.body import kept_storages
from pfeife.cost.estimate import compute_bound, node_seconds
from pfeife.data import plain
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.ir.evaluate import named_batch
from pfeife.ir.outline import read_by_backwards
from pfeife.ir.program import Kind, Role, call_of, find_node, is_source, messages
from pfeife.runtime import LocalPipeline
from pfeife.sched import choose_recompute, recompute_options
from pfeife.sched.cutting.recompute_choice import _stages
from pfeife.testing import assert_same, check_pass, nets, plans, recomputing, tied_across

CPU_CORE = machine("cpu-core")
# So slow at products that "selective" does none of them again.
NO_PRODUCTS = attrs.evolve(CPU_CORE, flops=CPU_CORE.flops["float32"] / 1e4)


@functools.cache
def planned(name: str, stages: int, policy: str = "1f1b"):
    fused = clusters(captured(name)[1])
    # The best cut of the GPT is within a block; these tests count on one value at the border.
    cuts = (
        [int(unit >= 12) for unit in range(fused.units)] if (name, stages) == ("GPT", 2) else None
    )
    plan = sched.plan(
        fused, machine=CPU_CORE, microbatches=4, stages=stages, schedule=policy, cuts=cuts
    )
    return fused, plan, pfeife.partition(plan)(fused)


def chosen(name: str, stages: int, budget, policy: str = "1f1b"):
    """A plan with what a budget has its stages recompute, and its stage calls."""
    fused, plan, staged = planned(name, stages, policy)
    choice = choose_recompute(staged, budget, machine=CPU_CORE, duplicated=plan.duplicated)
    plan = attrs.evolve(plan, recompute=choice)
    return plan, pfeife.partition(plan)(fused)


def again(program: pfeife.Program, kind: Kind, unit: int) -> list[torch.fx.Node]:
    """The nodes of a body that compute something a second time."""
    nodes = program.body(program.call(kind, unit)).graph.nodes
    return [node for node in nodes if node.op == "call_function" and "_again" in node.name]


def run(plan: Plan, staged: pfeife.Program, split: bool, state, microbatches):
    if split:
        staged = pfeife.split_backward()(staged)
    sent = pfeife.verify(pfeife.insert_send_recv()(staged))
    return LocalPipeline(sent, lowered(plan, sent))(state, microbatches)


@pytest.mark.parametrize("budget", ["none", "full"])
@pytest.mark.parametrize("name", CASES)
def test_what_no_backward_reads_may_change_before(name, budget):
    """Of parameters, constants and the batch: all that is not said to be read. Of buffers: those
    that the step updates."""
    drawn, _, state, microbatches = captured(name)
    plan, staged = chosen(name, 2, budget, "gpipe")
    program = pfeife.insert_send_recv()(staged)
    pipeline = LocalPipeline(program, lowered(plan, program))
    expected = pipeline(state, microbatches)
    state = {name: value.clone() for name, value in state.items()}
    places = {port.name: port.fqn for port in program.ports(Role.BATCH)}
    batch = [
        {places[n]: value.clone() for n, value in named_batch(program, one).items()}
        for one in microbatches
    ]
    step = pipeline.start(state, batch)
    step.run(backward=False)
    read, updated = read_by_backwards(program), program.ports(Role.BUFFER_UPDATE)
    names = {p.fqn for p in program.inputs if p.name not in read} | {p.fqn for p in updated}
    assert names
    for values in (state, *batch):
        for name in names & set(values):
            values[name].fill_(3)
    step.run(forward=False)
    assert_same(expected, attrs.evolve(step.result(), buffers=expected.buffers), drawn.tied)


@pytest.mark.parametrize(
    ("name", "stages", "budget"),
    crossed([*CASES], [1, 3], ["none", "full", "selective", 0.5]),
)
def test_the_same_numbers_and_the_decided_bytes(name, stages, budget):
    one, program, state, microbatches = captured(name)
    fused, _, staged = planned(name, stages)
    before = [stage.saved for stage in stage_memory(staged)]
    if budget == 0.5:
        budget = max(max(before) // 2, *(o[-1].saved for o in recompute_options(staged, CPU_CORE)))
    plan, less = chosen(name, stages, budget)
    check_pass(pfeife.partition(plan), fused, state, microbatches, rounding=one.tied)
    expected = pfeife.evaluate(program, state, microbatches)
    for split in (False, True):
        assert_same(expected, run(plan, less, split, state, microbatches), one.tied)
    saved = [stage.saved for stage in stage_memory(less)]
    assert saved == [option.saved for option in plan.recompute]
    assert all(after <= whole for after, whole in zip(saved, before, strict=True))
    if isinstance(budget, int):
        assert max(saved) <= budget < max(before)
    elif budget == "none":
        assert saved == before and not any(option.names for option in plan.recompute)
    else:
        assert sum(saved) < sum(before)


@random_cases(24)
@given(st.data())
def test_random_programs(data):
    net = data.draw(nets(linear=2))
    microbatches = [(torch.randn(3, 4),) for _ in range(2)]
    program = pfeife.capture(lambda x: net(x).square().mean(), *microbatches[0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, net).items()}
    fused = clusters(program)
    plan = data.draw(recomputing(data.draw(plans(fused, 2)), fused))
    tied = tied_across(plan, fused)
    staged = check_pass(pfeife.partition(plan), fused, state, microbatches, rounding=tied)
    split = data.draw(st.booleans())
    if split:
        check_pass(pfeife.split_backward(), staged, state, microbatches)
    expected = pfeife.evaluate(staged, state, microbatches)
    assert_same(expected, run(plan, staged, split, state, microbatches), tied)


def test_full_keeps_only_what_a_stage_is_given():
    plan, staged = chosen("GPT", 3, "full")
    _, _, before = planned("GPT", 3)
    sent = pfeife.insert_send_recv()(staged)
    for unit, kept in enumerate(kept_storages(staged)):
        own = staged.call(Kind.FORWARD, unit).node
        assert not [storage for storage in kept if storage.call == own]
        assert again(staged, Kind.BACKWARD, unit)
        arriving = [
            m.bytes for m in messages(sent) if (m.destination, m.sender.kind) == (unit, "F")
        ]
        assert plan.recompute[unit].saved == sum(arriving)
    assert plan.recompute[0].saved == 0, "the first stage is given the batch alone"
    assert sum(stage.saved for stage in stage_memory(before)) > 10 * 4 * 2 * 8 * 16


def test_what_is_read_by_forwards_alone_is_not_saved_twice():
    """A value that only the backward wants leaves the forward's body."""
    mask = functools.partial(chosen, "DropoutNet", 1)
    kept, gone = (
        {node.name for node in staged.body(staged.call(Kind.FORWARD, 0)).graph.nodes}
        for _, staged in (mask("none"), mask("full"))
    )
    assert gone < kept


@pytest.mark.parametrize("budget", ["full", "selective"])
@pytest.mark.parametrize("stages", [1, 3])
def test_weights_gradients_recompute_for_themselves(stages, budget):
    """The input-backward computes again what its gradients need and nothing else; the
    weight-backward what only it reads."""
    fused, plan, staged = planned("GPT", stages)
    choice = choose_recompute(staged, budget, machine=NO_PRODUCTS, duplicated=plan.duplicated)
    less = pfeife.partition(attrs.evolve(plan, recompute=choice))(fused)
    split = pfeife.split_backward()(less)
    for unit in range(plan.stages):
        early, late = (
            {node.name: node for node in again(split, kind, unit) if is_operation(node)}
            for kind in (Kind.INPUT_BACKWARD, Kind.WEIGHT_BACKWARD)
        )
        assert not set(early) & set(late), "nothing is computed a third time"
        assert early and (late or budget == "full")
        body = split.body(split.call(Kind.INPUT_BACKWARD, unit))
        for node in early.values():
            assert _leads_to_a_gradient(split, unit, body, node), node


def test_what_several_weights_gradients_share_stays_with_them():
    """In the first stage too, where no other backward waits."""
    first, one, other = (torch.nn.Linear(4, 4) for _ in range(3))

    def step(x):
        shared = torch.nn.functional.gelu(first(x))
        return (one(shared) * other(shared)).sum()

    fused = clusters(pfeife.capture(step, torch.randn(3, 4)))
    plan = Plan((0,) * fused.units, sched.gpipe(1, 1))
    choice = choose_recompute(pfeife.partition(plan)(fused), "selective", machine=NO_PRODUCTS)
    passes = (pfeife.partition(attrs.evolve(plan, recompute=choice)), pfeife.split_backward())
    split = pfeife.compose(*passes)(fused)
    names = [{node.name for node in again(split, kind, 0)} for kind in (Kind("I"), Kind("W"))]
    assert names == [set(), {"gelu_again"}]


def is_operation(node: torch.fx.Node) -> bool:
    """Parts of a tuple are where it is made, whoever reads them."""
    return node.target is not operator.getitem


def _leads_to_a_gradient(program, unit: int, body, node) -> bool:
    """Whether a node's value goes into one that is made from an arriving gradient."""
    tangents = {port.name for port in program.ports(Role.TANGENT)}
    at = find_node(program.module, program.call(Kind.INPUT_BACKWARD, unit).node)
    forwards = {call.node for call in program.calls if call.kind == Kind.FORWARD}
    names = [n for n in body.graph.nodes if n.op == "placeholder"]
    late = {
        inner
        for inner, value in zip(names, at.all_input_nodes, strict=True)
        if value.name in tangents
        or (value.op == "call_function" and call_of(value).name not in forwards)
    }
    for inner in body.graph.nodes:
        if not late.isdisjoint(inner.all_input_nodes):
            late.add(inner)
    reached, pending = set(), [node]
    while pending:
        one = pending.pop()
        if one in late and one.op == "call_function":
            return True
        if one not in reached:
            reached.add(one)
            pending += one.users
    return False


class Drifting(torch.nn.Module):
    """What it computes depends on a buffer that every microbatch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        x = self.first(x)
        y = (x + self.scale).tanh()
        self.scale.mul_(0.9).add_(x.detach().mean())
        return self.last(y)


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
@pytest.mark.parametrize("split", [False, True])
def test_an_updated_buffer_is_read_as_the_forward_read_it(policy, split):
    torch.manual_seed(0)
    net = Drifting()
    microbatches = [(torch.randn(3, 4),) for _ in range(4)]
    program = pfeife.capture(lambda x: net(x).square().mean(), *microbatches[0])
    state = {n: v.clone() for n, v in pfeife.state_of(program, net).items()}
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=2, schedule=policy)
    choice = choose_recompute(pfeife.partition(plan)(fused), "full", machine=CPU_CORE)
    plan = attrs.evolve(plan, recompute=choice)
    staged = pfeife.partition(plan)(fused)
    port = next(port for port in program.ports(Role.BUFFER) if port.fqn == "scale")
    readers = [node for unit in (0, 1) for node in again(staged, Kind.BACKWARD, unit)]
    assert any(port.name in str(node.args) for node in readers), "the sum is computed again"
    expected = pfeife.evaluate(program, state, microbatches)
    assert_same(expected, run(plan, staged, split, state, microbatches))


def test_a_buffer_that_the_forward_would_lose_is_kept_or_refused():
    """A forward that reads the old value for the backward alone: nobody would save it."""
    weight = torch.nn.Parameter(torch.randn(4))
    holder = torch.nn.Module()
    holder.register_buffer("scale", torch.ones(4))

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, scale):
            ctx.save_for_backward(scale.sin())
            return weight.sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0], None

    def step(x):
        loss = Times.apply(weight, holder.scale)
        holder.scale.copy_(x[0])
        return loss

    program = pfeife.capture(step, torch.randn(3, 4))
    fused = clusters(overwritten(program))
    plan = Plan((0,) * fused.units, sched.gpipe(1, 1))
    (option,) = choose_recompute(pfeife.partition(plan)(fused), "full", machine=CPU_CORE)
    kept = pfeife.partition(attrs.evolve(plan, recompute=(option,)))(fused)
    assert "sin" not in option.names
    assert [stage.saved for stage in stage_memory(kept)] == [option.saved] == [4 * 4]
    by_hand = RecomputeOption(names=("sin",))
    with pytest.raises(ValueError, match=r"buffer scale .* its old value would be lost"):
        pfeife.partition(attrs.evolve(plan, recompute=(by_hand,)))(fused)


def overwritten(program: pfeife.Program) -> pfeife.Program:
    """The program with its buffer's update taken from the batch alone."""
    graph, here = torch.fx.Graph(), {}
    for node in program.module.graph.nodes:
        if node.target is torch.ops.aten.copy.default:
            here[node] = graph.call_function(torch.ops.aten.clone.default, (here[node.args[1]],))
            here[node].meta = dict(node.meta)
        else:
            here[node] = graph.node_copy(node, here.__getitem__)
    module = torch.fx.GraphModule(program.module, graph)
    return pfeife.verify(attrs.evolve(program, module=module))


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
    plan = Plan((0,) * fused.units, sched.gpipe(1, 2))
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


def test_memory_curves_fall_as_decided():
    """On the last rank of a GPipe schedule all microbatches are saved at once."""
    _, plan, staged = planned("GPT", 2, "gpipe")
    less_plan, less = chosen("GPT", 2, "full", "gpipe")
    curves = []
    for program in (staged, less):
        sent = pfeife.insert_send_recv()(program)
        curves.append(memory_curves(sent, lowered(plan, sent)))
    difference = stage_memory(staged)[1].saved - less_plan.recompute[1].saved
    at = max(i for i, p in enumerate(curves[0][1].points) if p.action.do == "F")
    whole, fewer = (curve[1].points[at].after for curve in curves)
    assert whole - fewer == 4 * difference > 0
    for before, after in zip(*curves, strict=True):
        assert after.peak < before.peak


def test_a_plan_that_recomputes_is_data():
    plan, _ = chosen("UNet", 2, "selective")
    assert any(option.names for option in plan.recompute)
    assert plain.from_json(Plan, plain.to_json(plan)) == plan
    with pytest.raises(ValueError, match=r"RecomputeOption.saved must not be negative"):
        plain.from_json(Plan, plain.to_json(plan).replace('"saved": ', '"saved": -1'))
