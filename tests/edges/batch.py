"""The batch dimension: what is cut, and what is refused."""

import copy
import dataclasses
import os
import types
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import attrs
import torch
import torch.nn.functional as F
from listening import said
from rows import row
from torch import nn

import pfeife
from pfeife._torch import is_absent
from pfeife.backend.graphs.step_graph import MicrobatchGraph
from pfeife.testing import eager_accumulation, own_gradients


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def rows(count: int = 4, width: int = 8) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def same(compiled, step, model, whole, parts, expected=None):
    """One call against accumulation over the `parts`: loss and gradients, bit for bit."""
    expected = expected or eager_accumulation(step, model, parts)
    model.zero_grad()
    loss = compiled(*whole)
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if not is_absent(p)}  # on this rank
    found = {n: g for n, g in own_gradients(model).items() if n in trained}
    assert torch.equal(loss, expected.loss), (loss, expected.loss)
    assert found or "RANK" in os.environ  # a rank's stages may have no parameters
    for name, gradient in found.items():
        assert torch.equal(gradient, expected.gradients[name]), name


@row()
def the_users_tensor_is_not_marked():
    model, x = net(), rows()
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(x)
    assert not getattr(x, "_dynamo_dynamic_indices", None)
    torch.compile(lambda x: x.view(4, 2, 4).sum(), backend="eager")(x)


@row()
def results_that_rounding_decides():
    """As a batch norm of almost equal values: sums of rows in another order give anything."""
    model, x = net(), rows(14)

    def step(x):
        noise = (x - x.mean(0)).sum(0)  # zero but for rounding
        return model(x).square().mean() + F.normalize(noise, dim=0).sum()

    assert not torch.allclose(step(x[:7]), step(x[:7].flip(0)), rtol=0.1)
    compiled = pfeife.compile(step, microbatches=2, stages=2)
    same(compiled, step, model, (x,), [(x[:7],), (x[7:],)])


@row(ranks=(1, 2))
def an_unstrided_convolution_of_size_1():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def step(x):
        return model(x).square().mean()

    same(pfeife.compile(step, microbatches=4), step, model, (x,), [(p,) for p in x.chunk(4)])


@row()
def an_unstrided_convolution_of_size_1_by_name():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(1))

    def step(x):
        return model(x).square().mean()

    compiled = torch.compile(step, backend="pfeife", options={"microbatches": 4}, dynamic=True)
    same(compiled, step, model, (x,), [(p,) for p in x.chunk(4)])


MIXED = "depend on one another, in "


def warned(step, *batch, **options) -> list[str]:
    """What a first call says of rows that depend on one another."""
    with said() as found:
        pfeife.compile(step, microbatches=2, **options)(*batch)
    return [line for line in found if MIXED in line]


def sequences_first(**options) -> Callable:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, **options)
    return lambda x: layer(x).square().mean()


@row()
def a_sequence_in_the_place_of_the_batch():
    """It is cut, which nothing but the rules of its operations can tell: the step has no places."""
    for count in (6, 2):  # of 3 places a microbatch, or of 1
        x = torch.randn(count, 4, 8)
        for options in ({}, {"loss_reduction": "mean"}, {"capture": "trace"}):
            (found,) = warned(sequences_first(), x, **options)
            assert "(dimension 0) of ['x']" in found and "in_dims={'x': 0}" in found
            assert f'File "{__file__}", line ' in found
        assert not warned(sequences_first(), x, in_dims={"x": 1})
        assert not warned(sequences_first(batch_first=True), x)


@row()
def a_sequence_that_a_model_alone_is_given():
    (found,) = warned(nn.TransformerEncoderLayer(8, 2, 16, 0.0), torch.randn(6, 4, 8))
    assert "(dimension 0) of ['src']" in found


def by_products(one, other):
    return F.cross_entropy(one @ other.t(), torch.arange(len(one)))


def by_distances(one, other):
    return torch.cdist(one, other).diagonal().mean()


def by_differences(one, other):
    return (one[:, None] - other[None]).square().mean()


def by_shares(one, other):
    return (one.softmax(0) * other).square().mean()


@row()
def negatives_of_the_batch():
    for loss in (by_products, by_distances, by_differences, by_shares):
        model = net()

        def step(one, other, model=model, loss=loss):
            return loss(model(one), model(other))

        for options in ({}, {"loss_reduction": "mean"}):
            if options and loss is by_distances:
                continue  # no rule knows it, and nobody asks the graph for more rows
            assert len(warned(step, rows(), rows(), **options)) == 1, loss
            assert not warned(step, rows(), rows(), in_dims={"one": 0}, **options)


