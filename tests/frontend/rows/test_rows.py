"""How results depend on the rows of the batch: what the graph tells, and what it must not guess."""

import pytest
import torch
import torch.nn.functional as F
from listening import said
from models import CASES, case
from share import some
from torch import nn

import pfeife
from pfeife.ir.parts import Role


class Net(nn.Module):
    """What the steps below are made of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 4)
        self.normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.image = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(8, 4),
        )
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0)  # takes the sequence first


NET = Net()
CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0])
BATCH = (torch.randn(2, 8), torch.randint(4, (2,)))
IMAGES = (torch.randn(2, 3, 12, 12), torch.randint(4, (2,)))
SEQUENCES = (torch.randn(2, 5, 8), torch.randint(4, (2, 5)))
ONE_ROW = (torch.randn(1, 8), torch.randint(4, (1,)))
PAIRS = (torch.randn(4, 8), torch.randint(4, (4,)))


def words(x, y):
    return F.cross_entropy(NET.one(x).flatten(0, 1), y.flatten())


def masked(x, y):
    return (NET.one(x).mean(1) * (y > 0)).sum() / (y > 0).sum()


def unbatched(x, y):
    return F.cross_entropy(
        NET.one(NET.encoder(x.transpose(0, 1))).reshape(-1, 4), y.t().reshape(-1)
    )


ZERO = torch.zeros(())


def put(x, where, value):
    return x.index_put((where,), value)


def unpadded(x, y):
    y = y.clone()
    y[y == 0] = -100
    return F.cross_entropy(NET.one(x), y)


TOLD = [
    # the mean of all rows
    ("mean", BATCH, lambda x, y: NET.one(x).square().mean()),
    ("mean", BATCH, lambda x, y: F.mse_loss(NET.one(x), x[:, :4])),
    ("mean", BATCH, lambda x, y: 0.5 * F.mse_loss(NET.one(x), x[:, :4])),
    ("mean", BATCH, lambda x, y: F.smooth_l1_loss(NET.one(x), x[:, :4]) / 2),
    ("mean", BATCH, lambda x, y: F.huber_loss(NET.one(x), x[:, :4])),
    ("mean", BATCH, lambda x, y: F.binary_cross_entropy(NET.one(x).sigmoid(), x[:, :4] ** 0)),
    ("mean", BATCH, lambda x, y: F.binary_cross_entropy_with_logits(NET.one(x), x[:, :4])),
    ("mean", BATCH, lambda x, y: F.triplet_margin_loss(NET.one(x), x[:, :4], x[:, 4:])),
    ("mean", BATCH, lambda x, y: F.cross_entropy(NET.one(x), x[:, :4].softmax(1))),
    ("mean", BATCH, lambda x, y: -NET.one(x).log_softmax(1).gather(1, y[:, None]).mean()),
    ("mean", BATCH, lambda x, y: -NET.one(x).log_softmax(1)[torch.arange(len(y)), y].mean()),
    ("mean", BATCH, lambda x, y: (NET.normed(x) - F.one_hot(y, 8)).square().mean()),
    ("mean", BATCH, lambda x, y: NET.one(x).square().mean() + NET.one.weight.square().sum()),
    ("mean", BATCH, lambda x, y: NET.one(x).square().sum() / len(x)),
    ("mean", BATCH, lambda x, y: NET.one(x).square().sum() * (1 / x.numel())),
    ("mean", BATCH, lambda x, y: (NET.one(x).square() / len(x)).sum()),
    ("mean", BATCH, lambda x, y: NET.one(x).square().sum() / torch.ones(len(x), 4).sum()),
    ("mean", BATCH, lambda x, y: NET.one(x).square().sum() / torch.tensor(len(x))),
    ("mean", BATCH, lambda x, y: F.kl_div(NET.one(x).log_softmax(1), x[:, :4].softmax(1),
                                          reduction="batchmean")),
    ("mean", BATCH, lambda x, y: ((NET.one(x) / len(x)).t() @ NET.two(x)).sum()),
    ("mean", BATCH, lambda x, y: (NET.one(x)[:, 0] * (NET.one.bias / len(x))[y]).sum()),
    ("mean", BATCH, lambda x, y: NET.one(x)[:, None].expand(-1, 2, -1).mean()),
    ("mean", BATCH, lambda x, y: (NET.one(x) / 2).sigmoid().mean()),  # two rows, but no count
    ("mean", IMAGES, lambda x, y: F.interpolate(NET.image[0](x), scale_factor=2).square().mean()),
    ("mean", BATCH, lambda x, y: F.hardswish(NET.one(x)).mean()),
    ("mean", BATCH, lambda x, y: F.glu(NET.one(x)).square().mean()),
    ("mean", BATCH, lambda x, y: (NET.one(x).flip(1) * NET.two(x).roll(1, 1)).mean()),
    ("mean", BATCH, lambda x, y: -F.logsigmoid(NET.one(x) - NET.two(x)).mean()),
    ("mean", BATCH, lambda x, y: F.prelu(NET.one(x), NET.one.bias).mean()),
    ("mean", BATCH, lambda x, y: torch.polar(NET.one(x).abs(), NET.two(x)).abs().mean()),
    ("mean", BATCH, lambda x, y: F.gumbel_softmax(NET.one(x), hard=True).square().mean()),
    # by the targets that are not ignored, or by a mask
    ("weighted", IMAGES, lambda x, y: F.cross_entropy(NET.image(x), y)),
    ("weighted", SEQUENCES, words),
    ("weighted", BATCH, unpadded),
    ("weighted", SEQUENCES, unbatched),
    ("weighted", SEQUENCES, lambda x, y: 2 * words(x, y) + NET.one.weight.square().sum()),
    ("weighted", SEQUENCES, lambda x, y: F.nll_loss(NET.one(x).log_softmax(2).mT, y)),
    ("weighted", BATCH, masked),
    ("weighted", BATCH, lambda x, y: (NET.one(x).mean(1) * y).sum() / (y.sum() + 1e-8)),
    # a sum over all rows
    ("sum", BATCH, lambda x, y: NET.one(x).square().sum()),
    ("sum", BATCH, lambda x, y: F.cross_entropy(NET.one(x), y, reduction="sum")),
    ("sum", BATCH, lambda x, y: F.cross_entropy(NET.one(x), y, reduction="sum") / 128),
    ("sum", BATCH, lambda x, y: F.mse_loss(NET.one(x), x[:, :4]) * len(x)),
    ("sum", BATCH, lambda x, y: NET.one(x).mean(0) @ torch.full((4,), 1.0 * len(x))),
    ("sum", BATCH, lambda x, y: -0.5 * torch.sum(1 + NET.one(x) - NET.one(x).exp())),
    ("sum", BATCH, lambda x, y: (NET.one(x) * NET.two(x)).sum(1).unsqueeze(0).sum()),
    ("sum", SEQUENCES, lambda x, y: F.scaled_dot_product_attention(*[NET.one(x)[None]] * 3).sum()),
]  # fmt: skip
UNKNOWN = [
    # numbers that count rows, in functions of rows
    (BATCH, lambda x, y: (NET.one(x) / len(x)).abs().sum()),
    (BATCH, lambda x, y: NET.one(x / len(x)).sum()),
    (BATCH, lambda x, y: NET.one(x).square().sum() * len(x)),
    (BATCH, lambda x, y: NET.one(x).square().mean() / len(x)),
    (BATCH, lambda x, y: (NET.one.weight / len(x)).exp().sum() + NET.one(x).mean()),
    (BATCH, lambda x, y: NET.one(x).square().mean().sqrt()),
    (BATCH, lambda x, y: NET.one(x).square().sum() + NET.one.weight.square().sum()),
    (BATCH, lambda x, y: NET.one(x).square().mean() * NET.two(x).square().mean()),
    (BATCH, lambda x, y: F.cross_entropy(NET.one(x) @ NET.one(x).t(), torch.arange(len(x)))),
    (BATCH, lambda x, y: (NET.one(x) - NET.one(x).mean(0)).square().mean()),
    (BATCH, lambda x, y: NET.one(x).square().amax()),
    (BATCH, lambda x, y: NET.one(x).std()),
    (BATCH, lambda x, y: F.cross_entropy(NET.one(x), y, weight=CLASSES)),
    (BATCH, lambda x, y: NET.one(x).flatten().softmax(0).square().sum()),
    (BATCH, lambda x, y: NET.one(x)[:1].square().mean()),
    (BATCH, lambda x, y: NET.one(x).square().sum() * x.sum()),
    (BATCH, lambda x, y: (NET.one(x) / len(x)).sum() / len(x)),
    (BATCH, lambda x, y: (NET.one(x) * CLASSES.expand(2, 4)).sum() / 128),  # no more than two rows
    (BATCH, lambda x, y: F.glu(NET.one(x), 0).sum()),
    (BATCH, lambda x, y: F.hardswish(NET.one(x).sum(0)).sum()),
    (BATCH, lambda x, y: -F.logsigmoid(NET.one(x).mean(0)).sum()),
    # numbers
    (BATCH, lambda x, y: NET.one(x).square().sum() / len(x) ** 2),
    (BATCH, lambda x, y: NET.one(x).square().sum() / torch.ones(len(x), len(x)).sum()),
    (BATCH, lambda x, y: torch.add(NET.one(x).sum(), NET.two(x).sum(), alpha=len(x))),
    (BATCH, lambda x, y: (NET.one(x).square().sum() * 1j).imag),
    (BATCH, lambda x, y: F.cross_entropy(NET.one(x), y) * len(x)),
    (BATCH, lambda x, y: len(x) * (NET.one(x).mean(1) * y).sum() / (y.sum() + 1e-8)),
    (BATCH, lambda x, y: NET.one(x)[:, None].expand(-1, len(x), -1).mean(0).sum()),
    (BATCH, lambda x, y: torch.zeros(len(x), 4).copy_(NET.one(x).mean(0)).sum()),
    # rows by a number
    (BATCH, lambda x, y: put(NET.one(x) / len(x), x[:, :4] > 0, ZERO).sum()),
    (BATCH, lambda x, y: put(NET.one(x), torch.arange(1), ZERO).sum()),
    (BATCH, lambda x, y: put(NET.one(x), y > 0, ZERO).sum()),
    (BATCH, lambda x, y: (NET.one(x) / len(x)).masked_fill(x[:, :4] > 0, 0.0).sum()),
    (BATCH, lambda x, y: torch.atan2(NET.one(x) / len(x), NET.two(x)).sum() / len(x)),
    (BATCH, lambda x, y: F.layer_norm(NET.one(x) * len(x), (4,)).sum() / len(x)),
    (BATCH, lambda x, y: F.nll_loss(NET.one(x) / len(x), y, reduction="sum")),
    (BATCH, lambda x, y: F.nll_loss(NET.one(x), y, CLASSES / len(x), reduction="sum")),
    (BATCH, lambda x, y: torch.cat([NET.one(x), torch.full((len(x), 4), 1 / len(x))], 1).sum()),
    (BATCH, lambda x, y: torch.cat([NET.one(x) / len(x), CLASSES.expand(len(x), 4)], 1).sum()),
    (BATCH, lambda x, y: torch.constant_pad_nd(NET.one(x) / len(x), (0, 1), 1.0).sum()),
    (BATCH, lambda x, y: F.embedding(y, NET.one.weight / len(x)).sum()),
    (BATCH, lambda x, y: (NET.one(x) / len(x)).gather(1, y[:, None]).sum()),
    (BATCH, lambda x, y: (NET.one(x) / len(x))[torch.arange(len(y)), y].sum()),
    (BATCH, lambda x, y: NET.one(x).sum() / len(x) + (x / len(x)).long().sum()),
    # functions of sums and means
    (BATCH, lambda x, y: NET.one(x).sum() + y.sum().bool()),
    (BATCH, lambda x, y: F.embedding(y.sum(), NET.one.weight).sum()),
    (BATCH, lambda x, y: NET.one(x).sum() + x.sum().long()),
    (BATCH, lambda x, y: NET.one(x).sum() + torch.div(x.sum(), 3, rounding_mode="floor")),
    (BATCH, lambda x, y: NET.one.weight.sum() / NET.one(x).exp().mean()),
    (BATCH, lambda x, y: torch.where(CLASSES[0] > 0, NET.one(x).sum(), NET.one.weight.sum())),
    (BATCH, lambda x, y: NET.one(x).mean(0) @ NET.two(x).mean(0)),
    (BATCH, lambda x, y: F.mse_loss(NET.one(x).mean(0), CLASSES)),
    (BATCH, lambda x, y: torch.stack([NET.one(x).mean(), NET.two(x).sum()]).sum()),
    (BATCH, lambda x, y: torch.stack([NET.one(x).sum(), NET.one.weight.sum()]).sum()),
    (BATCH, lambda x, y: torch.constant_pad_nd(NET.one(x).sum(0), (0, 1), 1.0).sum()),
    (BATCH, lambda x, y: NET.one(x).sum(0)[torch.tensor([0, 2])].sum()),
    (BATCH, lambda x, y: torch.addmm(NET.one.weight, NET.one(x).t(), x).sum()),
    # rows and a sum or a mean
    (BATCH, lambda x, y: torch.addmm(NET.two(x).mean(0), x, NET.one.weight.t()).mean()),
    (BATCH, lambda x, y: (NET.one(x) @ NET.two(x).mean(0)).mean()),
    (BATCH, lambda x, y: F.nll_loss(NET.one(x), y, x[:, :4].mean(0), reduction="sum")),
    (BATCH, lambda x, y: torch.select_scatter(NET.one(x), x.mean().expand(len(x)), 1, 0).mean()),
    (BATCH, lambda x, y: NET.one(x).gather(1, y.sum().expand(len(x), 1)).mean()),
    (BATCH, lambda x, y: NET.one(x)[:, y.sum(0, keepdim=True)].mean()),
    (BATCH, lambda x, y: F.layer_norm(NET.one(x), (4,), NET.two(x).mean(0)).mean()),
    (BATCH, lambda x, y: F.batch_norm(NET.one(x), None, None, x[:, :4].mean(0), None, True).mean()),
    # rows with other rows
    (BATCH, lambda x, y: (NET.one(x)[:, None] - NET.one(x)).square().mean()),
    (BATCH, lambda x, y: (NET.one(x).repeat(3, 1) * x.repeat_interleave(3, 0)[:, :4]).exp().mean()),
    (BATCH, lambda x, y: (NET.one(x) @ NET.two(x).t()).mean()),
    (BATCH, lambda x, y: torch.cdist(NET.one(x), NET.two(x)).mean()),
    (BATCH, lambda x, y: F.scaled_dot_product_attention(*[NET.one(x)[None, None]] * 3).mean()),
    (BATCH, lambda x, y: F.layer_norm(NET.one(x), (2, 4)).square().mean()),
    (BATCH, lambda x, y: F.avg_pool1d(NET.one(x).t(), 2).square().mean()),
    (BATCH, lambda x, y: torch.cat([NET.one(x), NET.two(x)]).square().mean()),
    (BATCH, lambda x, y: torch.constant_pad_nd(NET.one(x), (0, 0, 0, 1)).mean()),
    (BATCH, lambda x, y: torch.select_scatter(NET.one(x), CLASSES, 0, 0).square().mean()),
    (BATCH, lambda x, y: F.embedding(y % 2, NET.one(x)).square().mean()),
    (BATCH, lambda x, y: NET.one(x).gather(0, y[:, None]).mean()),
    (BATCH, lambda x, y: NET.one(x)[:, y].square().mean()),
    (BATCH, lambda x, y: NET.one(x)[y % 2].mean()),
    (BATCH, lambda x, y: (NET.one(x).t() @ CLASSES.view(2, 2)).mean()),
    (PAIRS, lambda x, y: (NET.one(x).view(2, 2, 4)[0] - x.view(2, 2, 8)[1, :, :4]).mean()),
    # rows elsewhere
    (BATCH, lambda x, y: F.nll_loss(NET.one(x)[:, :2].t(), y % 2)),
    (ONE_ROW, lambda x, y: NET.one(x).squeeze().square().sum(0)),
    (BATCH, lambda x, y: F.batch_norm(NET.one(x).t(), None, None, None, None, True).sum(0).mean()),
    (BATCH, lambda x, y: torch.zeros(3, len(x), 4).copy_(NET.one(x)).sum(0).mean()),
    (BATCH, lambda x, y: NET.one.weight.view(2, 4, 2, 2)[:, y, :, y % 2].sum(1).mean()),
    (SEQUENCES, lambda x, y: NET.one(x).transpose(0, 1)[y[:, 0], torch.arange(2)].sum(1).mean()),
]


def captured(step, batch) -> pfeife.Program:
    torch._dynamo.reset()
    return pfeife.capture(step, *batch)


@pytest.mark.parametrize("index", some(range(len(TOLD))))
def test_what_the_graph_tells(index):
    """Without a warning, also with one row, where every number may count rows; and the proof: the
    uncut batch has the same loss, with other data and uneven counts (batch norm evaluates, for a
    microbatch has statistics of its own)."""
    how, batch, step = TOLD[index]
    net = NET.eval()
    with said() as found:
        program = captured(step, batch)
        one = captured(step, [x[:1] for x in batch]) if batch is BATCH else program
    assert not found
    for each in (program, one):
        (loss,) = each.ports(Role.LOSS)
        assert loss.reduction == how
        assert f" {how}" in str(loss) and (how == "weighted") == bool(each.counts)
    more = [torch.cat([x, 2 * x if x.is_floating_point() else (x + 1) % 4]) for x in batch]
    more[1][..., 1:] = more[1][..., 1:].clamp(min=1)
    parts = [{"x": more[0][i : i + 2], "y": more[1][i : i + 2]} for i in (0, 2)]
    result = pfeife.evaluate(program, pfeife.state_of(program, net), parts)
    torch.testing.assert_close(result.loss, step(*more).detach())


@pytest.mark.parametrize("index", range(len(UNKNOWN)))
def test_what_it_does_not_tell(index):
    """Averaged, with one warning that has the line."""
    batch, step = UNKNOWN[index]
    with said() as found:
        program = captured(step, batch)
    assert program.ports(Role.LOSS)[0].reduction == "mean"
    assert len(found) == 1
    assert "test_rows.py" in found[0] and 'loss_reduction="mean"' in found[0]


@pytest.mark.parametrize("index", some(range(len(UNKNOWN)), 20))
def test_what_somebody_says_holds(index):
    batch, step = UNKNOWN[index]
    with said() as found:
        program = pfeife.capture(step, *batch, loss_reduction="sum")
    assert program.ports(Role.LOSS)[0].reduction == "sum" and not found


def test_models_without_a_warning():
    with said() as found:
        for name in set(CASES) - {"WideNet"}:  # it adds the mean of all rows to each
            captured(case(name).step, case(name).batch(2))
    assert not found
