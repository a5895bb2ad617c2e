"""Programs of one member of a group, against the whole: in float64, since sums that are cut are
rounded otherwise."""

import copy
from functools import partial

import attrs
import pytest
import torch
import torch.nn.functional as F
from decisions import CPU_CORE
from sent import DEAR_TO_COMPUTE, collectives
from torch import fx, nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, member_prices
from pfeife.factors import Place
from pfeife.factors.recipes import Part, log_softmax, softmax
from pfeife.frontend.cache.program_json import store
from pfeife.ir.members import MEANING, addend, all_gather, all_reduce, member, part, reduce_scatter
from pfeife.passes import shard
from pfeife.runtime import LocalPipeline
from pfeife.testing import check_pass

aten = torch.ops.aten


class Block(nn.Module):
    """Attention with queries, keys and values of one product, and two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.double()

    def forward(self, x):
        rows, length, _ = x.shape
        qkv = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [each.view(rows, length, 4, 2).transpose(1, 2) for each in qkv]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(rows, length, 8)), 0.1)
        return x + self.down(F.gelu(self.up(x)))


MEGATRON = {
    **{"*.qkv.*": Place(0, 3), "*.out.weight": 1},
    **{"*.up.*": 0, "*.down.weight": 1},
}


def test_columns_then_rows_are_added_once_each_way():
    """Shoeybi et al. 2019, section 3: two sums a block forward, two backward, and nothing else is
    sent: not even where queries, keys and values are one product."""
    model = nn.Sequential(Block(), Block())
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    state = pfeife.state_of(program, model)
    one = shard(MEGATRON, 2)
    result = check_pass(one, program, state, [x, x + 1], rounding=None, within=1e-13)
    # Of the last one nothing but the gradients of the first norm is computed, by rows.
    assert collectives(result) == {"all_reduce": 7, "reduce_scatter": 1}


def test_what_cannot_be_cut_is_refused():
    model = nn.Sequential(Block())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    refused = {
        "no parameter is called 'up'": {"up": 0},
        "has no dimension 2": {"0.up.weight": 2},
        "has 16 elements, which 3 members do not divide": {"0.up.weight": 0},
    }
    for text, placements in refused.items():
        with pytest.raises(ValueError, match=text):
            shard(placements, 3)(program)
    with pytest.raises(ValueError, match="flat one"):
        shard({"0.up.weight": 0}, 2)(pfeife.fuse()(program))


def left_out(told):
    """A part is taken for the whole, or a sum of which each member has a part for the sum."""
    value, *rest = told.args
    if told.target in (all_reduce, addend):
        return value
    if told.target is reduce_scatter:
        return told.make(part, value, *rest)
    return told.make(aten.cat.default, [value] * 2, rest[0]) if told.target is all_gather else None


def added_twice(told):
    value, *rest = told.args
    if told.target is all_reduce:
        return told.make(all_reduce, told.make(all_reduce, *told.args), *rest)
    if told.target is reduce_scatter:
        return told.make(reduce_scatter, told.make(all_reduce, value, 2), *rest)
    if told.target is all_gather:
        return told.make(all_reduce, told.make(all_gather, *told.args), 2)
    return None


def along_another_dimension(told):
    if told.target not in (all_gather, reduce_scatter, part):
        return None
    value, dim, _, members = told.args
    sizes = enumerate(told.node.args[0].meta["val"].shape)
    other = next((d for d, size in sizes if d != dim and size % members == 0), None)
    if other is None:
        return None
    wrong = told.make(told.target, value, other, 1, members)
    return told.make(aten.reshape.default, wrong, [*told.value.shape])


@pytest.mark.parametrize("fault", [left_out, added_twice, along_another_dimension])
@pytest.mark.parametrize("placements", [MEGATRON, {"*.qkv.weight": 0, "*.up.*": 0}])
def test_a_fault_of_any_collective_is_found(placements, fault):
    """One at a time, by the check of all passes."""
    model = nn.Sequential(Block())
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    state, local = pfeife.state_of(program, model), shard(placements, 2)(program)
    check = partial(check_pass, rounding=None, within=1e-13)
    check(lambda _: local, program, state, [x, x + 1])
    nodes, found = local.module.graph.nodes, 0
    for name in [n.name for n in nodes if n.target in MEANING and n.target is not member]:
        faulty = local.rewrite(
            lambda told, name=name: fault(told) if told.node.name == name else None
        )
        if str(faulty) != str(local):
            with pytest.raises((AssertionError, ValueError)):
                check(lambda _, faulty=faulty: faulty, program, state, [x, x + 1])
            found += 1
    assert found >= 2


def test_members_that_disagree_are_told_of():
    model = nn.Sequential(Block())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    faulty = shard({"*.up.*": 0, "*.down.weight": 1}, 2)(program).rewrite(left_out)
    with pytest.raises(ValueError, match="a sum of their parts is missing"):
        pfeife.evaluate(faulty, pfeife.state_of(program, model), [x])


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(4, 6).double())


def test_an_operation_without_a_rule_is_refused_by_line_or_computed_as_a_whole():
    model = Table()
    x = torch.ones((), dtype=torch.float64)
    program = pfeife.capture(lambda x: model.table.kthvalue(2, 1)[0].square().sum() * x, x)
    with pytest.raises(ValueError, match=r"no rule says how aten.kthvalue.default .*test_shard.py"):
        shard({"table": 1}, 2)(program)
    gathered = shard({"table": 1}, 2, unknown="gather")
    check_pass(gathered, program, pfeife.state_of(program, model), [x])


class Heads(nn.Module):
    """Queries, keys and values of a product each, and a vocabulary."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(48, 8), nn.Linear(8, 48, bias=False)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.double()

    def forward(self, tokens):
        x = self.words(tokens)
        heads = [w(x).unflatten(-1, (4, 2)).transpose(1, 2) for w in (self.q, self.k, self.v)]
        attended = F.scaled_dot_product_attention(*heads)
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("places", [{"weight": 0}, {"weight": 1}])
def test_what_reads_memory_as_it_lies_there_is_not_given_another_order(places):
    """Parts are joined in the order of dimensions: not in that of memory."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 8).double(), torch.randn(2, 4, 8).double()

    def step(x):
        h = net(x).transpose(0, 1) + 1
        return h.as_strided((2, 3, 8), (8, 16, 1)).square().sum()

    flat = pfeife.capture(step, x, loss_reduction="sum")
    cut = shard(places, 2, unknown="gather")
    check_pass(cut, flat, pfeife.state_of(flat, net), [x], rounding=None, within=1e-13)


@pytest.mark.parametrize("prices", [None, DEAR_TO_COMPUTE])
def test_a_sum_of_parts_may_lie_otherwise(prices):
    """A reduction lies as what it reads does, and its parts are added as they lie."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 8).double(), torch.randn(2, 4, 8).double()

    def step(x):
        h = net(x).relu().transpose(0, 1).sum(-1)
        return h.as_strided((2, 3), (3, 1)).square().sum()

    flat = pfeife.capture(step, x, loss_reduction="sum")
    cut = shard({"weight": 0}, 2, unknown="gather", prices=prices)
    check_pass(cut, flat, pfeife.state_of(flat, net), [x], rounding=None, within=1e-13)