@row()
def statistics_of_the_batch():
    """By convention those of a batch norm are each microbatch's own; of one by hand, and of weights
    that are made of all rows, somebody is told."""
    norm, model = nn.BatchNorm1d(8), net()

    def by_hand(x):
        h = model(x)
        return ((h - h.mean(0)) / h.std(0)).square().mean()

    def weighted(x):
        weights = model(x).exp().mean(1)
        return (model(x).square().mean(1) * weights / weights.sum()).sum()

    assert not warned(lambda x: norm(model(x)).square().mean(), rows(8))
    assert warned(by_hand, rows(8)) and warned(weighted, rows(8))


def _looked_up(model):
    def step(x, table):
        return F.mse_loss(model(x) + table[:1], x)

    return step


@row("microbatch: the inputs have {'x': 8, 'table': 64} rows, which do not belong together")
def a_table_of_64_rows_beside_a_batch_of_8():
    pfeife.compile(_looked_up(net()), microbatches=2)(rows(8), rows(64))


@row("microbatch: the inputs have {'x': 8, 'table': 64} rows, which do not belong together")
def a_table_by_name_beside_a_batch_of_8():
    pfeife.compile(_looked_up(net()), microbatches=2)(rows(8), table=rows(64))


@row("microbatch: the inputs have {'x': 6, 'table': 64} rows, which do not belong together")
def a_table_beside_a_batch_with_the_named_backend():
    options = {"microbatches": 2}
    torch.compile(_looked_up(net()), backend="pfeife", options=options, dynamic=True)(
        rows(6), rows(64)
    )


@row("microbatch: the inputs have {'table': 64, 'x': 6} rows, which do not belong together")
def a_table_before_a_batch_with_the_named_backend():
    model = net()
    step = _looked_up(model)
    options = {"microbatches": 2}
    torch.compile(lambda table, x: step(x, table), backend="pfeife", options=options, dynamic=True)(
        rows(64), rows(6)
    )


@row(ranks=(1, 2))
def a_table_that_in_dims_names():
    model = net()
    step = _looked_up(model)
    compiled = pfeife.compile(step, microbatches=2, in_dims={"table": None})
    x, table = rows(8), rows(64)
    same(compiled, step, model, (x, table), [(p, table) for p in x.chunk(2)])


@row(ranks=(1, 2))
def two_views_stacked_where_in_dims_says_so():
    model = net()

    def step(x, views):
        return F.mse_loss(model(x), views[::2] + views[1::2])

    x, views = rows(4), rows(8)
    parts = list(zip(x.chunk(2), views.chunk(2), strict=True))
    same(pfeife.compile(step, microbatches=2, in_dims=(0, 0)), step, model, (x, views), parts)


@row("in_dims: the step has no arguments ['tabel']")
def in_dims_of_no_argument():
    pfeife.compile(_looked_up(net()), microbatches=2, in_dims={"tabel": None})(rows(8), rows(64))


class Attention(nn.Module):
    """Sequence first, as torch's own layers are unless told otherwise."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.MultiheadAttention(8, 1)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


class Tabled(nn.Module):
    """Its table has as many rows as the batch, and belongs to none of them."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, kinds, table):
        return F.mse_loss(self.net(x) + table[kinds], x)


@row("in_dims: table has as many rows as the batch, but they do not belong to its rows")
def a_table_with_as_many_rows_as_the_batch():
    step = Tabled()
    kinds = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1])
    pfeife.compile(step, microbatches=2)(rows(8), kinds, rows(8) * 3)


@row("in_dims: the results of the step depend on the order of the rows of ['x']")
def a_sequence_with_places_first():
    model = net()
    places = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(2))

    def step(x):
        return (model(x) * places).square().mean()

    x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1))
    pfeife.compile(step, microbatches=2)(x)


@row("in_dims: the results of the step depend on the order of the rows of ['x']")
def places_first_with_dropout():
    model = nn.Sequential(net(), nn.Dropout(0.5))
    places = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(2))

    def step(x):
        return (model(x) * places).square().mean()

    x = torch.randn(8, 3, 8, generator=torch.Generator().manual_seed(1))
    pfeife.compile(step, microbatches=2)(x)


