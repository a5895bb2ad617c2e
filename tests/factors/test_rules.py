"""Each operation on parts is the operation on the whole: forward and backward, along every
dimension of every operand, against the program that is not sharded."""

import itertools
import operator

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (has an operator for products of experts)
from sent import CHEAP_TO_COPY, DEAR_TO_COMPUTE
from torch import nn

import pfeife
from pfeife.factors.equation import Place
from pfeife.factors.rules import RINGS, equation_of
from pfeife.passes.shard import shard
from pfeife.testing import check_pass

OPERATIONS = {
    "add": (lambda a, b: a + b, (4, 6), (6,)),
    "broadcast": (lambda a, b: a * b, (4, 1, 6), (2, 1)),
    "where": (lambda a, b: torch.where(a > b, a, b), (4, 6), (4, 6)),
    "cross_entropy": (
        lambda a, b: F.cross_entropy(a @ b, torch.tensor([1, 5, -100, 0])),
        *((4, 3), (3, 6)),
    ),
    "summed cross_entropy": (
        lambda a: F.cross_entropy(a, torch.tensor([1, 5, -100, 0]), reduction="none").square(),
        (4, 6),
    ),
    "like": (lambda a: a * torch.zeros_like(a).exp() + torch.ones_like(a), (4, 6)),
    "softmax": (lambda a: a.softmax(1) ** 2, (4, 6)),
    "log_softmax": (lambda a: F.log_softmax(a, -1)[:, 0], (4, 6)),
    "sum": (lambda a: a.sum(1).square(), (4, 6)),
    "mean": (lambda a: a.mean(0, keepdim=True).square(), (4, 6)),
    "amax": (lambda a: a.amax(1).square(), (4, 6)),
    "view": (lambda a: a.view(8, 3).square(), (4, 6)),
    "heads": (lambda a: a.view(2, 4, 4).transpose(0, 1).reshape(8, 4).square(), (2, 16)),
    "uneven view": (lambda a: a.view(6, 4).square(), (4, 6)),
    "permute": (lambda a: a.permute(2, 0, 1).square(), (2, 4, 6)),
    "unsqueeze": (lambda a: a.unsqueeze(1).square().squeeze(1).square(), (4, 6)),
    "expand": (lambda a: a.unsqueeze(1).expand(4, 2, 6) * torch.arange(2.0)[:, None], (4, 6)),
    "select": (lambda a: a.select(1, 2).square(), (4, 6)),
    "slice": (lambda a: a[:, 2:4].square(), (4, 6)),
    "split": (lambda a: a.split(2, 1)[1].square() * a.split(2, 1)[0], (4, 6)),
    "uneven split": (lambda a: a.split([2, 4], 1)[1].square(), (4, 6)),
    "chunk": (lambda a: torch.cat([part.sin() for part in a.chunk(3, 1)], 1), (4, 12)),
    "cat": (lambda a, b: torch.cat([a, b], 1).square(), (4, 6), (4, 2)),
    "pad": (lambda a: F.pad(a, (1, 2)).exp(), (4, 6)),
    "cumsum": (lambda a: a.cumsum(1).square(), (4, 6)),
    "mm": (lambda a, b: (a @ b).square(), (4, 6), (6, 2)),
    "bmm": (lambda a, b: torch.bmm(a, b).square(), (2, 4, 6), (2, 6, 2)),
    "linear": (lambda a, b, c: F.linear(a, b, c).square(), (3, 4, 6), (8, 6), (8,)),
    "embedding": (lambda a: F.embedding(torch.arange(6).view(2, 3) % 4, a).square(), (4, 6)),
    "padded embedding": (
        lambda a: F.embedding(torch.arange(6).view(2, 3) % 4, a, padding_idx=2).square(),
        (4, 6),
    ),
    "layer_norm": (lambda a, b, c: F.layer_norm(a, (6,), b, c) ** 3, (4, 2, 6), (6,), (6,)),
    "gelu": (lambda a: F.gelu(a), (4, 6)),
    "attention": (
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, is_causal=True).square(),
        *[(2, 4, 6, 2)] * 3,
    ),
    "attention of all": (
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c).square(),
        *((2, 4, 6, 2), (2, 4, 4, 2), (2, 4, 4, 2)),
    ),
    "masked attention": (
        lambda a, b, c: F.scaled_dot_product_attention(
            *(a, b, c), attn_mask=torch.arange(24.0).view(6, 4).sin()
        ).square(),
        *((2, 4, 6, 2), (2, 4, 4, 2), (2, 4, 4, 2)),
    ),
    "index": (lambda a: a[:, torch.tensor([[0, 3], [1, 1]])].square(), (4, 6, 2)),
    "two indices": (
        lambda a: a[:, torch.tensor([0, 3, 1, 1]), torch.tensor([[1, 0, 1, 1]])].square(),
        (4, 6, 2),
    ),
    "index_put": (
        lambda a, b: a.index_put((torch.tensor([0, 3, 1, 1]),), b, accumulate=True).square(),
        *((6, 4), (4, 4)),
    ),
    "sort": (lambda a: a.sort(1)[0] * torch.arange(6.0), (4, 6)),
    "topk": (lambda a: a.topk(2, 1)[0].square(), (4, 6)),
    "dropout": (lambda a: F.dropout(a, 0.5).square(), (4, 6)),
}


