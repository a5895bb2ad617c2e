"""What the toolkit makes, the backend takes: families, schedules, plans, costs, passes."""

import copy
import doctest
import functools
import itertools
import sys
from types import SimpleNamespace

import attrs
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import fx, nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, memory_curves
from pfeife.data import plain
from pfeife.ir.digest import program_digest
from pfeife.sched.cutting.partitions import even
from pfeife.testing import eager_accumulation

CORE = machine("cpu-core")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Some blocks, small enough to be built in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net() -> SimpleNamespace:
    """A model, its step, and batches of any number of rows."""
    torch.manual_seed(0)
    model = Net()

    def step(x):
        return model(x).square().mean()

    return SimpleNamespace(model=model, step=step, batch=lambda rows: torch.randn(rows, 4))


def compiled(**options):
    """What was built for the net after one step, which has eager's bits."""
    one, options = net(), {"microbatches": 4, **options}
    step = pfeife.compile(one.step, **options)
    check(one, step, 8, options["microbatches"])
    return step.backend.compiled[-1]


def check(one, step, rows: int, microbatches: int) -> None:
    """One step with eager's loss and gradients."""
    x = one.batch(rows)
    expected = eager_accumulation(one.step, one.model, [(p,) for p in x.chunk(microbatches)])
    one.model.zero_grad()
    loss = step(x)
    loss.backward()
    assert torch.equal(loss, expected.loss)
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name]), name


def by_pairs(problem: sched.Problem) -> pfeife.Schedule:
    """A function of a problem: the family "loops", two microbatches at a time."""
    stage_ranks = problem.stage_ranks
    assert problem.memory is not None and len(problem.memory) == problem.ranks
    return sched.families.loops(len(stage_ranks), problem.microbatches, stage_ranks, loop_batch=2)


OURS = pfeife.Family("ours", sched.families.zb_v, sched.families.folded, splits=True)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (OURS, sched.families.zb_v(4, 4, (0, 1, 1, 0))),
        (
            sched.POLICIES["loops"].bind(loop_batch=2),
            sched.families.loops(4, 4, (0, 1, 0, 1), loop_batch=2),
        ),
        (sched.families.gpipe(4, 4, (1, 0, 1, 0)), sched.families.gpipe(4, 4, (1, 0, 1, 0))),
        (by_pairs, sched.families.loops(4, 4, (0, 1, 0, 1), loop_batch=2)),
    ],
    ids=["a family", "a bound family", "a schedule", "a function"],
)
def test_a_schedule_of_ones_own(schedule, expected):
    found = compiled(stages=4, devices=["cpu", "cpu"], schedule=schedule)
    assert found.plan.schedule == expected


def test_a_schedule_brings_its_stages_and_its_first_microbatches():
    """A smaller batch runs the first of a schedule's microbatches; without gradients, and with the
    loss outside, the stages stay on its ranks."""
    one, order = net(), sched.families.zb_v(4, 4, (0, 1, 1, 0))
    step = pfeife.compile(one.step, microbatches=4, schedule=order)
    check(one, step, 8, 4)
    check(one, step, 6, 3)
    with torch.no_grad():
        step(one.batch(8))
    plans = [found.plan.schedule for found in step.backend.compiled]
    assert plans == [order, order.first(3), sched.families.forward_only(4, 4, (0, 1, 1, 0))]
    model = pfeife.compile(one.model, microbatches=4, schedule=order)
    model(one.batch(8)).sum().backward()
    assert model.backend.compiled[0].plan.schedule == sched.families.gpipe(4, 4, (0, 1, 1, 0))


def test_the_table_says_what_its_families_do():
    for name, family in sched.POLICIES.items():
        stage_ranks = family.placement(4, 2)
        order = family(4, 4, stage_ranks)
        split = any(action.do == "I" for rank in order.ranks for action in rank)
        assert (family.name, family.splits) == (name, split)
    assert {name for name, f in sched.POLICIES.items() if not f.seeds} == {
        "naive",
        "breadth-first",
        "loops",
    }


