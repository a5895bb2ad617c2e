"""Bugs that pipelines have had, each put in on purpose: the checks must find every one."""

import importlib

import attrs
import pytest
import torch
from programs import CPU_CORE, captured, clusters, for_ranks, lowered
from seeded import seed
from torch import fx, nn

import pfeife
from pfeife import sched
from pfeife.frontend.aot import ports
from pfeife.frontend.cache import program_json
from pfeife.ir import microbatch
from pfeife.ir.editing import infer_values
from pfeife.ir.microbatch import named_batch
from pfeife.ir.verify import verify
from pfeife.lowering import wiring
from pfeife.lowering.coverage import check_coverage
from pfeife.lowering.wiring import Wiring
from pfeife.runtime import LocalPipeline, interpret
from pfeife.runtime.interpret import RankRunner
from pfeife.testing import assert_same, check_pass


@pytest.fixture(scope="module")
def sent():
    """A UNet on three ranks: skip connections make values with readers on several of them."""
    _, program, state, microbatches = captured("UNet")
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=3)
    program = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    return plan, program, state, microbatches


def rebuilt(program: pfeife.Program, change) -> pfeife.Program:
    """A copy of a program whose graph `change` has edited."""
    graph = fx.Graph()
    copies: dict = {}
    for node in program.module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    change(graph)
    return attrs.evolve(program, module=fx.GraphModule(program.module, graph))


def test_a_pass_that_edits_its_input():
    _, program, state, microbatches = captured("UNet")

    def careless(program):
        for node in program.module.graph.nodes:
            if node.op == "call_function":
                node.meta["seen"] = True
                with program.module.graph.inserting_after(node):
                    program.module.graph.call_function(torch.neg, (node,))
                break
        return program

    victim = pfeife.passes.fuse()(program)  # a copy of our own to spoil
    with pytest.raises(AssertionError, match="edited its input"):
        check_pass(careless, victim, state, microbatches)


def test_a_pass_that_changes_the_numbers(sent):
    _, program, state, microbatches = sent

    def sloppy(program):
        def drop_one_gradient(graph):
            results = dict(output_node_of(graph).args[0])
            name = next(n for n in results if n.startswith("grad_first"))
            with graph.inserting_before(output_node_of(graph)):
                results[name] = graph.call_function(torch.mul, (results[name], 2))
            output_node_of(graph).args = (results,)

        return rebuilt(program, drop_one_gradient)

    with pytest.raises(AssertionError, match=r"first.weight differs by up to"):
        check_pass(sloppy, program, state, microbatches)


def test_a_graph_that_reads_a_value_before_it_is_made(sent):
    """What fx's own lint finds is told as what is wrong with the program."""

    def ahead(graph):
        first, *_, last = (node for node in graph.nodes if node.op == "call_module")
        first.args = (last,)

    with pytest.raises(ValueError, match=r"is not well formed: .* before it has been defined"):
        verify(rebuilt(sent[1], ahead))


def output_node_of(graph: fx.Graph) -> fx.Node:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def test_an_order_that_ignores_dependencies(sent):
    plan, program, _, _ = sent
    _, flat, _, _ = captured("UNet")
    fused = clusters(flat)
    backwards = pfeife.Plan(plan.stage_of_cluster[::-1], plan.schedule)
    with pytest.raises(ValueError, match="computes later"):
        pfeife.partition(backwards)(fused)
    order = lowered(plan, program)
    first = order.ranks[0]
    early = pfeife.Schedule((tuple(reversed(first)), *order.ranks[1:]))
    with pytest.raises(ValueError, match=r"rank 0: .*a backward comes after its forward"):
        sched.verify_schedule(early)


def test_a_transfer_that_reaches_one_reader_only():
    """The second reader on a rank is left with the value of the rank that made it."""
    _, flat, state, microbatches = captured("GPT")
    fused = clusters(flat)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=3)
    program = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)

    def forget(graph):
        by_name = {node.name: node for node in graph.nodes}
        for message in pfeife.ir.messages.messages(program):
            for value, copy in zip(message.values, message.copies, strict=True):
                readers = list(by_name[copy].users)
                if len(readers) > 1:
                    readers[1].replace_input_with(by_name[copy], by_name[value])
                    return
        raise AssertionError("no value has two readers on one rank")

    broken = rebuilt(program, forget)
    assert_same(  # in one process nobody would notice
        pfeife.evaluate(program, state, microbatches), pfeife.evaluate(broken, state, microbatches)
    )
    with pytest.raises(ValueError, match=r"on rank \d reads .* lives on rank \d"):
        pfeife.verify(broken)


