"""What stages compute again: the numbers stay, the bytes fall as decided, the time is the least."""

import functools
import operator

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES
from programs import CPU_CORE, Updating, captured, clusters, lowered
from recomputing import NO_PRODUCTS, again, chosen, planned
from share import crossed, random_cases

import pfeife
from pfeife import sched
from pfeife.cost import memory_curves, stage_memory
from pfeife.cost.body import kept_storages
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.ir.messages import call_of, messages
from pfeife.ir.microbatch import named_batch
from pfeife.ir.nodes import find_node
from pfeife.ir.outline import read_by_backwards
from pfeife.ir.parts import Kind, Role
from pfeife.runtime import LocalPipeline
from pfeife.sched.cutting import choose_recompute, recompute_options
from pfeife.testing import assert_same, check_pass, nets, plans, recomputing, tied_across


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
    plan, staged = chosen("GPT, 3 blocks", 3, "full")
    _, _, before = planned("GPT, 3 blocks", 3)
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
    plan = Plan((0,) * fused.units, sched.families.gpipe(1, 1))
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


class Drifting(Updating):
    """What it computes depends on a buffer that every microbatch changes."""

    def forward(self, x):
        x = self.first(x)
        y = (x + self.scale).tanh()
        self.update(x)
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
    plan = Plan((0,) * fused.units, sched.families.gpipe(1, 1))
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
