"""Plain nodes between calls have one place, and what cannot have one is refused in words."""

import operator

import attrs
import pytest
import torch
from small import CORE, clusters, net
from torch import fx

import pfeife
from pfeife import sched
from pfeife.cost import memory_curves
from pfeife.ir.editing.infer_values import settle
from pfeife.ir.messages import messages
from pfeife.ir.nodes import receive, send
from pfeife.lowering.predict import travels
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, check_pass

aten = torch.ops.aten
PLAN = pfeife.Plan((0, 0, 1, 1), sched.families.gpipe(2, 4))


def stages(rows: int = 2) -> pfeife.Program:
    return pfeife.partition(PLAN)(clusters(net(), rows))


def ranks(rows: int = 2) -> pfeife.Program:
    return pfeife.insert_send_recv()(stages(rows))


def as_bytes(operation):
    """Every message as two: the values in int8, and their scale."""
    make = operation.make
    if operation.target is send:
        parts = []
        for value in operation.args[0]:
            scale = make(
                aten.div.Scalar, make(aten.amax.default, make(aten.abs.default, value)), 127
            )
            steps = make(aten.round.default, make(aten.div.Tensor, value, scale))
            parts += [make(aten._to_copy.default, steps, dtype=torch.int8), scale]
        return make(send, tuple(parts), *operation.args[1:])
    if operation.target is operator.getitem and operation.args[0].target is receive:
        message, index = operation.args
        steps = make(operator.getitem, message, 2 * index)
        wide = make(aten._to_copy.default, steps, dtype=operation.value.dtype)
        return make(aten.mul.Tensor, wide, make(operator.getitem, message, 2 * index + 1))
    return None


def test_a_quantised_message_is_small_everywhere():
    one, whole = net(), ranks(512)
    microbatches = [one.batch(512) for _ in range(4)]
    state = pfeife.state_of(whole, one.model)
    small = check_pass(
        lambda program: program.rewrite(as_bytes, of="calls"),
        whole,
        state,
        microbatches,
        rounding=None,
        within=0.05,
    )
    assert {message.bytes for message in messages(small)} == {512 * 4 + 4}
    assert {message.bytes for message in messages(whole)} == {512 * 4 * 4}
    schedule = sched.verify_schedule(sched.lower(PLAN.schedule, small))
    found = LocalPipeline(small, schedule)(state, microbatches)
    assert_same(pfeife.evaluate(small, state, microbatches), found)
    slow = attrs.evolve(CORE, link_bandwidth=1.0, link_latency=0.0)
    seconds = [max(one.arriving for one in travels(p, slow).values()) for p in (whole, small)]
    assert seconds[0] > 3 * seconds[1]
    peaks = [sum(one.peak for one in memory_curves(p, schedule)) for p in (whole, small)]
    assert peaks[1] < peaks[0]
    assert not any(
        "_to_copy" in str(node.target) for node in pfeife.absorb(small).module.graph.nodes
    )


def saved_in_half(program: pfeife.Program) -> pfeife.Program:
    """What a forward keeps for its backward, kept in half precision."""

    def change(module: fx.GraphModule) -> None:
        graph = module.graph
        for node in list(graph.nodes):
            users = [u for u in node.users if u.op == "call_module" and "backward" in u.name]
            if node.target is not operator.getitem or "forward" not in node.args[0].name:
                continue
            for user in users:
                with graph.inserting_before(user):
                    half = graph.call_function(
                        aten._to_copy.default, (node,), {"dtype": torch.bfloat16}
                    )
                    wide = graph.call_function(
                        aten._to_copy.default, (half,), {"dtype": torch.float32}
                    )
                user.replace_input_with(node, wide)

    return program.edit(change, of="calls")


def test_the_smaller_value_is_carried():
    program = saved_in_half(stages())
    absorbed = pfeife.absorb(program)
    kept = [
        node.meta["val"].dtype
        for call in absorbed.calls
        if call.kind == pfeife.Kind.BACKWARD
        for node in absorbed.node(call.node).all_input_nodes
        if node.target is operator.getitem and "forward" in node.args[0].name
    ]
    assert kept and set(kept) == {torch.bfloat16}
    for node in program.module.graph.nodes:
        if getattr(node.meta.get("val"), "dtype", None) == torch.bfloat16:
            node.meta["side"] = "reader"
    everywhere = pfeife.absorb(program)
    read = everywhere.node("stage_1_backward").all_input_nodes
    assert all(node.meta["val"].dtype == torch.float32 for node in read)


@pytest.mark.parametrize(
    ("target", "where", "read", "words"),
    [
        (aten.neg_.default, "stage_1_forward", "add_1_on_1", "writes in place"),
        (aten.neg.default, "send_stage_0_forward_to_1", "x", "put it into a body"),
        (operator.neg, "stage_1_forward", "stage_0_forward", "read its parts"),
    ],
)
def test_what_has_no_place_is_refused(target, where, read, words):
    program = ranks()
    graph = program.edit(lambda module: None, of="calls").module
    names = {node.name: node for node in graph.graph.nodes}
    with graph.graph.inserting_before(names[where]):
        new = graph.graph.call_function(target, (names[read],))
    if names[where].target is send:
        names[where].args = ((new,), *names[where].args[1:])
    else:
        names[where].args = (new, *names[where].args[1:])
    graph.recompile()
    with pytest.raises(ValueError, match=f"the plain node {new.name} .*{words}"):
        pfeife.verify(attrs.evolve(program, module=graph))


def test_a_message_hands_on_all_that_is_sent():
    program = ranks()
    longer = program.rewrite(
        lambda o: o.make(send, (*o.args[0], *o.args[0]), *o.args[1:]) if o.target is send else None,
        of="calls",
    )
    with pytest.raises(ValueError, match=r"sends 2 values, of which receive_.* hands on"):
        pfeife.verify(settle(longer))
