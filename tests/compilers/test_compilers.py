"""Stage compilers: the same step through compiled bodies, and what compilers may get wrong."""

import logging
import shutil
from pathlib import Path

import attrs
import models
import pytest
import torch
from models import GPT, case, gpt, tied_gpt
from share import crossed, whole
from torch import fx, nn

import pfeife
from pfeife import _torch, sched
from pfeife.backend.settings.options import options_from
from pfeife.compilers import BodyCompiler, compile_bodies, compiler_name, cuda_graphs, fingerprint
from pfeife.cost import estimate, machine, measure
from pfeife.ir.digest import fingerprint as text_of
from pfeife.ir.parts import Kind
from pfeife.runtime import LocalPipeline
from pfeife.testing import assert_same, eager_accumulation

CORE = machine("cpu-core")
needs_cpp = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler"
)


@attrs.frozen(eq=False)
class Staged:
    """A case as a program of ranks, with its state and microbatches."""

    program: pfeife.Program
    state: dict
    microbatches: list
    schedule: pfeife.Schedule

    def run(self, bodies=None, schedule=None, **options) -> pfeife.Result:
        pipeline = LocalPipeline(self.program, schedule or self.schedule, bodies=bodies)
        return pipeline(self.state, self.microbatches, **options)

    def ordered(self, name: str) -> pfeife.Schedule:
        """The schedule of another family for the same stages."""
        order = sched.policy(name)(self.program.units, len(self.microbatches), (0, 1))
        return sched.verify_schedule(sched.lower(order, self.program))


def staged(one, *, split=True, rows=2) -> Staged:
    """Two stages on two ranks, three microbatches."""
    torch._dynamo.reset()
    microbatches = [one.batch(rows, seed) for seed in range(3)]
    program = pfeife.capture(one.step, *microbatches[0])
    state = pfeife.state_of(program, one.model)
    clusters = pfeife.fuse()(program)
    clusters = pfeife.split_backward()(clusters) if split else clusters
    clusters = pfeife.annotate(estimate(clusters, CORE))(clusters)
    order = "zb-h1" if split else "1f1b"
    plan = sched.plan(clusters, machine=CORE, microbatches=3, stages=2, schedule=order)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    return Staged(ranks, state, microbatches, schedule)


class Noted:
    """A compiler that runs the graphs, notes what it is given, and spoils its copy of it."""

    def __init__(self, boxed=False):
        self.boxed, self.graphs, self.examples = boxed, [], []

    def __call__(self, graph: fx.GraphModule, examples: list[torch.Tensor]):
        code = fx.GraphModule(graph, fx.Graph())
        code.graph.output(code.graph.graph_copy(graph.graph, {}))
        code.recompile()
        self.graphs.append(str(graph.graph))
        self.examples.append(examples)
        for node in reversed(graph.graph.nodes):
            graph.graph.erase_node(node)
        if not self.boxed:
            return code

        def boxed(arguments: list[torch.Tensor]) -> list[torch.Tensor]:
            results = code(*arguments)
            arguments.clear()
            return list(results)

        boxed._boxed_call = True
        return boxed


class Deduplicating:
    """A compiler that returns what it has already, where a result has the same elements."""

    def __call__(self, graph, examples):
        def run(*arguments):
            known, results = list(arguments), []
            for value in graph(*arguments):
                same = [k for k in known if torch.equal(k.flatten(), value.flatten())]
                one = same[0] if same else value
                results.append(one if one.shape == value.shape else one.view(value.shape))
                known.append(results[-1])
            return results

        return run


@needs_cpp
@pytest.mark.parametrize("name", ["DropoutNet", *map(whole, ("GPT", "TiedGPT", "BatchNormNet"))])
def test_inductor_gives_the_same_step(name):
    """Within rounding, as Inductor fuses and adds up in another order; dropout draws the same
    numbers (others would be far away), and the seed still matters."""
    small = {"GPT": gpt(GPT(depth=1)), "TiedGPT": tied_gpt(GPT(depth=1, tied=True))}
    one = staged(small.get(name) or case(name))
    bodies = compile_bodies(one.program, "inductor")
    assert set(bodies) == {call.node for call in one.program.calls}
    plain = one.run(seed=5)
    assert_same(plain, one.run(bodies, seed=5), None)
    for order in ("gpipe", "1f1b"):  # I and W of a microbatch at once, as one action B
        assert_same(plain, one.run(bodies, one.ordered(order), seed=5), None)
    if name == "DropoutNet":
        assert not torch.allclose(plain.loss, one.run(bodies, seed=6).loss, rtol=1e-3)