def test_arguments_of_a_family():
    family = sched.POLICIES["loops"].bind(loop_batch=2).bind(prefetch=1)
    assert str(family) == "loops(loop_batch=2, prefetch=1)"
    assert family(2, 4) == sched.families.loops(2, 4, loop_batch=2, prefetch=1)
    with pytest.raises(ValueError, match=r"loops has no arguments \['batch'\]; it has \['loop_b"):
        family.bind(batch=3)


def test_the_example_of_a_family():
    found = doctest.testmod(sys.modules["pfeife.sched.families.family"])
    assert found.attempted and not found.failed


def backwards_first(problem: sched.Problem) -> pfeife.Schedule:
    return sched.families.one_f_one_b(
        len(problem.stages), problem.microbatches + 1, problem.stage_ranks
    )


ORDER = sched.families.one_f_one_b(2, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": 3}, "option schedule=3: must be the name of a family, a Family"),
        ({"schedule": "zigzag"}, "schedule='zigzag' is not known"),
        ({"schedule": ORDER, "microbatches": 2}, "that is 2, but the given schedule runs 4; pass"),
        ({"schedule": ORDER, "microbatches": 8, "replicas": 2}, ""),
        ({"schedule": ORDER, "stages": 3}, "stages=3: the given schedule has 2 stages"),
        ({"schedule": ORDER, "devices": ["cpu"]}, "the given schedule is for 2 ranks, not 1"),
        ({"schedule": backwards_first, "stages": 2}, "it returned 5 microbatches .* has 4"),
        ({"schedule": lambda problem: None, "stages": 2}, "it returned NoneType, not a Schedule"),
        (
            {"schedule": pfeife.Family("whole", sched.families.zb_h1), "stages": 2},
            "Family with splits=True",
        ),
        ({"schedule": pfeife.Schedule(((), ()))}, "the given schedule runs 0"),
        (
            {"schedule": ORDER, "partition": lambda program: [0, 1, 1, 2]},
            r"the given schedule has 2 stages on ranks \[0, 1\], but 3 stages on ranks \[0, 1\]",
        ),
    ],
)
def test_wrong_schedules_are_refused(options, message):
    one = net()
    options = {"microbatches": 4, **options}
    if not message:
        pfeife.compile(one.step, **options)(one.batch(8))
        return
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, **options)(one.batch(8))
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_ranks_tell_options_apart_by_content_and_name():
    """The text that ranks compare says the same in every process, and other things otherwise."""
    options = [
        *({"schedule": sched.families.zb_v(2, 4)}, {"schedule": ORDER}, {"schedule": "zb-v"}),
        *({"plan": pfeife.Plan((0, 1), ORDER)}, {"costs": by_flops}, {"partition": [1]}),
        *({"passes": {"flat": [failing]}}, {"passes": {"ranks": [failing]}}, {"recompute": 2}),
        *({"schedule": by_pairs}, {"schedule": OURS}, {"schedule": OURS.bind()}),
    ]
    texts = [str(pfeife.backend(microbatches=4, **one).options) for one in options]
    assert len(set(texts)) == len(texts) - 1 and texts[-1] == texts[-2]
    assert not any(" at 0x" in text for text in texts)


# A plan of one's own.


def saved(path, **options) -> pfeife.Plan:
    """The plan of a step, written to a file."""
    plan = compiled(**options).plan
    plain.save(plan, path)
    return plan


@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 4, "schedule": "zb-v"}])
def test_a_recorded_plan_is_used_again(tmp_path, options):
    """From its file or as data, also for a batch of other rows and for a smaller one."""
    path = tmp_path / "plan.json"
    plan = saved(path, devices=["cpu", "cpu"], **options)
    assert plan.program is not None
    for spelled in (plan, path, str(path)):
        one = net()
        step = pfeife.compile(one.step, microbatches=4, plan=spelled)
        check(one, step, 16, 4)
        assert step.backend.compiled[0].plan == plan
    check(one, step, 9, 3)
    with torch.no_grad():
        step(one.batch(8))
    plans = [found.plan for found in step.backend.compiled]
    assert plans[1].schedule == plan.schedule.first(3) and plans[1].step_seconds is None
    assert plans[2].stage_ranks == plan.stage_ranks


