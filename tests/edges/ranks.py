"""Ranks that differ: seen at the call, on all of them, before anything is sent."""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from listening import said
from models import Wrapped
from rows import row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pfeife
from pfeife._torch import is_absent
from pfeife.runtime.distributed.process_group import join_world
from pfeife.testing import eager_accumulation

OTHER_BATCH = "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'x"
RANK = int(os.environ.get("RANK", "0"))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def rows(seed: int = 1, count: int = 4) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def expected(model, x):
    def step(x):
        return model(x).square().mean()

    return eager_accumulation(step, model, [(p,) for p in x.chunk(2)]).loss


def compiled(model, **options):
    return pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, **options)


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'x", ranks=(2,)
)
def another_batch_after_the_first_call():
    step = compiled(net())
    step(rows())
    step(rows(seed=2 + RANK))


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'x", ranks=(2,)
)
def the_same_rows_in_another_order():
    step = compiled(net())
    step(rows())
    step(rows().flip(0) if RANK else rows())


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'x", ranks=(2,)
)
def a_batch_that_one_rank_left_out():
    step = compiled(net())
    for seed in (1, 2, 3):
        if seed == 2 and RANK == 1:
            continue  # its loader raised, and somebody caught that
        step(rows(seed=seed))


@row(ranks=(2,))
def models_that_something_else_distributes():
    """Around the compiled model, inside of the step, by its parameters; then plainly, as nothing
    has happened."""
    join_world(torch.device("cpu"))
    inside, outside, sharded, x = Wrapped(net()), Wrapped(net()), Wrapped(net()), rows(count=8)
    inside.compile(backend="pfeife", options={"microbatches": 2}, dynamic=True)
    around, within = DistributedDataParallel(inside), DistributedDataParallel(outside)
    too_late = compiled(sharded)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for step, words in (
        (around, "DistributedDataParallel wraps Wrapped, and"),
        (compiled(within), "DistributedDataParallel wraps Wrapped, and"),
        (too_late, "fully_shard (FSDP) shards FSDPWrapped, and"),
    ):
        try:
            step(x)
        except ValueError as error:
            assert str(error).startswith(words), error
            assert "pipelined(Trainer, ...) of pfeife.integrations.transformers" in str(error)
        else:
            raise AssertionError(f"{words} was not refused")
    assert torch.equal(compiled(outside)(x), expected(net(), x))


@row(ranks=(2,))
def the_comparison_of_batches_turned_off():
    step = compiled(net(), compare_batches=False)
    step(rows())
    step(rows(seed=2 + RANK))


@row(ranks=(2,))
def a_batch_that_one_rank_cannot_trace():
    """Its own error there; the others are told, and the next batch is right everywhere."""
    model = net()

    def step(x, flag):
        return model(x).square().mean() * (1.0 if flag else missing)  # noqa: F821

    run, alone = pfeife.compile(step, microbatches=2), expected(model, rows())
    assert torch.equal(run(rows(), True), alone)
    try:
        run(rows(), RANK == 0)
    except ValueError as error:
        assert "missing" in str(error), error
        assert str(error).startswith("the step could" if RANK else "rank 1: RefusedByBoth: the")
    else:
        raise AssertionError("rank 0 went on alone")
    assert torch.equal(run(rows(), True), alone)


@row(ranks=(2,))
def a_batch_that_one_rank_cannot_cut():
    model = net()
    step, alone = compiled(model), expected(model, rows())
    step(rows())
    try:
        step(rows(count=0) if RANK else rows())
    except ValueError as error:
        assert "the batch is empty" in str(error), error
    else:
        raise AssertionError("rank 0 went on alone")
    assert torch.equal(step(rows()), alone)


@row(ranks=(2,))
def a_mode_on_one_rank_whose_program_is_not_built():
    """Known at the call, without waiting for who builds what."""
    model = nn.Sequential(*net(), nn.Dropout(0.5))
    step = compiled(model)
    step(rows())
    model.train(RANK == 0)
    try:
        step(rows())
    except ValueError as error:
        new = "a program that is not built yet, in evaluation"
        assert f"rank 1 has '{new}' where rank 0 has 'program " in str(error), error
    else:
        raise AssertionError("ranks ran different programs")


@row(ranks=(2,))
def a_mode_on_one_rank_whose_program_is_built():
    model = nn.Sequential(*net(), nn.Dropout(0.5))
    step = compiled(model, loss=0)
    for training in (True, False):
        model.train(training)
        step(rows())
    model.train(RANK == 0)
    try:
        step(rows())
    except ValueError as error:
        assert "rank 1 has 'program " in str(error), error
    else:
        raise AssertionError("ranks ran different programs")


def _with_targets(t):
    """A call with the loss outside of the step, and its backward."""
    step = pfeife.compile(net(), microbatches=2)
    (step(rows()) - t).square().mean().backward()