@needs_cpp
@pytest.mark.whole
def test_inductor_of_a_compiled_step():
    """By option: a loop that trains, costs that are measured with Inductor, a loss outside whose
    gradient arrives with strides of zero."""
    one = gpt(GPT(depth=1))
    step = pfeife.compile(one.step, microbatches=2, stages=2, compiler="inductor", costs="measure")
    batch = one.batch(4)
    expected = eager_accumulation(
        one.step, one.model, list(zip(*(part.chunk(2) for part in batch), strict=True))
    )
    loss = step(*batch)
    loss.backward()
    found = {name: p.grad for name, p in one.model.named_parameters()}
    result = pfeife.Result(loss.detach(), expected.outputs, found, {})
    assert_same(attrs.evolve(expected, buffers={}), result, None)
    one.model.zero_grad()
    model = pfeife.compile(one.model, microbatches=2, stages=2, compiler="inductor")
    model(batch[0]).sum().backward()
    found = {name: p.grad.clone() for name, p in one.model.named_parameters()}
    one.model.zero_grad()
    one.model(batch[0]).sum().backward()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, one.model.get_parameter(name).grad)


@pytest.mark.parametrize(
    ("name", "boxed"), crossed(["GPT", "BatchNormNet", "DropoutNet"], [False, True])
)
def test_a_function_as_compiler(name, boxed):
    """In both forms; a compiler that runs the graphs gives the same bits, the program is left as
    it was, and no draw is shown to it."""
    one, compiler = staged(case(name)), Noted(boxed)
    before = text_of(one.program)
    bodies = compile_bodies(one.program, compiler)
    assert text_of(one.program) == before and not any("seeded" in g for g in compiler.graphs)
    for graph, examples in zip(compiler.graphs, compiler.examples, strict=True):
        assert graph.count("= placeholder[") == len(examples)
    assert_same(one.run(seed=3), one.run(bodies, seed=3))


def test_aot_eager_is_the_graph():
    one = staged(gpt(GPT(depth=1)))
    assert compile_bodies(one.program) == {} == compile_bodies(one.program, "aot_eager")
    assert_same(one.run(), one.run({}))


class Repeated(nn.Module):
    """Stages that are all the same."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def test_a_repeated_body_is_compiled_once():
    """Four equal layers, a stage each: the first (no gradient of its input) and the last differ."""
    model, x = Repeated(), torch.randn(2, 4)
    clusters = pfeife.fuse()(pfeife.capture(lambda x: model(x).sum(), x))
    clusters = pfeife.annotate(estimate(clusters, CORE))(clusters)
    plan = sched.plan(clusters, machine=CORE, microbatches=2, stages=4)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    compiler = Noted()
    bodies = compile_bodies(ranks, compiler)
    assert len(bodies) == 8 and len(compiler.graphs) < 8
    middle = [ranks.call(kind, unit).node for kind in "FB" for unit in (1, 2)]
    only = Noted()
    compile_bodies(
        attrs.evolve(ranks, calls=tuple(c for c in ranks.calls if c.node in middle)), only
    )
    assert len(only.graphs) == 2, "one forward, one backward"
    mine = compile_bodies(ranks, Noted(), rank=1)
    assert set(mine) == {call.node for call in ranks.calls if call.rank == 1}


class Twins(nn.Module):
    """Biases whose gradients are equal, and for one row a gradient equal to what it is made of."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        a, b, c, d = self.layers
        y = (a(x) + b(x)).tanh()
        return (c(y) + d(y)).square().mean()


@pytest.mark.parametrize("split", [False, True])
def test_compiled_code_that_shares_storage(split):
    """Gradients are added up in place; that must not change an argument or another gradient."""
    model = Twins()
    torch.manual_seed(0)
    microbatches = [(torch.randn(1, 3),) for _ in range(3)]
    program = pfeife.capture(model, *microbatches[0])
    clusters = pfeife.fuse()(program)
    clusters = pfeife.split_backward()(clusters) if split else clusters
    clusters = pfeife.annotate(estimate(clusters, CORE))(clusters)
    plan = sched.plan(
        clusters, machine=CORE, microbatches=3, stages=2, schedule="zb-h1" if split else "1f1b"
    )
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    one = Staged(ranks, pfeife.state_of(program, model), microbatches, schedule)
    assert_same(one.run(), one.run(compile_bodies(ranks, Deduplicating())))


