"""Every pass keeps what a program means, on programs that nobody has thought of."""

import functools

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, EQUAL_TO_EAGER, case
from pass_rows import ROWS
from programs import CPU_CORE, captured, clusters, lowered
from share import crossed, random_cases

import pfeife
from pfeife import sched
from pfeife.cost import measure
from pfeife.ir.parts import Port, Role
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, check_pass, eager_accumulation, nets


@pytest.mark.parametrize(
    ("name", "policy", "stages"), crossed([*CASES], ["gpipe", "1f1b"], [1, 2, 3, 4])
)
def test_every_level_and_the_local_runtime_equal_eager(name, policy, stages):
    one, program, state, microbatches = captured(name)
    flat = pfeife.evaluate(program, state, microbatches)
    if name in EQUAL_TO_EAGER:
        assert_same(eager_accumulation(one.step, one.model, microbatches), flat)
    fused = clusters(program)
    plan = sched.plan(
        fused, machine=CPU_CORE, microbatches=len(microbatches), stages=stages, schedule=policy
    )
    passes = [pfeife.partition(plan), pfeife.split_backward(), pfeife.insert_send_recv()]
    for recorded in pfeife.record(fused, *passes):
        assert_same(flat, pfeife.evaluate(recorded.program, state, microbatches), one.tied)
    for ranks_program in (
        recorded.program,
        pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused),
    ):
        pipeline = LocalPipeline(ranks_program, lowered(plan, ranks_program))
        assert_same(flat, pipeline(state, microbatches), one.tied)


@random_cases(32)
@given(st.data())
def test_random_programs(data):
    net = data.draw(nets())
    microbatches = [(torch.randn(3, 4),) for _ in range(data.draw(st.integers(1, 4)))]
    check_random(data, net, lambda x: net(x).square().mean(), [microbatches])


@random_cases(16)
@given(st.data())
def test_random_programs_for_members(data):
    """In float64: a sum that is cut is rounded otherwise, and what follows may look at signs."""
    net = data.draw(nets()).double()
    microbatches = [(torch.randn(3, 4).double(),) for _ in range(data.draw(st.integers(1, 2)))]
    check_random(data, net, lambda x: net(x).square().mean(), [microbatches], members=True)


@pytest.mark.parametrize("members", [False, True])
@random_cases(12)
@given(st.data())
def test_random_programs_of_open_sizes(members, data):
    """Of any number of rows, and of any length of these. Members cut both where they divide them
    when captured, and then hold for such sizes alone."""
    net, count = data.draw(nets()), data.draw(st.integers(1, 4))
    are_divided = members and data.draw(st.booleans())
    shapes = ((6, 12), (12, 6), (18, 24)) if are_divided else ((3, 2), (2, 5), (4, 3))
    steps = [[(torch.randn(*sizes, 4),) for _ in range(count)] for sizes in shapes]
    for dim in range(2):
        torch._dynamo.mark_dynamic(steps[0][0][0], dim)

    def step(x):
        return net(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1).square().mean() * x.shape[1]

    check_random(data, net, step, steps, members)


def check_random(data, net, step, steps, members=False):
    """Draws passes for a step, those for `members` too if asked for, and compares what becomes of
    each of several batches of it."""
    torch._dynamo.reset()
    microbatches, *others = steps
    program = pfeife.capture(step, *microbatches[0])
    assert len(program.ports(Role.SIZE)) == (2 if others else 0)
    state = {n: v.clone() for n, v in pfeife.state_of(program, net).items()}
    check = functools.partial(check_pass, state=state, microbatches=microbatches, others=others)
    for batch in steps:
        assert_same(eager_accumulation(step, net, batch), pfeife.evaluate(program, state, batch))
    tied: set[str] = set()
    for row in ROWS:
        if row.name == "shard" and not members:
            continue
        if not row.sometimes or data.draw(st.booleans()):
            one, rounding = data.draw(row.draw(program, len(microbatches)))
            program = check(one, program, rounding=rounding)
            tied |= set(rounding or ())
    if members:  # several processes run such programs: tests/distributed/members.py
        return
    rank_of = {call.unit: call.rank for call in program.calls}
    each = len(microbatches) // program.replicas
    family = sched.policy(data.draw(st.sampled_from(["gpipe", "1f1b"])))
    order = family(program.units, each, [rank_of[unit] for unit in range(program.units)])
    pipeline = LocalPipeline(program, sched.verify_schedule(sched.lower(order, program)))
    # Parts of one sum may be added in another order on ranks with several stages.
    for batch in steps:
        assert_same(pfeife.evaluate(program, state, batch), pipeline(state, batch), tied)


