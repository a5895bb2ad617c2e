"""Steps that are called with arguments of many sizes: one program, the numbers of one device."""

import itertools
import logging
import random

import attrs
import pytest
import sympy
import torch
import torch.nn.functional as F
from listening import said
from share import crossed, some
from torch import nn

import pfeife
from pfeife.frontend.rows.reductions import derive_reductions
from pfeife.ir.parts import Role, captured_sizes
from pfeife.ir.sizes import resized
from pfeife.testing import eager_accumulation

MICROBATCHES = 2


def compared(step, model, batches, **options):
    """How many programs there are after calls with each of the batches, all of them as on one
    device."""
    torch._dynamo.reset()
    compiled = pfeife.compile(step, microbatches=MICROBATCHES, progress=False, **options)
    for batch in batches:
        parts = list(zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True))
        expected = eager_accumulation(step, model, parts)
        model.zero_grad()
        loss = compiled(*batch)
        loss.backward()
        assert torch.equal(loss.detach(), expected.loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None or name in expected.gradients:
                assert torch.equal(parameter.grad, expected.gradients[name]), name
    return compiled.backend.compiled


class Words(nn.Module):
    """A transformer over sequences of any length, with places and a causal mask."""

    def __init__(self, blocks=2, width=16):
        super().__init__()
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(600, width)
        layers = [
            nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True) for _ in range(blocks)
        ]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(width, 50)

    def forward(self, words):
        size = words.shape[1]
        hidden = self.words(words) + self.places(torch.arange(size))
        mask = torch.ones(size, size).triu(1).bool()
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden)


def small():
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 50))


def words(model):
    return lambda x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def padded(rows, length):
    x, y = (torch.randint(0, 50, (rows, length)) for _ in range(2))
    y[:, length - 2 :] = -100
    return x, y


@pytest.mark.parametrize("capture", some(["dynamo", "trace"]))
def test_one_program_for_all_lengths(capture):
    torch.manual_seed(0)
    model = Words()
    lengths = random.Random(0).sample(range(8, 200), 12)
    batches = [padded(4, n) for n in (16, *lengths, 16)]
    built = compared(words(model), model, batches, stages=2, capture=capture)
    assert len(built) == 2, "one for the first length, one for all others"
    program = built[1].captured.program
    assert [port.fqn for port in program.ports(Role.SIZE)], program.inputs
    assert program.ports(Role.BATCH)[0].sizes is not None


@pytest.mark.parametrize("schedule", some(["zb-h1", "1f1b", "interleaved", "gpipe"]))
def test_schedules_and_rows(schedule):
    torch.manual_seed(0)
    model = Words(4)
    stages = 4 if schedule == "interleaved" else 2
    sizes = [(4, 8), (4, 9), (8, 9), (12, 30), (4, 8)]
    built = compared(
        words(model), model, [padded(*n) for n in sizes], stages=stages, schedule=schedule
    )
    assert len(built) <= 3


DIVIDED = {
    "mean by a number": (lambda x, y: y.sum() / (x.shape[0] * x.shape[1]), "mean"),
    "mean by a size of a tensor": (lambda x, y: y.sum() / y.reshape(-1, 8).shape[0], "mean"),
    "sum by a number": (lambda x, y: y.sum() / x.shape[1], "sum"),
    "a sum and what counts rows": (lambda x, y: y.sum() * (x.shape[0] / x.numel()), "sum"),
}