@pytest.mark.parametrize("compiler", [pytest.param("inductor", marks=needs_cpp), Deduplicating()])
def test_results_are_the_users_own(compiler):
    """They may be written to. Inductor of torch 2.15 returns the input itself for `x * 1`."""
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    one = one_stage(lambda x: (model(x).square().sum(), x * 1), model, x)
    (value,) = one.run(compile_bodies(one.program, compiler)).outputs[0].values()
    assert torch.equal(value, x) and value.data_ptr() != x.data_ptr()


def test_who_shares_a_storage():
    tensor = torch.randn(3)
    assert not _torch.is_shared(tensor) and not _torch.is_shared(torch.randn(3))
    view = tensor[1:]
    assert _torch.is_shared(tensor) and _torch.is_shared(view) and _torch.is_shared(view.detach())
    del view
    assert not _torch.is_shared(tensor)


def one_stage(step, model: nn.Module, *batch: torch.Tensor) -> Staged:
    """One stage, one microbatch."""
    program = pfeife.capture(step, *batch)
    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, CORE))(clusters)
    plan = sched.plan(clusters, machine=CORE, microbatches=1, stages=1)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    return Staged(ranks, pfeife.state_of(program, model), [batch], schedule)


@pytest.mark.parametrize("strides", [(1, 2), (0, 0), (5, 1)])
def test_values_arrive_as_compiled_for(strides):
    """Whatever layout the user's tensors have, a compiled body gets the one that it was made for;
    a captured layout in which elements share memory stands for none."""
    seen = []

    def compiler(graph, examples):
        code, wanted = Noted()(graph, examples), [one.stride() for one in examples]

        def run(*arguments):
            seen.append(([one.stride() for one in arguments], wanted))
            return code(*arguments)

        return run

    model = nn.Linear(2, 2)
    captured = torch.randn(8).as_strided((2, 2), strides)
    one = one_stage(lambda x: model(x).square().sum(), model, captured)
    bodies = compile_bodies(one.program, compiler)
    for x in (captured, torch.randn(2, 2).t()):
        mine = attrs.evolve(one, microbatches=[(x,)])
        assert_same(mine.run(), mine.run(bodies), None)  # kernels round by layout
    assert len(seen) == 4 and all(found == wanted for found, wanted in seen)
    assert (captured.stride() in seen[0][1]) == (strides != (0, 0))


def test_graphs_inside_are_told_apart():
    """A body of a higher-order operation differs with the graph that it holds."""

    def held(operation) -> fx.GraphModule:
        inner, outer = fx.Graph(), fx.Graph()
        inner.output(inner.call_function(operation, (inner.placeholder("x"),)))
        outer.output((outer.call_function(len, (outer.get_attr("inner"),)),))
        return fx.GraphModule({"inner": fx.GraphModule({}, inner)}, outer)

    texts = [fingerprint(held(one)) for one in (torch.sin, torch.cos, torch.sin)]
    assert texts[0] == texts[2] != texts[1]


def fails(graph, examples):
    raise RuntimeError("no lowering for aten.tanh.default here\nand more lines")


def test_a_compiler_that_fails():
    """The message names the stage, what it computes, the line of the model, and a way out."""
    one = staged(case("DropoutNet"))
    with pytest.raises(ValueError, match=r"stage 0 forward, from .*models.py.*aot_eager") as caught:
        compile_bodies(one.program, fails)
    message = str(caught.value)
    assert "test_compilers.fails" in message and "RuntimeError: no lowering" in message
    assert "and more" not in message and isinstance(caught.value.__cause__, RuntimeError)
    line = int(message.split("models.py")[1].split("line ")[1].split(",")[0])
    assert ".tanh()" in Path(models.__file__).read_text().splitlines()[line - 1]


def test_a_compiler_that_returns_something_else():
    one = staged(gpt(GPT(depth=1)))
    with pytest.raises(ValueError, match="returned NoneType, not a function"):
        compile_bodies(one.program, lambda graph, examples: None)
    wrong = compile_bodies(one.program, lambda graph, examples: lambda *args: graph(*args)[0])
    with pytest.raises(TypeError, match=r"returned Tensor, not the graph's [0-9]+ tensors"):
        one.run(wrong)


