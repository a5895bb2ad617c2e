"""What the toolkit makes, the backend takes: families, schedules, plans, costs, passes."""

import contextlib
import copy
import functools
from collections.abc import Sequence

import attrs
import pytest
import torch
from small import check, compiled, net, sigmoids
from torch import fx, nn

import pfeife
from pfeife import sched
from pfeife.data import plain
from pfeife.passes.compose import pass_name
from pfeife.sched.search.parallel import search_side_by_side
from pfeife.testing import check_pass


def by_pairs(problem: sched.Problem) -> pfeife.Schedule:
    """A function of a problem: the family "loops", two microbatches at a time."""
    stage_ranks = problem.stage_ranks
    assert problem.memory is not None and len(problem.memory) == problem.ranks
    return sched.families.loops(len(stage_ranks), problem.microbatches, stage_ranks, loop_batch=2)


def on_one_each(stages: int, microbatches: int, ranks: Sequence[int] | None) -> pfeife.Schedule:
    """Looks not at the ranks that it is given."""
    return sched.families.gpipe(stages, microbatches)


ONE_EACH = pfeife.Family("one each", on_one_each)
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
        ({"schedule": ORDER, "stages": 3}, "stages=3: the given schedule has 2 stages"),
        ({"schedule": ORDER, "devices": ["cpu"]}, "the given schedule is for 2 ranks, not 1"),
        (
            {"schedule": backwards_first, "stages": 2},
            "it returned 5 microbatches .* asked for are 4",
        ),
        ({"schedule": lambda problem: None, "stages": 2}, "it returned NoneType, not a Schedule"),
        ({"schedule": sched.families.gpipe, "stages": 2}, "with a Problem .*wrap .*Family"),
        (
            {"schedule": ONE_EACH, "stages": 4, "devices": ["cpu"] * 2},
            r"family one each: it returned .*\[0, 1, 2, 3\]; asked for are .*\[0, 1, 0, 1\]",
        ),
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
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, **{"microbatches": 4, **options})(one.batch(8))
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_each_replica_runs_a_schedule_of_ones_own():
    """It is for the microbatches of one; two of them add up in another order than eager."""
    one = net()
    step = pfeife.compile(one.step, microbatches=8, replicas=2, schedule=ORDER)
    x = one.batch(8)
    torch.testing.assert_close(step(x), one.step(x))
    assert step.backend.compiled[0].plan.schedule == ORDER


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
        ({"memory_limit": 100}, "option plan: the best plan found needs .* of 100 B on rank"),
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
    """Another program with the same ports."""
    module = copy.deepcopy(program.module)
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sigmoid.default
    return attrs.evolve(program, module=fx.GraphModule(module, module.graph))


def test_a_pass_may_change_what_is_computed():
    """Where that is said."""
    one = net()
    passes = {"flat": [tanh_as_sigmoid]}
    step = pfeife.compile(one.step, microbatches=4, stages=2, passes=passes, check=False)
    x = one.batch(8)
    found = step(x)
    assert not torch.equal(found, pfeife.compile(one.step, microbatches=4)(x))
    one.model.forward = sigmoids.__get__(one.model)
    torch._dynamo.reset()
    assert torch.equal(found, pfeife.compile(one.step, microbatches=4)(x))


def in_halves(program: pfeife.Program) -> pfeife.Program:
    """New nodes as fx makes them: without a value, in a graph whose module has its old code."""
    module = fx.GraphModule(program.module, copy.deepcopy(program.module.graph))
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.tanh.default:
            with module.graph.inserting_before(node):
                again = module.graph.call_function(torch.ops.aten.tanh.default, node.args)
                half = module.graph.call_function(torch.ops.aten.mul.Tensor, (again, 0.5))
                whole = module.graph.call_function(torch.ops.aten.add.Tensor, (half, half))
            node.replace_all_uses_with(whole)
    return attrs.evolve(program, module=module)


def stale(program: pfeife.Program) -> pfeife.Program:
    """A wrong pass whose module still has the right code."""
    module = fx.GraphModule(program.module, copy.deepcopy(program.module.graph))
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.tanh.default:
            node.target = torch.ops.aten.sigmoid.default
    return attrs.evolve(program, module=module)


def test_what_a_pass_edits_is_settled():
    one, x = net(), net().batch(8)
    program = pfeife.capture(one.step, x[:2])
    state = pfeife.state_of(program, one.model)
    result = check_pass(in_halves, program, state, [x[:2]])
    assert all("val" in n.meta for n in result.module.graph.nodes if n.op == "call_function")
    with pytest.raises(AssertionError, match="differs by up to"):
        check_pass(stale, program, state, [x[:2]])
    with pytest.raises(AssertionError, match="returned NoneType, not a Program"):
        check_pass(lambda program: None, program, state, [x[:2]])
    step = pfeife.compile(one.step, microbatches=4, stages=2, passes={"flat": [in_halves]})
    assert torch.equal(step(x), pfeife.compile(one.step, microbatches=4)(x))


