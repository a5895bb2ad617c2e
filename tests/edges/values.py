"""Values of every kind from stage to stage: numbers and sizes that only data tell, numbers of
torch's own types, what other people's operators and functions make."""

import copy
import os

import torch
from rows import row
from torch import nn

import pfeife
from pfeife.testing import eager_accumulation, own_gradients

WIDTH = 8
ALONE = "RANK" not in os.environ
STAGES = {"stages": 3} if ALONE else {}


class Net(nn.Module):
    """Three layers, and whatever a row puts between them."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if between:
            self.between = between

    def between(self, x):
        return x

    def forward(self, x):
        x = self.between(torch.relu(self.first(x)))
        return self.last(torch.tanh(self.middle(x))).square().mean()


def same(model, close=(), **options):
    """Two calls with other data give what eager accumulation gives: the same bits, but for
    gradients that several stages add to. Returns what was compiled."""
    plain = copy.deepcopy(model)
    step = pfeife.compile(model, microbatches=2, **STAGES, **options)
    for seed in (3, 4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        eager = eager_accumulation(plain, plain, [(one,) for one in x.chunk(2)])
        plain.load_state_dict(eager.buffers, strict=False)
        model.zero_grad()
        loss = step(x)
        loss.backward()
        assert torch.equal(loss, eager.loss), (loss, eager.loss)
        _compare(model, eager, close)
    (compiled,) = step.backend.compiled
    return compiled


def _compare(model, eager, close):
    mine = own_gradients(model)
    assert mine if not ALONE else mine.keys() == eager.gradients.keys()
    for name, gradient in mine.items():
        wanted = eager.gradients[name]
        assert gradient.layout == wanted.layout, name
        one, other = (g.to_dense() if g.is_sparse else g for g in (gradient, wanted))
        if name in close:
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other), name
    for name, value in eager.buffers.items() if ALONE else ():
        assert torch.equal(model.get_buffer(name), value), name


# Numbers and sizes that only data tell.


@row(ranks=(1, 2))
def a_number():
    same(Net(lambda x: x * x.abs().max().item()))


class Early(Net):
    def forward(self, x):
        scale = x.sum().item()
        x = torch.tanh(self.middle(torch.relu(self.first(x))))
        return (self.last(x) * scale).square().mean() * scale


@row(ranks=(1, 2))
def a_number_for_all_stages():
    """It is read from its tensor on every rank, which is what travels."""
    found = same(Early())
    assert found.program.units == (3 if ALONE else 2)


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def between(self, x):
        scale = self.calls.item()
        self.calls.mul_(1.5)
        return x * scale


@row(ranks=(1, 2))
def a_number_of_a_buffer():
    """The backward of a microbatch reads it as its forward did, though others have changed it."""
    same(Counting())


class Averaging(Net):
    """A norm whose running statistics are the mean of all microbatches, by a number of Python's."""

    def __init__(self, norm="batch_norm", by_float=False):
        super().__init__()
        self.norm, self.by_float = norm, by_float
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def between(self, x):
        self.seen.add_(1)
        share = 1.0 / (float(self.seen) if self.by_float else self.seen.item())
        if self.norm == "instance_norm":
            means, variances = self.mean[:2], self.variance[:2]
            x = x.unflatten(1, (2, -1))
            return nn.functional.instance_norm(x, means, variances, momentum=share).flatten(1)
        if self.norm == "torch":
            statistics = self.mean, self.variance
            return torch.batch_norm(x, None, None, *statistics, True, share, 1e-5, False)
        statistics = (None, None) if self.norm == "none" else (self.mean, self.variance)
        return nn.functional.batch_norm(x, *statistics, training=True, momentum=share)


@row(ranks=(1, 2))
def a_momentum_of_data():
    """The kernel gets the number of each microbatch, as in eager: the same bits."""
    same(Averaging())


@row(ranks=(1, 2), whole=(1,))
def a_momentum_of_data_traced():
    same(Averaging(), capture="trace")