class Operands(nn.Module):
    """Parameters of some shapes."""

    def __init__(self, *shapes):
        super().__init__()
        torch.manual_seed(0)
        self.operands = nn.ParameterList(torch.randn(shape).double() for shape in shapes)


PLACES = [
    (name, at, dim)
    for name, (_, *shapes) in OPERATIONS.items()
    for at, shape in enumerate(shapes)
    for dim in range(len(shape))
]


@pytest.mark.parametrize(("name", "at", "dim"), PLACES)
def test_an_operation(name, at, dim):
    """In float64: sums that are cut are rounded otherwise."""
    function, *shapes = OPERATIONS[name]
    model = Operands(*shapes)
    x = torch.ones((), dtype=torch.float64)
    program = pfeife.capture(lambda x: function(*model.operands).sum() * x, x)
    state = pfeife.state_of(program, model)
    for members, before in itertools.product((2, 3), (1, 2)):
        for prices in (None, DEAR_TO_COMPUTE) if shapes[at][dim] % (members * before) == 0 else ():
            cut = shard({f"operands.{at}": Place(dim, before)}, members, prices=prices)
            check_pass(cut, program, state, [x], rounding=None, within=1e-13)


# Of four experts one has no rows, both of a member, the first ones; and rows go to nobody.
@pytest.mark.parametrize("ends", [[2, 5, 5, 6], [3, 6, 6, 6], [0, 0, 2, 5]])
@pytest.mark.parametrize("dims", [(1, None), (2, 1), (None, 2), (0, None), (0, 0)])
def test_products_of_experts(ends, dims):
    """By columns of the first matrices, and rows of the second ones, or by experts; in bfloat16,
    which torch's kernel takes."""
    torch.manual_seed(0)
    shapes = (4, 16, 32), (4, 32, 16)
    layers = nn.ParameterList((torch.randn(shape) / 4).bfloat16() for shape in shapes)

    def step(x, ends, is_sent):
        h = F.grouped_mm(x, layers[0], offs=ends).relu()
        h = F.grouped_mm(h, layers[1], offs=ends)
        return torch.where(is_sent, h, 0).float().square().mean()

    is_sent = torch.arange(6)[:, None] < ends[-1]
    batch = torch.randn(6, 16).bfloat16(), torch.tensor(ends, dtype=torch.int32), is_sent
    program = pfeife.capture(step, *batch)
    names = [port.fqn for port in program.ports(pfeife.Role.PARAMETER)]
    state = dict(zip(names, (layer.detach() for layer in layers), strict=True))
    for prices in (None, DEAR_TO_COMPUTE):
        cut = shard(dict(zip(names, dims, strict=True)), 2, prices=prices)
        check_pass(cut, program, state, [batch], rounding=None, within=2e-2)


@pytest.mark.parametrize("ends", [[2, 5, 5, 6], [0, 0, 2, 5]])
@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_products_of_experts_as_transformers_has_them(ends, members, dim):
    """In other types than bfloat16; of any number of rows."""
    torch.manual_seed(0)
    layer = torch.randn(4, 8, 12, dtype=torch.float64).requires_grad_()
    product = torch.ops.transformers.grouped_mm_fallback

    def step(x, ends):
        return product(x.sin(), layer, ends).square().mean()

    batch = torch.randn(6, 8, dtype=torch.float64), torch.tensor(ends, dtype=torch.int32)
    torch._dynamo.mark_dynamic(batch[0], 0)
    program = pfeife.capture(step, *batch)
    assert program.ports(pfeife.Role.SIZE)
    (port,) = program.ports(pfeife.Role.PARAMETER)
    state = {port.fqn: layer.detach()}
    longer = torch.randn(9, 8, dtype=torch.float64), batch[1]
    for prices in (None, DEAR_TO_COMPUTE):
        cut = shard({port.fqn: dim}, members, prices=prices)
        check_pass(cut, program, state, [batch, longer], rounding=None, within=1e-13)