def test_a_plan_by_hand():
    plan = pfeife.Plan((0, 1, 1, 0), sched.families.gpipe(2, 4))
    with pytest.raises(ValueError, match=r"stage"):  # a value would flow backwards
        compiled(plan=plan)
    for plan in (pfeife.Plan((0, 0, 1, 2), sched.families.gpipe(3, 4, (0, 1, 0))),):
        found = compiled(plan=plan)
        assert found.plan == plan and len(found.schedule.ranks) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage_of_cluster": (0, 1)}, "it is for 2 clusters, and this program has 4"),
        ({"program": "0" * 32}, "it was made for the program 0{32}, and this is [0-9a-f]{32}: ano"),
        ({"duplicated": ("nothing",)}, r"the plan duplicates \['nothing'\], which are no values"),
        (
            {"recompute": (pfeife.RecomputeOption(names=("nothing",)),) * 2},
            "the plan recomputes nothing, which stage 0 does not make",
        ),
        (
            {"schedule": sched.families.one_f_one_b(2, 3)},
            "that is 4, but the given plan runs 3; pass",
        ),
        ({"schedule": sched.families.forward_only(2, 4)}, "no action runs"),
    ],
)
def test_a_plan_of_something_else_is_refused(change, message):
    plan = pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    one = net()
    with pytest.raises(ValueError, match=message):
        step = pfeife.compile(one.step, microbatches=4, plan=attrs.evolve(plan, **change))
        step(one.batch(8))
    assert all(parameter.grad is None for parameter in one.model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan": 3}, "option plan=3: must be a Plan"),
        ({"plan": "nowhere.json"}, "option plan='nowhere.json': No such file"),
        ({"schedule": "gpipe"}, "options plan and schedule='gpipe': the plan has its schedule"),
        ({"stages": 3}, "stages=3: the given plan has 2 stages"),
        ({"partition": "uniform"}, "options plan and partition='uniform': the plan has decided"),
        ({"recompute": "always"}, "options plan and recompute='always'"),
        ({"devices": ["cpu"]}, "it is for 2 ranks a pipeline, and there are 1"),
        ({"split_at": {"blocks.1": "begin"}}, r"stages of the clusters are \[0, 0, 1, 1\], and by"),
        ({"memory_limit": 100}, "option plan: a limit of 100 bytes a rank: the best plan found"),
    ],
)
def test_a_plan_against_other_options(options, message):
    one, plan = net(), pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, **{"microbatches": 4, "plan": plan, **options})(one.batch(8))


def test_a_plan_and_what_it_cannot_do():
    """More microbatches than it has; backwards before forwards, with the loss outside."""
    one, plan = net(), pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 2))
    step = pfeife.compile(one.step, microbatches=2, plan=plan)
    check(one, step, 6, 2)
    with pytest.raises(ValueError, match="it runs 2 microbatches, and this batch is cut into 5"):
        step(one.batch(5))
    step = pfeife.compile(one.step, microbatches=2, schedule=plan.schedule)
    step(one.batch(6))
    with pytest.raises(ValueError, match="the given schedule runs 2 microbatches, not 5"):
        step(one.batch(5))
    model = pfeife.compile(one.model, microbatches=2, plan=plan)
    with pytest.raises(ValueError, match="with the loss outside"):
        model(one.batch(4))


def test_a_plan_that_is_not_json(tmp_path):
    (tmp_path / "plan.json").write_text('{"schedule": 3}')
    with pytest.raises(ValueError, match=r"plan.json': .*missing fields"):
        pfeife.backend(plan=tmp_path / "plan.json")