def test_no_such_compiler():
    program = staged(gpt(GPT(depth=1))).program
    for compiler in ("inductr", 3, None):
        with pytest.raises(ValueError, match=r"compiler=.*'aot_eager', 'inductor' or a function"):
            options_from({"compiler": compiler})
        with pytest.raises(ValueError, match="compiler="):
            compile_bodies(program, compiler)


def test_cuda_graphs_need_cuda():
    one = gpt(GPT(depth=1))
    step = pfeife.compile(one.step, microbatches=2, stages=2, cuda_graphs=True)
    with pytest.raises(ValueError, match=r"cuda_graphs=True: .* of stage 0 is on cpu"):
        step(*one.batch(4))
    with pytest.raises(ValueError, match="cuda_graphs"):
        options_from({"cuda_graphs": 1})


def test_sizes_that_come_again_are_recorded_and_no_more_than_a_bound():
    """What records is CUDA's alone; here it notes for which tensors, and replays copies of them."""
    recorded = []

    def record(run, slots):
        recorded.append([tuple(slot.shape) for slot in slots])

        def replay(*values):
            for slot, value in zip(slots, values, strict=True):
                slot.copy_(value)
            return run(*slots)

        return replay

    run = cuda_graphs.graphs_by_size(lambda x, n, y: (x + n * y,), record)

    def calls(*sizes):
        recorded.clear()
        for size in sizes:
            x, y = torch.randn(size, 2), torch.randn(2)
            assert torch.equal(run(x, size, y)[0], x + size * y)
        return [shapes[0][0] for shapes in recorded]

    assert calls(3, 4, 3, 3, 4, 5) == [3, 4]
    assert calls(*range(6, 6 + cuda_graphs.MOST - 2)) == []  # 3 is forgotten
    assert calls(4, 4) == [] and calls(3, 3) == [3]


def test_the_options_read_the_same_on_every_rank():
    """Ranks compare the text of their options; a function's own text has an address."""
    texts = {str(options_from({"compiler": one})) for one in (Noted(), Noted(boxed=True))}
    assert len(texts) == 1 and f"{__name__}.Noted" in texts.pop()
    assert compiler_name(fails) == f"{__name__}.fails"
    assert compiler_name("inductor") == "inductor"


class Told(logging.Handler):
    """What is logged under a name."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_effects_and_draws_are_told():
    """A body that checks a value while it runs is not compiled; one that draws is, in pieces."""
    one, told, log = staged(case("DropoutNet")), Told(), logging.getLogger("pfeife")
    body = one.program.body(one.program.call(Kind.FORWARD, 0))
    first = next(node for node in body.graph.nodes if node.op == "call_function")
    with body.graph.inserting_before(first):
        number = body.graph.call_function(torch.ops.aten.scalar_tensor.default, (1,))
        body.graph.call_function(torch.ops.aten._assert_async.msg, (number, "never"))
    body.recompile()
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(told)
    try:
        bodies = compile_bodies(one.program, Noted())
    finally:
        log.removeHandler(told)
        log.setLevel(level)
    name = f"compiler {__name__}.Noted"
    assert f"{name}: stage 0 forward: it has effects, so it runs as its graph" in told.lines
    assert f"{name}: stage 1 forward: its draws run as they are" in told.lines
    assert bodies[one.program.call(Kind.FORWARD, 0).node] == body.forward
    assert_same(one.run(seed=1), one.run(bodies, seed=1))


def test_costs_are_measured_with_the_compiler(tmp_path):
    """Of whole bodies, draws included, and kept under the compiler's name."""
    one, compiler = case("DropoutNet"), Noted()
    clusters = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    costs = measure(clusters, repeats=1, compiler=BodyCompiler(compiler), cache=tmp_path)
    assert set(costs.seconds) == {call.node for call in clusters.calls}
    count = len(compiler.graphs)
    assert count and not any("seeded" in graph for graph in compiler.graphs)
    measure(clusters, repeats=1, compiler=BodyCompiler(compiler), cache=tmp_path)
    assert len(compiler.graphs) == count, "kept"
    other = Noted()
    measure(clusters, repeats=1, compiler=BodyCompiler(other), cache=tmp_path)
    assert len(other.graphs) == count, "measured anew"


def test_progress():
    one, done = staged(gpt(GPT(depth=1))), []
    compile_bodies(one.program, Noted(), rank=1, progress=lambda *now: done.append(now))
    assert done == [(1, 3), (2, 3), (3, 3)]
