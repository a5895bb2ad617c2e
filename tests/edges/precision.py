"""Half precision: gradients that float16 would lose, sums in float32."""

import contextlib
import copy
import os

import torch
from listening import said
from rows import row
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import pfeife
from pfeife.cost import memory_curves
from pfeife.runtime.distributed.state.remote_gradients import is_here
from pfeife.runtime.profile import LiveTensors

STAGES = {} if "RANK" in os.environ else {"stages": 2}
CUT = {**STAGES, "split_at": {"2": "begin"}}
HALF = torch.float16


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())


def rows(seed, count=8):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def tiny(model, x, factor=1.0):
    """A loss whose gradients are less than 1e-8 within float16."""
    with torch.autocast("cpu", dtype=HALF):
        return (model(x).float().square() * factor).mean() * 1e-7


def accumulated(step, scaler, *batch, count=2, times=1.0):
    """One device's loss, its gradients those of its microbatches in turn."""
    total = torch.zeros(())
    for part in zip(*(one.chunk(count) for one in batch), strict=True):
        loss = step(*part)
        scaler.scale(loss / count * times).backward()
        total = total + loss.detach() / count
    return total


def same_gradients(model, other):
    mine = [(n, p.grad) for n, p in model.named_parameters() if is_here(p.grad)]
    assert mine
    theirs = dict(other.named_parameters())
    wrong = [name for name, gradient in mine if not torch.equal(gradient, theirs[name].grad)]
    assert not wrong, wrong


def pair(**options):
    model = net()
    other = copy.deepcopy(model)
    return model, other, pfeife.compile(lambda x, f: tiny(model, x, f), microbatches=2, **options)


def scalers(**options):
    return [torch.amp.GradScaler("cpu", **options) for _ in range(2)]


@row(ranks=(1, 2))
def small_gradients_survive():
    """The default scaler, whose scale is what the first call supposes."""
    for options in ({}, {"loss": "outside"}, {"schedule": "zb-h1"}):
        model, other, _ = pair()
        step = pfeife.compile(lambda x, m=model: tiny(m, x), microbatches=2, **options, **CUT)
        mine, theirs = scalers()
        found = step(rows(1))
        mine.scale(found).backward()
        assert torch.equal(found, accumulated(lambda x, m=other: tiny(m, x), theirs, rows(1)))
        same_gradients(model, other)
        assert all(p.grad.abs().max() > 0 for p in model.parameters() if is_here(p.grad))
        other.zero_grad()
        accumulated(lambda x, m=other: tiny(m, x), scalers(enabled=False)[0], rows(1))
        assert not other[0].weight.grad.any(), "without a scale they are lost"


@row(ranks=(1, 2))
def a_scale_that_grows_and_shrinks():
    """Steps that overflow are left out, as on one device: 12 steps, growth after every two."""
    model, other, step = pair(**CUT)
    mine, theirs = scalers(growth_interval=2, init_scale=2.0**13)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, other)]
    scales = []
    for seed in range(12):
        factor = torch.full((8, 1), 1e12 if seed in (3, 8) else 1.0)
        batch = rows(seed), factor
        loss = step(*batch)
        mine.scale(loss).backward()
        expected = accumulated(lambda x, f: tiny(other, x, f), theirs, *batch)
        assert torch.equal(loss, expected)
        if seed not in (3, 8):
            same_gradients(model, other)
        for scaler, optimizer in zip((mine, theirs), optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert mine.get_scale() == theirs.get_scale()
        scales.append(mine.get_scale())
    assert set(scales) == {2.0**13, 2.0**14, 2.0**15}, scales
    found = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        assert torch.equal(found[name], value), name


class Remembers(nn.Module):
    """What it computes depends on a buffer that it updates, and on one that it assigns anew."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = net(3), nn.BatchNorm1d(16)
        self.register_buffer("shift", torch.zeros(16))
        self.calls = torch.zeros(())

    def forward(self, x):
        h = x + self.shift
        self.shift.add_(x.mean(0))
        h = self.norm(self.net(h)) * (1 + self.calls)
        self.calls = self.calls + 1
        return h


def run_again(**options):
    """Each of three calls, whose gradients add up, runs again: nobody has said 1/3 before. A loss
    that is kept keeps its batch as long as there is a graph."""
    model = Remembers()
    other = copy.deepcopy(model)
    step = pfeife.compile(lambda x: tiny(model, x), microbatches=2, **options)
    mine, theirs = scalers()
    for seed in range(3):
        batch = rows(seed)
        memory = StorageWeakRef(batch.untyped_storage())
        found = step(batch)
        del batch
        mine.scale(found * (1 / 3)).backward(retain_graph=True)
        assert not memory.expired()
        mine.scale(found * (1 / (4 + seed))).backward()
        assert memory.expired() or not seed  # the first call is compared with eager
        before, calls = copy.deepcopy(other.state_dict()), other.calls
        for times in (1 / 3, 1 / (4 + seed)):  # the same microbatches, from the same state
            other.load_state_dict(before)
            other.calls = calls
            sums = [p.grad for p in other.parameters()]
            other.zero_grad()
            expected = accumulated(lambda x: tiny(other, x), theirs, rows(seed), times=times)
            assert torch.equal(found, expected)
            for parameter, total in zip(other.parameters(), sums, strict=True):
                parameter.grad += 0 if total is None else total
        same_gradients(model, other)
    state = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        assert torch.equal(state[name], value), name
    return model, step


@row(ranks=(1, 2))
def gradients_of_several_calls_that_run_again():
    cut = {"split_at": {"net.2": "begin"}}
    with said() as lines:
        run_again(**STAGES, **cut)
    told = any("the gradient of the loss was another one" in line for line in lines)
    assert told == (os.environ.get("RANK", "0") == "0")


@row("0.weight was changed in place between a call of the step and its backward", ranks=(1, 2))
def a_parameter_that_changes_before_a_step_runs_again():
    model, _, step = pair(**CUT)
    loss = step(rows(0), torch.ones(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0)
    loss.backward()


class Mixed(nn.Module):
    """What asks for dtypes as models do: an embedding, a norm in float32, a cast back."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.a, self.b = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11)
        self.scale = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, tokens):
        h = self.a(self.embed(tokens))
        given = h.dtype
        h = (nn.functional.layer_norm(h.float(), (16,)) * self.scale.float()).to(given)
        return self.b(h.relu())


