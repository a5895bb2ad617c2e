"""Costs: rooflines by hand, measurements that touch nothing, bytes that are counted once."""

import importlib
import json
import math
import multiprocessing
import weakref
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import GPT, case, gpt
from programs import fused
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pfeife
from pfeife.cost import estimate, machine, measure, stage_memory
from pfeife.cost.cache import Measured
from pfeife.cost.estimate import node_flops, node_seconds
from pfeife.cost.measure import fingerprint, processor
from pfeife.cost.network import piecewise_fit
from pfeife.data import plain
from pfeife.data.machine import Link, Machine, Network
from pfeife.data.plan import Costs
from pfeife.ir.program import Kind
from pfeife.runtime import LocalPipeline
from pfeife.runtime.profile import profile
from pfeife.sched import clusters_of, workload_of

CPU_CORE = machine("cpu-core")
aten = torch.ops.aten
# Rates at which a second is easily counted: an operation a second, eight bytes a second.
SLOW = Machine("slow", flops=1.0, memory_bandwidth=8.0, memory=1, link_bandwidth=1.0)


def nodes_of(step, *batch: torch.Tensor) -> list[torch.fx.Node]:
    program = pfeife.fuse()(pfeife.capture(step, *batch))
    return [node for call in program.calls for node in program.body(call).graph.nodes]


def flops_by_operation(nodes: list[torch.fx.Node]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node in nodes:
        if node_flops(node):
            found.setdefault(str(node.target), []).append(node_flops(node))
    return found


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(2, 6))
def test_flops_of_a_matmul(m, n, k):
    """2 m n k forward; the same again for each gradient that is wanted."""
    weight, other = nn.Parameter(torch.randn(k, n)), nn.Parameter(torch.randn(n, 2))

    def step(x):
        return (x @ weight @ other).square().sum()

    found = flops_by_operation(nodes_of(step, torch.randn(m, k)))
    first, second = 2 * m * n * k, 2 * m * 2 * n
    assert sorted(found.pop("aten.mm.default")) == sorted([first] * 2 + [second] * 3)
    assert not found, "nothing else has a formula"


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_attention_on_the_cpu_has_flops(dropout):
    """torch's table knows the GPU kernels alone; with dropout the kernel is a random operation."""
    project = nn.Linear(4, 12)

    def step(x):
        q, k, v = project(x).view(2, 5, 2, 6).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).square().sum()

    nodes = nodes_of(step, torch.randn(2, 5, 4))
    products = [aten.mm, aten.addmm, aten.bmm, aten.matmul]
    attention = [
        node
        for node in nodes
        if node_flops(node) and getattr(node.target, "overloadpacket", None) not in products
    ]
    small = 2 * 2 * 2 * (5 * 2 * 5)  # both products of attention, over 2 rows and 2 heads
    if attention:
        assert node_flops(attention[0]) == 2 * small
        assert len(attention) == 2 and node_flops(attention[1]) > 2 * small
        assert all(node_seconds(node, SLOW) >= node_flops(node) for node in attention)
    else:  # spelt out as two batched products
        assert sum(flops_by_operation(nodes)["aten.bmm.default"]) >= 6 * small


def test_flops_of_a_convolution():
    conv = nn.Conv2d(3, 5, 3)
    found = flops_by_operation(nodes_of(lambda x: conv(x).sum(), torch.randn(2, 3, 6, 6)))
    assert found["aten.convolution.default"] == [2 * 2 * 16 * 3 * 5 * 9]
    assert set(found) == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_roofline_by_hand():
    """An operation takes the longer of computing and moving its bytes, and a launch."""
    weight = nn.Parameter(torch.randn(5, 7))
    (product,) = (
        node
        for node in nodes_of(lambda x: (x @ weight).sum(), torch.randn(3, 5))
        if node.target == aten.mm.default and node.meta["val"].shape == (3, 7)
    )
    moved = 4 * (3 * 5 + 5 * 7 + 3 * 7)
    assert node_seconds(product, SLOW) == 210
    assert node_seconds(product, attrs.evolve(SLOW, flops=1e9)) == moved / 8
    late = attrs.evolve(SLOW, launch_seconds=1.0)
    assert node_seconds(product, late) == 211


