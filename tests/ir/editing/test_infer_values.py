"""What a pass may leave undone: values are told without anything being run, and nothing that was
given is edited."""

import copy
import operator

import attrs
import pytest
import torch
from small import clusters, net
from torch import fx

import pfeife
from pfeife import Kind, sched
from pfeife._torch import FakeTensor
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.evaluate import evaluate
from pfeife.ir.seeding import seeded
from pfeife.testing import assert_same

aten = torch.ops.aten


def flat() -> pfeife.Program:
    one = net()
    return pfeife.capture(one.step, one.batch(2))


def with_copy(program: pfeife.Program) -> pfeife.Program:
    """The outer graph copied, as fx's own tools do it: its bodies are those of the input."""
    graph = copy.deepcopy(program.module.graph)
    return attrs.evolve(program, module=fx.GraphModule(program.module, graph))


def first(program: pfeife.Program, target) -> fx.Node:
    return next(node for node in program.module.graph.nodes if node.target is target)


def added(program: pfeife.Program, target, *args, read: bool = True) -> fx.Node:
    """A new node at the end, which another one reads."""
    graph = program.module.graph
    with graph.inserting_before(next(reversed(graph.nodes))):
        node = graph.call_function(target, args)
        if read:
            graph.call_function(torch.ops.aten.neg.default, (node,))
    return node


def value(program: pfeife.Program, node: fx.Node) -> torch.Tensor:
    return program.node(node.name).meta["val"]


def meta(program: pfeife.Program) -> list[dict]:
    modules = [program.module, *map(program.body, program.calls)]
    return [dict(node.meta) for module in modules for node in module.graph.nodes]


def test_what_is_settled_is_kept():
    plan = pfeife.Plan((0, 1, 1, 1), sched.families.one_f_one_b(2, 2))
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())
    for program in (flat(), clusters(), ranks(clusters())):
        assert settle(program) is program


def test_values_have_no_storage():
    """Without an argument that is a tensor too."""
    program = with_copy(flat())
    node = added(program, aten.zeros.default, [1000, 1000])
    found = value(settle(program), node)
    assert isinstance(found, FakeTensor) and found.shape == (1000, 1000)
    assert found.fake_mode is program.node("x").meta["val"].fake_mode


def test_no_random_number_is_drawn():
    program = with_copy(flat())
    drawn = added(program, aten.rand.default, [4])
    dropped = added(program, aten.rand_like.default, drawn)
    before = torch.get_rng_state()
    settled = settle(program)
    assert torch.equal(torch.get_rng_state(), before)
    assert value(settled, dropped).shape == (4,)


def test_a_seeded_node_has_a_value():
    program = with_copy(flat())
    with program.module.graph.inserting_before(program.node("x")):
        seed = program.module.graph.placeholder("seed")
    seed.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
    source = first(program, aten.tanh.default)
    drawn = added(program, seeded, aten.bernoulli.p, 0, seed, source, 0.5)
    assert value(settle(program), drawn).shape == (2, 4)


def test_nothing_with_an_effect_is_run():
    """Neither what fx knows to have one, nor a function that nobody reads; one that is read has to
    say what it gives."""
    heard: list[object] = []

    @fx.has_side_effect
    def tap(x: torch.Tensor) -> torch.Tensor:
        heard.append(x)
        return x

    program = with_copy(flat())
    source = first(program, aten.tanh.default)
    added(program, tap, source, read=False)
    added(program, lambda x: heard.append(x), source, read=False)
    settle(program)
    assert not heard
    node = added(program, tap, source)
    with pytest.raises(ValueError, match=r"neg.*tap_1 has no meta\['val'\], and is not run"):
        settle(program)
    node.meta["val"] = source.meta["val"]
    settle(program)
    assert not heard


def test_bodies_of_the_input_stay_as_they_are():
    """A pass that copies the outer graph alone shares them."""
    given = clusters()
    call = given.call(Kind.FORWARD, 1)
    body = given.body(call)
    tanh = next(node for node in body.graph.nodes if node.target is aten.tanh.default)
    with body.graph.inserting_after(tanh):
        again = body.graph.call_function(aten.neg.default, (tanh,))
    before, program = meta(given), with_copy(given)
    settled = settle(program)
    assert meta(given) == before and "val" not in again.meta
    assert program.body(call) is body is not settled.body(call)
    assert all("val" in n.meta for n in settled.body(call).graph.nodes if n.op == "call_function")
    others = [one for one in given.calls if one != call]
    assert all(settled.body(one) is given.body(one) for one in others)


def test_code_is_that_of_the_graph():
    """Also where another function has the same name."""
    one, x = net(), net().batch(2)
    given = pfeife.capture(one.step, x)
    state = pfeife.state_of(given, one.model)

    def named(function):
        def run(x: torch.Tensor) -> torch.Tensor:
            return function(x)

        return run

    program = with_copy(given)
    tanh = first(program, aten.tanh.default)
    tanh.target = named(torch.sigmoid)
    program.module.recompile()
    assert settle(program) is program
    tanh.target = named(torch.tanh)
    settled = settle(program)
    assert settled is not program
    assert_same(evaluate(settled, state, [x]), evaluate(given, state, [x]))


def test_a_new_result_of_a_call():
    """What its body returns."""
    program = with_copy(clusters())
    call = program.node(program.call(Kind.FORWARD, 0).node)
    result = added(program, operator.getitem, call, 0)
    old = next(iter(call.users))
    assert value(settle(program), result) is old.meta["val"]


def test_what_reads_another_value_is_told_again():
    """As far as it changes, and no further."""
    program = with_copy(flat())
    old, loss = first(program, aten.tanh.default), first(program, aten.mean.default)
    wide = added(program, aten.repeat.default, old, [3, 1])
    again, mean, last = (
        added(program, aten.exp.default, wide),
        added(program, aten.mean.default, wide),
        added(program, aten.neg.default, loss),
    )
    again.meta["val"], mean.meta["val"], last.meta["val"] = (
        one.meta["val"] for one in (old, loss, loss)
    )
    settled = settle(program)
    assert value(settled, again).shape == (6, 4) and again.meta["val"].shape == (2, 4)
    assert value(settled, mean) is value(settled, last) is loss.meta["val"]


def test_what_does_not_fit_is_refused():
    program = with_copy(flat())
    tanh = first(program, aten.tanh.default)
    with program.module.graph.inserting_before(tanh):
        tanh.args = (program.module.graph.call_function(aten.t.default, tanh.args),)
    with pytest.raises(ValueError, match=r"%add.* has another value than before.*broadcast"):
        settle(program)


def test_a_size_that_data_decide_is_not_told_again():
    """Torch's rules would give a symbol, whose size nothing can compare or count."""
    flat = pfeife.capture(lambda x: (x * 2)[x > 0].mean(), torch.randn(3, 2), loss_reduction="mean")
    program = with_copy(flat)
    index, twice = first(program, aten.index.Tensor), first(program, aten.mul.Tensor)
    with program.module.graph.inserting_before(index):
        new = program.module.graph.call_function(aten.neg.default, (twice,))
    index.args = (new, index.args[1])
    with pytest.raises(ValueError, match=r"%index.* that data decide.*write meta\['val'\]"):
        settle(program)
    new.meta["val"] = twice.meta["val"]
    settled = settle(program)
    assert value(settled, index) is index.meta["val"] and index.meta["val"].shape == (6,)