def clusters(one=None, rows: int = 2, *, split: bool = False) -> pfeife.Program:
    one = one or net()
    passes = [pfeife.fuse(), *([pfeife.split_backward()] if split else [])]
    program = pfeife.compose(*passes)(pfeife.capture(one.step, one.batch(rows)))
    return pfeife.annotate(estimate(program, CORE))(program)


def test_a_plan_knows_its_program():
    """By what is computed of what, whatever the batch; not by whether backwards are split."""
    digest = program_digest(clusters())
    assert program_digest(clusters(rows=5)) == digest == program_digest(clusters(split=True))
    deeper, other = net(), net()
    deeper.model.blocks.append(Block())
    other.model.forward = functools.partial(sigmoids, other.model)
    found = {digest, *(program_digest(clusters(one)) for one in (deeper, other))}
    assert len(found) == 3


def test_a_plan_keeps_to_where_state_is_trained():
    program, plan = clusters(), pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    first = program.ports(pfeife.Role.PARAMETER)[0].fqn
    adopt = functools.partial(sched.given.adopted, plan, program, machine=CORE, microbatches=4)
    assert adopt(owners={first: frozenset({0, 1})}) == plan
    with pytest.raises(ValueError, match=rf"{first} on ranks \[0\], .* it on ranks \[1\]"):
        adopt(owners={first: frozenset({1})})


# Costs of one's own.


def by_flops(program: pfeife.Program) -> pfeife.Costs:
    return pfeife.Costs("mine", {call.node: 1.0 + call.unit for call in program.calls})


def test_costs_of_ones_own():
    found = compiled(stages=2, costs=by_flops)
    assert [call.seconds for call in found.clusters.calls if call.kind == "F"] == [
        1.0,
        2.0,
        3.0,
        4.0,
    ]
    assert found.plan.stage_of_cluster == (0, 0, 0, 1)
    again = compiled(stages=2, costs=by_flops(found.clusters))
    assert again.plan == found.plan


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (3, "option costs=3: must be 'estimate' or 'measure', Costs, or a function"),
        ("guess", "must be 'estimate' or 'measure'"),
        (lambda program: {}, r"option costs=.*<lambda>: it returned \{\}, not Costs"),
        (pfeife.Costs("none", {}), r"the costs \(none\) know nothing of"),
    ],
)
def test_wrong_costs_are_refused(costs, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, stages=2, costs=costs)(one.batch(8))


# Passes of one's own.


def seen(level: str, found: list[str]):
    """A pass that changes nothing and notes where it was called."""

    def look(program: pfeife.Program) -> pfeife.Program:
        found.append(f"{level}: {len(program.calls)} calls")
        return pfeife.Program(
            program.module,
            program.inputs,
            program.outputs,
            program.calls,
            program.reductions,
            program.replicas,
            program.counts,
        )

    look.__qualname__ = f"look_at_{level}"
    return look


def test_passes_see_every_level_and_are_recorded():
    levels, found = ("flat", "clusters", "stages", "ranks"), []
    built = compiled(stages=2, passes={level: [seen(level, found)] for level in levels})
    assert set(found) == {
        "flat: 0 calls",
        "clusters: 8 calls",
        "stages: 4 calls",
        "ranks: 4 calls",
    }
    assert [one.maker for one in built.history] == [
        *("capture", "look_at_flat", "fuse", "look_at_clusters", "annotate", "partition"),
        *("look_at_stages", "insert_send_recv", "dp_wrap", "look_at_ranks"),
    ]


def tanh_as_sigmoid(program: pfeife.Program) -> pfeife.Program:
    """Another program with the same ports: nobody knows that but who wrote the pass."""
    module = copy.deepcopy(program.module)
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sigmoid.default
    return attrs.evolve(program, module=fx.GraphModule(module, module.graph))