@pytest.mark.parametrize("name", ["GPT", "UNet", "DropoutNet"])
def test_estimates(name):
    """Every call has seconds, the sum of its nodes'; views and placeholders cost nothing."""
    program = fused(name)
    costs = estimate(program, CPU_CORE)
    assert set(costs.seconds) == {call.node for call in program.calls}
    assert all(seconds > 0 for seconds in costs.seconds.values())
    assert costs == estimate(program, CPU_CORE)
    for call in program.calls:
        nodes = list(program.body(call).graph.nodes)
        assert costs.seconds[call.node] == pytest.approx(
            sum(node_seconds(n, CPU_CORE) for n in nodes)
        )
        for node in nodes:
            free = node.op != "call_function" or node.target in (
                *(aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int),
                *(aten.split.Tensor, aten.expand.default, aten.detach.default),
            )
            assert not free or node_seconds(node, CPU_CORE) == 0.0, node.format_node()


def test_annotate_refuses_unknown_calls():
    program = fused("DropoutNet")
    costs = estimate(program, CPU_CORE)
    assert pfeife.annotate(costs)(program).calls[0].seconds == costs.seconds[program.calls[0].node]
    with pytest.raises(ValueError, match=r"\(by hand\) know nothing of \['cluster_0_forward', "):
        pfeife.annotate(Costs("by hand", {}))(program)


class Counting(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **kwargs or {})


def products(body: torch.fx.GraphModule) -> int:
    return sum(node.target in (aten.mm.default, aten.addmm.default) for node in body.graph.nodes)


def test_identical_bodies_are_measured_once():
    """Three equal blocks take the time of one: one warm-up and two runs of each distinct body."""
    program = fused("GPT")
    bodies = [program.body(call) for call in program.calls]
    prints = [fingerprint(body) for body in bodies]
    distinct = dict(zip(prints, bodies, strict=True))
    assert len(distinct) < len(bodies)
    with Counting() as counting:
        costs = measure(program, repeats=2)
    ran = counting.counts[aten.mm.default] + counting.counts[aten.addmm.default]
    assert ran == 3 * sum(products(body) for body in distinct.values())
    seconds = [costs.seconds[call.node] for call in program.calls]
    assert all(one > 0 for one in seconds)
    for key, one in zip(prints, seconds, strict=True):
        assert one == seconds[prints.index(key)]


def distinct_bodies(program: pfeife.Program) -> int:
    return len({fingerprint(program.body(call)) for call in program.calls})


def test_repeated_blocks_have_one_fingerprint():
    """A deeper model has more calls, but no more to measure; nor has each dropout its own cost."""
    deep = gpt(GPT(depth=5))
    deeper = pfeife.fuse()(pfeife.capture(deep.step, *deep.batch(2)))
    assert len(deeper.calls) > len(fused("GPT").calls)
    assert distinct_bodies(deeper) == distinct_bodies(fused("GPT"))
    layers = fused("DropoutNet")  # three forwards alike, the last; first, inner, last backward
    assert (len(layers.calls), distinct_bodies(layers)) == (8, 5)


def test_what_fingerprints_tell_apart():
    """Shapes, types, strides and constants decide what a body costs; names do not."""

    def body(x: torch.Tensor, scale: float = 0.5) -> str:
        weight = nn.Parameter(torch.randn(3, 3, dtype=x.dtype))
        program = pfeife.fuse()(pfeife.capture(lambda x: (x @ weight * scale).sum(), x))
        return fingerprint(program.body(program.call(Kind.FORWARD, 0)))

    x = torch.randn(4, 3)
    assert body(x) == body(torch.zeros(4, 3))
    others = (body(x[:2]), body(x.double()), body(torch.randn(3, 4).t()), body(x, scale=0.25))
    assert len({body(x), *others}) == 5


@pytest.mark.parametrize("name", ["BatchNormNet", "DropoutNet"])
def test_measuring_touches_nothing(name):
    """Parameters, buffers, gradients and the random generator are the user's."""
    one = case(name)
    program = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    before = {key: value.clone() for key, value in one.model.state_dict().items()}
    text = [str(program.body(call).graph) for call in program.calls]
    random = torch.get_rng_state()
    costs = measure(program, repeats=1)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[key]) for key, value in one.model.state_dict().items())
    assert all(parameter.grad is None for parameter in one.model.parameters())
    assert [str(program.body(call).graph) for call in program.calls] == text
    assert set(costs.seconds) == {call.node for call in program.calls}


def staged(name: str, cuts: tuple[int, ...]) -> pfeife.Program:
    program = pfeife.annotate(estimate(fused(name), CPU_CORE))(fused(name))
    stage_of = tuple(sum(cut <= unit for cut in cuts) for unit in range(program.units))
    order = pfeife.sched.gpipe(len(cuts) + 1, 1)
    return pfeife.partition(pfeife.Plan(stage_of, order))(program)