@row(ranks=(1, 2))
def negatives_from_the_microbatch():
    model = net()

    def step(x):
        h = model(x)
        return F.cross_entropy(h @ h.t(), torch.arange(h.shape[0]))

    x = rows(8)
    same(pfeife.compile(step, microbatches=2), step, model, (x,), [(p,) for p in x.chunk(2)])


@row()
def dropout_does_not_disturb_the_check():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(rows(8)).backward()


@row()
def noise_does_not_disturb_the_check():
    """What is drawn has no expected value to put in its place."""
    model = net()
    torch.manual_seed(0)
    pfeife.compile(lambda x: (model(x + torch.randn_like(x))).square().mean(), microbatches=2)(
        rows(8)
    ).backward()


@row("the rows of ['x'] (dimension 0) depend on one another")
def a_sequence_first_with_the_named_backend():
    model = Attention()
    x = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
    options = {"microbatches": 2}
    torch.compile(
        lambda x: model(x).square().mean(), backend="pfeife", options=options, dynamic=True
    )(x)


def _pairs_by_name(step):
    """Cuts along a sequence, which comes first here, and would be right for no row."""
    options = {"microbatches": 2}
    try:
        torch.compile(step, backend="pfeife", options=options, dynamic=True)(rows(6))
    except ValueError as error:
        assert str(error).startswith(f'File "{__file__}", line '), error
        assert "computes something for every pair of rows of dimension 0" in str(error), error
    else:
        raise AssertionError("cut along the sequence")


@row()
def scores_of_all_pairs_with_the_named_backend():
    model = net()

    def step(x):
        h = model(x)
        return ((h @ h.t()).softmax(-1) @ h).square().mean()

    _pairs_by_name(step)


@row()
def attention_among_rows_with_the_named_backend():
    model = net()

    def step(x):
        h = model(x)
        return F.scaled_dot_product_attention(h, h, h).square().mean()

    _pairs_by_name(step)


@row("the captured program computes another loss than the step on the first microbatch")
def a_program_that_is_not_the_step():
    """As a defect of the capturing would make it: another function of the activations."""
    model = net()
    capture = MicrobatchGraph.capture

    class Wrong(MicrobatchGraph):
        def capture(self, args, options):
            found = capture(self, args, options)
            module = copy.deepcopy(found.program.module)
            for node in module.graph.nodes:
                if node.target is torch.ops.aten.relu.default:
                    node.target = torch.ops.aten.sigmoid.default
            return attrs.evolve(found, program=attrs.evolve(found.program, module=module))

    with mock.patch("pfeife.backend.doors.doorway.MicrobatchGraph", Wrong):
        pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(rows())


@row()
def statistics_of_a_microbatch_with_the_named_backend():
    """Rows depend on one another by them, as in eager accumulation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def step(x):
        return model(x).square().mean()

    parts = rows(6).chunk(2)
    expected = sum(copy.deepcopy(model)(part).square().mean() for part in parts) / 2
    options = {"microbatches": 2}
    found = torch.compile(step, backend="pfeife", options=options, dynamic=True)(rows(6))
    assert torch.equal(found, expected)
    assert model[1].num_batches_tracked == 2


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


class Encoding(UserDict):
    """As Hugging Face's tokenizers return."""


@row(ranks=(1, 2))
def a_batch_in_a_dataclass():
    model = net()

    def step(batch):
        return F.mse_loss(model(batch.x), batch.y)

    x, y = rows(), rows().flip(0)
    parts = [(Pair(*p),) for p in zip(x.chunk(2), y.chunk(2), strict=True)]
    same(pfeife.compile(step, microbatches=2), step, model, (Pair(x, y),), parts)


