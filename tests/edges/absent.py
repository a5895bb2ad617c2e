"""What scripts do with parameters and gradients that their rank does not have: each is what it is
on one device, or refused in words. None gives a number of half a model."""

import copy
import io
import json
import math
import pickle

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rows import row
from share import random_cases
from torch import nn
from torch.nn.utils import parameters_to_vector, prune
from torch.optim import swa_utils
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import pfeife
from edges.state import layers, rows, sgd, stepped
from pfeife._torch import is_absent
from pfeife.testing import eager_accumulation, own_gradients

HERE = ("state of other ranks: ", "what looks for its memory", "Cannot access data pointer")


def refused(call, begins):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert str(error).startswith(begins), error
        return
    raise AssertionError(f"was not refused with {begins!r}")


def trained():
    """A model and its step after one call, its optimizer, and a plain twin of one device."""
    torch.manual_seed(3)
    model, twin = layers(6, 6, 6, 6), layers(6, 6, 6, 6)
    twin.load_state_dict(model.state_dict())
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    mine, theirs = (torch.optim.AdamW(net.parameters(), 0.1) for net in (model, twin))
    turn(model, step, mine, twin, theirs)
    return model, step, mine, twin, theirs


def turn(model, step, mine, twin, theirs, seed=0):
    """A step of both, which is the same."""
    step(rows(seed)).backward()
    for part in rows(seed).chunk(2):
        (twin(part).square().mean() / 2).backward()
    for optimizer in (mine, theirs):
        optimizer.step()
        optimizer.zero_grad()


def same(model, twin):
    whole = pfeife.full_state_dict(model)
    for name, value in twin.state_dict().items():
        assert torch.equal(whole[name], value), name


def parameters(model):
    """Those that are here, and those that are not."""
    every = list(model.parameters())
    return [p for p in every if not is_absent(p)], [p for p in every if is_absent(p)]


READS = {
    "norm": lambda p: float(p.norm()) > 1,
    "sum": lambda p: p.sum().item(),
    "mean": lambda p: float(p.detach().mean()),
    "max": lambda p: p.max() > 0,
    "comparison": lambda p: bool((p > 0).any()),
    "equality": lambda p: torch.equal(p, p),
    "all close": lambda p: torch.allclose(p, p),
    "numbers": lambda p: p.data.numpy(),
    "numpy": lambda p: numpy.asarray(p.detach()),
    "list": lambda p: p.tolist(),
    "JSON": lambda p: json.dumps(p.tolist()),
    "item": lambda p: p.flatten()[0].item(),
    "float": lambda p: float(p.flatten()[0]),
    "format": lambda p: f"{p.flatten()[0]:.3f}",
    "repr": lambda p: repr(p),
    "bool": lambda p: bool(p.flatten()[0]),
    "iteration": lambda p: [float(one) for one in p.flatten()],
    "index": lambda p: torch.arange(9)[p.flatten().long()],
    "tensor": lambda p: float(torch.tensor(p).sum()),
    "Tensor": lambda p: float(torch.Tensor(p).sum()),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "save detached": lambda p: torch.save({"p": p.detach()}, io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p),
    "memory": lambda p: p.untyped_storage().tolist(),
    "address": lambda p: p.data_ptr(),
    "share": lambda p: p.share_memory_(),
    "histogram": lambda p: torch.histc(p.detach(), 10),
    "quantile": lambda p: torch.quantile(p.detach().abs(), 0.5),
    "kthvalue": lambda p: p.detach().flatten().kthvalue(2).values.item(),
    "sort": lambda p: p.detach().flatten().sort().values,
    "nonzero": lambda p: p.detach().nonzero(),
    "unique": lambda p: p.detach().unique(),
    "NaN": lambda p: p.isnan().any(),
    "finite": lambda p: torch.isfinite(p).all(),
    "vector": lambda p: parameters_to_vector([p]).norm(),
    "stack": lambda p: torch.stack([p, p]),
    "concatenation": lambda p: torch.cat([p.flatten(), torch.ones(1)]),
    "einsum": lambda p: torch.einsum("...,...->", p, p).item(),
    "product": lambda p: torch.ones(1, p.shape[0]) @ p,
    "layer": lambda p: F.linear(torch.ones(2, p.shape[-1]), p.view(-1, p.shape[-1])),
    "vmap": lambda p: torch.vmap(lambda one: one.sum())(p),
    "functional gradient": lambda p: torch.func.grad(lambda q: (q * q).sum())(p.detach()),
    "each norm": lambda p: [float(one) for one in torch._foreach_norm([p.detach()])],
    "each max": lambda p: torch._foreach_max([p.detach()]),
    "TorchScript": lambda p: torch.jit.script(nn.Linear(2, 2)).forward(p.detach()[..., :2]),
    "collective": lambda p: dist.all_reduce(p.data),
    "DLPack": lambda p: torch.from_dlpack(p.detach()),
    "deep copy": lambda p: float(copy.deepcopy(p).sum()),
    "copy": lambda p: float(copy.copy(p).sum()),
    "parameter": lambda p: float(nn.Parameter(p.detach().clone()).sum()),
    "another dtype": lambda p: p.double().sum(),
    "another device": lambda p: p.cpu().sum(),
    "arithmetic": lambda p: float((2 * p + 1).abs().sum()),
    "variance": lambda p: p.detach().var().item(),
    "penalty": lambda p: p.square().sum().backward(),
    "spectral": lambda p: torch.linalg.svdvals(p.view(-1, p.shape[-1])),
    "quantised": lambda p: torch.quantize_per_tensor(p.detach(), 0.1, 0, torch.qint8),
    "fake quantised": lambda p: torch.fake_quantize_per_tensor_affine(
        p.detach(), 0.1, 0, 0, 255
    ).sum(),
    "where": lambda p: torch.where(p > 0, p, 0 * p).sum(),
    "written into numbers": lambda p: float(torch.zeros(p.shape).copy_(p.detach()).sum()),
    "added to numbers": lambda p: float(torch.zeros(p.shape).add_(p.detach()).sum()),
    "math": lambda p: math.exp(p.flatten()[0]),
}