def test_a_member_has_the_matrices_of_its_own_experts():
    """And the gradients of these alone, which are not parts of what all compute."""
    layer = torch.randn(4, 16, 8).bfloat16().requires_grad_()

    def step(x, ends):
        return F.grouped_mm(x, layer, offs=ends).float().sum()

    batch = torch.ones(6, 16).bfloat16(), torch.tensor([1, 2, 4, 6], dtype=torch.int32)
    program = pfeife.capture(step, *batch)
    (port,) = program.ports(pfeife.Role.PARAMETER)
    local = shard({port.fqn: 0}, 2, prices=CHEAP_TO_COPY)(program)
    products = [n for n in local.module.graph.nodes if "grouped_mm" in str(n.target)]
    values = [n.meta["val"] for p in products for n in (p, *p.all_input_nodes)]
    assert len(products) >= 2
    assert {len(value) for value in values if value.dim() == 3} == {2}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_gpus_is_cut(kernel):
    """Its kernels run nowhere here: their equations alone. A mask takes the second one, which pads
    what it saves; torch takes the third one on some GPUs."""
    shape, mask = (2, 4, 100, 64), torch.ones(1, 1, 100, 100, dtype=torch.bfloat16)
    q, k, v = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    masked = {"attn_mask": mask} if kernel == "efficient" else {"is_causal": True}

    def step(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **masked).float().square().mean()

    moved = pfeife.move_to_device("cuda")(pfeife.capture(step, q, k, v))
    taken = "efficient" if kernel == "efficient" else "flash"
    nodes = [n for n in moved.module.graph.nodes if f"{taken}_attention" in str(n.target)]
    if kernel == "cudnn":
        nodes = by_cudnn(*nodes)
    assert len(nodes) == 2
    for node in nodes:
        rule = equation_of(node)
        heads = [rule.place(dims, "h") for dims in (*rule.operands, *rule.results) if len(dims) > 2]
        assert {*heads} <= {Place(1), None} and heads.count(Place(1)) >= 5
        assert rule.can_cut("h", 4) and not any("h" in summed for summed in rule.sums)
        assert rule.can_cut("s", 4) == (kernel != "efficient")
        added = [place for place, summed in enumerate(rule.sums) if "s" in summed]
        backward = "backward" in str(node.target)
        assert added == ([1, 2] if backward and kernel != "efficient" else []), added
        # In a ring all is cut along the sequence, where a kernel has no mask.
        ring = equation_of(node, RINGS)
        cut = [ring.place(dims, "s") for dims in (*ring.operands, *ring.results) if len(dims) > 2]
        assert ("s" in ring.recipes) == (kernel != "efficient")
        assert cut.count(Place(2)) >= 5 or kernel == "efficient"
        assert not ring.passed or len(ring.passed["s"]) == (4 if backward else 2)


def test_the_gradient_of_a_trained_mask_is_cut_as_its_attention():
    """By the one kernel of a GPU that has one, each head of which has its own, or adds to one."""
    q, k, v = (torch.ones(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 4, 64, 64, dtype=torch.bfloat16)

    def step(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).float().square().mean()

    moved = pfeife.move_to_device("cuda")(pfeife.capture(step, q, k, v))
    (node,) = [n for n in moved.module.graph.nodes if "attention_backward" in str(n.target)]
    of_mask = node.args[4].meta["val"]
    with of_mask.fake_mode:
        added = of_mask.new_empty(2, 1, 64, 64)
    for gradient, place in ((of_mask, Place(1)), (added, None)):
        node.meta["val"] = (*node.meta["val"][:3], gradient)
        rule = equation_of(node)
        assert rule.place(rule.results[3], "h") == place
        assert ("h" in rule.sums[3]) == (place is None) and rule.can_cut("h", 2)


def by_cudnn(forward, backward):
    """The same attention by cuDNN's kernel."""
    aten, graph = torch.ops.aten, forward.graph
    qkv = forward.args[:3]
    with graph.inserting_after(forward):
        first = graph.call_function(
            aten._scaled_dot_product_cudnn_attention.default, (*qkv, None, True, 0.0, True)
        )
    q, _, v = (node.meta["val"] for node in qkv)
    sums = q.new_empty((*q.shape[:3], 1), dtype=torch.float32)
    state = q.new_empty((), dtype=torch.int64)
    none = None, None, q.shape[2], q.shape[2]
    first.meta["val"] = (torch.empty_like(v), sums, *none, state, state, None)
    with graph.inserting_after(first):
        out, saved, seed, offset = (
            graph.call_function(operator.getitem, (first, at)) for at in (0, 1, 6, 7)
        )
    for node in (out, saved, seed, offset):
        node.meta["val"] = first.meta["val"][node.args[1]]
    grad = backward.args[0]
    with graph.inserting_before(backward):
        second = graph.call_function(
            aten._scaled_dot_product_cudnn_attention_backward.default,
            (grad, *qkv, out, saved, seed, offset, *(None,) * 3, 100, 100, 0.0, True),
        )
    second.meta["val"] = tuple(torch.empty_like(node.meta["val"]) for node in qkv)
    return first, second