def test_memory_of_another_value_is_not_read_of_parts():
    net, x = nn.Linear(8, 8).double(), torch.randn(2, 4, 8).double()

    def step(x):
        h = (net(x).transpose(0, 1) + 1)[:, :1]
        return h.as_strided((2, 3, 8), (8, 16, 1)).square().sum()

    flat = pfeife.capture(step, x, loss_reduction="sum")
    with pytest.raises(ValueError, match=r"in another order .*, in step"):
        shard({"weight": 0}, 2, unknown="gather")(flat)


class Two(nn.Module):
    """Two layers, of which the second has `classes`."""

    def __init__(self, classes: int):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, classes)
        self.double()

    def forward(self, x):
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("members", [2, 3])
def test_a_squeeze_takes_the_dimensions_of_one_device(members):
    """Of as many rows each member has one."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 4).double(), torch.randn(members, 1, 8).double()

    def step(x):
        h = net(x).squeeze()
        return (h.softmax(0) * h).square().sum()

    flat = pfeife.capture(step, x, loss_reduction="sum")
    cut = shard({}, members, prices=member_prices(machine("h100-sxm")))
    check_pass(cut, flat, pfeife.state_of(flat, net), [x, x + 1], rounding=None, within=1e-13)


def test_a_squeeze_of_nothing_stays_one():
    model = Two(2)
    x = torch.randn(4, 8, dtype=torch.float64)
    flat = pfeife.capture(
        lambda x: (model.down.weight.squeeze(0).mean(0) * x.sum()).sum(), x[:, :1]
    )
    state = pfeife.state_of(flat, model)
    check_pass(shard({"down.weight": 0}, 2), flat, state, [x[:, :1]], rounding=None, within=1e-13)


@pytest.mark.parametrize("placements", ["cut", "auto", {"weight": 0}])
@pytest.mark.parametrize("drop", [lambda h: F.dropout(h, 0.3), lambda h: h * torch.rand_like(h)])
def test_draws_are_in_the_order_of_memory(drop, placements):
    """As where a sequence is the first dimension, or channels are."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 6, bias=False).double(), torch.randn(4, 8).double()
    flat = pfeife.capture(lambda x: drop(net(x).T).square().sum(), x, loss_reduction="sum")
    cut = shard(placements, 2, prices=DEAR_TO_COMPUTE, unknown="gather")
    check_pass(cut, flat, pfeife.state_of(flat, net), [x, x + 1], rounding=None, within=1e-13)