@row(ranks=(2, 3), whole=(3,))
def whatever_reads_a_parameter():
    model, step, mine, twin, theirs = trained()
    here, absent = parameters(model)
    assert here and absent
    for name, read in READS.items():
        read_here = [one for one in here if one.dim() > 1][:1]
        for parameter in absent:
            try:
                found = read(parameter)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                assert IN_TORCHS_WORDS.get(name, HERE[0]) in str(error), (name, error)
            else:
                assert all(map(is_absent, tree_leaves(found))), name
        for parameter in read_here if name not in NOT_HERE else ():
            read(parameter)
            parameter.grad = None
    turn(model, step, mine, twin, theirs, 1)
    same(model, twin)


IN_TORCHS_WORDS = {"address": HERE[2]}
# Others do not do it at that moment, or it moves memory.
NOT_HERE = {"collective", "share", "layer", "product", "TorchScript", "numpy", "index"}


@row(ranks=(2,))
def whatever_reads_a_buffer():
    """Integers too, which have no NaN."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)))
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    step(rows(0)).backward()
    buffers = [one for one in model.buffers() if is_absent(one)]
    assert {one.dtype for one in buffers} == {torch.float32, torch.int64}
    for buffer in buffers:
        for read in (lambda b: b.sum().item(), lambda b: b.tolist(), lambda b: b.numpy(), bool):
            refused(lambda r=read, b=buffer: r(b), (HERE[0], "Boolean value of"))
    copied = copy.deepcopy(model)
    assert [is_absent(one) for one in copied.buffers()] == [is_absent(o) for o in model.buffers()]


@row(ranks=(2,))
def what_a_script_computes_of_a_whole_model():
    """Numbers that were those of half of it: each of these is a refusal."""
    model, step, mine, twin, theirs = trained()
    average = [p.detach().clone() for p in model.parameters()]
    pairs = list(zip(model.parameters(), average, strict=True))
    named = dict(zip([name for name, _ in model.named_parameters()], average, strict=True))
    x = rows(5)
    reads = [
        lambda: torch.func.functional_call(model, named, (x,)).argmax(1),
        lambda: torch.cat([p.abs().flatten() for p in model.parameters()]).quantile(0.5),
        lambda: sum(float(p.norm()) for p in model.parameters()),
        lambda: max(float((p - q).abs().max()) for p, q in pairs),
        lambda: model(x),
        lambda: copy.deepcopy(model)(x),
        lambda: prune.global_unstructured(
            [(one[0], "weight") for one in model], prune.L1Unstructured, amount=0.5
        ),
        lambda: torch.nn.utils.get_total_norm(list(model.parameters())),
        lambda: (
            swa_utils.update_bn([x], swa_utils.AveragedModel(model))
            or average[0].sum().item() + average[-1].sum().item()
        ),
        lambda: torch.save(swa_utils.AveragedModel(model).module[0], io.BytesIO()),
        lambda: torch.save(average, io.BytesIO()),
        lambda: torch.jit.trace(model, (x,)),
        lambda: torch.export.export(model, (x,)).module()(x),
        lambda: torch.compile(model, backend="eager")(x),
        lambda: {name: p.tolist() for name, p in model.named_parameters()},
    ]
    for at, read in enumerate(reads):
        try:
            found = read()
        except Exception as error:
            assert str(error), at
        else:
            raise AssertionError(f"{at}: {found!r}")
        torch._dynamo.reset()
    model, step, mine, twin, theirs = trained()
    turn(model, step, mine, twin, theirs, 1)
    same(model, twin)


@row(ranks=(2,))
def what_changes_each_element_is_done_where_it_is():
    """With numbers, random ones, gradients and other parameters, on views and through data."""
    model, step, mine, twin, theirs = trained()
    writes = [
        lambda p: p.clamp_(-0.3, 0.3),
        lambda p: p.mul_(0.9).add_(0.01),
        lambda p: p.data.lerp_(torch.ones(p.shape), 0.1),
        lambda p: p.view(-1)[:3].zero_(),
        lambda p: p.flatten()[1:2].fill_(0.5),
        lambda p: p.add_(torch.randn_like(p), alpha=0.01),
        lambda p: p.data.sub_(0.1 * p.sign()),
        lambda p: p.masked_fill_(p.abs() < 0.05, 0.0),
        lambda p: p.copy_(p.round(decimals=3)),
        lambda p: nn.init.uniform_(p, -0.1, 0.1),
        lambda p: torch._foreach_mul_([p], 2.0),
        lambda p: setattr(p, "data", p.data * 0.5),
        lambda p: p.index_fill_(0, torch.tensor([0]), 0.25),
    ]
    for seed, write in enumerate(writes):
        for net in (model, twin):
            torch.manual_seed(seed)
            with torch.no_grad():
                for parameter in net.parameters():
                    write(parameter)
        turn(model, step, mine, twin, theirs, seed)
        same(model, twin)


@row(ranks=(2,))
def a_rank_holds_a_few_bytes_of_what_others_train():
    model, *_ = trained()
    _, absent = parameters(model)
    for parameter in absent:
        assert (parameter.shape, parameter.dtype) == (parameter.detach().shape, torch.float32)
        assert parameter.is_contiguous() and type(parameter) is nn.Parameter
        assert parameter.untyped_storage()._cdata and parameter.requires_grad


@row(ranks=(2,))
def gradients_are_asked_for_by_name():
    """`torch.autograd.grad` would give those of this rank alone; and nothing stays behind."""
    model, step, mine, twin, theirs = trained()
    loss = step(rows(1))
    for more in ({}, {"allow_unused": True}):
        refused(
            lambda m=more: torch.autograd.grad(
                loss, list(model.parameters()), retain_graph=True, **m
            ),
            "torch.autograd.grad of a pipelined step",
        )
    assert all(parameter.grad is None for parameter in model.parameters())
    turn(model, step, mine, twin, theirs, 2)
    same(model, twin)


@row(ranks=(2,))
def the_average_of_a_model():
    """Kept by torch from before the first step on, evaluated by a step, saved whole."""
    torch.manual_seed(3)
    model, twin = layers(6, 6, 6, 6), layers(6, 6, 6, 6)
    twin.load_state_dict(model.state_dict())
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    mine, theirs = sgd(model), sgd(twin)
    averages = [
        swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for net in (model, twin)
    ]
    validate = pfeife.compile(lambda x: averages[0](x).square().mean(), microbatches=2)
    for seed in range(3):
        turn(model, step, mine, twin, theirs, seed)
        for average, net in zip(averages, (model, twin), strict=True):
            average.update_parameters(net)
    with torch.no_grad():
        parts = [averages[1](part).square().mean() for part in rows(7).chunk(2)]
        assert torch.equal(validate(rows(7)), (parts[0] + parts[1]) / 2)
    if dist.get_rank() == 0:
        for name, value in averages[0].state_dict().items():
            assert torch.equal(value, averages[1].state_dict()[name]), name
    dist.barrier()
    same(averages[0], averages[1])


EACH = (
    *("abs", "neg", "exp", "sign", "sigmoid", "tanh", "relu", "square", "isnan", "isfinite"),
    *("clone", "detach", "double", "half", "bool", "long", "t", "contiguous", "logical_not"),
    *("zeros_like", "ones_like", "round", "sgn", "erf", "log1p", "reciprocal"),
)
PAIRS = (
    *("add", "sub", "mul", "div", "maximum", "minimum", "gt", "le", "eq", "ne", "atan2"),
    *("matmul", "dot", "outer", "allclose", "equal", "lerp", "cat", "stack", "where", "dist"),
)
READ = (
    *("sum", "mean", "max", "min", "any", "all", "argmax", "std", "prod", "median", "nonzero"),
    *("unique", "sort", "cumsum", "topk", "histc", "trace", "count_nonzero", "logsumexp"),
    *("flatten", "softmax", "tolist", "item", "numpy", "len", "unbind", "svdvals"),
)
PLACED = ("add_", "mul_", "copy_", "lerp_", "clamp_", "zero_", "sub_", "addcmul_")


def expressions():
    """Trees of torch's functions over parameters ("p"), gradients ("g") and optimizer state ("s"),
    without norms of gradients, for which all ranks come together."""
    leaves = st.tuples(st.sampled_from("pgs"), st.integers(0, 5))

    def grown(inner):
        return st.one_of(
            st.tuples(st.sampled_from(EACH + READ), inner),
            st.tuples(st.sampled_from(PAIRS), inner, inner),
            st.tuples(st.sampled_from(PLACED), inner, inner),
        )

    return st.recursive(leaves, grown, max_leaves=5)


def value_of(tree, net, optimizer):
    """What an expression gives; what is written to is a copy."""
    name, *rest = tree
    parameters = list(net.parameters())
    if name in ("p", "g", "s"):
        parameter = parameters[rest[0]]
        if name == "s":
            return optimizer.state[parameter]["exp_avg"]
        return parameter.detach() if name == "p" else parameter.grad
    args = [value_of(one, net, optimizer) for one in rest]
    if name in PLACED:
        more = {"lerp_": (args[1], 0.3), "clamp_": (-0.1, 0.1), "zero_": (), "addcmul_": args[:2]}
        return getattr(args[0].clone(), name)(*more.get(name, (args[1],)))
    special = {
        "lerp": lambda a, b: torch.lerp(a, b, 0.25),
        "cat": lambda a, b: torch.cat([a, b]),
        "stack": lambda a, b: torch.stack([a, b]),
        "where": lambda a, b: torch.where(a > b, a, b),
        "len": len,
        "topk": lambda a: torch.topk(a.flatten(), 2).values,
        "softmax": lambda a: torch.softmax(a, 0),
        "logsumexp": lambda a: torch.logsumexp(a, 0),
        "cumsum": lambda a: torch.cumsum(a, 0),
        "svdvals": torch.linalg.svdvals,
        "double": torch.Tensor.double,
        "half": torch.Tensor.half,
        "long": torch.Tensor.long,
        "bool": torch.Tensor.bool,
        "contiguous": torch.Tensor.contiguous,
        "tolist": torch.Tensor.tolist,
        "item": torch.Tensor.item,
        "numpy": torch.Tensor.numpy,
    }
    return special.get(name, getattr(torch, name, None))(*args)


def as_numbers(value):
    """Numbers of Python's, read from whatever an expression gives."""
    leaves = tree_leaves(value)
    return [one.tolist() if hasattr(one, "tolist") else one for one in leaves]