def test_a_pass_may_change_what_is_computed():
    one = net()
    step = pfeife.compile(one.step, microbatches=4, stages=2, passes={"flat": [tanh_as_sigmoid]})
    x = one.batch(8)
    found = step(x)
    assert not torch.equal(found, pfeife.compile(one.step, microbatches=4)(x))
    one.model.forward = sigmoids.__get__(one.model)
    torch._dynamo.reset()
    assert torch.equal(found, pfeife.compile(one.step, microbatches=4)(x))


def sigmoids(model: Net, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = x + block.linear(x).sigmoid()
    return x


def without_a_result(program: pfeife.Program) -> pfeife.Program:
    module = copy.deepcopy(program.module)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    names = list(output.args[0])[:-1]
    output.args = ({name: output.args[0][name] for name in names},)
    kept = tuple(port for port in program.outputs if port.name in names)
    return attrs.evolve(program, module=fx.GraphModule(module, module.graph), outputs=kept)


def unsound(program: pfeife.Program) -> pfeife.Program:
    return attrs.evolve(program, inputs=program.inputs[1:])


def failing(program: pfeife.Program) -> pfeife.Program:
    raise RuntimeError("no way")


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ({"flats": [unsound]}, "option passes=.*must have lists of passes by the level"),
        ([unsound], "option passes=.*must have lists of passes by the level"),
        ({"flat": unsound}, "option passes: 'flat' has .*must be a list of functions"),
        ({"flat": ["fuse"]}, "option passes: 'flat' has .*must be a list of functions"),
        ({"flat": [without_a_result]}, r"without_a_result, on the program of flat: it has changed"),
        ({"clusters": [unsound]}, "unsound, on the program of clusters: the program is not well"),
        ({"stages": [lambda program: None]}, "on the program of stages: it returned NoneType, not"),
    ],
)
def test_wrong_passes_are_refused(passes, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, stages=2, passes=passes)(one.batch(8))


def test_a_pass_that_fails_is_named():
    one = net()
    step = pfeife.compile(one.step, microbatches=4, passes={"ranks": [failing]})
    with pytest.raises(RuntimeError, match="no way") as raised:
        step(one.batch(8))
    assert "in the pass failing of the option passes" in raised.value.__notes__[0]


# Where to cut, and what to recompute.


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("uniform", (0, 0, 1, 1)),
        ("parameters", (0, 0, 1, 1)),
        ("type:BLOCK", (0, 0, 1, 1)),
        ([1, 3], (0, 1, 1, 2)),
        (["blocks.1"], (0, 1, 1, 1)),
        (lambda program: [0] * 3 + [1], (0, 0, 0, 1)),
    ],
)
def test_partitions(partition, expected):
    several = len(set(expected)) > 2
    found = compiled(partition=partition, stages=None if several else 2)
    assert found.plan.stage_of_cluster == expected


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sets(st.integers(1, 7)),
)
def test_even_parts_are_the_best_of_all(weights, stages, borders):
    borders = sorted(border for border in borders if border < len(weights))
    every = []
    for starts in itertools.combinations(borders, stages - 1):
        edges = [0, *starts, len(weights)]
        loads = [sum(weights[a:b]) for a, b in itertools.pairwise(edges)]
        every.append((max(loads), sum(load**2 for load in loads)))
    assume(every)
    found = even(weights, borders, stages)
    loads = [sum(w for w, s in zip(weights, found, strict=True) if s == k) for k in range(stages)]
    assert (max(loads), sum(load**2 for load in loads)) == min(every)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ("layers", "option partition='layers': must be 'parameters', 'uniform', 'type:Regex'"),
        ([1, "blocks.1"], "option partition=.*must be 'parameters'"),
        ("type:conv", r"no module has such a class; there are \['Block', 'Linear', 'Net'\]"),
        ("type:(", r"partition='type:\(': missing \)"),
        ("type:net", "2 stages, and only 0 places for a border"),
        ([3, 1], r"partition=\[3, 1\]: the clusters at which stages start go up, from 1 to 3"),
        (["blocks.9"], "no module of that name computes anything"),
        (lambda program: [0], "it returned 1 stages for 4 clusters"),
    ],
)
def test_wrong_partitions_are_refused(partition, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, stages=2, partition=partition)(one.batch(8))


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("never", [0, 0]),
        ("always", [2, 2]),
        ("except_last", [2, 0]),
        (1, [2, 2]),
        (2, [1, 1]),
        (["blocks.0"], [1, 0]),
    ],
)
def test_what_is_recomputed(recompute, again):
    """By stages, how many of their two blocks."""
    plan = compiled(partition="uniform", stages=2, recompute=recompute).plan
    found = plan.recompute or (pfeife.RecomputeOption(),) * 2
    assert [sum("tanh" in name for name in one.names) for one in found] == again
    assert (plan.step_seconds > compiled(partition="uniform", stages=2).plan.step_seconds) == (
        any(again)
    )