@pytest.mark.parametrize(("case", "capture"), crossed([*DIVIDED], ["dynamo", "trace"]))
def test_open_rows_are_told_of_one_trace(case, capture):
    """What counts rows is read off the program itself, for more rows; where a length is the same
    symbol, as a trace has it, the step is captured for more rows."""
    loss, reduction = DIVIDED[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def step(x):
        return loss(x, model(x))

    for shapes, again in (((4, 5), (6, 7), (10, 4)), False), (((4, 2), (6, 3), (10, 5)), True):
        torch._dynamo.reset()
        options = {"microbatches": MICROBATCHES, "stages": 2, "progress": False}
        compiled = pfeife.compile(step, capture=capture, **options)
        for shape in shapes:
            x = torch.randn(*shape, 8)
            assert torch.allclose(compiled(x), step(x), 1e-5, 1e-6)
        _, built = compiled.backend.compiled
        program, asked = built.captured.program, []
        told, unknown, _ = derive_reductions(program, larger=lambda *one, to=asked: to.append(one))
        assert [port.reduction for port in program.ports(Role.LOSS)] == [reduction]
        assert bool(asked) == (again and capture == "trace")
        assert asked or (told.outputs == program.outputs and not unknown)


@pytest.mark.parametrize(("dynamic", "capture"), crossed([True, False], ["dynamo", "trace"]))
def test_dynamic_is_that_of_torch_compile(dynamic, capture):
    torch.manual_seed(0)
    model = Words()
    batches = [padded(4, n) for n in (8, 9, 10)]
    built = compared(words(model), model, batches, stages=2, dynamic=dynamic, capture=capture)
    assert len(built) == (1 if dynamic else 3)


@pytest.mark.parametrize(
    ("mark", "capture"),
    crossed(["mark_dynamic", "maybe_mark_dynamic", "mark_unbacked"], ["dynamo", "trace"]),
)
def test_marks_on_arguments(capture, mark):
    torch.manual_seed(0)
    model = small()
    batches = [padded(4, n) for n in (8, 9)]
    for one in batches[0]:
        getattr(torch._dynamo.decorators, mark)(one, 1)
    assert len(compared(words(model), model, batches, capture=capture)) == 1


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, x):
        hidden = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        hidden = F.interpolate(self.second(hidden), scale_factor=2)
        return self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))


@pytest.mark.parametrize("deferred", [False, True])
def test_pictures_of_several_sizes(deferred):
    """Running statistics are over as many elements as the pictures have."""
    torch.manual_seed(0)
    models = [Pictures(), Pictures()]
    models[1].load_state_dict(models[0].state_dict())
    steps = [lambda x, y, m=m: F.cross_entropy(m(x), y) for m in models]
    compiled = [
        pfeife.compile(
            step, microbatches=2, stages=2, deferred_batch_norm=deferred, dynamic=dynamic
        )
        for step, dynamic in zip(steps, (None, False), strict=True)
    ]
    for height, width in [(16, 16), (16, 20), (24, 20), (18, 30), (16, 16)]:
        x, y = torch.randn(4, 3, height, width), torch.randint(0, 5, (4,))
        for one in compiled:
            one(x, y).backward()
    pairs = zip(models[0].named_parameters(), models[1].parameters(), strict=True)
    for (name, one), other in pairs:
        assert torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("mode", "factor"), [("nearest", 2.0), ("bilinear", (1.5, 0.5))])
def test_interpolation_by_a_factor(mode, factor):
    torch.manual_seed(0)
    model = nn.Conv2d(3, 3, 3, padding=1)

    def step(x):
        return F.interpolate(model(x), scale_factor=factor, mode=mode).square().mean()

    batches = [(torch.randn(4, 3, n, n + 1),) for n in (8, 11, 12)]
    assert len(compared(step, model, batches, stages=1)) == 2