def test_memory_by_hand():
    """The product is kept for its square's gradient; the batch is not the stage's."""
    weight = nn.Parameter(torch.randn(5, 7))
    program = pfeife.capture(lambda x: (x @ weight).square().sum(), torch.randn(3, 5))
    (memory,) = stage_memory(pfeife.fuse()(program))
    assert (memory.parameters, memory.saved) == (4 * 5 * 7, 4 * 3 * 7)


def test_memory_by_hand_of_two_stages():
    """What the later stage keeps of the earlier one's is its own; gradients are not kept."""
    first, second = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 2))
    program = pfeife.capture(lambda x: (x @ first @ second).square().sum(), torch.randn(3, 5))
    program = pfeife.fuse()(program)
    assert program.units == 2
    before, after = stage_memory(program)
    assert (before.parameters, before.saved) == (4 * 5 * 7, 0)
    assert (after.parameters, after.saved) == (4 * 7 * 2, 4 * (3 * 7 + 3 * 2))


def test_memory_of_stages():
    """Every parameter is counted once, a tied one on each of its stages."""
    memory = stage_memory(staged("DropoutNet", (2,)))
    assert [stage.parameters for stage in memory] == [4 * 2 * (36 + 6)] * 2
    assert all(stage.saved > 0 for stage in memory)
    plain, tied = stage_memory(staged("GPT", (10,))), stage_memory(staged("TiedGPT", (10,)))
    table = 4 * 23 * 16  # the embedding, in the first stage and, as the head, in the last
    assert [stage.parameters for stage in tied] == [stage.parameters for stage in plain]
    everything = sum(p.nbytes for p in case("TiedGPT").model.parameters())
    assert sum(stage.parameters for stage in tied) == everything + table


def test_what_the_planner_knows_of_memory():
    """Clusters add up to the stage that they become, but for values that stay inside it."""
    program = pfeife.annotate(estimate(fused("UNet"), CPU_CORE))(fused("UNet"))
    known, (whole,) = clusters_of(workload_of(program)), stage_memory(staged("UNet", ()))
    assert sum(known.parameters) == whole.parameters
    assert sum(known.saved) >= whole.saved > 0
    assert len(known.crossing) == program.units and known.crossing[0] == 0
    costs = estimate(program, CPU_CORE)
    both = sum(costs.seconds.values()) + sum(costs.accumulate.values())
    assert sum(known.seconds) == pytest.approx(both)


def test_the_cache_tells_processors_apart(tmp_path):
    """Python knows no processor on Linux: a folder shared by machines mixed their times up."""
    listed, arm = tmp_path / "cpuinfo", tmp_path / "arm"
    listed.write_text("processor\t: 0\nmodel name\t: Fast 9000 @ 3GHz\nflags\t\t: fpu\n" * 2)
    assert processor(listed) == "Fast 9000 @ 3GHz"
    arm.write_text("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert processor(arm) == "0x41, 0xd0c"
    assert processor(tmp_path / "none")
    measure(small_program(), repeats=1, cache=tmp_path / "costs")
    for path in (tmp_path / "costs").iterdir():
        assert processor() in plain.load(Measured, path).key


def test_the_cache_is_used_and_never_trusted(tmp_path):
    """Measured once for all; whatever happens to the files, it is measured again."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    program = pfeife.fuse()(pfeife.capture(lambda x: model(x).square().sum(), torch.randn(2, 3)))
    runs = []

    def measured():
        return measure(program, repeats=2, cache=tmp_path, progress=lambda *n: runs.append(n))

    first = measured()
    assert runs[-1] == (len(runs), len(runs)) and len(runs) < 3 * len(program.calls)
    assert measured() == first, "the second time comes from the cache"
    for damage in (b"", b"{", b"[]", b"\xff\xfe", b'{"key": "", "seconds": 1, "spread": 0}'):
        for path in tmp_path.glob("*.json"):
            path.write_bytes(damage)
        again = measured()
        assert again != first and measured() == again
    one, other = sorted(tmp_path.glob("*.json"))[:2]
    one.write_bytes(other.read_bytes())
    assert measured() != first, "an entry of another body"
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"seconds": ', '"seconds": -'))
    assert all(seconds > 0 for seconds in measured().seconds.values())
    more = measure(program, repeats=3, cache=tmp_path)
    assert more != again, "fewer runs than asked for are not enough"


def small_program() -> pfeife.Program:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    return pfeife.fuse()(
        pfeife.capture(lambda x: model(x).square().sum(), torch.randn(2, 3)),
    )


def write_costs(folder: Path, barrier, results) -> None:
    """One of several processes that measure the same again and again, each time with more runs."""
    program = small_program()
    barrier.wait()
    found = [measure(program, repeats=repeats, cache=folder) for repeats in range(2, 12)]
    calls = {call.node for call in program.calls}
    results.put(all(set(costs.seconds) == calls for costs in found))


def test_writers_of_one_cache(tmp_path):
    """Whoever reads meanwhile finds whole files or none, and nothing else is left behind."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    writers = [
        context.Process(target=write_costs, args=(tmp_path, barrier, results)) for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    barrier.wait(120)
    read = 0
    while any(writer.is_alive() for writer in writers):
        for path in tmp_path.glob("*.json"):
            read += plain.load(Measured, path).repeats >= 2
        for writer in writers:
            writer.join(0.01)
    assert [results.get(timeout=60) for _ in writers] == [True] * 3 and read
    assert all(writer.exitcode == 0 for writer in writers)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}
    assert len(list(tmp_path.iterdir())) == distinct_bodies(small_program())
    assert all(plain.load(Measured, path).repeats == 11 for path in tmp_path.glob("*.json"))


