"""The bytes of one body: by hand, and against the tensors that live while it runs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CASES
from programs import CPU_CORE, annotated, clusters, for_ranks
from share import random_cases, some
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import pfeife
from pfeife import sched
from pfeife.cost import stage_memory
from pfeife.cost.body import Body
from pfeife.data.schedule import Action, Do
from pfeife.runtime.profile import LiveTensors
from pfeife.testing import STATIC, nets, plans

CPU = torch.device("cpu")
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
        if not result.numel():  # what a batch norm keeps for cuDNN is empty, and has no address
            continue
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


@pytest.mark.parametrize(
    ("compute", "peak", "results"), BODIES, ids=lambda x: getattr(x, "__name__", str(x))
)
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
    net = data.draw(nets(operations=STATIC))  # else sizes are bounds
    program = pfeife.capture(lambda x: net(x).square().mean(), torch.randn(3, 4))
    fused = clusters(program)
    staged = pfeife.partition(data.draw(plans(fused, 2)))(fused)
    if data.draw(st.booleans()):
        staged = pfeife.split_backward()(staged)
    for call in staged.calls:
        check_body(staged.body(call), examples(staged.body(call)))


@pytest.mark.parametrize("name", some(CASES))
def test_bodies_of_models(name):
    fused = annotated(name)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=3)
    sent, _ = for_ranks(fused, plan, split=True)
    bodies = [sent.body(call) for call in sent.calls]
    checked = [check_body(body, examples(body)) for body in bodies if known(body)]
    assert len(checked) >= len(bodies) - 1
    temporaries = [
        max(Body.of(sent.body(call)).peak for call in sent.calls if call.unit == stage)
        for stage in range(3)
    ]
    assert [stage.temporaries for stage in stage_memory(sent)] == temporaries