@row(whole=(1,))
def a_momentum_of_data_in_other_ways():
    """By Python's float; in a norm of each row, one without statistics, one of torch's own."""
    same(Averaging(by_float=True), capture="dynamo")
    for norm in ("instance_norm", "none", "torch"):
        for door in ("dynamo", "trace"):
            same(Averaging(norm), capture=door)


@row(f'File "{__file__}"', whole=(1,))
def a_momentum_by_pythons_float_traced():
    """Python's float must be told what it is: one answer for all microbatches."""
    same(Averaging(by_float=True), capture="trace")


@row(f'File "{__file__}"', whole=(1,))
def an_epsilon_of_data():
    """Gradients are made of it, too."""

    class Scaled(Counting):
        def between(self, x):
            share = 1.0 / self.calls.item()
            self.calls.add_(1)
            return nn.functional.layer_norm(x, (WIDTH,), eps=share)

    same(Scaled())


def some_rows(x):
    (chosen,) = (x.sum(1) > 0.5).nonzero(as_tuple=True)
    return x.index_add(0, chosen, x[chosen] * 2)


@row(ranks=(1, 2))
def rows_of_an_expert():
    same(Net(some_rows))


@row(whole=(1,))
def rows_of_an_expert_in_parts():
    same(Net(some_rows), schedule="zb-h1", recompute="always")


@row()
def rows_of_an_expert_measured():
    same(Net(some_rows), costs="measure")


@row(ranks=(1, 2), whole=(1,))
def rows_of_an_expert_traced():
    same(Net(some_rows), capture="trace")


@row(ranks=(1, 2))
def rows_that_are_dropped_out():
    """Dropout asks whether it is given anything, but not while it is traced. With this probability
    it leaves all there is."""

    def dropped(x):
        (chosen,) = (x.sum(1) > 0.5).nonzero(as_tuple=True)
        return x.index_add(0, chosen, nn.functional.dropout(x[chosen], 1e-12))

    same(Net(dropped), capture="trace")


class Masked(Net):
    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.last(self.middle(x))[x > 0].square().mean()


@row(ranks=(1, 2))
def what_a_mask_selects():
    same(Masked())


@row()
def what_a_mask_selects_measured():
    same(Masked(), costs="measure")


class Experts(Net):
    """A router, and two experts of which each has the rows that are sent to it."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)

    def between(self, x):
        weights = self.router(x).softmax(1)
        found = torch.zeros_like(x)
        for index, expert in enumerate((self.first, self.middle)):
            (chosen,) = torch.where(weights.argmax(1) == index)
            found = found.index_add(0, chosen, expert(x[chosen]) * weights[chosen, index, None])
        return found


@row(ranks=(1, 2))
def a_mixture_of_experts():
    shared = [f"{layer}.{name}" for layer in ("first", "middle") for name in ("weight", "bias")]
    same(Experts(), close=shared)


class Hit(Experts):
    """As transformers' models do it: a loop over the experts to which rows are sent, found by their
    names."""

    def __init__(self, bias):
        super().__init__()
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor(bias))

    def between(self, x):
        weights = self.router(x).softmax(1)
        mask = torch.nn.functional.one_hot(weights.argmax(1), 2).t()
        found = torch.zeros_like(x)
        for index in (mask.sum(1) > 0).nonzero():
            (chosen,) = torch.where(mask[index].squeeze(0))
            expert = {"expert_0": self.first, "expert_1": self.middle}[f"expert_{index[0]}"]
            found = found.index_add(0, chosen, expert(x[chosen]) * weights[chosen].amax(1)[:, None])
        return found


@row(ranks=(1, 2))
def the_only_expert_that_is_hit():
    """A loop over one row: torch takes no size that data decide for 1."""
    same(Hit([9.0, -9.0]), close=["first.weight", "first.bias"])


@row(ranks=(1, 2))
def experts_that_are_hit_in_some_microbatches():
    """It is said where and what to do, whichever microbatch hits more of them."""
    model = Hit([0.0, 0.0])
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
        model.router.weight.copy_(torch.eye(2, WIDTH))
    x = torch.full((4, WIDTH), 0.1)
    x[:2, 0] = 1.0
    x[2, 0], x[3, 1] = 2.0, 3.0
    for batch in (x, x.flip(0)):
        torch._dynamo.reset()
        try:
            pfeife.compile(model, microbatches=2, **STAGES)(batch)
        except ValueError as error:
            text = str(error)
            assert "values.py" in text and "compute it with tensors (torch.where)" in text, text
            assert "Runtime assertion" not in text and "FakeTensor" not in text, text
        else:
            raise AssertionError("was not refused")


@row()
def a_size_that_nobody_bounds():
    def repeated(x):
        index = torch.repeat_interleave(torch.arange(2), (x[:, 0] > 0).long() + 1)
        return torch.zeros_like(x).index_add(0, index, x[index])

    same(Net(repeated))


class Spelling(nn.Module):
    """Reads signs off frames, as speech models do: the loss keeps a table of which only the
    longest target tells the size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        frames = torch.tanh(self.middle(torch.tanh(self.first(x.reshape(len(x), -1, 2)))))
        signs = (x[:, :2] > 0).long() + 1
        times = torch.full((len(x),), frames.shape[1])
        return nn.functional.ctc_loss(
            self.last(frames).log_softmax(-1).transpose(0, 1), signs, times, (x[:, 0] > 0) + 1
        )


