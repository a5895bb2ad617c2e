"""Rows that data send to experts, of which each member has some."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (has an operator for products of experts)
from decisions import CPU_CORE
from sent import CHEAP_TO_COPY, DEAR_TO_COMPUTE, collectives
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, member_prices
from pfeife.ir.flops import node_flops
from pfeife.ir.members import added_rows, fetched_rows
from pfeife.passes import shard
from pfeife.testing import check_pass


class Experts(nn.Module):
    """Each word goes to two of four experts, as transformers computes them in groups."""

    def __init__(self, biased=False):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.norm = nn.Linear(8, 4), nn.LayerNorm(8)
        self.up = nn.Parameter(torch.randn(4, 8, 12))
        self.down = nn.Parameter(torch.randn(4, 6, 8))
        self.bias = nn.Parameter(torch.randn(4, 12)) if biased else None
        self.double()

    def forward(self, x):
        words = self.norm(x).flatten(0, -2)
        shares, experts = self.router(words).softmax(-1).topk(2)
        shares = (shares / shares.sum(-1, keepdim=True)).flatten()
        chosen, order = experts.flatten().sort()
        ends = (chosen[:, None] <= torch.arange(4)).sum(0).int()
        product = torch.ops.transformers.grouped_mm_fallback
        hidden = product(words[order // 2], self.up, ends)
        if self.bias is not None:
            hidden = hidden + self.bias[chosen]
        gate, up = hidden.chunk(2, -1)
        rows = product(F.silu(gate) * up, self.down, ends) * shares[order][:, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return x + rows[back].unflatten(0, (-1, 2)).sum(1).view_as(x)


PRICES = {
    "fewest bytes": None,
    "computing": DEAR_TO_COMPUTE,
    "copies": CHEAP_TO_COPY,
    "a machine": member_prices(CPU_CORE),
}


def captured(*batch, biased=False):
    model = nn.Sequential(Experts(biased), nn.Linear(8, 8).double(), Experts(biased))
    step = lambda x: model(x).square().mean()  # noqa: E731
    program = pfeife.capture(step, *batch, loss_reduction="mean")
    return program, pfeife.state_of(program, model)


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("biased", [False, True])
def test_rows_go_to_the_members_that_have_their_experts(members, prices, biased):
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    program, state = captured(x, biased=biased)
    cut = shard({"*.up": 0, "*.down": 0}, members, prices=PRICES[prices])
    # Of the last one all words are alike: they go to the same experts.
    batches = [[x], [x.flip(0)], [torch.ones_like(x)]]
    local = check_pass(cut, program, state, batches, rounding=None, within=1e-12)
    if prices in ("computing", "copies"):
        assert collectives(local).keys() >= {"fetched_rows", "added_rows"}, collectives(local)


class Rows(nn.Module):
    """Rows that one of four experts computes, in an order that is told."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.use, self.up = use, nn.Parameter(torch.randn(4, 8, 8).double())

    def forward(self, x, expert):
        chosen, order = expert.sort(stable=True)
        ends = (chosen[:, None] <= torch.arange(4)).sum(0).int()
        rows = torch.ops.transformers.grouped_mm_fallback(x[order], self.up, ends)
        return self.use(self.up, rows, order)


def _again(up, rows, order):
    """The same rows for other experts."""
    others = torch.tensor([1, 2, 4, len(order)], dtype=torch.int32)
    return torch.ops.transformers.grouped_mm_fallback(rows[order.flip(0)], up, others)


USES = {
    "by others": _again,
    "a row for all": lambda up, rows, order: rows.index_put((order,), up[0, 0], accumulate=True),
    "from the end": lambda up, rows, order: rows[order - len(order)],
    "added from the end": lambda up, rows, order: torch.zeros_like(rows).index_put(
        (order - len(order),), rows, accumulate=True
    ),
    "sums": lambda up, rows, order: rows.cumsum(0) + rows.mean(0) - rows.amax(0) + rows.var(0),
}