def test_a_receive_that_is_missing_from_the_schedule(sent):
    plan, program, _, _ = sent
    order = lowered(plan, program)
    last = order.ranks[2]
    gone = next(a for a in last if a.do == "RECV_F")
    broken = pfeife.Schedule((*order.ranks[:2], tuple(a for a in last if a != gone)))
    with pytest.raises(ValueError, match=r"sends|never received"):
        sched.verify_schedule(broken)


def test_a_wrong_reduction():
    _, program, state, microbatches = captured("TiedGPT")
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=2)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    (tied,) = sent.reductions
    assert tied.name == "embed.weight" and tied.ranks == (0, 1)
    expected = pfeife.evaluate(program, state, microbatches)
    right = LocalPipeline(sent, lowered(plan, sent))(state, microbatches)
    assert_same(expected, right, ("embed.weight",))
    forgotten = attrs.evolve(sent, reductions=())
    wrong = LocalPipeline(forgotten, lowered(plan, forgotten))(state, microbatches)
    with pytest.raises(AssertionError, match=r"embed.weight"):
        assert_same(expected, wrong, ("embed.weight",))
    # A sum over replicas instead of their mean.
    half = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2)
    sent = pfeife.compose(pfeife.partition(half), pfeife.insert_send_recv())(fused)
    averaged = pfeife.dp_wrap(pfeife.Mesh(2, 2))(sent)
    alone = attrs.evolve(averaged, reductions=averaged.reductions[:-1])
    assert_same(
        expected, LocalPipeline(averaged, lowered(half, averaged))(state, microbatches), None
    )
    with pytest.raises(AssertionError, match=averaged.reductions[-1].name):
        result = LocalPipeline(alone, lowered(half, alone))(state, microbatches)
        assert_same(expected, result, None)


def test_a_reduction_before_the_last_gradient(sent):
    plan, _, _, _ = sent
    _, program, _, _ = captured("UNet")
    fused = clusters(program)
    replicated = pfeife.compose(
        pfeife.partition(plan), pfeife.insert_send_recv(), pfeife.dp_wrap(pfeife.Mesh(3, 2))
    )(fused)
    order = lowered(plan, replicated)
    actions = list(order.ranks[1])
    reduction = next(a for a in actions if a.do == "REDUCE_GRAD")
    actions.remove(reduction)
    actions.insert(len(actions) // 2, reduction)
    broken = pfeife.Schedule((order.ranks[0], tuple(actions), order.ranks[2]))
    with pytest.raises(ValueError, match="a gradient comes after its reduction"):
        sched.verify_schedule(broken)
    never = tuple(tuple(a for a in rank if a.do != "REDUCE_GRAD") for rank in order.ranks)
    for wrong, said in ((broken, "comes before 1[BW]"), (pfeife.Schedule(never), "no 0REDUCE")):
        with pytest.raises(ValueError, match=rf"rank .*: .*{said}.* the gradient of"):
            check_coverage(wrong, Wiring(replicated), ())


def test_malformed_programs_are_named():
    _, program, _, _ = captured("UNet")
    with pytest.raises(ValueError, match="are not the input ports"):
        pfeife.verify(attrs.evolve(program, inputs=program.inputs[1:]))
    with pytest.raises(ValueError, match="does not return a dict of the output ports"):
        pfeife.verify(attrs.evolve(program, outputs=program.outputs[1:]))
    fused = pfeife.fuse()(program)
    with pytest.raises(ValueError, match="are not the call_module nodes"):
        pfeife.verify(attrs.evolve(fused, calls=fused.calls[1:]))


class Sized(nn.Module):
    """Sizes that are read, computed with, and asked."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        hidden = hidden.relu() if x.shape[1] > 3 else hidden.tanh()
        return self.last(hidden).mean(1).square().mean() * x.shape[1]


def by_way_of(*shape):
    """A pass that gives the operands of `relu` another shape in between (None: the same)."""

    def change(operation):
        if operation.target is not torch.ops.aten.relu.default:
            return None
        value, aten = operation.args[0], torch.ops.aten
        sizes = [operation.make(aten.sym_size.int, value, dim) for dim in range(3)]
        wanted = [sizes[at] if size is None else size for at, size in enumerate(shape)]
        there = operation.make(aten.reshape.default, value, wanted)
        again = operation.make(
            aten.reshape.default, operation.make(aten.relu.default, there), sizes
        )
        return operation.make(aten.add.Tensor, again, again)

    return lambda program: program.rewrite(change)


def check_sizes():
    """What keeps a program with open sizes right at all of them, on a small one."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    net = Sized()
    steps = [[(torch.randn(*sizes, 4),) for _ in range(2)] for sizes in ((2, 5), (3, 4), (2, 7))]
    fixed = [pfeife.capture(net, *batch[0], loss_reduction="mean") for batch in steps]
    for dim in range(2):
        torch._dynamo.mark_dynamic(steps[0][0][0], dim)
    torch._dynamo.reset()
    flat = pfeife.capture(net, *steps[0][0], loss_reduction="mean")
    state = pfeife.state_of(flat, net)
    bare = attrs.evolve(flat, outputs=[attrs.evolve(p, reduction=None) for p in flat.outputs])
    again = program_json.restore(program_json.store(bare, "key"))
    assert again.limits == flat.limits and str(again.module.graph) == str(flat.module.graph)
    assert [p.sizes for p in again.inputs] == [p.sizes for p in flat.inputs]
    kit = {"state": state, "microbatches": steps[0], "others": steps[1:]}
    there_and_back = (pfeife.move_to_device("cuda:0"), pfeife.move_to_device("cpu"))
    check_pass(pfeife.compose(*there_and_back), flat, **kit)
    reshaped = by_way_of(None, None, 4)(flat)
    check_pass(pfeife.fuse(), reshaped, **kit)
    fused = clusters(flat)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2)
    sent, schedule = for_ranks(fused, plan)
    pipeline = LocalPipeline(sent, schedule)
    for batch, other in zip(steps, fixed, strict=True):
        found = pipeline(state, batch)
        assert_same(pfeife.evaluate(other, state, batch), found)
        alone, order = for_ranks(clusters(other), plan)
        sizes = named_batch(flat, batch[0])
        here = tuple(sizes[port.name] for port in sent.ports(pfeife.Role.SIZE))
        for rank, runner in enumerate(pipeline.runners):
            there = RankRunner(alone, order, rank).envelopes
            assert runner._messages_at(here).envelopes == there, "messages of other sizes"
    for program in (flat, by_way_of(2, 5, 4)(flat)):
        check_refused(program, state, [torch.randn(2, 3, 4)])
    check_refused(by_way_of(2, 5, 4)(flat), state, steps[1])