@row(ranks=(1, 2))
def speech_without_alignment():
    same(Spelling())


class Throughout(Net):
    """What a mask selects goes through all layers, with values of known sizes beside it; of some
    microbatches nothing is selected."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x):
        x = torch.relu(self.first(x))
        chosen = (x.sum(1) > 1.7).nonzero()[:, 0]
        found = self.wide(x[chosen]).t()[::2]
        some = torch.tanh(self.narrow(torch.cat([found, found]).t()))
        x = torch.tanh(self.middle(x))
        return self.last(x.index_add(0, chosen, some)).square().mean()


SPLIT = ("narrow", "last") if ALONE else ("narrow",)


@row(ranks=(1, 2))
def values_of_such_a_size_for_other_stages():
    found = same(Throughout(), split_at=dict.fromkeys(SPLIT, "begin"))
    assert found.program.units == len(SPLIT) + 1


@row(ranks=(1, 2), whole=(1, 2))
def large_values_of_such_a_size():
    same(Throughout(2**17), split_at=dict.fromkeys(SPLIT, "begin"))


@row(ranks=(1, 2))
def rows_that_are_chosen_early_and_read_late():
    class Late(Net):
        def forward(self, x):
            x = torch.relu(self.first(x))
            (chosen,) = (x.sum(1) > 0.5).nonzero(as_tuple=True)
            x = self.last(torch.tanh(self.middle(x)))
            return x.index_add(0, chosen, x[chosen]).square().mean()

    found = same(Late())
    assert found.program.units == (3 if ALONE else 2)


class Chosen(Net):
    """Returns the rows that it has chosen, and others."""

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = torch.tanh(self.middle(x[x.sum(1) > 1.2]))
        return x, self.last(x[:, :1] * x)


@row(ranks=(1, 2))
def results_of_such_a_size():
    """All of them have rows, then two of four; a gradient arrives at one of the results."""
    model, stages = Chosen(), {"stages": 2} if ALONE else {}
    plain, step = copy.deepcopy(model), pfeife.compile(model, microbatches=1, **stages)
    for least, rows in ((1.0, 4), (0.0, 2)):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3)) + least
        expected, found = plain(x), step(x)
        assert len(found[0]) == rows and all(map(torch.equal, found, expected))
        for results, net in ((expected, plain), (found, model)):
            net.zero_grad()
            results[1].square().sum().backward()
        for name, gradient in own_gradients(model).items():
            assert torch.equal(gradient, plain.get_parameter(name).grad), name


@row()
def an_assertion_names_microbatch_and_line():
    def checked(x):
        torch._check(x.abs().max().item() < 1.0)
        return x

    _asserts(checked)


def counted(x):
    count = (x > 1).sum().item()
    torch._check(count < 2)
    return x * count + x


@row()
def an_assertion_that_is_traced():
    _asserts(counted, capture="trace")


@row(refused="the step takes it for granted of a number of data that ", whole=(1,))
def an_assertion_of_floats_that_is_traced():
    def checked(x):
        torch._check(x.abs().max().item() < 1.0)
        return x

    same(Net(checked), capture="trace")


def _asserts(checked, **options):
    model = Net(checked)
    step = pfeife.compile(model, microbatches=2, check=False, **STAGES, **options)
    x = torch.full((4, WIDTH), 0.01)
    step(x)
    try:
        step(torch.cat([x[:2], 1e6 * x[2:]]))
    except RuntimeError as error:
        notes = " ".join(error.__notes__)
        assert "microbatch 1" in notes and "values.py" in notes, notes
        return
    raise AssertionError("the assertion is lost")


# Gradients of rows, and numbers of other types.


class Looking(Net):
    """A table whose gradient is sparse, read by one stage or by two."""

    def __init__(self, again=False):
        super().__init__()
        self.table, self.again = nn.Embedding(5, WIDTH, sparse=True), again

    def between(self, x):
        x = x + self.table((x[:, 0] > 0.3).long())
        if self.again:
            x = torch.tanh(self.middle(x))
            x = x + self.table((x[:, 0] > 0).long() + 1)
        return x


@row(ranks=(1, 2))
def a_sparse_gradient():
    same(Looking())


@row(ranks=(1, 2))
def a_sparse_gradient_of_two_stages():
    same(Looking(again=True), close=["table.weight", "middle.weight", "middle.bias"])


class Waves(Net):
    """Complex values and a complex parameter, conjugates and views of them between stages."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x):
        wave = torch.fft.rfft(self.first(x)) * self.filter
        turned, opposite = wave.conj(), wave.conj().imag  # views that say so by a bit of theirs
        x = self.middle(torch.fft.irfft(wave))
        wave = torch.fft.rfft(torch.tanh(x)) * turned
        x = torch.cat([torch.view_as_real(wave).flatten(1)[:, :6], opposite[:, :2]], 1)
        return self.last(x).square().mean() + wave.abs().mean()