ALONE = ("a row for all", "from the end", "added from the end")  # needs no other row


@pytest.mark.parametrize(
    ("use", "count"), [*((use, 8) for use in USES), *((use, 1) for use in ALONE)]
)
def test_what_becomes_of_rows_of_experts(use, count):
    """Also of one alone, of which all members have all."""
    model = Rows(USES[use])
    x, expert = torch.randn(count, 8, dtype=torch.float64), torch.randint(4, (count,))
    step = lambda *batch: model(*batch).square().mean()  # noqa: E731
    program = pfeife.capture(step, x, expert, loss_reduction="mean")
    state = pfeife.state_of(program, model)
    for prices in PRICES.values():
        cut = shard({"up": 0}, 2, prices=prices)
        try:
            check_pass(cut, program, state, [[x, expert]], rounding=None, within=1e-12)
        except IndexError as error:
            assert "counts from their end" in str(error) and "the end" in use


def test_members_share_the_operations_of_experts():
    """By estimate: of the rows each has as many."""
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    program, _ = captured(x)
    local = shard({"*.up": 0, "*.down": 0}, 2, prices=CHEAP_TO_COPY)(program)
    whole, own = (
        sum(node_flops(n) for n in each.module.graph.nodes if "grouped_mm" in str(n.target))
        for each in (program, local)
    )
    assert own * 2 == whole > 0


def test_as_many_rows_as_there_are():
    """Of a batch whose length is open, and whose rows members may have cut."""
    x, longer = (torch.randn(4, length, 8, dtype=torch.float64) for length in (6, 9))
    torch._dynamo.mark_dynamic(x, 1)
    program, state = captured(x)
    assert program.ports(pfeife.Role.SIZE)
    for prices in PRICES.values():
        cut = shard({"*.up": 0, "*.down": 0}, 2, prices=prices)
        check_pass(cut, program, state, [[x], [longer]], rounding=None, within=1e-12)


def test_a_fault_of_an_exchange_is_found():
    """One at a time: rows of other places, or of other members."""
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    program, state = captured(x)
    local = shard({"*.up": 0, "*.down": 0}, 2, prices=CHEAP_TO_COPY)(program)

    def reversed_index(told):
        at = 1 if told.target is fetched_rows else 2
        arguments = [*told.args]
        arguments[at] = told.make(torch.ops.aten.flip.default, arguments[at], [0])
        return told.make(told.target, *arguments)

    def another_start(told):
        arguments = [
            told.make(torch.ops.aten.mul.Tensor, each, 2)
            if at > 1 and isinstance(each, torch.fx.Node) and each.meta["val"].shape == (2,)
            else each
            for at, each in enumerate(told.args)
        ]
        return told.make(told.target, *arguments)

    check = partial(check_pass, rounding=None, within=1e-12)
    check(lambda _: local, program, state, [[x], [x + 1]])
    names = [n.name for n in local.module.graph.nodes if n.target in (fetched_rows, added_rows)]
    assert len(names) >= 6
    for name in names:
        for fault in (reversed_index, another_start):
            faulty = local.rewrite(
                lambda told, name=name, fault=fault: fault(told) if told.node.name == name else None
            )
            if str(faulty) == str(local):
                continue
            with pytest.raises((AssertionError, ValueError, RuntimeError, IndexError)):
                check(lambda _, faulty=faulty: faulty, program, state, [[x], [x + 1]])


def test_stages_of_experts():
    """Cut anywhere, also where rows are sent on of which data decide how many there are."""
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    program, state = captured(x)
    local = shard({"*.up": 0, "*.down": 0}, 2, prices=CHEAP_TO_COPY)(program)
    fused = pfeife.compose(pfeife.fuse(), pfeife.split_backward())
    local = check_pass(fused, local, state, [[x], [x + 1]])
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    for stages in (2, 3, 4):
        plan = sched.plan(local, machine=CPU_CORE, microbatches=2, stages=stages)
        check_pass(pfeife.apply(plan), local, state, [[x], [x + 1]])