@pytest.mark.parametrize("of", [torch.linalg.det, lambda h: torch.linalg.slogdet(h)[1]])
@pytest.mark.parametrize("prices", [None, member_prices(machine("h100-sxm"))])
def test_a_decomposition_is_of_the_matrix_as_it_lies_there(of, prices):
    """Its backward solves with the factors of the transpose where one device had these."""
    torch.manual_seed(0)
    net, x = nn.Linear(8, 4).double(), torch.randn(4, 8).double()

    def step(x):
        return of(net(x).transpose(0, 1).sin() + 2 * torch.eye(4).double()) + net(x).square().mean()

    flat = pfeife.capture(step, x, loss_reduction="sum")
    cut = shard({"weight": 1}, 2, unknown="gather", prices=prices)
    check_pass(cut, flat, pfeife.state_of(flat, net), [x], rounding=None, within=1e-12)


def test_what_is_cut_may_be_far_away_from_what_looks_alike():
    model = Two(8)

    def far(h):
        for _ in range(20):
            h = h.sin()
        return h.sum()

    x = torch.randn(4, 8, dtype=torch.float64)
    flat = pfeife.capture(
        lambda x: far(model.up.weight) * x.sum() + far(model.down.weight.T), x, loss_reduction="sum"
    )
    cut = shard({"up.weight": 0}, 2, prices=DEAR_TO_COMPUTE)
    check_pass(cut, flat, pfeife.state_of(flat, model), [x], rounding=None, within=1e-13)


@pytest.mark.parametrize(
    "of",
    [
        lambda h: h.detach().sum(0, dtype=torch.int64).square().sum(),
        lambda h: (h > 0).sum(0, dtype=torch.bool).sum(),
        lambda h: ((h > 0).sum(0, dtype=torch.bool) + (h > 0).sum(0)).sum(),
        lambda h: (h.detach().view(torch.int64) >> 40).sum(),
        lambda h: torch.native_dropout(h, 0.5, False)[0].square().sum(),
    ],
)
@pytest.mark.parametrize("placements", ["cut", "gathered", {"weight": 1}])
def test_what_is_no_sum_of_parts_is_not_taken_for_one(of, placements):
    torch.manual_seed(0)
    net, x = nn.Linear(8, 6, bias=False).double(), 10 * torch.randn(4, 8).double()

    def step(x):
        h = net(x)
        return h.square().sum() * of(h) + h.sum()

    flat = pfeife.capture(step, x, loss_reduction="sum")
    cut = shard(placements, 2, prices=DEAR_TO_COMPUTE, unknown="gather")
    check_pass(cut, flat, pfeife.state_of(flat, net), [x], rounding=None, within=1e-12)


@pytest.mark.parametrize(
    "of",
    [
        lambda net, x, mask: net.up(x[mask]).view(-1).sin().square().mean(),
        lambda net, x, mask: net.down(net.up(x[mask]).view(-1).softmax(0).view(-1, 16)).sum(),
        lambda net, x, mask: F.dropout(net.up(x[mask]), 0.3).square().sum(),
        lambda net, x, mask: net.down(net.up(x))[mask].tanh().square().mean(),
        lambda net, x, mask: net.down(net.up(x)).t().masked_select(mask).square().mean(),
    ],
)
@pytest.mark.parametrize("placements", ["cut", {}, {"up.*": 0}])
def test_rows_that_data_choose_are_fewer_than_there_may_be(of, placements):
    model, x = Two(6), torch.randn(12, 8, dtype=torch.float64)
    masks = [torch.arange(12) % 2 < 1, torch.arange(12) % 5 == 1, torch.ones(12, dtype=torch.bool)]
    flat = pfeife.capture(partial(of, model), x, masks[0], loss_reduction="sum")
    for prices in (None, DEAR_TO_COMPUTE, member_prices(machine("h100-sxm"))):
        cut = shard(placements, 2, prices=prices, unknown="gather")
        batches = [(x, mask) for mask in masks]
        check_pass(cut, flat, pfeife.state_of(flat, model), batches, rounding=None, within=1e-12)


