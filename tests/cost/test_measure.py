"""Measured costs: each distinct body once, in turn, touching nothing."""

import importlib
import weakref
from collections import Counter

import attrs
import pytest
import torch
from models import GPT, case, gpt
from programs import distinct_bodies, fused, small_program
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pfeife
from pfeife.cost import machine, measure
from pfeife.cost.measure import fingerprint
from pfeife.ir.members import ALONE, MEANING
from pfeife.ir.parts import Kind

aten = torch.ops.aten


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


def test_a_member_is_measured_alone():
    """What the others tell it is made up; what messages take is that of a machine's link."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    flat = pfeife.capture(lambda x: net(x).mean(), torch.ones(4, 8))
    local = pfeife.shard({"0.*": 0, "2.weight": 1}, members=2)(flat)
    clusters = pfeife.compose(pfeife.fuse(), pfeife.split_backward())(local)
    slow, sends = attrs.evolve(machine("cpu-core"), link_latency=7.0), MEANING.keys() - ALONE
    seconds = measure(clusters, repeats=1, machine=slow).seconds
    for call in clusters.calls:
        told = sum(n.target in sends for n in clusters.body(call).graph.nodes)
        assert 7.0 * told < seconds[call.node] < 7.0 * told + 6.0
    with pytest.raises(ValueError, match="one of 2 members, whose messages cannot be measured"):
        measure(clusters)