SIZED = {
    "GPT": lambda rows, n: (torch.randint(23, (rows, n)), torch.randint(23, (rows, n))),
    "BatchNormNet": lambda rows, n: (torch.randn(rows, 1, n, 5), torch.randint(3, (rows,))),
    "DropoutNet": lambda rows, n: (torch.randn(rows, n, 6),),
}


@pytest.mark.parametrize("name", SIZED)
def test_what_changes_results_does_it_at_all_sizes(name):
    """A pass of a program with open sizes gives what it gives of one for each size."""
    one, program = case(name), None
    for rows, length in ((2, 4), (3, 7)):
        torch.manual_seed(0)
        microbatches = [SIZED[name](rows, length) for _ in range(2)]
        torch._dynamo.reset()
        fixed = pfeife.capture(one.step, *microbatches[0])
        if program is None:
            torch._dynamo.reset()
            for value in microbatches[0]:
                for dim in range(value.dim() if name == "GPT" else min(value.dim(), 3)):
                    if value.shape[dim] in (rows, length):
                        torch._dynamo.mark_dynamic(value, dim)
            program = pfeife.capture(one.step, *microbatches[0])
            fused = clusters(program)
            state = pfeife.state_of(program, one.model)
            plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2, recompute="always")
        assert len(program.ports(Role.SIZE)) >= 2
        for flat in (pfeife.accumulate_in(torch.float64), pfeife.defer_batch_norm()):
            found, expected = (
                pfeife.evaluate(flat(p), state, microbatches) for p in (program, fixed)
            )
            assert_same(found, expected)
            assert_same(
                pfeife.evaluate(pfeife.fuse()(flat(program)), state, microbatches), expected
            )
        expected = pfeife.evaluate(fixed, state, microbatches)
        assert_same(expected, pfeife.evaluate(pfeife.apply(plan)(fused), state, microbatches))


def test_progress_of_passes_is_told():
    net, told = torch.nn.Linear(4, 4), []
    flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(2, 4))
    pfeife.record(flat, pfeife.fuse(), pfeife.fuse(), progress=lambda *at: told.append(at))
    assert told == [(1, 2), (2, 2)]


def test_every_pass_has_a_row():
    # These change what comes out: test_precision.py, test_defer_batch_norm.py.
    others = {"accumulate_in", "master_weights", "defer_batch_norm"}
    together = {"compose", "record", "apply", "passes_of"}  # test_apply.py
    told = {"Pass", "History", "Totals", "totals", "difference"}  # test_changes.py
    names = set(pfeife.passes.__all__) - told - together
    assert {row.name for row in ROWS} - {"plain nodes"} | others == names


@pytest.mark.parametrize("last", [True, False])
def test_what_nobody_reads_is_no_cluster_of_its_own(last):
    _, program, state, microbatches = captured("GPT")
    graph = torch.fx.Graph()
    result = graph.graph_copy(program.module.graph, {})
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    weight = graph.find_nodes(op="placeholder", target="blocks_0_qkv_weight")[0]
    tagged = [node for node in nodes if node.meta.get("partitioner_tag") == "is_backward"]
    with graph.inserting_before(tagged[0]) if last else graph.inserting_after(inputs[-1]):
        dead = graph.call_function(torch.ops.aten.exp.default, (weight,))
    dead.meta["val"] = weight.meta["val"]
    graph.output(result)
    changed = attrs.evolve(program, module=torch.fx.GraphModule(program.module, graph))
    fused = clusters(changed)
    assert fused.units == clusters(program).units
    assert_same(*(pfeife.evaluate(one, state, microbatches) for one in (program, fused)))


def cut_at(program: pfeife.Program, points: dict[str, str]) -> tuple[pfeife.Program, pfeife.Plan]:
    """Clusters, and a plan with stages that begin or end at modules."""
    fused = clusters(program, boundaries=points)
    cuts = sched.cutting.split_at(fused, points)
    return fused, sched.plan(fused, machine=CPU_CORE, microbatches=2, cuts=cuts)


def test_boundaries_by_name_and_by_marker():
    one, program, _, _ = captured("GPT")
    fused, plan = cut_at(program, {"blocks.0": "begin", "blocks.1": "end"})
    staged = pfeife.partition(plan)(fused)
    stages_of = {
        port.fqn: {call.unit for call in calls}
        for port in program.ports(pfeife.Role.PARAMETER)
        for calls in [pfeife.ir.messages.holders(staged)[port.fqn]]
    }
    blocks = [stages for name, stages in stages_of.items() if name.startswith("blocks.")]
    assert stages_of["embed.weight"] == {0} and blocks == [{1}] * len(blocks)
    assert stages_of["head.weight"] == {2}

    def marked(tokens, targets):
        x = one.model.embed(tokens)
        x = pfeife.stage_boundary(x)
        return torch.nn.functional.cross_entropy(one.model.head(x).flatten(0, 1), targets.flatten())

    fused = clusters(pfeife.capture(marked, *one.batch(2)))
    assert sched.cutting.marked(fused) == (0, 1)