@row(ranks=(1, 2))
def a_batch_in_a_mapping():
    model = net()

    def step(batch):
        return F.mse_loss(model(batch["x"]), batch["y"])

    x, y = rows(), rows().flip(0)
    parts = [(Encoding(x=a, y=b),) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    same(pfeife.compile(step, microbatches=2), step, model, (Encoding(x=x, y=y),), parts)


class Opaque:
    def __init__(self, x):
        self.x = x


@row("args.0.x is a tensor inside of an argument that Pfeife does not look into")
def a_batch_in_an_object():
    model = net()
    pfeife.compile(lambda batch: model(batch.x).square().mean(), microbatches=2)(Opaque(rows()))


@row("input x is a ndarray, not a tensor: pass torch.from_numpy")
def a_batch_of_numpy():
    model = net()
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(rows().numpy())


@row("microbatch: the batch is empty: x has no rows")
def an_empty_batch():
    model = net()
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(rows(0))


@row("input x is a nested tensor, which has no rows of equal size to cut")
def a_jagged_batch():
    model = net()
    x = torch.nested.nested_tensor([rows(2), rows(3)], layout=torch.jagged)
    pfeife.compile(lambda x: model(x).mean(), microbatches=2)(x)


@row(ranks=(1, 2))
def a_last_smaller_batch():
    model = net()

    def step(x):
        return model(x).square().mean()

    compiled = pfeife.compile(step, microbatches=4)
    cuts = ((8, 4), (6, 3), (4, 4), (5, 5), (1, 1), (8, 4))
    parts = [[(p,) for p in rows(count).chunk(cut)] for count, cut in cuts]
    expected = [eager_accumulation(step, model, microbatches) for microbatches in parts]
    for (count, _), microbatches, one in zip(cuts, parts, expected, strict=True):
        same(compiled, step, model, (rows(count),), microbatches, one)


@row(ranks=(1, 2))
def an_evaluation_whose_first_batch_does_not_divide():
    """Of rows of its own number, as an evaluation set that is a single batch."""
    model = net()

    def step(x):
        hidden = model(x)
        return hidden.square().mean(), hidden

    twin = copy.deepcopy(model)
    compiled = pfeife.compile(step, microbatches=4)
    with torch.no_grad():
        for count, parts in ((13, 13), (10, 5), (3, 3), (8, 4)):
            microbatches = rows(count).chunk(parts)
            loss, hidden = compiled(rows(count))
            expected = [twin(one) for one in microbatches]
            assert torch.equal(hidden, torch.cat(expected))
            torch.testing.assert_close(loss, torch.cat(expected).square().mean())


@row()
def a_last_smaller_batch_of_two_replicas():
    """Six microbatches of a row: three of two rows would leave one replica with fewer."""
    model = net()

    def step(x):
        return model(x).square().mean()

    compiled = pfeife.compile(step, microbatches=4, replicas=2)
    for count in (8, 6):
        torch.testing.assert_close(compiled(rows(count)), step(rows(count)))


@row("microbatch: a batch of 6 rows does not divide into 4 microbatches; pass microbatches=3")
def a_last_smaller_batch_that_is_not_to_fit():
    model = net()
    step = pfeife.compile(
        lambda x: model(x).square().mean(), microbatches=4, fit_smaller_batches=False
    )
    step(rows(8))
    step(rows(6))


@row(
    "microbatch: a batch of 7 rows does not divide into 4 microbatches, nor into any number that "
    "gives each of 2 replicas as many; pad it, or pass drop_last=True in the loader"
)
def an_odd_batch_for_two_replicas():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4, replicas=2)
    step(rows(8))
    step(rows(7))


@row(
    "microbatch: a batch of 7 rows does not divide into 4 microbatches; pass microbatches=1, or "
    "drop_last=True in the loader (the first batch that trains must"
)
def a_first_batch_that_does_not_divide():
    model = net()
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=4)(rows(7))


@row("microbatch: a batch of 10 rows does not divide into 4 microbatches; pass microbatches=2")
def a_larger_batch_that_does_not_divide():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4)
    step(rows(8))
    step(rows(10))