@row("the gradient of output_0 is another one on rank 1 than on rank 0", ranks=(2,))
def other_targets_of_a_loss_outside():
    _with_targets(rows(seed=2 + RANK))


@row("the gradient of output_0 is another one on rank 1 than on rank 0", ranks=(2,))
def one_other_target_of_a_loss_outside():
    """Of a thousand, and among classes whose gradients add up to the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50))
    x, targets = rows(count=1000), torch.arange(1000) % 50
    targets[500] += RANK
    F.cross_entropy(pfeife.compile(model, microbatches=2)(x), targets).backward()


@row(ranks=(2,), whole=(2,))
def targets_of_a_loss_outside_that_are_rounded_otherwise():
    _with_targets(rows(seed=2) * (1 + 1e-6 * RANK))


@row(ranks=(2,))
def another_seed_on_a_rank():
    """All draw as rank 0 does, and it is said once."""
    model = nn.Sequential(*net(), nn.Dropout(0.5))
    step = compiled(model)
    torch.manual_seed(5)
    alone = step(rows())
    with said() as found:
        for _ in range(2):
            torch.manual_seed(5 + RANK)
            assert torch.equal(step(rows()), alone)
    assert len([text for text in found if "seed every rank alike" in text]) == 1, found


class Overflows(nn.Module):
    """The gradient of its first layer overflows where the batch says so, that of the last not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, factor):
        h = self.first(x)
        return (self.last(h.detach()).square().mean(1) + (h * factor).square().mean(1)).mean()


def scaled(step, model, factors):
    """Losses and scales of a loop with GradScaler."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for seed, factor in enumerate(factors):
        found.append(step(rows(seed), torch.full((4, 1), factor), scaler))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found[-1] = (found[-1], scaler.get_scale())
    return found


def accumulated(model):
    def step(x, factor, scaler):
        total = torch.zeros(())
        for part in zip(x.chunk(2), factor.chunk(2), strict=True):
            loss = model(*part) / 2
            scaler.scale(loss).backward()
            total = total + loss.detach()
        return total

    return step


@row(ranks=(1, 2))
def a_gradient_that_overflows_on_one_rank():
    overflowing()


@row(ranks=(1, 2), whole=(2,))
def a_gradient_that_overflows_with_the_loss_outside():
    overflowing(loss="outside")


def overflowing(**options):
    """No rank makes that step, and the scale goes down on all."""
    model, reference = Overflows(), Overflows()
    factors = [1.0, 1e30, 1.0, 1e30, 1.0]
    expected = scaled(accumulated(reference), reference, factors)
    cuts = {"split_at": {"last": "begin"}} if "RANK" in os.environ else {"stages": 2}
    options |= {"microbatches": 2, **cuts}
    compiled = pfeife.compile(lambda x, factor: model(x, factor), **options)

    def step(x, factor, scaler):
        loss = compiled(x, factor)
        scaler.scale(loss).backward()
        return loss.detach()

    found = scaled(step, model, factors)
    for index, ((loss, scale), (one, other)) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(loss, one) and scale == other, (index, loss, one, scale, other)


@row(ranks=(1, 2))
def a_scaler_on_a_rank_without_parameters():
    model = net()
    cuts = {"split_at": {"2": "end"}} if "RANK" in os.environ else {}
    compiled = pfeife.compile(lambda x: model(x).exp().sin().mean(), microbatches=2, **cuts)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        scaler.scale(compiled(rows())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trained = [p for p in model.parameters() if not is_absent(p)]
    assert RANK == 0 or not trained, "this rank has no parameters"


@row(ranks=(2,))
def another_seed_at_the_first_call():
    model = nn.Sequential(*net(), nn.Dropout(0.5))
    torch.manual_seed(5)
    alone = compiled(model)(rows())
    torch.manual_seed(5 + RANK)
    assert torch.equal(compiled(model)(rows()), alone)


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'the step "
    "another_step_on_a_rank.<locals>.validate in",
    ranks=(2,),
)
def another_step_on_a_rank():
    model = net()

    def train(x):
        return model(x).square().mean()

    def validate(x):
        return model(x).abs().mean()

    pfeife.compile(validate if RANK else train, microbatches=2)(rows())


@row(
    'the arguments of this call: ranks [1] have another one than rank 0: rank 1 has "option '
    "schedule='gpipe'\" where rank 0 has \"option schedule='1f1b'\"",
    ranks=(2,),
)
def other_options_on_a_rank():
    compiled(net(), schedule="gpipe" if RANK else "1f1b")(rows())


@row("the arguments of this call: ranks [1] have another one than rank 0", ranks=(2,))
def no_gradients_on_a_rank():
    step = compiled(net())
    try:
        with torch.set_grad_enabled(RANK == 0):
            step(rows())
    except ValueError as error:
        assert "in 2 microbatches, gradients off' where rank 0 has" in str(error), error
        raise


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'table: ",
    ranks=(2,),
)
def another_table_that_is_not_cut():
    model = net()
    step = pfeife.compile(
        lambda x, table: (model(x) * table).square().mean(), microbatches=2, in_dims={"table": None}
    )
    step(rows(), torch.ones(8))
    step(rows(), torch.ones(8) + RANK)


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'scale: ",
    ranks=(2,),
)
def another_value_of_a_tensor_from_outside():
    model, scale = net(), torch.ones(8)
    step = pfeife.compile(lambda x: (model(x) * scale).square().mean(), microbatches=2)
    step(rows())
    scale += RANK
    step(rows())


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'x: "
    "torch.float64 [4, 8]",
    ranks=(2,),
)
def another_dtype_on_a_rank():
    step = compiled(net().double(), compare_batches=False)
    step(rows().double() if RANK else rows())


@row(
    "the arguments of this call: ranks [1] have another one than rank 0: rank 1 has 'x: "
    "torch.float32 [8, 8]",
    ranks=(2,),
)
def more_rows_on_a_rank():
    compiled(net(), compare_batches=False)(rows(count=4 + 4 * RANK))


@row(ranks=(2,))
def a_batch_that_one_rank_cannot_tell_from_another_size():
    model = net()
    step = torch.compile(
        lambda x: model(x).square().mean(),
        backend="pfeife",
        options={"microbatches": 2},
        dynamic=True,
    )
    try:
        step(rows(count=8 if RANK else 4))
    except ValueError as error:
        said = "input x: dimensions [0, 1] of"
        assert str(error).startswith(said if RANK else f"rank 1: ValueError: {said}"), error
    assert torch.equal(step(rows()), expected(net(), rows()))


@row("an optimizer has stepped on ranks [1] with other settings than on rank 0", ranks=(2,))
def another_learning_rate_on_a_rank():
    """A rank may have an optimizer of its own, but not set one otherwise that all step."""
    model = net()
    step, optimizer = compiled(model), torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (1 + at * RANK))
    for seed in range(2):
        step(rows(seed)).backward()
        optimizer.step()
        schedule.step()
    step(rows())


@row(ranks=(2,))
def a_measured_report():
    """Rank 0 writes what all ranks have measured, bytes too; the next call is as it would be."""
    model, x = net(), rows()
    step = compiled(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.html"
        step.report(path, x)
        assert path.exists() == (RANK == 0)
        if RANK == 0:
            page = path.read_text()
            assert "measured" in page and "not measured" not in page
    assert all(p.grad is None for p in model.parameters())
    loss = step(x)
    loss.backward()
    assert torch.equal(loss, expected(net(), x))


SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

def loss_of(model, factor=2.0):
    def loss(tokens, targets, mask):
        found = model(tokens)
        if mask.any():
            found = found * factor
        return F.cross_entropy(found.flatten(0, 1), targets.flatten(), ignore_index=3)
    return loss

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 9))

def batch():
    targets = torch.arange(8).repeat(4, 1)
    return torch.arange(32).view(4, 8) % 9, targets, torch.ones(4, 1) > 0
"""


