"""Tensors are made on the device of the rank that reads them."""

import attrs
import pytest
import torch
from programs import CPU_CORE, captured, clusters, lowered

import pfeife
from pfeife import sched
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, check_pass


def test_every_rank_makes_its_tensors_on_its_device():
    _, program, state, microbatches = captured("GPT")
    fused = clusters(program)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=2)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    check_pass(pfeife.place(["cpu", "cpu"]), sent, state, microbatches)
    placed = pfeife.verify(pfeife.place(["cpu", "meta"])(sent))
    on_meta = {call.rank for call in placed.calls if "device: meta" in str(placed.body(call).graph)}
    assert on_meta == {1}, "rank 1 computes the mask for itself"
    pipeline = LocalPipeline(sent, lowered(plan, sent), [torch.device("cpu")] * 2)
    expected = pfeife.evaluate(program, state, microbatches)
    assert_same(expected, pipeline(state, microbatches))
    with pytest.raises(ValueError, match="give every rank a device"):
        pfeife.place(["cpu"])(sent)


def test_bodies_are_placed_whatever_their_names():
    """A body is found by what its call runs: other names than the nodes', or one for two ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def step(x):
        h = pfeife.stage_boundary(model[0](x) * torch.arange(4.0))
        return (model[1](h) * torch.arange(4.0)).square().mean()

    microbatches = [(torch.randn(2, 4),)] * 2
    program = pfeife.capture(step, *microbatches[0])
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 2))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(pfeife.fuse()(program))
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(sent.module.graph, {}))
    bodies = {}
    for node in graph.nodes:
        if node.op == "call_module":
            bodies[f"body_of.{node.name}"] = sent.module.get_submodule(node.target)
            node.target = f"body_of.{node.name}"
    renamed = attrs.evolve(sent, module=torch.fx.GraphModule(bodies, graph))
    pfeife.verify(renamed)
    placed = pfeife.verify(pfeife.place(["cpu", "meta"])(renamed))
    for call in placed.calls:
        text = str(placed.body(call).graph)
        assert ("device: meta" in text) == (call.rank == 1 and "aten.arange" in text), text
    state = pfeife.state_of(program, model)
    check_pass(pfeife.place(["cpu", "cpu"]), renamed, state, microbatches)


def test_constants_are_on_the_rank_that_reads_them():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def step(x):
        h = pfeife.stage_boundary(model[0](x) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return (model[1](h) * torch.tensor([4.0, 3.0, 2.0, 1.0])).square().mean()

    microbatches = [(torch.randn(2, 4),)] * 2
    program = pfeife.capture(step, *microbatches[0])
    fused, devices = pfeife.fuse()(program), [torch.device("cpu"), torch.device("meta")]
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 2))
    passes = [pfeife.partition(plan), pfeife.place(devices), pfeife.insert_send_recv()]
    placed = pfeife.compose(*passes)(fused)
    constants = [n.name for n in placed.module.graph.nodes if n.op == "get_attr"]
    assert len(constants) == 2
    pipeline = LocalPipeline(placed, lowered(plan, placed), devices)
    for runner, step in pipeline.start(pfeife.state_of(program, model), microbatches).runners:
        for values in step.values:
            assert {values[name].device for name in constants} == {devices[runner.rank]}