@pytest.mark.parametrize("attention", ["gather", "ring"])
@pytest.mark.parametrize("placements", ["gathered", "cut"])
def test_an_open_size_is_cut_where_members_divide_it(placements, attention):
    """In the program's own sizes, and in those of the call that it is for."""
    model = Block().eval()
    x = torch.randn(1, 8, 8, dtype=torch.float64)
    torch._dynamo.mark_dynamic(x, 1)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    state = pfeife.state_of(program, model)
    cut = shard(placements, 2, attention=attention, prices=DEAR_TO_COMPUTE)
    (name,) = (port.name for port in program.ports(pfeife.Role.SIZE))
    others = [[torch.randn(1, length, 8, dtype=torch.float64)] for length in (6, 12, 4)]
    local = check_pass(cut, program, state, [x], rounding=None, others=others)
    odd = torch.randn(1, 7, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"captured for Eq\(Mod\("):
        pfeife.evaluate(local, state, [odd])
    of_any = shard(placements, 2, attention=attention, sizes={name: 7})
    check_pass(of_any, program, state, [x], rounding=None, others=[*others, [odd]])


@pytest.mark.parametrize(
    "of",
    [
        lambda h: F.embedding(torch.arange(len(h)) % 3, h[:, 0]),
        lambda h: h.reshape(-1).log_softmax(0),
        lambda h: F.pad(h, (0, 0, 0, 3)),
        lambda h: F.pad(h, (0, 0, 0, -h.shape[1] % 8)),
        lambda h: h[h[..., 0] > 0],
        lambda h: (h[:, :, None] * h[:, None]).transpose(1, 2).flatten(1, 2).softmax(1),
        lambda h: h[:, 1:] * h[:, :-1] - h[:, : h.shape[1] // 2].sum(),
    ],
)
@pytest.mark.parametrize("placements", ["gathered", "cut"])
def test_two_open_sizes_are_divided_by_members(of, placements):
    """Whatever is computed of the two, the program holds for all that members divide, and for no
    reason but that they do."""
    layer = nn.Linear(4, 4).double()
    x = torch.randn(6, 12, 4, dtype=torch.float64)
    for dim in range(2):
        torch._dynamo.mark_dynamic(x, dim)
    program = pfeife.capture(lambda x: of(layer(x)).square().sum() + layer(x).sin().mean(), x)
    state = pfeife.state_of(program, layer)
    cut = shard(placements, 3, unknown="gather", prices=DEAR_TO_COMPUTE)
    others = [[torch.randn(*sizes, 4, dtype=torch.float64)] for sizes in ((12, 6), (9, 18))]
    check_pass(cut, program, state, [x], rounding=None, within=1e-12, others=others)


def test_an_open_size_may_divide_another_one():
    layer = nn.Linear(4, 4).double()
    x, y = (torch.randn(rows, 4, dtype=torch.float64) for rows in (24, 6))
    for value in (x, y):
        torch._dynamo.mark_dynamic(value, 0)

    def step(x, y):
        return (layer(x).reshape(len(y), -1, 4) * y[:, None]).square().sum()

    program = pfeife.capture(step, x, y)
    others = [[(torch.cat([x] * times), torch.cat([y] * times))] for times in (2, 3)]
    cut = shard("gathered", 2, prices=DEAR_TO_COMPUTE)
    state = pfeife.state_of(program, layer)
    check_pass(cut, program, state, [(x, y)], rounding=None, within=1e-12, others=others)


def test_ranks_that_know_other_ways_are_told_of():
    """As where a rank has the program from a cache, captured at another length."""
    layer, told = nn.Linear(4, 4), []

    def flat(length):
        torch._dynamo.reset()
        x = torch.randn(2, length, 4)
        torch._dynamo.mark_dynamic(x, 1)
        return pfeife.capture(lambda x: layer(x).square().mean(), x)

    def of_rank_zero(decide):
        told.append(decide())
        return told[0]

    cut = shard("cut", 2, decided=of_rank_zero)
    cut(flat(6))
    cut(flat(8))
    with pytest.raises(ValueError, match="captured at other sizes"):
        cut(flat(7))


@pytest.mark.parametrize("placements", ["cut", {"weight": 0}])
def test_a_view_may_begin_where_an_open_size_says(placements):
    weight = nn.Linear(12, 6, bias=False).double()
    x = torch.randn(5, 12, dtype=torch.float64)
    torch._dynamo.mark_dynamic(x, 0)
    program = pfeife.capture(lambda x: weight(x)[len(x) // 2].sum(), x)
    others = [[torch.randn(rows, 12, dtype=torch.float64)] for rows in (6, 7)]
    state = pfeife.state_of(program, weight)
    check_pass(shard(placements, 2), program, state, [x], rounding=None, others=others)


@pytest.mark.parametrize("members", [2, 3])
def test_a_table_of_rows_that_is_also_read_as_a_whole(members):
    """The sum of a sparse gradient and another one has all rows, of the sparse one there are no
    parts."""
    torch.manual_seed(0)
    table = nn.Embedding(12, 6, sparse=True, dtype=torch.float64)
    places = torch.arange(8) * 5 % 12
    flat = pfeife.capture(
        lambda places: table(places).sin().sum() + table.weight.square().sum(), places
    )
    state = pfeife.state_of(flat, table)
    check_pass(shard("cut", members), flat, state, [places], rounding=None, within=1e-13)


@pytest.mark.parametrize("placements", ["cut", {"weight": 0}])
def test_a_microbatch_of_which_no_target_counts_has_no_gradients(placements):
    net, x = nn.Linear(8, 12, bias=False).double(), torch.randn(6, 8).double()
    targets = torch.full((6,), -100)
    flat = pfeife.capture(
        lambda x, t: F.cross_entropy(net(x), t).nan_to_num() + net(x).sum(), x, targets
    )
    cut = shard(placements, 2)
    state = pfeife.state_of(flat, net)
    check_pass(cut, flat, state, [(x, targets)], rounding=None, within=1e-13)


@pytest.mark.parametrize("recipe", [softmax, log_softmax])
def test_a_softmax_that_widens_does_so_before_anything_is_computed(recipe):
    """As kernels of a GPU do (`half_to_float`), which no CPU has."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    device, narrow = torch.device("cpu"), torch.bfloat16
    part = Part({"self": x, "dim": 1}, 6, 12, 2, torch.float32, device, narrow)
    recipe(lambda target, *args, **kwargs: graph.call_function(target, args, kwargs), part)
    assert [(user.target, user.kwargs["dtype"]) for user in x.users] == [
        (aten._to_copy.default, torch.float32)
    ]


@pytest.mark.parametrize("wrong", [12, -1])
def test_an_index_that_no_member_has_is_an_error_as_on_one_device(wrong):
    words, head = nn.Embedding(12, 8).double(), nn.Linear(8, 12).double()
    model = nn.ModuleDict({"words": words, "head": head})
    tokens, good = torch.tensor([wrong, 1]), torch.tensor([0, 1])
    flat = pfeife.capture(lambda w, t: F.cross_entropy(head(words(w)), t), good, good + 0)
    local = shard({"words.weight": 0, "head.*": 0}, 2)(flat)
    for rows in ((tokens, good), (good, tokens)):
        with pytest.raises(IndexError, match="out of range"):
            pfeife.evaluate(local, pfeife.state_of(flat, model), [rows])


@pytest.mark.parametrize(
    "arguments",
    [
        *({"placements": word} for word in ("foo", None, {"*": "colum"}, {"*": True}, {"*": 1.0})),
        *({"placements": {"*": Place(0, 0)}}, {"members": 1}, {"members": 2.0}),
        *({"unknown": "gathers"}, {"attention": "rings"}),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments):
    with pytest.raises(ValueError, match="shard: "):
        shard(**{"placements": "cut", "members": 2, **arguments})


def test_sums_that_are_added_are_taken_once():
    model, tokens = Heads(), torch.randint(48, (1, 5))
    program = pfeife.capture(lambda t: F.cross_entropy(model(t).flatten(0, 1), t.flatten()), tokens)
    state = pfeife.state_of(program, model)
    columns = {f"{name}.weight": 0 for name in "qkv"} | {"out.weight": 1}
    result = shard(columns, 2)(program)
    assert collectives(result) == {"all_reduce": 2}
    check_pass(shard(columns, 2), program, state, [tokens], rounding=None, within=1e-13)


def test_gradients_of_which_members_have_addends_are_added_up_once_a_step():
    """As Megatron does with its norms: a microbatch sends nothing for them. Nobody forgets it."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    state = pfeife.state_of(program, model)
    one = shard({}, 2, prices=DEAR_TO_COMPUTE)
    local = check_pass(one, program, state, [x, x + 1, x * 2], rounding=None, within=1e-13)
    names = {"0.weight", "0.bias", "1.weight"}
    assert {port.fqn for port in local.outputs if port.partial} == names
    assert collectives(local) == {"all_reduce": 1}  # of the loss
    taken = tuple(attrs.evolve(port, partial=False) for port in local.outputs)
    with pytest.raises(ValueError, match=r"different values of gradient 0\.weight"):
        pfeife.evaluate(attrs.evolve(local, outputs=taken), state, [x])
    fused = pfeife.fuse()(local)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=1)
    ranks = pfeife.apply(plan)(fused)
    assert {(r.name, r.members, r.bucket) for r in ranks.reductions} == {
        (name, 2, 0) for name in names
    }
    with pytest.raises(ValueError, match=r"has an addend of the gradient of 0\.weight, and no"):
        sched.lower(plan.schedule, attrs.evolve(ranks, reductions=()))


@pytest.mark.parametrize("wide", [pfeife.accumulate_in, pfeife.master_weights])
def test_gradients_in_a_wider_type_are_added_up_once_a_step_too(wide):
    """Each addend is cast, in place of their sum."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
    narrow = model.bfloat16() if wide is pfeife.accumulate_in else copy.deepcopy(model).bfloat16()
    x = torch.randn(4, 8).bfloat16()
    program = wide(torch.float32)(pfeife.capture(lambda x: narrow(x).float().square().mean(), x))
    local = shard({}, 2, prices=DEAR_TO_COMPUTE)(program)
    partial = {port.fqn: port.dtype for port in local.outputs if port.partial}
    assert partial == dict.fromkeys(("0.weight", "0.bias", "1.weight"), torch.float32)
    assert collectives(local) == {"all_reduce": 1}  # of the loss
    state = pfeife.state_of(program, model)
    whole, parts = (pfeife.evaluate(p, state, [x, x + 1]).gradients for p in (program, local))
    for name, gradient in whole.items():  # of products in bfloat16, of which one bit is 2 ** -8
        assert (parts[name] - gradient).norm() < 2**-6 * gradient.norm()


def test_a_table_of_rows_is_compared_as_any():
    """Members that all have the same sparse gradient."""
    table = nn.Embedding(16, 4, sparse=True, dtype=torch.float64)
    rows = torch.tensor([[1, 2, 2]])
    program = pfeife.capture(lambda rows: table(rows).square().mean(), rows)
    local = shard({}, 2)(program)
    whole, parts = (
        pfeife.evaluate(p, pfeife.state_of(p, table), [rows]).gradients["weight"].to_dense()
        for p in (program, local)
    )
    assert torch.equal(whole, parts)
    with pytest.raises(ValueError, match=r'the gradient of weight is sparse.* say "gathered"'):
        shard({"weight": 0}, 2)(program)


def test_no_logits_are_gathered_where_the_vocabulary_is_cut():
    model, tokens = Heads(), torch.randint(48, (1, 5))
    program = pfeife.capture(
        lambda t: F.cross_entropy(model(t).flatten(0, 1), t.flatten(), ignore_index=3), tokens
    )
    state = pfeife.state_of(program, model)
    cut = shard({"words.weight": 0, "head.weight": 0}, 3)
    result = check_pass(cut, program, state, [tokens], rounding=None, within=1e-13)
    assert collectives(result).keys() == {"all_reduce"}


def test_a_program_for_members_is_cut_into_stages_as_any():
    """Bit for bit what it is before; and what cannot run it or keep it says so."""
    model = nn.Sequential(Block(), Block())
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    program = pfeife.capture(lambda x: model(x).square().mean(), x)
    state = pfeife.state_of(program, model)
    local = shard(MEGATRON, 2)(program)
    fused = check_pass(pfeife.fuse(), local, state, [x, x + 1])
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=2, stages=2)
    ranks = check_pass(pfeife.apply(plan), fused, state, [x, x + 1])
    with pytest.raises(ValueError, match="one of 2 members of a group: run it on 4 ranks"):
        LocalPipeline(ranks, sched.lower(plan.schedule, ranks))
    with pytest.raises(ValueError, match="for members of a group is not stored"):
        store(local, "key")