def tokens(seed, count=16, length=5):
    return torch.randint(11, (count, length), generator=torch.Generator().manual_seed(seed))


def cross_entropy(model, x):
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def summed(model, x, count, dtype=torch.float32):
    """The sums of gradients that plain torch gives in a type, the loss, by microbatches."""
    total, sums = torch.zeros(()), {}
    for part in x.chunk(count):
        model.zero_grad()
        loss = cross_entropy(model, part)
        (loss / count).backward()
        total = total + loss.detach() / count
        for name, p in model.named_parameters():
            sums[name] = sums[name] + p.grad.to(dtype) if name in sums else p.grad.to(dtype)
    model.zero_grad()
    return total, sums


HALF_CUT = {**STAGES, "split_at": {"b": "begin"}}


def here(model):
    return {name: p.grad for name, p in model.named_parameters() if is_here(p.grad)}


@row(ranks=(1, 2))
def gradients_of_bfloat16_are_added_up_in_float32():
    wide = torch.float32
    for kind, options in ((None, {}), (wide, {"loss": "outside"}), (wide, {"schedule": "zb-h1"})):
        model = Mixed().bfloat16()
        other = copy.deepcopy(model)
        if kind is not None:
            for parameter in model.parameters():
                parameter.grad_dtype = kind
        given = {"microbatches": 8, "accumulate": "float32", **options, **HALF_CUT}
        step = pfeife.compile(lambda x, m=model: cross_entropy(m, x), **given)
        loss = step(tokens(0))
        loss.backward()
        total, sums = summed(other, tokens(0), 8)
        assert torch.equal(loss, total) and here(model)
        for name, gradient in here(model).items():
            assert gradient.dtype == (kind or torch.bfloat16)
            assert torch.equal(gradient, sums[name].to(gradient.dtype)), name
    _, narrow = summed(other, tokens(0), 8, torch.bfloat16)
    assert any(not torch.equal(narrow[name], one.bfloat16()) for name, one in sums.items())


ADAM = {"rtol": 1e-3, "atol": 1e-3}
EXACT, CLOSE = {"rtol": 0, "atol": 0}, {"rtol": 1e-4, "atol": 1e-5}


def master(near=EXACT, made=contextlib.nullcontext, cut=HALF_CUT, lengths=(5, 5, 5, 5), **options):
    """Training with copies in bfloat16, beside plain torch that makes a copy a step."""
    with made():
        model = Mixed()
    other = Mixed()
    given = {"microbatches": 4, "param_dtype": "bfloat16", **options, **cut}
    step = pfeife.compile(lambda x: cross_entropy(model, x), **given)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, other)]
    for seed, shape in enumerate(zip((16, 16, 8, 16), lengths, strict=True)):
        loss = step(tokens(seed, *shape))  # of another shape: captured with gradients there
        loss.backward()
        total, sums = summed(copy.deepcopy(other).bfloat16(), tokens(seed, *shape), 4)
        torch.testing.assert_close(loss.detach(), total, **near)
        for name, parameter in other.named_parameters():
            parameter.grad = sums[name]
        assert here(model)
        for name, gradient in here(model).items():
            torch.testing.assert_close(gradient, sums[name], **near)
        for optimizer in optimizers:
            optimizer.step()
        if seed != 1:
            for optimizer in optimizers:
                optimizer.zero_grad()
        else:
            for one in (model, other):
                one.zero_grad(set_to_none=False)
    state = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        assert value.dtype == torch.float32
        # Where a gradient is almost nothing, its last bit may decide where Adam goes.
        torch.testing.assert_close(state[name], value, **(EXACT if near is EXACT else ADAM))
    return step


