"""Run by itself, `python tests/on_two_devices.py`: two stages of one process on two devices.

The second one is that of `second_device`; no GPU is needed, and nothing of CUDA is run.
"""

import contextlib
import copy
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from second_device import on_second_device
from torch import nn

import pfeife
from pfeife._torch import is_absent
from pfeife.data.machine import Mesh
from pfeife.frontend.deferred.remote_batch import Absence, become_absent
from pfeife.frontend.watch.gc_objects import living
from pfeife.runtime.distributed.state.optimizer_probe import why_not_apart
from pfeife.runtime.distributed.state.owned import Owned
from pfeife.runtime.distributed.state.remote_parameters import Foreign
from pfeife.runtime.peak import give_back

HERE, THERE = "cpu", "second:0"
OPTIONS = {"microbatches": 2, "stages": 2, "devices": [HERE, THERE]}


class Tied(nn.Module):
    """A weight that the first and the last stage use, a scalar, statistics, and a mask of both."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.early, self.late = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.norm, self.scale = nn.BatchNorm1d(16), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.arange(16) % 3)

    def forward(self, tokens):
        hidden = torch.tanh(self.early(self.embedding(tokens).mean(1)) * self.mask)
        hidden = pfeife.stage_boundary(hidden)
        return self.head(self.norm(self.late(hidden)) * self.scale * self.mask)


def loss_of(model, tokens, targets):
    return F.cross_entropy(model(tokens), targets)


def batch(rows=8):
    return torch.randint(20, (rows, 5)), torch.randint(20, (rows,))


def whole(model):
    return {name: value.cpu() for name, value in model.state_dict().items()}


def check_alike(model, other, tolerance=0.0):
    for name, value in other.state_dict().items():
        torch.testing.assert_close(whole(model)[name], value, rtol=tolerance, atol=tolerance)


def check_places(model, optimizer=None):
    places = {name: str(value.device) for name, value in model.state_dict().items()}
    theirs = {n for n in places if n.split(".")[0] in ("late", "norm", "scale")}
    assert {name for name, place in places.items() if place == THERE} == theirs, places
    for one in model.parameters():
        assert one.grad is None or one.grad.device == one.device
        kept = optimizer.state[one] if optimizer else {}
        assert {value.device for value in kept.values() if value.dim()} <= {one.device}


def eager(model, optimizer, *rows):
    for part in zip(*(one.chunk(2) for one in rows), strict=True):
        (loss_of(model, *part) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def trained(step, model, optimizer, *rows):
    step(*rows).backward()
    check_places(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    check_places(model, optimizer)
    optimizer.zero_grad()


def training_goes_on():
    """An optimizer with state from before the first call, other shapes, `cpu()` in between, another
    step that evaluates, a checkpoint: the numbers of one device."""
    model = Tied()
    other = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, other))
    step = pfeife.compile(lambda *rows: loss_of(model, *rows), **OPTIONS)
    seen = pfeife.compile(lambda tokens: model(tokens), **OPTIONS)
    for one, optimizer in ((model, ours), (other, theirs)):
        eager(one, optimizer, *map(torch.ones_like, batch()))
    objects = [*map(id, model.parameters())]
    for rows in (batch(), batch(4), batch()):
        trained(step, model, ours, *rows)
        eager(other, theirs, *rows)
        check_alike(model, other, 1e-5)  # the tied weight's gradient is summed in another order
    for one in (model, other):
        one.eval()
    with torch.no_grad():
        found = seen(rows[0])
        torch.testing.assert_close(found, other(rows[0]), rtol=1e-4, atol=1e-4)
    assert found.device.type == HERE
    check_places(model, ours)
    model.cpu()
    torch.testing.assert_close(model(rows[0]), other(rows[0]), rtol=1e-4, atol=1e-4)
    for one in (model, other):
        one.train()
    trained(step, model, ours, *rows)
    eager(other, theirs, *rows)
    check_alike(model, other, 1e-4)
    assert objects == [*map(id, model.parameters())]
    fresh = Tied()
    model.load_state_dict(fresh.state_dict(), assign=True)
    model.head.weight = model.embedding.weight
    torch.testing.assert_close(step(*rows), mean_loss(fresh, rows), rtol=1e-5, atol=1e-5)
    check_places(model)


def mean_loss(model, rows):
    parts = zip(*(one.chunk(2) for one in rows), strict=True)
    return sum(loss_of(copy.deepcopy(model), *part) for part in parts) / 2


def every_door():
    rows = batch()
    for more in ({"capture": "trace"}, {"schedule": "zb-h1"}, {"loss": "outside"}):
        model = Tied()
        before = copy.deepcopy(model)
        call = model if "loss" in more else functools.partial(loss_of, model)
        step = pfeife.compile(call, **OPTIONS, **more)
        for _ in range(2):  # the second one sees what the first one has moved
            before.load_state_dict(whole(model))
            found = F.cross_entropy(step(rows[0]), rows[1]) if "loss" in more else step(*rows)
            found.backward()
            wanted = mean_loss(before, rows)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            check_places(model)
    with pfeife.deferred_init():
        model = Tied()
    pfeife.compile(lambda *rows: loss_of(model, *rows), **OPTIONS)(*rows).backward()
    check_places(model)


def moved():
    """A program that was captured here computes the same bits there; a tensor of the wrong device
    would end it."""
    model, rows = Tied(), batch(4)

    def step(*given):
        made = torch.arange(2.0, device=given[0].device)
        return (loss_of(model, *given) * torch.tensor([0.5, 1.5]) * made).mean()

    flat = pfeife.capture(step, *rows, loss_reduction="mean")
    there = pfeife.move_to_device(THERE)(flat)
    state = pfeife.state_of(flat, model)
    wanted = pfeife.evaluate(flat, state, [rows] * 2)
    away = {name: value.detach().to(THERE) for name, value in state.items()}
    found = pfeife.evaluate(there, away, [tuple(one.to(THERE) for one in rows)] * 2)
    assert {str(one.device) for one in (found.loss, *found.gradients.values())} == {THERE}
    assert torch.equal(found.loss.cpu(), wanted.loss)
    for name, gradient in found.gradients.items():
        assert torch.equal(gradient.cpu(), wanted.gradients[name]), name


def refused():
    def message(run):
        try:
            run()
        except (ValueError, RuntimeError) as error:
            return str(error)
        raise AssertionError("nothing was refused")

    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    shared[2].weight.data = shared[0].weight.data
    step = pfeife.compile(lambda x: shared(x).mean(), **OPTIONS)
    assert "share memory, but are two tensors" in message(lambda: step(torch.ones(4, 4)))
    assert {one.device.type for one in shared.parameters()} == {HERE}
    step = pfeife.compile(lambda x: shared(x).mean(), **OPTIONS, compiler="inductor")
    assert "compiler='aot_eager'" in message(lambda: step(torch.ones(4, 4)))
    model = Tied()
    pfeife.compile(lambda *rows: loss_of(model, *rows), **OPTIONS)(*batch())
    assert "on one device" in message(lambda: model(batch()[0]))


class Signs(torch.optim.Optimizer):
    """One that is not torch's, and so is tried."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad.sign())