def test_backwards_in_two_parts_recompute_too():
    found = compiled(partition="uniform", stages=2, schedule="zb-h1", recompute=1)
    assert all(option.names for option in found.plan.recompute)


def test_as_much_is_recomputed_as_the_memory_asks_for():
    limits = [
        peaks(compiled(stages=2, schedule="gpipe", recompute=how)) for how in ("never", "always")
    ]
    most, least = limits
    assert least < most
    seconds = []
    for limit in (most, (most + least) // 2, least):
        found = compiled(stages=2, schedule="gpipe", recompute="auto", memory_limit=limit)
        assert peaks(found) <= limit
        seconds.append(found.plan.step_seconds)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    with pytest.raises(ValueError, match="the best plan found needs"):
        compiled(stages=2, schedule="gpipe", recompute="auto", memory_limit=least - 1)


def peaks(found) -> int:
    return max(curve.peak for curve in memory_curves(found.program, found.schedule))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "sometimes"}, "option recompute='sometimes': must be one of"),
        ({"recompute": 0}, "option recompute=0: must be one of"),
        ({"recompute": True}, "option recompute=True: must be one of"),
        ({"recompute": 5}, r"recompute=5: the model has 4 blocks \(modules such as"),
        ({"recompute": ["head"]}, r"no module 'head' computes anything; there are \['blocks.0', "),
        ({"recompute": "always", "schedule": "search"}, "the search decides what to recompute"),
        ({"partition": "uniform", "split_at": {"blocks.1": "end"}}, "both say where to cut"),
    ],
)
def test_wrong_requests_to_recompute_are_refused(options, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, stages=2, **options)(one.batch(8))


@pytest.mark.whole
def test_searches_side_by_side():
    """Some more seeds, each with the whole budget: never a worse plan, and the same one again."""
    search = {"devices": ["cpu", "cpu"], "schedule": "search", "search_work": 2000}
    one, *two = (compiled(jobs=jobs, **search).plan for jobs in (1, 2, 2))
    assert two[0] == two[1] and two[0].step_seconds <= one.step_seconds


# A runtime of one's own.


class InOrder:
    """A runtime that computes in no order but that of the program: `evaluate`, which is given the
    program that all passes have made."""

    def __init__(self, program: pfeife.Program, order: pfeife.Schedule, bodies: dict):
        self.program = program
        self.gradients = frozenset(port.fqn for port in program.ports(pfeife.Role.GRADIENT))

    def start(self, state, microbatches, *, seed=0, tangents=None) -> "InOrder":
        self.make = functools.partial(
            pfeife.evaluate, self.program, state, microbatches, seed=seed, tangents=tangents
        )
        return self

    def run(self, *, forward=True, backward=True, watch=None) -> None:
        self.found = self.make()

    def result(self, *, outputs=True) -> pfeife.Result:
        return self.found


def test_a_runtime_of_ones_own():
    assert isinstance(compiled(stages=2, runtime=InOrder).pipeline, InOrder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": 3}, "option runtime=3: must be a function of"),
        ({"runtime": InOrder, "devices": ["cpu"]}, "it runs all ranks in one process"),
    ],
)
def test_a_wrong_runtime_is_refused(options, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, **options)(one.batch(8))