@row(ranks=(1, 2))
def complex_values():
    same(Waves())


class Assorted(Net):
    """Booleans, integers, nothing at all, one element, elements that share memory: all of these are
    made by the first stage and read by the last."""

    def forward(self, x):
        x = self.first(x)
        mask, order, nothing, one = x > 0, x.argsort(1), x[:, :0], x.mean()
        spread, turned, left = x[:, :1].expand(-1, WIDTH), x.t(), x[:, 1:4]
        x = self.last(torch.relu(self.middle(x)))
        x = torch.where(mask, x.gather(1, order), -x) * one + spread
        x = torch.cat([x @ turned, nothing, left], 1)
        return x.square().mean() + nothing.sum()


@row(ranks=(1, 2))
def tensors_of_every_form():
    same(Assorted())


class Returning(Net):
    """Results that are inputs, parameters, views of one another, or nothing."""

    def forward(self, x):
        middle = self.first(x).detach()
        results = {"input": x, "weight": self.last.weight, "none": None, "text": "no tensor"}
        parts = [middle[:, :2], middle[:, 2:], middle > 0]
        return {"loss": super().forward(x), "parts": parts, **results}


@row(ranks=(1, 2))
def results_of_every_kind():
    model = Returning()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    expected = model(x)
    found = pfeife.compile(model, microbatches=2, **STAGES)(x)
    assert found.keys() == expected.keys()
    assert found["none"] is None and found["text"] == "no tensor"
    assert found["input"] is x and found["weight"] is model.last.weight
    for one, other in zip(found["parts"], expected["parts"], strict=True):
        assert torch.equal(one, other)