@row()
def two_threads_that_make_the_first_call_together():
    model = net()

    def step(x):
        return model(x).square().mean()

    compiled = pfeife.compile(step, microbatches=2)
    expected = [
        eager_accumulation(step, model, [(p,) for p in rows(count).chunk(2)]).loss
        for count in (4, 6)
    ]
    with ThreadPoolExecutor(2, initializer=lambda: torch.set_num_threads(1)) as pool:
        found = list(pool.map(lambda count: compiled(rows(count)).detach(), (4, 6)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@row("the step returns the number 2, which Python has computed of one microbatch")
def a_number_among_the_results():
    model = net()
    pfeife.compile(lambda x: (model(x).square().mean(), x.shape[0]), microbatches=2)(rows())


@row()
def an_argument_among_the_results():
    model, x = net(), rows()
    _, found = pfeife.compile(lambda x: (model(x).square().mean(), x), microbatches=2)(x)
    assert found is x


class Kept:
    def __init__(self, loss, x):
        self.loss, self.x = loss, x


@row()
def an_argument_in_an_object_that_is_returned():
    model, x = net(), rows()
    found = pfeife.compile(lambda x: Kept(model(x).square().mean(), x), microbatches=2)(x)
    assert torch.equal(found.x, x)


@row()
def an_argument_that_the_step_keeps():
    model, x, seen = net(), rows(), []

    def step(x):
        model.last = x
        seen.append(x)
        return model(x).square().mean()

    pfeife.compile(step, microbatches=2)(x)
    assert torch.equal(seen[0], x)
    assert torch.equal(model.last, x)


@dataclasses.dataclass
class Counted:
    loss: torch.Tensor
    count: int


@row("the step returns the number 2, which Python has computed of one microbatch")
def a_number_in_a_dataclass_among_the_results():
    model = net()
    pfeife.compile(lambda x: Counted(model(x).square().mean(), x.shape[0]), microbatches=2)(rows())


@row()
def numbers_among_the_results_of_one_microbatch():
    model = net()
    step = pfeife.compile(lambda x: (model(x).square().mean(), x.shape[0]), microbatches=1)
    assert [step(rows(count))[1] for count in (4, 6)] == [4, 6]


@row("in_dims: x has '0', which is no number of a dimension or None")
def in_dims_of_another_kind():
    model = net()
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, in_dims={"x": "0"})(rows())


@row("in_dims: x, a tensor of 2 dimensions, has no dimension 2")
def in_dims_beyond_the_dimensions():
    model = net()
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, in_dims=2)(rows())


@row()
def in_dims_from_the_end():
    model = net()

    def step(x):
        return model(x.t()).square().mean()

    parts = [(part.t(),) for part in rows().chunk(2)]
    same(pfeife.compile(step, microbatches=2, in_dims=-1), step, model, (rows().t(),), parts)


@row("args.0.x is a tensor inside of an argument that Pfeife does not look into")
def a_batch_in_a_mapping_that_cannot_be_written_to():
    model = net()
    step = pfeife.compile(lambda batch: model(batch["x"]).square().mean(), microbatches=2)
    step(types.MappingProxyType({"x": rows()}))


@dataclasses.dataclass(frozen=True)
class Fixed:
    x: torch.Tensor


@row()
def a_batch_in_a_frozen_dataclass():
    model = net()

    def step(batch):
        return model(batch.x).square().mean()

    parts = [(Fixed(part),) for part in rows().chunk(2)]
    same(pfeife.compile(step, microbatches=2), step, model, (Fixed(rows()),), parts)


@row("input x is a sparse_coo tensor, which has no rows of equal size to cut")
def a_sparse_batch():
    model = net()
    pfeife.compile(lambda x: model(x).mean(), microbatches=2)(rows().to_sparse())


@row()
def the_same_tensor_twice():
    model, x, y = net(), rows(), rows().flip(0)

    def step(x, y):
        return F.mse_loss(model(x), y if y is not x else y * 2)

    compiled = pfeife.compile(step, microbatches=2)
    alone = [(part, part) for part in x.chunk(2)]
    pairs = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for whole, parts in (((x, x), alone), ((x, y), pairs), ((x, x), alone)):
        same(compiled, step, model, whole, parts)


@row(ranks=(1, 2))
def arguments_in_a_star():
    model, x = net(), rows()

    def step(*given):
        return F.mse_loss(model(given[0]) + given[1][:1], given[0])

    compiled = pfeife.compile(step, microbatches=2, in_dims={"given.1": None})
    same(compiled, step, model, (x, rows(64)), [(part, rows(64)) for part in x.chunk(2)])


@row(ranks=(1, 2))
def results_of_microbatches_of_one_row():
    model, x = net(), rows()

    def step(x):
        h = model(x)
        return h.square().mean(), h

    expected = torch.cat([model(part) for part in x.chunk(4)])
    _, found = pfeife.compile(step, microbatches=4)(x)
    assert torch.equal(found, expected)


