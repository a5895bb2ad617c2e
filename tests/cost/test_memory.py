"""The account of bytes: by hand, and against the tensors that live while real bodies run."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES, case
from share import random_cases
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, memory_curves, stage_memory
from pfeife.cost.body import Body
from pfeife.data.optimizers import optimizer_bytes
from pfeife.data.schedule import Action, Do
from pfeife.data.timeline import MemoryCurve
from pfeife.lowering.envelope import AHEAD
from pfeife.runtime.profile import LiveTensors
from pfeife.sched.cutting.room import kept_within
from pfeife.testing import nets, plans

CPU_CORE = machine("cpu-core")
CPU = torch.device("cpu")
POLICIES = {"gpipe": sched.families.gpipe, "1f1b": sched.families.one_f_one_b}
aten = torch.ops.aten


def traced(compute, *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(compute, tracing_mode="fake")(*args)


def counted(body: torch.fx.GraphModule, args) -> tuple[int, int, list[torch.Tensor]]:
    """The peak of a real run, what is left after it, and its results."""
    with torch.no_grad(), LiveTensors(args, CPU) as live:
        results = body(*args)
        live(0)(Action(0, Do.FORWARD, 0))
    (point,) = live.points
    return point.peak, point.after, list(results)


def check_body(body: torch.fx.GraphModule, args) -> Body:
    """What is said of a body is what a run of it shows: peak, results, who shares a storage."""
    said = Body.of(body)
    peak, after, results = counted(body, args)
    assert said.peak == peak, body.code
    assert sum(said.sizes[owner] for owner in set(said.results) & set(said.sizes)) == after
    placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
    found = {
        arg.untyped_storage().data_ptr(): node for arg, node in zip(args, placeholders, strict=True)
    }
    for owner, result in zip(said.results, results, strict=True):
        first = found.setdefault(result.untyped_storage().data_ptr(), owner)
        assert first is owner, f"{owner} and {first} share a storage, or do not\n{body.code}"
    return said


def chained(x):
    return (x.exp().sin().cos(),)


def viewed(x):
    flat = x.exp().view(32)
    other = flat.sin().cos()
    return (other + flat,)


def unused_argument_view(x):
    return x.t(), x.exp().t().t().sin(), x.view(2, 16)


def normed(x):
    return (aten.native_layer_norm(x, [8], None, None, 1e-5)[0].sin(),)


def normed_and_mean(x):
    norm, mean, _ = aten.native_layer_norm(x, [8], None, None, 1e-5)
    return mean, norm.sin().cos()


def largest(x):
    return (x.max(1)[0].sin(),)


def largest_where(x):
    values, where = x.max(1)
    return where, values.sin().cos().sin()


def split_once(x):
    one, other = x.exp().split(2)
    return one.sin().cos(), other


def split_of_argument(x):
    one, other = x.split(2)
    return one, other.sin()


def chunked(x):
    one, other = x.exp().chunk(2, 1)
    return (one + other.cos().sin().sin(),)


def unbound(x):
    rows = x.exp().unbind(0)
    return (rows[0] + rows[3],)


# x has 4 x 8 floats, 128 bytes.
BODIES = [
    (chained, 2 * 128, [128]),  # a value is freed after the operation that reads it
    (viewed, 3 * 128, [128]),  # exp lives as long as its view: exp, sin, cos
    (unused_argument_view, 2 * 128, [None, 128, None]),
    (normed, 128 + 128, [128]),  # mean and rstd (16 each) are made, and freed before sin
    (normed_and_mean, 16 + 128 + 128, [16, 128]),
    (largest, 16 + 32, [16]),  # indices are int64
    (largest_where, 32 + 16 + 16, [32, 16]),
    (split_once, 128 + 64 + 64, [64, 128]),  # a part keeps the whole
    (split_of_argument, 64, [None, 64]),
    (chunked, 128 + 64 + 64, [64]),
    (unbound, 128 + 32, [32]),
]


@pytest.mark.parametrize(("compute", "peak", "results"), BODIES, ids=lambda x: str(x)[:24])
def test_bodies_by_hand(compute, peak, results):
    x = torch.randn(4, 8)
    body = traced(compute, x)
    for _ in range(2):
        said = check_body(body, [x])
        assert said.peak == peak
        assert [said.sizes.get(owner) for owner in said.results] == results
        body.graph.eliminate_dead_code()  # then nobody takes what is not used; it is made
        body.recompile()


def test_a_result_that_is_not_wanted_is_not_made():
    """Of the gradient that the mask leaves out, the fake kernel returns one all the same."""
    wanted = [False, True, False]

    def scale(x):
        given = (x, x, x[0], None, None, x[1], x[2], True, 1e-5, wanted)
        return (aten.native_batch_norm_backward(*given)[1].sin(),)

    x = torch.randn(4, 8)
    body = traced(scale, x)
    body.graph.eliminate_dead_code()
    body.recompile()
    assert check_body(body, [x]).peak == 32 + 32


def test_several_results_of_one_operation_are_freed_together():
    """fx keeps the tuple until its last part is taken, so a part outlives its own last use."""
    largest = traced(lambda x: x.max(1), torch.randn(4, 8))
    x, maximum, values, where, _ = largest.graph.nodes
    sine = list(traced(lambda x: x.sin(), torch.randn(4)).graph.nodes)[1]
    body = torch.fx.Graph()
    whole = body.node_copy(maximum, {x: body.node_copy(x)}.__getitem__)
    first = body.node_copy(values, lambda _: whole)
    second = body.node_copy(sine, lambda _: first)
    third = body.node_copy(sine, lambda _: second)
    body.output((third, body.node_copy(where, lambda _: whole)))  # taken only now
    said = check_body(torch.fx.GraphModule(nn.Module(), body), [torch.randn(4, 8)])
    assert said.peak == 16 + 32 + 16 + 16, "values and indices stay while both sines are made"


def examples(body: torch.fx.GraphModule) -> list[torch.Tensor]:
    """Ones in the shapes and strides that a body was captured with."""
    found = []
    for node in body.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            ends = zip(value.shape, value.stride(), strict=True)
            size = 1 + sum((length - 1) * stride for length, stride in ends)
            found.append(
                torch.ones(size, dtype=value.dtype).as_strided(value.shape, value.stride())
            )
    return found


def known(body: torch.fx.GraphModule) -> bool:
    """mse_loss leaves its scalar in a storage of many elements."""
    return all(node.target != aten.mse_loss.default for node in body.graph.nodes)


@random_cases(32)
@given(st.data())
def test_random_bodies(data):
    """Stages of random nets, forward and backward, take what they are said to take."""
    net = data.draw(nets())
    program = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(3, 4))
    fused = pfeife.annotate(estimate(f := pfeife.fuse()(program), CPU_CORE))(f)
    staged = pfeife.partition(data.draw(plans(fused, 2)))(fused)
    if data.draw(st.booleans()):
        staged = pfeife.split_backward()(staged)
    for call in staged.calls:
        check_body(staged.body(call), examples(staged.body(call)))


@functools.cache
def annotated(name: str) -> pfeife.Program:
    one = case(name)
    fused = pfeife.fuse()(pfeife.capture(one.step, *one.batch(2)))
    return pfeife.annotate(estimate(fused, CPU_CORE))(fused)


def lowered(program: pfeife.Program, plan: pfeife.Plan, split: bool = False):
    passes = [pfeife.split_backward()] if split else []
    sent = pfeife.compose(pfeife.partition(plan), *passes, pfeife.insert_send_recv())(program)
    return sent, sched.verify_schedule(sched.lower(plan.schedule, sent))


@pytest.mark.parametrize("name", CASES)
def test_bodies_of_models(name):
    fused = annotated(name)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=3)
    sent, _ = lowered(fused, plan, split=True)
    bodies = [sent.body(call) for call in sent.calls]
    checked = [check_body(body, examples(body)) for body in bodies if known(body)]
    assert len(checked) >= len(bodies) - 1
    temporaries = [
        max(Body.of(sent.body(call)).peak for call in sent.calls if call.unit == stage)
        for stage in range(3)
    ]
    assert [stage.temporaries for stage in stage_memory(sent)] == temporaries


# Two matrices, one a rank. In bytes: 3 x 5 floats of a batch, 3 x 7 of what crosses, both ways.
BATCH, FIRST, SECOND, CROSSING, PRODUCT = 60, 140, 56, 84, 24


@functools.cache
def two_matrices(width: int = 7) -> pfeife.Program:
    first, second = nn.Parameter(torch.randn(5, width)), nn.Parameter(torch.randn(width, 2))

    def step(x):
        return (pfeife.stage_boundary(x @ first) @ second).square().sum()

    fused = pfeife.fuse()(pfeife.capture(step, torch.randn(3, 5)))
    return pfeife.annotate(estimate(fused, CPU_CORE))(fused)


def curves(policy: str, microbatches: int, width: int = 7, **options):
    plan = pfeife.Plan((0, 1), POLICIES[policy](2, microbatches))
    return memory_curves(*lowered(two_matrices(width), plan), **options)


def text_of(curve) -> list[tuple[str, int, int]]:
    return [(str(point.action), point.peak, point.after) for point in curve.points]


def test_temporaries_by_hand():
    """The first stage's most is its gradient; the second has both gradients and the square's."""
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 1))
    memory = stage_memory(pfeife.partition(plan)(two_matrices()))
    assert [stage.temporaries for stage in memory] == [FIRST, SECOND + CROSSING + PRODUCT]
    assert [stage.parameters for stage in memory] == [FIRST, SECOND]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_microbatch_by_hand(policy):
    """From the first action on there is a buffer for the message that will arrive."""
    first, second = curves(policy, 1)
    c, loss = CROSSING, 4
    assert text_of(first) == [
        ("0F0", 2 * c, 2 * c),
        ("0SEND_F0", 2 * c, 2 * c),
        ("0RECV_B0", 2 * c, c),  # says that what was sent has arrived
        ("0B0", c + FIRST, FIRST),
    ]
    forward = PRODUCT + PRODUCT + loss  # the product, its square, the sum
    assert text_of(second) == [
        ("1RECV_F0", c, c),
        ("1F0", c + forward, c + PRODUCT + loss),  # the loss is cloned, its own is dropped
        ("1B0", c + PRODUCT + loss + SECOND + c + PRODUCT, loss + SECOND + c),
        ("1SEND_B0", loss + SECOND + c, loss + SECOND + c),  # nothing tells when it has arrived
    ]
    same = {"buffers": 0, "receive buffers": 0, "batch": BATCH}
    assert first.held == {"parameters": FIRST, **same}
    assert second.held == {"parameters": SECOND, **same}
    assert first.peak == FIRST + BATCH + c + FIRST
    assert first.at_peak == {"temporaries": FIRST, "received": c}


def test_a_reduced_gradient_is_there_once():
    """With replicas: it is reduced in a copy, and then what was summed up goes."""
    plan = pfeife.Plan((0, 1), sched.families.gpipe(2, 1))
    passes = [pfeife.partition(plan), pfeife.insert_send_recv(), pfeife.dp_wrap(pfeife.Mesh(2, 2))]
    sent = pfeife.compose(*passes)(two_matrices())
    first, _ = memory_curves(sent, sched.lower(plan.schedule, sent))
    assert text_of(first)[-1] == ("0REDUCE_GRAD", 2 * FIRST, FIRST)
    assert first.held["batch"] == 2 * BATCH, "every rank is given the batch of all replicas"


@pytest.mark.parametrize(("width", "ahead"), [(7, 64), (AHEAD // 24 + 1, 2), (AHEAD // 36, 3)])
def test_memory_grows_with_microbatches_in_gpipe(width, ahead):
    """All that was sent is kept until the first gradient is there; buffers for `ahead` messages,
    as many as fit but two at least, are there from the start, more when some have arrived. Those
    of large messages stay."""
    crossing = 3 * width * 4
    for m in range(2, 9):
        first, _ = curves("gpipe", m, width)
        points = {str(point.action): point for point in first.points}
        posted = m if width == 7 else 0  # beside those that stay
        again = ahead - 1  # so many have come when receives are posted again
        most = max(min(m, ahead), min(m, ahead + again) - again + 1)
        stay = 0 if width == 7 else most
        assert first.held["receive buffers"] == stay * crossing
        last = points[f"0F{m - 1}"]
        assert last.peak == last.after == (m + posted) * crossing
        assert points["0RECV_B0"].peak == (m + posted) * crossing
        assert points["0RECV_B0"].after == posted * crossing
        assert first.points[-1].after == 5 * width * 4, "only the gradient is left"
        assert first.held["batch"] == m * BATCH


def test_memory_is_bounded_in_1f1b():
    def most(m):
        large = curves("1f1b", m, AHEAD // 24 + 1)  # two messages ahead, however many there are
        return [max(point.peak for point in curve.points) for curve in large]

    for m in range(5, 9):
        # Of the later rank the losses alone are more.
        assert most(m)[0] == most(4)[0] and most(m)[1] - most(4)[1] <= 4 * (m - 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_allocations_are_rounded_up_each(policy):
    """As if every tensor had 512 bytes: those of a body too, results and temporaries."""
    first, second = curves(policy, 1, rounding=512)
    c = 512
    expected = [(2 * c, 2 * c), (2 * c, 2 * c), (2 * c, c), (2 * c, c)]
    assert [point[1:] for point in text_of(first)] == expected
    assert [point[1:] for point in text_of(second)] == [
        (512, 512),
        (4 * 512, 3 * 512),  # received; product, its square, the sum
        (6 * 512, 3 * 512),  # received, product, loss; both gradients and the square's
        (3 * 512, 3 * 512),
    ]
    assert first.held["parameters"] == second.held["parameters"] == 512


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
}
COPIES = {"SGD": 0, "momentum": 1, "Adam": 2, "amsgrad": 3, "AdamW": 2}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_bytes(name):
    """What a real step of the real optimizer keeps; nothing of it is stepped."""
    kind, options = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (3,), (), (1, 2, 1))]
    real = kind(parameters, **options)
    state = optimizer_bytes(real)
    said = [state(p.shape, p.dtype) for p in parameters]
    assert not real.state, "the user's optimizer was stepped"
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    real.step()
    for one, parameter in zip(said, parameters, strict=True):
        kept = [v for v in real.state[parameter].values() if isinstance(v, torch.Tensor)]
        assert one == sum(value.nbytes for value in kept)
        count = 4 if name in ("Adam", "amsgrad", "AdamW") else 0  # steps are counted
        assert one == COPIES[name] * parameter.nbytes + count
    if not options:
        assert optimizer_bytes(kind)((5, 7), torch.float32) == said[0]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimizers_in_curves(name):
    kind, _ = OPTIMIZERS[name]
    real = kind([nn.Parameter(torch.randn(2))], lr=0.1)
    for optimizer in (kind, real):
        step = 4 if COPIES[name] else 0
        held = [curve.held for curve in curves("gpipe", 2, optimizer=optimizer)]
        assert [one["optimizer"] for one in held] == [
            COPIES[name] * FIRST + step,
            COPIES[name] * SECOND + step,
        ]
        plain = [curve.peak for curve in curves("gpipe", 2)]
        more = [curve.peak for curve in curves("gpipe", 2, optimizer=optimizer)]
        assert [b - a for a, b in zip(plain, more, strict=True)] == [h["optimizer"] for h in held]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_peak_is_accounted_for(name, policy):
    """What `at_peak` names adds up to the highest point, and nothing is left but results."""
    fused = annotated(name)
    for split in (False, True):
        plan = sched.plan(
            fused, machine=CPU_CORE, microbatches=4, stages=4, ranks=2, schedule=policy
        )
        sent, schedule = lowered(fused, plan, split)
        for curve in memory_curves(sent, schedule):
            assert sum(curve.at_peak.values()) == max(point.peak for point in curve.points)
            assert all(size > 0 for size in curve.at_peak.values())
            assert tuple(point.action for point in curve.points) == schedule.ranks[curve.rank]
            assert all(point.peak >= point.after >= 0 for point in curve.points)


def test_what_was_left_out_is_left_room_for():
    """A planner whose figures leave out 50 bytes is asked once more, for 50 bytes less."""
    asked = []

    def make(room: int, tries: int) -> pfeife.Plan:
        asked.append(room)
        return pfeife.Plan((0,), sched.families.gpipe(1, room // 10))

    def curves(plan: pfeife.Plan) -> list[MemoryCurve]:
        return [MemoryCurve(0, {"all": 10 * plan.schedule.microbatches + 50}, ())]

    def counted(plan: pfeife.Plan) -> tuple[int, ...]:
        return (10 * plan.schedule.microbatches,)

    plan = kept_within(108, "memory_limit=108", make, curves, counted)
    assert asked == [108, 58] and plan.schedule.microbatches == 5


@pytest.mark.parametrize("share", [0.98, 0.9])
def test_other_cuts_are_found_below_a_limit(share):
    """The planner's figures are far below the account's, and so is what it must be asked for."""
    fused = annotated("UNet")

    def planned(**limit) -> tuple[pfeife.Plan, int]:
        plan = sched.plan(
            fused, machine=CPU_CORE, microbatches=8, stages=2, schedule="1f1b", **limit
        )
        return plan, max(curve.peak for curve in memory_curves(*lowered(fused, plan)))

    limit = int(share * planned()[1])
    assert planned(memory_limit=limit)[1] <= limit