aten = torch.ops.aten


def scaled(port: str, factor: float):
    """A wrong pass of one's own: a result is multiplied by something."""

    def scale(program: pfeife.Program) -> pfeife.Program:
        def change(module: fx.GraphModule) -> None:
            (output,) = (node for node in module.graph.nodes if node.op == "output")
            results = dict(output.args[0])
            with module.graph.inserting_before(output):
                args = (results[port], factor)
                results[port] = module.graph.call_function(aten.mul.Tensor, args)
            output.args = (results,)

        return program.edit(change, of="calls" if program.calls else "bodies")

    return scale


def without_bias(program: pfeife.Program) -> pfeife.Program:
    def change(operation):
        if operation.target is not aten.addmm.default:
            return None
        return operation.make(aten.mm.default, *operation.args[1:])

    return program.rewrite(change)


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def loss(self, x):
        return self.net(x).square().mean()


WRONG = {
    "gradient": ("flat", scaled("grad_net_0_weight", 1.05), "gradient net.0.weight"),
    "of stages": ("stages", scaled("grad_net_0_weight", 1.05), "gradient net.0.weight"),
    "with messages": ("ranks", scaled("grad_net_0_weight", 1.05), "gradient net.0.weight"),
    "loss": ("clusters", scaled("loss", 1.05), "loss"),
    "bias": ("flat", without_bias, "loss"),
    "buffer": ("flat", scaled("new_net_1_running_var", 1.05), "buffer net.1.running_var"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_pass_that_computes_something_else_is_refused(kind, replicas):
    level, wrong, name = WRONG[kind]
    model = Trained()
    options = {"microbatches": 4, "stages": 2, "replicas": replicas}
    step = pfeife.compile(model.loss, **options, passes={level: [seen(level, []), wrong]})
    with pytest.raises(ValueError, match=f"after {pass_name(wrong)} .* another {name} on the"):
        step(torch.randn(16, 8))


def test_a_pass_may_round_as_much_as_is_said():
    x = torch.randn(8, 8)
    for allowed, right in ((True, False), (0.01, False), (0.1, True), (False, True)):
        passes = {"flat": [scaled("grad_net_0_weight", 1.05)]}
        step = pfeife.compile(Trained().loss, microbatches=2, passes=passes, check=allowed)
        with contextlib.nullcontext() if right else pytest.raises(ValueError, match="another"):
            step(x).backward()


def test_a_pass_is_compared_with_the_loss_outside_and_one_microbatch():
    model = Trained()
    for microbatches in (1, 2):
        step = pfeife.compile(
            model.net, microbatches=microbatches, passes={"flat": [scaled("grad__0_weight", 1.05)]}
        )
        with pytest.raises(ValueError, match=r"another gradient 0\.weight on"):
            step(torch.randn(8, 8))


def in_place(program: pfeife.Program) -> pfeife.Program:
    for node in program.module.graph.nodes:
        if node.target is torch.ops.aten.pow.Tensor_Scalar:
            node.args = (node.args[0], 4)
    program.module.recompile()
    return program


def strange(program: pfeife.Program) -> pfeife.Program:
    module = fx.GraphModule(program.module, copy.deepcopy(program.module.graph))
    with module.graph.inserting_before(next(iter(reversed(module.graph.nodes)))):
        module.graph.call_function(torch.ops.aten.mm.default, (1, 2))
    return attrs.evolve(program, module=module)


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
        ({"flat": [strange]}, r"strange, .*mm.* has no meta\['val'\], and it cannot be told from"),
        ({"flat": [in_place]}, "in_place, on the program of flat: it edited .*edits a copy"),
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


def test_the_option_jobs_is_that_of_the_search(monkeypatch):
    asked = []

    def alone(problems, budget, seed, seeds, jobs, further):
        asked.append(jobs)
        return search_side_by_side(problems, budget, seed, seeds, 1, further)

    monkeypatch.setattr("pfeife.sched.search.search.search_side_by_side", alone)
    compiled(jobs=2, devices=["cpu", "cpu"], schedule="search", search_work=500)
    assert set(asked) == {2}


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


class WithoutBias(InOrder):
    """Loses gradients."""

    def result(self, *, outputs=True) -> pfeife.Result:
        kept = {n: g for n, g in self.found.gradients.items() if not n.endswith("bias")}
        return attrs.evolve(self.found, gradients=kept)


class ThatSaysSo(InOrder):
    def __init__(self, *given):
        super().__init__(*given)
        self.gradients = frozenset(n for n in self.gradients if not n.endswith("bias"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime": WithoutBias}, "the runtime's step has no gradient of .*bias"),
        ({"runtime": ThatSaysSo}, "its pipeline says that it has no gradients of .*bias"),
        ({"runtime": 3}, "option runtime=3: must be a function of"),
        ({"runtime": InOrder, "devices": ["cpu"]}, "it runs all ranks in one process"),
    ],
)
def test_a_wrong_runtime_is_refused(options, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, **options)(one.batch(8))