def check_refused(program, state, batch):
    """Sizes for which a program was not captured."""
    try:
        pfeife.evaluate(program, state, batch)
    except ValueError as error:
        assert "was captured for" in str(error)
        return
    raise AssertionError("sizes that a program is not for")


MOVING = importlib.import_module("pfeife.passes.move_to_device")  # the name is the pass's too
BUGS_OF_SIZES = {
    "a constant in new nodes": (
        *(infer_values, "return opened.sizes[node.name]", "return opened.numbers[node.name]"),
    ),
    "a constant in moved nodes": (
        *(MOVING, "return self.opened.sizes[node.name]", "return node.meta['val']"),
    ),
    "a constant in captured nodes": (ports, 'node.meta["sizes"] = layout', "pass"),
    "constants in a file": (
        *(
            program_json,
            "sizes = None if stored.sizes is None else value(stored.sizes)",
            "sizes = None",
        ),
    ),
    "messages of the capture": (
        *(interpret, "named = dict(zip(self.sizes, sizes, strict=False))", "named = {}"),
    ),
    "layouts of the capture": (wiring, "if not (symbolic and sizes):", "if True:"),
    "a guard of the capture left out": (
        *(ports, "verify(Program(module, tuple(self.inputs), tuple(outputs), limits=limits))"),
        "verify(Program(module, tuple(self.inputs), tuple(outputs)))",
    ),
    "a guard of new nodes left out": (
        *(infer_values, "(*program.limits, *opened().assumed())", "program.limits"),
    ),
    "guards left out in a file": (
        program_json,
        "limits=tuple(map(value, stored.limits))",
        "limits=()",
    ),
    "guards that nobody looks at": (microbatch, "if broken:", "if False:"),
}


def test_sizes_without_a_bug():
    check_sizes()


@pytest.mark.parametrize("bug", BUGS_OF_SIZES)
def test_bugs_of_sizes(monkeypatch, bug):
    seed(monkeypatch, *BUGS_OF_SIZES[bug])
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        check_sizes()
