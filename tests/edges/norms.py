"""Batch norms: whose statistics are tracked, in one pipeline and in replicas."""

import copy
import os

import torch
from rows import row
from torch import nn

import pfeife

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
STAGES = {} if RANKS > 1 else {"stages": 2}
CUT = {**STAGES, "split_at": {"3": "begin"}}


def net(momentum=0.1, affine=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm2d(2, momentum=momentum, affine=affine),
        *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)),
        nn.BatchNorm2d(3, momentum=momentum, affine=affine),
    )


def images(seed, count=8):
    torch.manual_seed(seed)
    return 3 * torch.randn(count, 2, 7, 7) + torch.randn(2, 1, 1)


def norms_of(model):
    return [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]


def deferred(model, x, count):
    """One device's step, its loss and gradients, with the statistics of the whole batch."""
    norms, found = norms_of(model), []
    before = copy.deepcopy(model.state_dict())
    momenta = [one.momentum for one in norms]
    total = torch.zeros(())
    for part in x.chunk(count):
        for one in norms:
            one.momentum = 1.0  # what is tracked then is that of the microbatch
        loss = model(part).square().mean() / count
        loss.backward()
        total = total + loss.detach()
        found.append([(one.running_mean.double(), one.running_var.double()) for one in norms])
    model.load_state_dict(before)
    sizes = [x.numel() // 2, 3 * 3 * len(x)]
    for at, (one, momentum) in enumerate(zip(norms, momenta, strict=True)):
        one.momentum = momentum
        one.num_batches_tracked += 1
        means = torch.stack([each[at][0] for each in found])
        variances = torch.stack([each[at][1] for each in found])
        each, mean = sizes[at] // count, means.mean(0)
        within, between = (each - 1) * variances.sum(0), each * (means - mean).square().sum(0)
        share = momentum or 1.0 / one.num_batches_tracked.double()
        for running, new in (
            (one.running_mean, mean),
            (one.running_var, (within + between) / (sizes[at] - 1)),
        ):
            running.copy_((1.0 - share) * running.double() + share * new)
    return total


def tracks_the_batch(momentum=0.1, affine=True, count=4, close=False, **options):
    """Three steps beside one device; the first norm's statistics are those of the whole batch."""
    model = net(momentum, affine)
    other, whole = copy.deepcopy(model), copy.deepcopy(norms_of(model)[0])
    given = {"microbatches": count, "deferred_batch_norm": True, **options}
    step = pfeife.compile(lambda x: model(x).square().mean(), **given)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for seed in range(3):
        loss, expected = step(images(seed)), deferred(other, images(seed), count)
        loss.backward()
        torch.testing.assert_close(loss, expected, **({} if close else {"rtol": 0, "atol": 0}))
        whole(images(seed))
        for one in optimizers:
            one.step()
            one.zero_grad()
    state = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        near = {} if close else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(state[name], value, **near)
    torch.testing.assert_close(state["0.running_mean"], whole.running_mean)
    torch.testing.assert_close(state["0.running_var"], whole.running_var)
    return model, step, state


@row(ranks=(1, 2))
def statistics_of_the_whole_batch():
    tracks_the_batch(**CUT)


@row(ranks=(1, 2), whole=(1,))
def statistics_of_the_whole_batch_that_average_all():
    tracks_the_batch(momentum=None, schedule="zb-h1", capture="trace", **CUT)


@row(ranks=(1, 2), whole=(1,))
def statistics_of_the_whole_batch_with_the_loss_outside():
    tracks_the_batch(loss="outside", recompute="always", **CUT)


@row(ranks=(1, 2))
def statistics_of_the_batch_of_all_replicas():
    """Every replica has the same ones."""
    model, _, state = tracks_the_batch(affine=False, close=True, replicas=2, stages=1)
    for name, value in model.named_buffers():
        assert torch.equal(value, state[name]), name


@row(ranks=(1, 2))
def statistics_of_replicas():
    """Without the option each replica tracks its own microbatches, in their order. What is read
    back, in one process and from every rank, is that of the first one."""
    model = net()
    other = copy.deepcopy(model)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4, replicas=2, stages=1)
    step(images(0)).backward()
    rank = int(os.environ.get("RANK", "0"))
    expected = {}
    for replica, rows in enumerate(images(0).chunk(2)):
        one = copy.deepcopy(other)
        for part in rows.chunk(2):
            one(part)
        expected[replica] = dict(one.named_buffers())
    for name, value in model.named_buffers():
        assert torch.equal(value, expected[rank][name]), name
        assert torch.equal(pfeife.full_state_dict(model)[name], expected[0][name]), name


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x):
        return self.norm(self.norm(x).relu())


@row("the batch norm in File", ranks=(1, 2))
def a_norm_that_runs_twice_in_a_microbatch():
    model = Twice()
    step = pfeife.compile(
        lambda x: model(x).square().mean(), microbatches=2, stages=1, deferred_batch_norm=True
    )
    step(images(0)).backward()


@row("1 is a SyncBatchNorm, which gathers the statistics of all processes", ranks=(2,))
def a_synced_norm():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.SyncBatchNorm(2))
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(images(0)).backward()


@row("1 is a SyncBatchNorm, which gathers the statistics of all processes")
def a_synced_norm_in_replicas():
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.SyncBatchNorm(2))
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, replicas=2)(images(0))


@row()
def a_synced_norm_in_one_process():
    """An ordinary one, as on one device."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.SyncBatchNorm(2))
    other = copy.deepcopy(model)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    step(images(0)).backward()
    for part in images(0).chunk(2):
        (other(part).square().mean() / 2).backward()
    for one, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, expected.grad)
    for one, expected in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(one, expected)