@row(ranks=(1, 2))
def float32_master_weights():
    step = master()
    (built, *_) = step.backend.compiled
    sent = [m.bytes for m in pfeife.ir.messages.messages(built.program)]
    assert all(port.dtype == torch.bfloat16 for port in built.program.ports(pfeife.Role.PARAMETER))
    assert sent and max(sent) <= 4 * 5 * 16 * 2


@row(ranks=(1, 2))
def float32_master_weights_of_batches_of_many_lengths():
    step = master(lengths=(5, 6, 9, 7))
    assert len(step.backend.compiled) <= 3


@row(ranks=(1, 2))
def float32_master_weights_of_a_step_that_is_traced():
    master(capture="trace")


@row(ranks=(1, 2), whole=(1,))
def float32_master_weights_with_the_loss_outside():
    master(loss="outside")


@row(ranks=(1, 2), whole=(1,))
def float32_master_weights_that_each_rank_makes():
    master(made=pfeife.deferred_init)


@row(ranks=(1, 2))
def float32_master_weights_in_replicas():
    """The sums over replicas are in float32, too."""
    master(near=CLOSE, cut={"stages": 1}, replicas=2)
    if "RANK" in os.environ:
        master(near=CLOSE, cut={"stages": 1}, replicas=2, data_parallel="shard")


@row(ranks=(1, 2))
def float16_with_master_weights_and_a_scaler():
    model = net()
    other = copy.deepcopy(model)
    step = pfeife.compile(
        lambda x: half_loss(model, x), microbatches=2, param_dtype="float16", **CUT
    )
    mine, theirs = scalers()
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, other)]
    for seed in range(2):
        mine.scale(step(rows(seed))).backward()
        half = copy.deepcopy(other).half()
        for part in rows(seed).chunk(2):
            half.zero_grad()
            theirs.scale(half_loss(half, part) / 2).backward()
            for parameter, copied in zip(other.parameters(), half.parameters(), strict=True):
                before = 0 if parameter.grad is None else parameter.grad
                parameter.grad = before + copied.grad.float()
        assert all(gradient.any() for gradient in here(model).values())
        same_gradients(model, other)
        for scaler, optimizer in zip((mine, theirs), optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def half_loss(model, x):
    return model(x.half()).float().square().mean() * 1e-7


@row("option param_dtype=torch.bfloat16: it is one of pfeife.compile", ranks=(1,))
def master_weights_by_name():
    options = {"microbatches": 2, "param_dtype": torch.bfloat16}
    step = torch.compile(net(), backend="pfeife", options=options, dynamic=True)
    step(rows(0)).sum().backward()


class Shifted(nn.Module):
    """Its buffer is updated at every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(64))

    def forward(self, x):
        self.shift.add_(x.detach().float().mean(0))
        return x + self.shift


@row(ranks=(2,))
def what_a_step_that_runs_again_takes():
    """As much as it is said to: when it runs for the second time, the gradients of the first are
    gone, and of a buffer that it updates there is a copy on the rank that does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Shifted(), nn.Linear(64, 16))
    options = {"microbatches": 2, "split_at": {"2": "begin"}, "loss_reduction": "mean"}
    step, x = pfeife.compile(lambda x: tiny(model, x), **options), rows(0)
    peaks = []
    for factor in (1.0, 0.5, 0.25, 0.125):  # none is what is supposed; the first one is captured
        model.zero_grad()
        transports = [one.pipeline.transport for one in step.backend.compiled]
        buffers = [one for transport in transports for one in transport.buffers.tensors]
        known = [x, *model.parameters(), *model.buffers(), *buffers]
        with LiveTensors(known, torch.device("cpu")) as seen:
            loss = step(x)
            first, seen.peak = seen.peak, seen.bytes
            (loss * factor).backward()
            peaks.append((first, seen.peak))
        del loss
    compiled = step.backend.compiled[0]
    curve = memory_curves(compiled.program, compiled.schedule)[int(os.environ["RANK"])]
    again = curve.held["buffers of before"]
    assert again == (256 if os.environ["RANK"] == "0" else 0)
    most = max(point.peak for point in curve.points) + again
    # On a busy machine a step has once taken 555 bytes more, perhaps of a message that waits.
    least = [min(peaks_at) for peaks_at in zip(*peaks[1:], strict=True)]
    scalars = [peak - most for peak in least]  # losses, what arrives for them, one flag
    assert scalars == [4, 21], scalars
