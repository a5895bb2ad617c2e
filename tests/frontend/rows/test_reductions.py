"""How results of microbatches become those of the batch, and what is asked of them."""

import sys

import pytest
import torch
import torch.nn.functional as F
from listening import said
from models import GPT, gpt
from torch import fx, nn

import pfeife
from pfeife.frontend.rows.reductions import _operations
from pfeife.ir.parts import Count, Role
from pfeife.testing import check_pass, eager_accumulation


@pytest.mark.parametrize("how", ["sum", "weighted"])
def test_passes_keep_the_rule(how):
    """And replicas add up what is a sum."""
    one = gpt(GPT(depth=1))
    ignoring = [one.batch(2, seed) for seed in range(4)]
    ignoring[0][1][:, 2:] = -100

    def step(tokens, targets):
        scores = one.model(tokens).flatten(0, 1)
        return F.cross_entropy(
            scores, targets.flatten(), reduction="sum" if how == "sum" else "mean"
        )

    program = pfeife.capture(step, *ignoring[1])
    (loss,) = program.ports(Role.LOSS)
    assert loss.reduction == how
    state = pfeife.state_of(program, one.model)
    clusters = check_pass(pfeife.fuse(), program, state, ignoring)
    plan = pfeife.Plan(
        tuple(2 * unit // clusters.units for unit in range(clusters.units)),
        pfeife.sched.policy("1f1b")(2, 2),
    )
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())
    sent = check_pass(ranks, clusters, state, ignoring)
    wrapped = pfeife.dp_wrap(pfeife.Mesh(2, 2))(sent)
    assert wrapped.averages == (how != "sum")
    check_pass(pfeife.dp_wrap(pfeife.Mesh(2, 2)), sent, state, ignoring, rounding=None)


def test_even_counts_are_a_plain_mean():
    """Bit for bit, for numbers of microbatches and of targets that are no powers of two."""
    one = gpt(GPT(depth=1))
    batches = [one.batch(2, seed) for seed in range(7)]
    for _, targets in batches:
        targets[:, 3:] = -100

    def step(tokens, targets):
        return F.cross_entropy(one.model(tokens).flatten(0, 1), targets.flatten())

    program = pfeife.capture(step, *batches[0])
    found = pfeife.evaluate(program, pfeife.state_of(program, one.model), batches)
    expected = eager_accumulation(step, one.model, batches)
    assert torch.equal(found.loss, expected.loss)
    assert all(torch.equal(found.gradients[n], g) for n, g in expected.gradients.items())


def test_what_nobody_can_join_without_gradients():
    linear = nn.Linear(8, 4)

    def step(x):
        return linear(x).square().mean().sqrt()

    wanted = r"result 0 of the step .* because of sqrt in File .*reduce=\{0.*loss=0"
    with torch.no_grad(), pytest.raises(ValueError, match=wanted):
        pfeife.compile(step, microbatches=2)(torch.randn(4, 8))


def test_options():
    for given, message in (
        (
            {"loss_reduction": "average"},
            "loss_reduction='average': must be 'mean', 'sum' or 'auto'",
        ),
        ({"loss": ()}, r"loss=\(\): must be the name"),
        ({"loss": 1.0}, "loss=1.0: must be the name"),
    ):
        with pytest.raises(ValueError, match=message):
            pfeife.backend(**given)


def test_evaluation_may_return_something_else():
    """Where the loss was, without gradients, is no loss."""
    linear = nn.Linear(8, 4)

    def step(x):
        found = linear(x)
        return {"loss": found.square().mean()} if torch.is_grad_enabled() else {"scores": found}

    compiled = pfeife.compile(step, microbatches=2)
    compiled(torch.randn(4, 8))["loss"].backward()
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(compiled(x)["scores"], torch.cat([linear(x[:2]), linear(x[2:])]))


@pytest.mark.parametrize("start", [None, 0, 1])
def test_a_count_is_the_same_with_slices_of_all_there_is(start):
    """As traces of open sizes have them for x[:, 1]; not with one that leaves something out."""
    aten, counts = torch.ops.aten, []
    for sliced in (False, True):
        graph = fx.Graph()
        value = targets = graph.placeholder("targets")
        if sliced:
            value = graph.call_function(aten.slice.Tensor, (targets, 0, start, sys.maxsize))
        value = graph.call_function(aten.select.int, (value, 1, 2))
        zeros = written = graph.call_function(aten.zeros_like.default, (value,))
        if sliced:
            dead = graph.call_function(aten.slice.Tensor, (zeros, 0, 0, sys.maxsize))
            dead = graph.call_function(aten.neg.default, (dead,))
            every = (dead, value, 0, start, sys.maxsize)
            written = graph.call_function(aten.slice_scatter.default, every)
        else:
            written = value
        graph.output(graph.call_function(aten.sum.default, (written,)))
        counts.append(Count(fx.GraphModule({}, graph), "line"))
    first, second = map(_operations, counts)
    assert (first == second) == (start != 1)


MIXED = {
    "centered": lambda z: z - z.mean(0),
    "beside their sum": lambda z: z - z.sum(0),
    "beside the largest": lambda z: z - z.amax(0),
    "beside the first": lambda z: z - z[0],
    "by the deviation": lambda z: z / z.std(),
    "softmax": lambda z: z * z.softmax(0),
    "flipped": lambda z: z + z.flip(0),
    "rolled": lambda z: z + z.roll(1, 0),
    "the largest": lambda z: z.topk(2, 0)[0],
    "sums of those before": lambda z: z.cumsum(0),
    "distances": lambda z: z + torch.cdist(z, z).mean(1, keepdim=True),
    "products": lambda z: z + (z @ z.T).mean(1, keepdim=True),
    "whitened": lambda z: z @ (z.T @ z + torch.eye(4)),
    "principal": lambda z: z @ torch.linalg.svd(z.T @ z + torch.eye(4))[0],
}


@pytest.mark.parametrize("reduction", ["auto", "mean"])
@pytest.mark.parametrize("how", MIXED)
def test_rows_that_depend_on_one_another(how, reduction):
    """They are told of, whatever was said of the loss."""
    net = nn.Linear(4, 4)
    step = pfeife.compile(
        lambda x: MIXED[how](net(x)).square().mean(),
        microbatches=2,
        stages=1,
        loss_reduction=reduction,
        check=False,
    )
    with said() as texts:
        step(torch.randn(6, 4))
    assert "depend on one another, in " in "".join(texts)


def test_a_row_that_is_squeezed_away():
    """Then what is computed along rows is computed of what is in the row."""
    net = nn.Linear(4, 4)
    step = pfeife.compile(
        lambda x: net(x).squeeze().softmax(0).square().mean(), microbatches=4, stages=1
    )
    with said() as texts:
        step(torch.randn(4, 4))
    assert "depend on one another, in squeeze " in "".join(texts)


@pytest.mark.parametrize("reduction", ["auto", "mean"])
def test_rows_by_themselves(reduction):
    """Means over other dimensions, norms, products with what all microbatches have."""
    net, table = nn.Linear(4, 4), torch.randn(4, 4)

    def step(x):
        z = net(x)
        z = (z - z.mean(1, keepdim=True)) / z.std(1, keepdim=True) + z.flip(1)
        return (z @ table + table.sum(0)).square().mean() + net.weight.amax()

    compiled = pfeife.compile(step, microbatches=2, stages=1, loss_reduction=reduction)
    with said() as texts:
        compiled(torch.randn(6, 4))
    assert "depend on one another" not in "".join(texts)