class Backend:
    """A compiler that notes what it is given, what is run, with which arguments, and of how many
    earlier runs of the same body the results are there still."""

    def __init__(self, name: str):
        self.__qualname__ = name
        self.bodies: list[str] = []
        self.runs: list[tuple[str, list[torch.Tensor]]] = []
        self.held: dict[str, list[int]] = {}

    def __call__(self, module, examples):
        key = fingerprint(module)
        self.bodies.append(key)
        made: list[weakref.ref] = []

        def run(*args):
            self.runs.append((key, list(args)))
            self.held.setdefault(key, []).append(sum(one() is not None for one in made))
            results = module(*args)
            made.append(weakref.ref(results[0]))
            return results

        return run


def test_a_compiler_has_measurements_of_its_own(tmp_path):
    program = small_program()
    count = distinct_bodies(program)
    first, second = Backend("first"), Backend("second")
    costs = measure(program, repeats=2, compiler=first, cache=tmp_path)
    assert len(first.bodies) == len(set(first.bodies)) == count, "each is compiled once"
    assert len(first.runs) == 3 * count, "a warm-up and two runs, and nothing else"
    assert measure(program, repeats=2, compiler=first, cache=tmp_path) == costs
    assert len(first.runs) == 3 * count and len(list(tmp_path.iterdir())) == count
    measure(program, repeats=2, cache=tmp_path)
    measure(program, repeats=2, compiler=second, cache=tmp_path)
    assert len(second.runs) == 3 * count and len(first.runs) == 3 * count
    assert len(list(tmp_path.iterdir())) == 3 * count, "first, second and none"


@pytest.mark.parametrize("spare", [None, 0])
def test_bodies_run_in_turn(spare, monkeypatch):
    """Round by round, each once; what does not fit at once is made anew for every run."""
    if spare is not None:
        module = importlib.import_module("pfeife.cost.measure")  # the package has a function so
        monkeypatch.setattr(module, "_spare", lambda device: spare)
    program, backend, done = small_program(), Backend("noted"), []
    costs = measure(program, repeats=3, compiler=backend, progress=lambda *n: done.append(n))
    count = distinct_bodies(program)
    assert [key for key, _ in backend.runs] == backend.bodies * 4
    assert done == [(run + 1, 4 * count) for run in range(4 * count)]
    gradients = {call.node for call in program.calls if call.kind != Kind.FORWARD}
    assert set(costs.accumulate) == gradients and all(costs.accumulate.values())
    for index in range(count):
        turns = [args for _, args in backend.runs[index::count]]
        for others in zip(*turns, strict=True):
            same = {id(argument) for argument in others}
            assert len(same) == (4 if spare == 0 else 1)
    if spare == 0:
        assert set(map(tuple, backend.held.values())) == {(0, 0, 0, 0)}, "nothing is held then"


def inference_program() -> pfeife.Program:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    with torch.no_grad():
        return pfeife.fuse()(pfeife.capture(model, torch.randn(2, 3)))