def test_speech_of_several_lengths():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, stride=2), nn.ReLU(), nn.Conv1d(8, 6, 3, padding=1))

    def step(sounds, lengths, targets, sizes):
        scores = model(sounds).permute(2, 0, 1).log_softmax(-1)
        return F.ctc_loss(scores, targets, (lengths - 3) // 2 + 1, sizes)

    def batch(length):
        lengths = torch.tensor([length, length - 4, length - 2, length])
        return torch.randn(4, 4, length), lengths, torch.randint(1, 6, (4, 3)), torch.full((4,), 3)

    batches = [batch(n) for n in (40, 50, 64, 41, 40)]
    built = compared(step, model, batches, stages=2, loss_reduction="mean")
    assert built[0].captured.door == "trace" and len(built) == 2


@pytest.mark.parametrize("capture", some(["dynamo", "trace"]))
def test_packed_documents(capture):
    """Rows of one length, in which documents end where the numbers say."""
    torch.manual_seed(0)
    model = Words()

    def step(x, y, ends):
        places = torch.arange(x.shape[1])
        document = (places[None, :, None] >= ends[:, None, :]).sum(-1)
        hidden = model.words(x)
        mask = (document[:, :, None] == document[:, None, :]).float()
        hidden = mask @ hidden / mask.sum(-1, keepdim=True)
        return F.cross_entropy(model.head(hidden).flatten(0, 1), y.flatten())

    batches = []
    for length, documents in ((16, 3), (20, 3), (24, 5), (31, 4)):
        x, y = padded(4, length)
        batches.append((x, y.clamp(min=0), torch.randint(1, length, (4, documents)).sort().values))
    assert len(compared(step, model, batches, stages=2, capture=capture)) <= 3


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_a_choice_by_size_has_a_program_for_each_way(capture):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def step(x):
        hidden = model(x)
        return (hidden.relu() if x.shape[1] > 20 else hidden.tanh()).sum(1).square().mean()

    sizes = (8, 9, 30, 31, 10, 40)
    batches = [(torch.randn(4, n, 8),) for n in sizes]
    assert len(compared(step, model, batches, stages=2, capture=capture)) == 3


@torch.library.custom_op("pfeife_test::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@torch.library.custom_op("pfeife_test::doubled_backward", mutates_args=())
def doubled_backward(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


@doubled_backward.register_fake
def _(gradient):
    """As a kernel's rule that knows numbers alone."""
    if any(isinstance(size, torch.SymInt) for size in gradient.shape):
        raise NotImplementedError("symbols")
    return torch.empty_like(gradient)


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: doubled_backward(gradient))


def test_a_program_for_each_size_where_none_is_for_all():
    """Dynamo, which looks at no backward, has a graph for all sizes."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def step(x):
        return doubled(model(x)).square().mean()

    sizes = (4, 6, 8, 5, 4, 8)
    built = compared(step, model, [(torch.randn(4, n, 8),) for n in sizes], stages=1)
    fixed = [one.captured.at is not None for one in built]
    assert fixed == [False, True, True, True, True], "4 by the first graph, and by the second"


@pytest.mark.parametrize("capture", some(["auto", "trace"]))
def test_a_returned_size(capture):
    """There is no graph for all sizes, and then one for each."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    compiled = pfeife.compile(
        lambda x: (model(x).square().mean(), x.shape[1]), microbatches=1, capture=capture
    )
    for size in (4, 5, 6):
        x = torch.randn(4, size, 8)
        loss, found = compiled(x)
        assert found == size and torch.equal(loss, model(x).square().mean())


@pytest.mark.parametrize("capture", some(["dynamo", "trace"]))
def test_programs_that_are_kept(capture):
    """Where each size has a program, so many are kept; that is said once."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    batches = [(torch.randn(4, n, 8),) for n in (2, 3, 4, 5, 6, 5, 2)]
    options = {"capture": capture, "dynamic": False, "max_programs": 3, "stages": 1}
    said, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("pfeife").addHandler(handler)
    built = compared(lambda x: model(x).square().mean(), model, batches, **options)
    logging.getLogger("pfeife").removeHandler(handler)
    assert len(built) <= 3
    assert len([text for text in said if "max_programs=3" in text]) == 1, said


def test_targets_that_a_size_says_are_ignored():
    """As in extractive question answering: what lies beyond the row is no target."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)

    def step(x, y):
        scores = model(x).squeeze(-1)
        return F.cross_entropy(scores, y.clamp(max=x.shape[1]), ignore_index=x.shape[1])

    batches = [(torch.randn(4, n, 8), torch.tensor([0, 99, 2, 1])) for n in (4, 5, 9)]
    compiled = pfeife.compile(step, microbatches=2, progress=False)
    for x, y in batches:
        model.zero_grad()
        loss = compiled(x, y)
        torch.testing.assert_close(loss, step(x, y))  # of the whole batch: three targets
    assert len(compiled.backend.compiled) == 2


@pytest.mark.whole
def test_t5_of_several_lengths():
    """Its graphs of one size and of all differ in the names of nodes, its counts do not."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, dropout_rate=0.0, decoder_start_token_id=0, **small)
    )
    batches = [[torch.randint(2, 64, (4, n)) for n in sizes] for sizes in ((8, 5), (9, 7), (12, 6))]
    step = pfeife.compile(
        lambda x, y: model(input_ids=x, labels=y).loss, microbatches=2, progress=False
    )
    for x, y in batches:
        step(x, y)
    assert len(step.backend.compiled) == 2


def test_traced_sizes_that_part():
    """Sizes that were alike in two calls are one; in a third they are not."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def step(x, y):
        return model(x).mean(1).square().mean() + model(y).sum(1).square().mean()

    sizes = [(4, 4), (5, 5), (7, 7), (7, 5), (9, 4), (6, 6)]
    batches = [(torch.randn(4, n, 8), torch.randn(4, m, 8)) for n, m in sizes]
    assert len(compared(step, model, batches, stages=1, capture="trace")) == 3


@pytest.mark.parametrize("capture", some(["auto", "trace"]))
def test_sizes_that_steer(capture):
    """A loop over a size, a size that Python makes a number of, a cut of a transposed tensor, and
    what data say of a size, each as on one device."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)

    def loops(x):
        return sum(model(x[:, at]).square().mean() for at in range(x.shape[1]))

    def converts(x):
        return (model(x) * int(x.shape[1])).square().mean()

    def asks(x):
        ends = (x[:, :, 0] > -100).sum(1).max().item()
        return (model(x).sum(1) if ends == x.shape[1] else model(x).mean(1)).square().mean()

    def spells(x):
        scale = {"5 words": 2.0, "7 words": 3.0}.get(f"{x.shape[1]} words", 1.0)
        return (scale * model(x)).square().mean()

    def counts(x):
        return model(x[x[:, :, 0] > 0]).square().sum() / x.shape[1]

    for step, most in ((loops, 4), (converts, 4), (asks, 2), (counts, 2), (spells, 4)):
        batches = [(torch.randn(4, n, 8),) for n in (4, 5, 7, 6, 4)]
        built = compared(step, model, batches, stages=1, capture=capture, loss_reduction="mean")
        assert len(built) <= most, step.__name__
    batches = [(torch.randn(8, n, 4).transpose(0, 2),) for n in (4, 5, 7, 4)]
    assert len(compared(lambda x: model(x).square().mean(), model, batches, capture=capture)) <= 3


@pytest.mark.parametrize("dynamic", [True, None])
def test_the_named_backend(dynamic):
    """Dynamo's graph is of the whole batch: its rows are those of a microbatch in the program, of
    which there is one for all rows and lengths, as far as what was asked of both goes."""
    torch.manual_seed(0)
    model = small()

    def averages(x, y):
        return words(model)(x, y) / x.shape[1]

    def asks(x, y):  # before the loss tells that both have as many rows
        times = 2 if y.shape[0] < x.shape[1] else 3
        return words(model)(x, y) * times

    def counts(x, y):
        logits = model(x).flatten(0, 1)
        total = F.cross_entropy(logits, y.flatten(), ignore_index=-100, reduction="sum")
        return total * x.shape[1] / x.shape[0]

    sizes = [(4, 16), (4, 9), (4, 30), (8, 30), (8, 13), (4, 11)]
    for step in (words(model), averages, asks, counts):
        backend = pfeife.backend(microbatches=MICROBATCHES, progress=False)
        compiled = torch.compile(step, backend=backend, dynamic=dynamic)
        for batch in itertools.starmap(padded, sizes):
            for tensor in batch:
                torch._dynamo.mark_dynamic(tensor, 0)
            model.zero_grad()
            loss = compiled(*batch)
            loss.backward()
            parts = list(zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True))
            expected = eager_accumulation(step, model, parts)
            assert torch.equal(loss.detach(), expected.loss)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.grad, expected.gradients[name]), name
        assert len(backend.compiled) == 1 + (dynamic is None), "of the first length, and of all"
        if step is asks:
            with pytest.raises(ValueError, match="depends on the batch size"):
                compiled(*padded(8, 6))  # 8 rows are not fewer than 6, the 4 of a microbatch are
        with pytest.raises(ValueError, match="5 rows does not divide"):
            compiled(*padded(5, 9))
        torch._dynamo.reset()


def test_loss_outside():
    torch.manual_seed(0)
    model = Words()
    compiled = pfeife.compile(model, microbatches=2, stages=2, loss="outside")
    for length in (8, 9, 12, 30):
        x, y = padded(4, length)
        model.zero_grad()
        F.cross_entropy(compiled(x).flatten(0, 1), y.flatten()).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        outputs = [model(part) for part in x.chunk(2)]
        F.cross_entropy(torch.cat(outputs).flatten(0, 1), y.flatten()).backward()
        for one, p in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, p.grad)
    assert len(compiled.backend.compiled) == 2


def test_replicas():
    torch.manual_seed(0)
    model = Words()
    compiled = pfeife.compile(words(model), microbatches=4, stages=2, replicas=2)
    fixed = pfeife.compile(words(model), microbatches=4, stages=2, replicas=2, dynamic=False)
    for length in (8, 9, 12):
        batch, found = padded(8, length), []
        for one in (compiled, fixed):
            model.zero_grad()
            one(*batch).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert len(compiled.backend.compiled) == 2


def test_compilers_are_given_symbolic_sizes():
    """What a compiler assumes of them is looked at in each call; else the graph runs."""
    torch.manual_seed(0)
    model, calls = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), []

    def compiler(graph, examples):
        numbers = [one for one in examples if isinstance(one, int | torch.SymInt)]
        tensors = [one for one in examples if isinstance(one, torch.Tensor)]
        numbers += [size for one in tensors for size in one.shape]
        symbols = [size for size in numbers if isinstance(size, torch.SymInt)]
        assert not symbols or symbols[0] > 10 or symbols[0] <= 10  # one of both is assumed

        def run(*values):
            calls.append(bool(symbols))
            return graph(*values)

        return run

    def step(x):
        return model(x).sum(1).square().mean()

    seen = []
    compiled = pfeife.compile(step, microbatches=2, stages=2, compiler=compiler)
    for size in (12, 14, 20, 9):
        x = torch.randn(4, size, 8)
        calls.clear()
        model.zero_grad()
        compiled(x).backward()
        expected = eager_accumulation(step, model, [(part,) for part in x.chunk(2)])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, expected.gradients[name])
        seen.append(any(calls))
    assert len(compiled.backend.compiled) == 2
    assert seen == [False, True, True, False], seen


def test_the_account_is_that_of_a_program_of_one_size():
    """Bytes, figures and the limit of memory at sizes that were not captured."""
    torch.manual_seed(0)
    model, figures = Words(), []
    options = {"microbatches": MICROBATCHES, "stages": 2, "progress": False}
    compiled = pfeife.compile(words(model), dynamic=True, on_step=figures.append, **options)
    for length in (8, 30, 30, 20):
        compiled(*padded(4, length)).backward()
    assert [one.tokens for one in figures] == [4 * 30, 4 * 30, 4 * 20]
    (built,) = compiled.backend.compiled
    for length in (8, 20, 30):
        fixed = pfeife.compile(words(model), dynamic=False, plan=built.plan, **options)
        fixed(*padded(4, length))
        (other,) = fixed.backend.compiled
        sizes = built.captured.sizes(_arguments(built, padded(4, length)), MICROBATCHES)
        curves = [
            [(curve.peak, curve.held) for curve in pfeife.cost.memory_curves(program, one.schedule)]
            for program, one in ((resized(built.program, sizes), built), (other.program, other))
        ]
        for (peak, held), (other_peak, other_held) in zip(*curves, strict=True):
            assert held == other_held
            assert peak == pytest.approx(other_peak, rel=0.01), "of the graph of one size"
    most = max(peak for peak, _ in curves[0])
    limited = pfeife.compile(words(model), dynamic=True, memory_limit=most + 1000, **options)
    limited(*padded(4, 8))
    limited(*padded(4, 30))
    with pytest.raises(ValueError, match=r"size.1 = 60 needs .* up to .*size.1 = 3\d fit"):
        limited(*padded(4, 60))


@pytest.mark.parametrize("capture", some(["dynamo", "trace"]))
def test_declared_sizes(capture):
    """They are open from the first call on; a plan is made for the hint, or for the largest sizes
    if those do not fit otherwise; if they never do, nothing runs."""
    torch.manual_seed(0)
    model = small()
    options = {"microbatches": MICROBATCHES, "stages": 2, "progress": False, "capture": capture}

    def at(**more):
        compiled = pfeife.compile(words(model), **options, **more)
        compiled(*padded(4, 8))
        (built,) = compiled.backend.compiled
        compiled(*padded(4, 12))
        assert len(compiled.backend.compiled) == 1
        return built

    sizes = {"x": {1: 300}, "y": {1: 300}}
    hinted = at(sizes_hint=sizes)
    shapes = [port.shape for port in hinted.program.ports(Role.BATCH)]
    assert shapes == [(2, 300), (2, 300)]
    fixed = pfeife.compile(words(model), **options, dynamic=False)
    fixed(*padded(4, 300))
    assert fixed.backend.compiled[0].plan.stage_of_cluster == hinted.plan.stage_of_cluster
    most = max(curve.peak for curve in pfeife.cost.memory_curves(hinted.program, hinted.schedule))
    assert at(max_sizes=sizes, memory_limit=most).program.ports(Role.BATCH)[0].shape[0] == 2
    with pytest.raises(ValueError, match="limit"):
        at(max_sizes=sizes, memory_limit=most // 2)
    with pytest.raises(ValueError, match="z has no dimension 1 among"):
        at(max_sizes={"z": {1: 3}})
    with pytest.raises(ValueError, match="must be sizes by the names"):
        at(max_sizes={"x": 3})


def test_the_most_that_a_mark_says():
    torch.manual_seed(0)
    model = small()
    limited = pfeife.compile(words(model), stages=2, microbatches=2, memory_limit=100_000)
    x, y = padded(4, 8)
    limited(x, y)
    for one in (x, y):
        torch._dynamo.mark_dynamic(one, 1, max=400)
    torch._dynamo.reset()
    limited = pfeife.compile(words(model), stages=2, microbatches=2, memory_limit=100_000)
    with pytest.raises(ValueError, match="limit"):
        limited(x, y)


@pytest.mark.parametrize("schedule", some(["1f1b", "search"]))
def test_the_second_program_has_the_plan_of_the_first(schedule):
    """Nothing is searched again for another length, or other rows."""
    torch.manual_seed(0)
    model = small()
    batches = [padded(rows, n) for rows, n in ((4, 8), (4, 9), (8, 10))]
    built = compared(words(model), model, batches, stages=2, schedule=schedule)
    first, *others = [one.plan for one in built]
    assert first.step_seconds is not None
    assert others and all(one.step_seconds is None for one in others)
    assert {one.schedule for one in others} == {first.schedule}
    assert {one.stage_of_cluster for one in others} == {first.stage_of_cluster}


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize("level", ["flat", "ranks"])
def test_what_a_pass_assumes_of_sizes(level, capture):
    """Where that does not hold, there is one more program."""
    torch.manual_seed(0)
    model = small()

    def assumes(program):
        limits = [*program.limits]
        for name, now in captured_sizes(program).items():
            size = sympy.Symbol(name, integer=True, positive=True)
            limits.append(sympy.Le(size, 10) if now <= 10 else sympy.Gt(size, 10))
        return attrs.evolve(program, limits=tuple(limits))

    batches = [padded(4, n) for n in (8, 9, 12, 13, 7)]
    options = {"dynamic": True, "capture": capture, "passes": {level: [assumes]}}
    built = compared(words(model), model, batches, **options)
    assert len(built) == 2
    assert not built[1].breaks(_arguments(built[1], batches[2]), MICROBATCHES)


@pytest.mark.parametrize("hint", [{}, {"x": {1: 4}}])
def test_cuts_that_are_uneven_at_other_sizes(hint):
    """A head that grows with the square of the length: it is planned anew, once, unless somebody
    has said what for."""
    torch.manual_seed(0)
    first, last = nn.Linear(256, 256), nn.Linear(256, 256)

    def step(x):
        hidden = last(first(x).tanh())
        return (hidden @ hidden.transpose(1, 2) @ hidden).tanh().sum(1).square().mean()

    options = {"microbatches": 2, "stages": 2, "machine": "cpu-core", "sizes_hint": hint}
    compiled = pfeife.compile(step, dynamic=True, **options)
    cuts = []
    with said() as texts:
        for size in (4, 1200, 1300, 4):
            x = torch.randn(2, size, 256)
            assert torch.equal(compiled(x).detach(), (step(x[:1]) / 2 + step(x[1:]) / 2).detach())
            (built,) = compiled.backend.compiled
            cuts.append(built.plan.stage_of_cluster)
    (text,) = (one for one in texts if "the cuts were made" in one)
    assert "size.1 = 1200 the slowest stage takes" in text
    assert ("sizes_hint" in text) == bool(hint)
    assert len(set(cuts)) == (1 if hint else 2) and len(set(cuts[1:])) == 1


def _arguments(built, batch):
    """Arguments of a call, of which only the batch's tell sizes."""
    named = dict(zip(("x", "y"), batch, strict=True))
    ports = built.captured.ports
    sizes = {"x.size.0": 2, "x.size.1": batch[0].shape[1]}
    return [sizes.get(p.fqn, named.get(p.fqn)) if p else None for p in ports]