def script_in(folder):
    """The script as a module from a file of its own, as each node has it in its own folder."""
    path = Path(folder) / f"home of {RANK}" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@row(ranks=(2,))
def a_script_in_another_folder_on_each_rank():
    """Traced (where answers tell lines), and with counts, which tell lines; with a plan of it."""
    with tempfile.TemporaryDirectory() as folder:
        script = script_in(folder)
        alone = script.made()
        tokens, targets, mask = script.batch()
        parts = zip(tokens.chunk(2), targets.chunk(2), mask.chunk(2), strict=True)
        wanted = eager_accumulation(script.loss_of(alone), alone, list(parts)).loss
        plan = None
        for _ in range(2):
            step = pfeife.compile(
                script.loss_of(script.made()),
                **dict(microbatches=2, capture="trace", plan=plan, cache=Path(folder) / "cache"),
            )
            assert torch.equal(step(tokens, targets, mask), wanted)
            plan = step.backend.compiled[0].plan
        text = str(step.backend.compiled[0].program)
        assert f'count in File "{script.__file__}", line 11' in text, text
        assert f'answer: File "{script.__file__}", line 9' in text, text


@row(ranks=(2,))
def another_number_in_the_script_of_a_rank():
    """Both files are named, with the line that the difference comes from."""
    with tempfile.TemporaryDirectory() as folder:
        script = script_in(folder)
        loss = script.loss_of(script.made(), 2.0 + RANK)
        try:
            pfeife.compile(loss, microbatches=2, capture="trace")(*script.batch())
        except ValueError as error:
            said = str(error)
        assert f"(File: {script.__file__}:10 in loss, code: found = found * factor)" in said, said
        for number, folder in ((2.0, "home of 0"), (3.0, "home of 1")):
            assert f"{number}); " in said and f"{folder}/train.py:10" in said, said