def test_wrong_requests_are_refused():
    _, program, _, _ = captured("GPT")
    with pytest.raises(ValueError, match="no module of that name"):
        pfeife.fuse(boundaries={"blocks.9": "begin"})(program)
    fused = clusters(program)
    plan = functools.partial(sched.plan, fused, machine=CPU_CORE, microbatches=2)
    with pytest.raises(ValueError, match=r"only .* clusters"):
        plan(stages=1000)
    with pytest.raises(ValueError, match="not known; there are"):
        plan(stages=2, schedule="2f2b")
    with pytest.raises(ValueError, match="memory_limit=10: the best plan found needs"):
        plan(stages=2, memory_limit=10)
    with pytest.raises(ValueError, match="give fuse the same boundaries"):
        sched.cutting.split_at(fused, {"blocks.1.mlp.2": "begin"})
    other = sched.plan(clusters(captured("UNet")[1]), machine=CPU_CORE, microbatches=2, stages=2)
    with pytest.raises(ValueError, match="the plan is for"):
        pfeife.partition(other)(fused)


def test_masks_are_computed_where_they_are_read():
    _, program, _, _ = captured("GPT")
    fused, plan = cut_at(program, {"blocks.0": "begin", "blocks.1": "begin"})
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    crossing = pfeife.ir.messages.messages(sent)
    shapes = [
        tuple(pfeife.ir.nodes.find_node(sent.module, name).meta["val"].shape)
        for message in crossing
        for name in message.values
    ]
    assert plan.duplicated and (8, 8) not in shapes
    assert shapes == [(2, 8, 16)] * len(shapes), "one activation or gradient a border"


def test_a_buffer_of_two_stages_is_refused():
    norm = torch.nn.BatchNorm1d(4)
    lin = torch.nn.Linear(4, 4)

    def step(x):
        return lin(norm(pfeife.stage_boundary(lin(norm(x))))).square().mean()

    fused = clusters(pfeife.capture(step, torch.randn(3, 4)))
    assert fused.units == 2
    order = sched.families.gpipe(2, 1)
    with pytest.raises(
        ValueError, match=r"num_batches_tracked is updated and used by several stages"
    ):
        pfeife.partition(pfeife.Plan((0, 1), order))(fused)
    assert sched.cutting.clusters_of(sched.cutting.workload_of(fused)).blocked == {1}


def test_measured_costs_plan_too():
    _, program, _, _ = captured("UNet")
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(measure(fused, repeats=2))(fused)
    assert sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2).stages == 2


def test_captured_on_no_device_and_run_on_one():
    """A model on the meta device has the graph of the same model on the CPU."""
    one, program, state, microbatches = captured("GPT")
    with torch.device("meta"):
        model = type(one.model)()
        tokens = torch.zeros(2, 8, dtype=torch.int64)

    def step(tokens, targets):
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    found = pfeife.capture(step, tokens, tokens.clone())
    assert_same(
        pfeife.evaluate(program, state, microbatches), pfeife.evaluate(found, state, microbatches)
    )


def test_a_parameter_that_is_used_a_thousand_times():
    """The sum of its gradient's parts is deeper than Python calls may be."""
    graph, vector = torch.fx.Graph(), torch.ones(3)
    w, x, tangent = map(graph.placeholder, ("w", "x", "tangent"))
    out = graph.call_function(torch.ops.aten.mul.Tensor, (w, x))
    parts = [graph.call_function(torch.ops.aten.mul.Tensor, (tangent, x)) for _ in range(1200)]
    total = functools.reduce(
        lambda a, b: graph.call_function(torch.ops.aten.add.Tensor, (a, b)), parts
    )
    graph.output({"out": out, "gradient": total})

    def port(name, role, fqn):
        return Port(name, role, (fqn,), vector.shape, vector.dtype, vector.device)

    inputs = port("w", Role.PARAMETER, "w"), port("x", Role.BATCH, "x")
    flat = pfeife.Program(
        torch.fx.GraphModule(torch.nn.Module(), graph),
        (*inputs, port("tangent", Role.TANGENT, "out")),
        (port("out", Role.OUTPUT, "out"), port("gradient", Role.GRADIENT, "w")),
    )
    staged = pfeife.partition(pfeife.Plan((0,), sched.POLICIES["gpipe"](1, 1)))(pfeife.fuse()(flat))
    arguments = {"w": vector}, [(vector,)]
    given = [{"out": torch.tensor([0.1, 0.2, 0.3])}]
    assert_same(*(pfeife.evaluate(one, *arguments, tangents=given) for one in (flat, staged)))