def outcome(tree, net, optimizer):
    """The numbers as a text (then all NaN are alike), or the kind of the error."""
    try:
        return repr(as_numbers(value_of(tree, net, optimizer))), ""
    except Exception as error:
        return "", type(error).__name__


@row(ranks=(2,))
def expressions_over_the_state_of_a_model():
    """Each gives the numbers of one device, or is refused. All ranks try the same ones; what a rank
    has is also right, so that not all is refused."""
    model, step, mine, twin, theirs = trained()
    step(rows(1)).backward()
    for part in rows(1).chunk(2):
        (twin(part).square().mean() / 2).backward()
    right = refusals = 0

    @random_cases(2000, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(expressions())
    def each(tree):
        nonlocal right, refusals
        wanted, wrong = outcome(tree, twin, theirs)
        found, refusal = outcome(tree, model, mine)
        assert found == wanted or refusal, (tree, found, wanted)
        right += bool(found)
        refusals += bool(refusal and not wrong)

    each()
    assert right > 20 and refusals > 20, (right, refusals)
    stepped(mine, theirs)
    turn(model, step, mine, twin, theirs, 2)
    same(model, twin)


@row(ranks=(2,))
def copies_of_a_model():
    """Deep copies and averages that are made after the first step are where the model is: whole in
    their `state_dict()` on one rank or on all, saved, trained by a step of their own."""
    model, step, mine, twin, theirs = trained()
    pairs = [[], []]
    for seed in range(1, 4):
        for net, made in zip((model, twin), pairs, strict=True):
            made.append(copy.deepcopy(net))
            if seed == 2:
                made.append(swa_utils.AveragedModel(net))
        turn(model, step, mine, twin, theirs, seed)
        for made, net in zip(pairs, (model, twin), strict=True):
            for average in made:
                if isinstance(average, swa_utils.AveragedModel):
                    average.update_parameters(net)
        if seed == 2 and dist.get_rank() == 0:
            for copied, wanted in zip(*pairs, strict=True):
                file = io.BytesIO()
                torch.save(copied.state_dict(), file)
                file.seek(0)
                for name, value in torch.load(file).items():
                    assert torch.equal(value, wanted.state_dict()[name]), name
        dist.barrier()
    for copied, wanted in zip(*pairs, strict=True):
        same(copied, wanted)
        for name, value in copied.state_dict().items():
            assert torch.equal(value, wanted.state_dict()[name]), name
    best, wanted = pairs[0][0], pairs[1][0]
    again = pfeife.compile(lambda x: best(x).square().mean(), microbatches=2)
    optimizers = [torch.optim.AdamW(net.parameters(), 0.1) for net in (best, wanted)]
    for seed in range(2):
        turn(best, again, optimizers[0], wanted, optimizers[1], seed)
    same(best, wanted)
    turn(model, step, mine, twin, theirs, 5)
    same(model, twin)


@row(ranks=(2,))
def a_copy_that_one_rank_alone_has_made():
    """Nobody else has its values: it is refused, and training goes on."""
    model, step, mine, twin, theirs = trained()
    if dist.get_rank() == 0:
        best = copy.deepcopy(model)
    dist.barrier()
    turn(model, step, mine, twin, theirs, 1)
    if dist.get_rank() == 0:
        words = (*HERE, "rank 1 trains a part of the state, and has none of this point")
        refused(lambda: torch.save(best.state_dict(), io.BytesIO()), words)
    turn(model, step, mine, twin, theirs, 2)
    same(model, twin)


@row(ranks=(2,))
def what_would_leave_values_to_nobody():
    """A parameter of another rank that is written to one of this rank, or to its gradient, which no
    rank would step then."""
    model, step, mine, *_ = trained()
    step(rows(1)).backward()
    own, other = (next(p for p in some if p.dim() > 1) for some in parameters(model))
    with torch.no_grad():
        refused(lambda: own.add_(other), HERE[0])
        own.grad.add_(other.grad)
    refused(mine.step, "the gradient of ")
    dist.barrier()


@row(ranks=(2,))
def a_target_that_has_lost_its_values():
    """It was frozen on the rank that reads it, and is an average of what another one trains: who
    asks for it is refused, and the rank that is asked goes on."""
    torch.manual_seed(3)
    model = layers(6, 6, 6, 6)
    target = copy.deepcopy(model).requires_grad_(False)
    step = pfeife.compile(
        lambda x: (model(x) - target(x).detach() / 2).square().mean(), microbatches=2
    )
    optimizer = sgd(model)
    step(rows(0)).backward()
    optimizer.step()
    with torch.no_grad():
        for average, p in zip(target.parameters(), model.parameters(), strict=True):
            average.lerp_(p, 0.1)
    if dist.get_rank() == 0:
        refused(target.state_dict, "rank 1 trains a part of the state, and has none of this point")
    dist.barrier()
    refused(lambda: step(rows(1)), "target.")


@row("2.0.weight was written to by hand 1 times on rank 0, and 0 times on rank 1", ranks=(2,))
def what_one_rank_alone_changes_of_others():
    """Nobody would see it: on the rank that has the values nothing has happened."""
    model, step, *_ = trained()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model[2][0].weight.mul_(0.9)
    step(rows(1)).backward()


@row(ranks=(2,))
def what_ranks_change_where_they_have_state():
    """As by the state that an optimizer has here: that is right, and more than others have made."""
    model, step, mine, twin, theirs = trained()
    for seed in range(1, 3):
        for optimizer in (mine, theirs):
            with torch.no_grad():
                for parameter, state in optimizer.state.items():
                    parameter.add_(state["exp_avg"], alpha=-0.1)
        turn(model, step, mine, twin, theirs, seed)
    same(model, twin)


@row(ranks=(2,))
def a_graph_with_graphs_in_it_is_built_once():
    """Dynamo compiles a step once more when parameters have left a rank: also with a checkpoint's
    body in it there is no second program."""
    torch.manual_seed(3)
    model = layers(6, 6, 6, 6)

    def loss(x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    step, optimizer = pfeife.compile(loss, microbatches=2), sgd(model)
    for seed in range(3):
        step(rows(seed)).backward()
        stepped(optimizer)
    assert len(step.backend.compiled) == 1


class Counted(nn.Module):
    """Is compiled again with each call, for a number that it sets and does not read."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x).square().mean()


@row(ranks=(2,))
def what_is_compiled_again_and_sets_attributes():
    """Whether that makes a difference is asked where parameters have no values, too."""
    torch.manual_seed(0)
    model = Counted()
    other = copy.deepcopy(model)
    step = pfeife.compile(lambda x: model(x), microbatches=2)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        found = eager_accumulation(other, other, [(part,) for part in x.chunk(2)])
        loss = step(x)
        loss.backward()
        assert torch.equal(loss, found.loss)
        for name, gradient in own_gradients(model).items():
            assert torch.equal(gradient, found.gradients[name]), name
        model.zero_grad()


class Reading(Counted):
    """What it sets is read: the second microbatch would compute something else."""

    def forward(self, x):
        self.calls += 1
        return self.net(x).square().mean() * self.calls


@row("the step assigns Reading.calls and then computes something else", ranks=(2,))
def what_is_compiled_again_and_reads_attributes():
    model = Reading()
    step = pfeife.compile(lambda x: model.net(x).mean(), microbatches=2, capture="dynamo")
    step(torch.ones(4, 4)).backward()  # from here on each rank has its own parameters alone
    pfeife.compile(lambda x: model(x), microbatches=2, capture="dynamo")(torch.ones(4, 4))