def generators_stay():
    torch.manual_seed(7)
    torch.second.manual_seed_all(8)
    before = torch.get_rng_state(), torch.second.get_rng_state()
    assert not why_not_apart(Signs([nn.Parameter(torch.ones(4, 4))], {}))
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.second.get_rng_state())


def what_others_train_takes_no_memory():
    """A rank of four keeps its own quarter of a model, on any device; also of one that was not made
    yet, whose other three quarters never take any."""
    mesh = Mesh(4, 1)
    become_absent(torch.ones(1), Absence())  # once, for kernels of all operations: 5 MB
    for width, device in ((8, HERE), (8, THERE), (1024, HERE), (1024, THERE)):  # first what is lazy
        for later in (False, True) if device == HERE else (False,):  # it has no `set_`
            give_back()
            before = taken()
            with pfeife.deferred_init() if later else contextlib.nullcontext():
                layers = [nn.Linear(width, width, bias=False, device=device) for _ in range(16)]
            foreign = Foreign()
            if later:
                pfeife.materialize(nn.Sequential(*layers[:4]))
            for at, layer in enumerate(layers[4:]):
                foreign.add(layer.weight, Owned(at, f"{at}.weight", (1 + at // 4,), mesh))
            give_back()
            own = sum(layer.weight.nbytes for layer in layers[:4])
            more = 2**20 if width > 8 else 2**23
            if device == HERE:  # the other device keeps all memory
                assert taken() - before < own + more, (later, taken() - before, own)
            assert held(THERE) <= own
            assert all(layer.weight.device.type == torch.device(device).type for layer in layers)
            assert all(is_absent(layer.weight) for layer in layers[4:])
            del foreign, layers


def held(device: str) -> int:
    """Bytes of all tensors on a device that have values."""
    tensors = [one for one in living(torch.Tensor) if one.device == torch.device(device)]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in tensors}
    absent = {one.untyped_storage()._cdata for one in tensors if is_absent(one)}
    return sum(one.nbytes() for at, one in storages.items() if at not in absent)


def taken() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    on_second_device()
    checks = (training_goes_on, every_door, refused, moved, generators_stay)
    for check in (what_others_train_takes_no_memory, *checks):
        check()