# Operators and functions of other people, and operators that hold graphs.


class _Rounded(torch.autograd.Function):
    """Rounds, and hands gradients on as they are, scaled."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


@row(ranks=(1, 2))
def a_function_with_a_gradient_of_its_own():
    same(Net(lambda x: _Rounded.apply(x, 4.0)))


@torch.library.custom_op("pfeife_tests::scaled", mutates_args=())
def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@torch.library.custom_op("pfeife_tests::positive", mutates_args=())
def _positive(x: torch.Tensor) -> torch.Tensor:
    return x.gt(0).nonzero()


@torch.library.custom_op("pfeife_tests::halve_", mutates_args=("x",))
def _halve_(x: torch.Tensor) -> None:
    x.mul_(0.5)


def _remember(ctx, inputs, output):
    ctx.by = inputs[1]


_scaled.register_fake(lambda x, by: torch.empty_like(x))
_scaled.register_autograd(lambda ctx, gradient: (gradient * ctx.by, None), setup_context=_remember)
_positive.register_fake(
    lambda x: x.new_empty((torch.library.get_ctx().new_dynamic_size(), 2), dtype=torch.int64)
)


@row(ranks=(1, 2))
def operators_of_torch_library():
    def between(x):
        half = x.detach().clone()
        _halve_(half)
        index = _positive(x)[:, 0]
        return (_scaled(x, 3.0) + half).index_add(0, index, x[index])

    same(Net(between))


@row(ranks=(1, 2))
def branches_and_loops():
    def between(x):
        x = torch.cond(x.sum() > 3, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))
        return torch.vmap(lambda one: one * one.sum())(x)

    same(Net(between))


@row()
def gradients_inside_of_a_step():
    same(Net(lambda x: torch.func.grad(lambda y: (y**3).sum())(x)))


class Autocast(Net):
    """A region that ends between two stages, and another one inside of it."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.middle(torch.relu(self.first(x)))
            with torch.autocast("cpu", enabled=False):
                x = torch.tanh(x.float())
        return self.last(x).square().mean()


@row(ranks=(1, 2))
def an_autocast_region_across_a_cut():
    same(Autocast())


def _scanned(x, step):
    from torch._higher_order_ops.scan import scan

    _, found = scan(step, torch.zeros_like(x[:, 0]), x.t().contiguous())
    return found.t()


@row(whole=(1,))
def a_scan():
    same(Net(lambda x: _scanned(x, lambda total, one: (total + one, total.sin()))))


@row(
    refused="the step could not be captured with its gradients: RuntimeError: scan might be",
    whole=(1,),
)
def a_scan_that_torch_cannot_differentiate():
    def step(total, one):
        total = total * 0.9 + one
        return total, total.sin()

    same(Net(lambda x: _scanned(x, step)))


def _solved(x):
    square = x.unflatten(1, (2, 4)).mT @ x.unflatten(1, (2, 4)) + torch.eye(4)
    solved = torch.linalg.solve(square, x[:, :4]) * torch.logdet(square)[:, None]
    return torch.cat([solved, torch.linalg.inv(square)[:, 0]], 1)


@row(ranks=(1, 2))
def linear_algebra_which_checks_what_it_is_given():
    same(Net(_solved))


@row()
def a_matrix_without_an_inverse():
    def between(x):
        return x @ torch.linalg.inv(torch.diag(x.amax(0)))

    model = Net(between)
    step = pfeife.compile(model, microbatches=2, check=False, **STAGES)
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(WIDTH))
        model.first.bias.zero_()
    x = torch.ones(4, WIDTH)
    step(x)
    x[2:, 3] = 0
    try:
        step(x)
    except RuntimeError as error:
        assert "singular" in str(error) and "microbatch 1" in " ".join(error.__notes__)
        return
    raise AssertionError("the check is lost")