@row()
def the_step_is_a_model_with_cuts_by_hand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = net()

        def forward(self, x):
            return self.blocks(x).square().mean()

    model = Net()
    for step in (
        pfeife.compile(model, microbatches=2, split_at={"blocks.2": "begin"}),
        torch.compile(
            model,
            backend="pfeife",
            options={"microbatches": 2, "split_at": {"blocks.2": "begin"}},
            dynamic=True,
        ),
    ):
        expected = eager_accumulation(model, model, [(p,) for p in rows(6).chunk(2)])
        assert torch.equal(step(rows(6)), expected.loss)


@row()
def statistics_of_a_microbatch_by_name():
    """A row gives something else in other company, by what batch normalisation is."""
    model, x = nn.Sequential(*net(), nn.BatchNorm1d(8)), rows(12)
    options = {"microbatches": 2}
    compiled = torch.compile(model, backend="pfeife", options=options, dynamic=True)
    expected = torch.cat([copy.deepcopy(model)(part) for part in x.chunk(2)])
    assert torch.equal(compiled(x), expected)


@row("index out of range in self")
def a_step_that_fails_at_its_first_call():
    model = nn.Embedding(4, 8)
    pfeife.compile(lambda t: model(t).square().mean(), microbatches=2)(torch.tensor([0, 9, 1, 2]))


@row()
def rows_of_a_result_that_no_rule_tells():
    model, x = net(), rows(8)

    def step(x):
        hidden = model(x)
        return {"loss": hidden.square().mean(), "spectrum": torch.fft.fft(hidden).real}

    found = pfeife.compile(step, microbatches=2)(x)["spectrum"]
    assert torch.equal(found, torch.cat([step(part)["spectrum"] for part in x.chunk(2)]))


def _sets(how, **options):
    """A step that does something with the gradients of its parameters itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x):
        loss = model(x).square().mean()
        how(model, loss)
        return loss

    return pfeife.compile(step, microbatches=2, stages=2, **options)(torch.ones(4, 8))


OWN = "the step calls backward(), or reads or sets gradients itself"


@row(OWN, ranks=(1, 2))
def a_step_with_a_backward_of_its_own():
    _sets(lambda model, loss: loss.backward(retain_graph=True))


@row(OWN)
def a_step_with_a_backward_of_its_own_that_clears_gradients_first():
    def run(model, loss):
        model.zero_grad()
        torch.autograd.backward([loss], retain_graph=True)

    _sets(run)


@row(OWN)
def a_step_that_sets_gradients():
    def run(model, loss):
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient

    _sets(run)


@row(OWN)
def a_step_with_an_optimizer():
    def run(model, loss):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()

    _sets(run)


@row(OWN, ranks=(1, 2))
def an_optimizer_that_clears_gradients_in_a_step():
    def run(model, loss):
        torch.optim.SGD(model.parameters(), 0.1).zero_grad()

    _sets(run)


@row(OWN)
def a_traced_step_that_clears_gradients():
    _sets(lambda model, loss: model.zero_grad(), capture="trace")


@row(OWN)
def a_traced_step_that_asks_whether_there_are_gradients():
    def run(model, loss):
        return loss if model[0].weight.grad is None else 2 * loss

    _sets(run, capture="trace")


@row()
def gradients_of_what_a_step_has_made():
    """By a backward that leaves parameters alone, as for adversarial examples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(x):
        x = x.detach().requires_grad_()
        model(x).square().sum().backward(inputs=[x])
        return model(x + 0.1 * x.grad.sign()).square().mean()

    batch = rows()
    losses = []
    for one in (step, pfeife.compile(step, microbatches=2, stages=2)):
        model.zero_grad()
        loss = one(batch)
        loss.backward()
        losses.append((loss.detach(), model[0].weight.grad.clone()))
    for ours, eager in zip(losses[1], losses[0], strict=True):
        assert torch.allclose(ours, eager, 1e-5, 1e-6)


@row()
def gradients_that_dynamo_clears():
    """In a step, before each call's own come."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = net()

        def step(x, model=model):
            model.zero_grad()
            return model(x).square().mean()

        one = pfeife.compile(step, microbatches=2, stages=2) if compiled else step
        for seed in (1, 2):
            one(rows() * seed).backward()
        found.append(model[0].weight.grad.clone())
    assert torch.allclose(*found, 1e-5, 1e-6)


@row("the step puts a hook on model.0.weight, one more whenever it runs")
def a_traced_step_that_puts_a_hook_on_a_parameter():
    def run(net, loss):
        net[0].weight.register_hook(lambda gradient: 2 * gradient)

    _sets(run, capture="trace")