@pytest.mark.parametrize(
    ("make", "holding"),
    [
        (small_program, {"F"}),
        (lambda: pfeife.split_backward()(small_program()), {"F", "I"}),
        (inference_program, set()),
    ],
    ids=["training", "split", "inference"],
)
def test_results_are_held_for_what_comes_later(make, holding):
    """As in a step: what a backward, or its second part, will read is there still when the body
    runs again; all else is gone."""
    program, backend = make(), Backend("noted")
    measure(program, repeats=3, compiler=backend)
    kinds = {fingerprint(program.body(call)): call.kind for call in program.calls}
    assert set(kinds) == set(backend.held) and holding <= set(kinds.values())
    for key, held in backend.held.items():
        assert held == ([0, 1, 2, 2] if kinds[key] in holding else [0, 0, 0, 0])


LINK = {
    **{"source": 0, "destination": 1, "sizes": (0, 1000), "seconds": (1e-6, 2e-6)},
    **{"sending": (1e-6, 1e-6), "receiving": (0.0, 1e-6), "residual": 0.0},
}


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("seconds", (1e-6,), "Link 0 -> 1: figures for"),
        ("sending", (1e-6, 1e-6, 1e-6), "Link 0 -> 1: figures for"),
        ("receiving", (), "Link 0 -> 1: figures for"),
        ("sizes", (0, 1000, 2000), "Link 0 -> 1: figures for"),
        ("sizes", (1000, 0), r"Link.sizes must ascend from 0, not \(1000, 0\)"),
        ("sizes", (1000, 1000), "must ascend"),
        ("seconds", (-1e-6, 2e-6), "are negative or fall"),
        ("sending", (0.0, -1.0), "are negative or fall"),
        ("receiving", (0.0, -1.0), "are negative or fall"),
        ("seconds", (math.nan, 1.0), "are negative or fall"),
    ],
)
def test_refused_links(field, value, problem):
    good = Link(**LINK)
    assert plain.from_json(Network, plain.to_json(Network((good,)))).link(0, 1) == good
    with pytest.raises(ValueError, match=problem):
        attrs.evolve(good, **{field: value})
    data = json.loads(plain.to_json(Network((good,))))
    data["links"][0][field] = list(value)
    with pytest.raises(ValueError, match="finite" if math.nan in value else problem):
        plain.from_json(Network, json.dumps(data))


def test_a_link_needs_two_sizes():
    one = {name: LINK[name][:1] for name in ("sizes", "seconds", "sending", "receiving")}
    with pytest.raises(ValueError, match="figures for"):
        Link(**{**LINK, **one})


def test_links_are_fitted():
    """Through the points where they rise, between and beyond them in straight lines."""
    sizes = (1000, 10_000)
    values, residual = piecewise_fit(sizes, (2e-6, 11e-6))
    link = Link(0, 1, (0, *sizes), values, values, (0.0,) * 3, residual)
    assert residual < 1e-6 and link.send_seconds(1000) == link.transfer_seconds(1000)
    for size, seconds in ((1000, 2e-6), (5500, 6.5e-6), (10_000, 11e-6), (20_000, 21e-6)):
        assert math.isclose(link.transfer_seconds(size), seconds, rel_tol=1e-6)
    rising, residual = piecewise_fit((1000, 10_000, 100_000), (2e-6, 1e-6, 11e-6))
    assert list(rising) == sorted(rising) and 0.2 < residual < 1
    with pytest.raises(ValueError, match="no link from rank 1 to rank 0"):
        Network((link,)).link(1, 0)


def test_predicted_and_profiled_steps_have_the_same_actions():
    """One type of timeline: what was to run, and what ran, on the same ranks in the same order."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    microbatches = [(torch.randn(2, 3),) for _ in range(3)]
    program = pfeife.capture(lambda x: model(x).square().sum(), *microbatches[0])
    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)
    plan = pfeife.sched.plan(clusters, machine=CPU_CORE, microbatches=3, stages=2)
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = pfeife.sched.lower(plan.schedule, sent)
    predicted = pfeife.sched.predict(sent, schedule, CPU_CORE)
    slow = attrs.evolve(CPU_CORE, action_seconds=1.0, link_latency=10.0)
    assert pfeife.sched.predict(sent, schedule, slow).seconds > predicted.seconds + 10
    pipeline = LocalPipeline(sent, schedule)
    measured = profile(pipeline, pfeife.state_of(program, model), microbatches)
    for timeline in (predicted, measured):
        for rank, actions in enumerate(schedule.ranks):
            events = [event for event in timeline.events if event.rank == rank]
            assert tuple(event.action for event in events) == actions
            assert all(event.start <= event.end for event in events)
    assert 0 < measured.bubble < 1
