"""Where Dynamo does not see the whole step: the pipeline runs all of it, or says that it cannot."""

import copy
import logging
import os
import warnings

import torch
from rows import row
from torch import nn

import pfeife
from pfeife.testing import eager_accumulation


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def rows(count: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


class Counting(nn.Module):
    """Dynamo compiles it anew at every call, since it guards the counter."""

    def __init__(self):
        super().__init__()
        self.net, self.calls = net(), 0

    def forward(self, x):
        self.calls += 1
        return self.net(x).square().mean()


def _expected(model, seed):
    losses = [model.net(p).square().mean() / 2 for p in rows(seed=seed).chunk(2)]
    return losses[0] + losses[1]


@row(ranks=(1, 2), whole=(1,))
def more_programs_than_dynamos_limit():
    model = Counting()
    reference = copy.deepcopy(model)
    step = pfeife.compile(lambda x: model(x), microbatches=2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for call in range(1, 13):
        loss = step(rows(seed=call))
        loss.backward()
        expected = _expected(reference, call)
        expected.backward()
        assert torch.equal(loss, expected), f"call {call}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(step.backend.compiled) == 12


@row(whole=(1,))
def a_loop_of_trials_over_one_function():
    model = net()

    def step(x):
        return model(x).square().mean()

    expected = eager_accumulation(step, model, [(p,) for p in rows().chunk(2)])
    for _ in range(12):
        compiled = pfeife.compile(step, microbatches=2, max_programs=5)  # of one step
        assert torch.equal(compiled(rows()), expected.loss)
        assert len(compiled.backend.compiled) == 1


@row(ranks=(1, 2))
def a_float_that_changes_with_every_call():
    """The numbers are eager's, what has not come for longest is dropped, and it is said once."""
    model, said, built = net(), [], []
    reference = copy.deepcopy(model)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())

    def loss(model, x, scale):
        return (model(x) * scale).square().mean() * scale

    backend = pfeife.backend(microbatches=2, max_programs=2)
    step = torch.compile(lambda x, scale: loss(model, x, scale), backend=backend, dynamic=True)
    logging.getLogger("pfeife").addHandler(handler)
    for scale in (0.1, 0.2, 0.1, 0.3, 0.1):
        losses = [loss(reference, part, scale) for part in rows().chunk(2)]
        assert torch.equal(step(rows(), scale), losses[0] / 2 + losses[1] / 2), scale
        built.append(backend.compiled[-1])
    logging.getLogger("pfeife").removeHandler(handler)
    kept = [one for one in said if "different shapes and numbers" in one]
    assert len(kept) == (os.environ.get("RANK", "0") == "0"), said
    assert backend.compiled == [built[0], built[-1]] and built[-1] is built[3]


@row("this step has been compiled so often", ranks=(1, 2))
def more_programs_than_dynamos_limit_by_name():
    model = Counting()
    step = torch.compile(lambda x: model(x), backend="pfeife", dynamic=True)
    for _ in range(12):
        step(rows())


@row("the step could not be captured as one graph: Skip calling `torch.compiler.disable()`d")
def a_loss_that_is_disabled():
    model = net()

    @torch.compiler.disable
    def loss(y):
        return y.square().mean()

    pfeife.compile(lambda x: loss(model(x)), microbatches=2, capture="dynamo")(rows())


@row()
def a_break_before_all_tensors_by_name():
    model, notes = net(), []

    @torch.compiler.disable
    def note():
        notes.append("a call")

    def step(x):
        note()
        return model(x).square().mean()

    expected = eager_accumulation(step, model, [(p,) for p in rows().chunk(2)])
    notes.clear()
    options = {"microbatches": 2, "stages": 2}
    compiled = torch.compile(step, backend="pfeife", options=options, dynamic=True)
    assert torch.equal(compiled(rows()), expected.loss) and len(notes) == 1


@row("the step could not be captured as one graph: Skip calling `torch.compiler.disable()`d")
def a_step_that_is_disabled():
    model = net()

    @torch.compiler.disable
    def step(x):
        return model(x).square().mean()

    pfeife.compile(step, microbatches=2, capture="dynamo")(rows())


@row("the step could not be captured as one graph: Unsupported Tensor.requires_grad_() call")
def a_step_that_freezes_a_part():
    model = net()

    def step(x):
        model[0].requires_grad_(False)
        return model(x).square().mean()

    pfeife.compile(step, microbatches=2)(rows())


@row("the call of a_step_without_tensors.<locals>.<lambda> has not reached Pfeife")
def a_step_without_tensors():
    pfeife.compile(lambda x: 3, microbatches=2)(rows())


@row("the call of torch_is_turned_off.<locals>.<lambda> has not reached Pfeife")
def torch_is_turned_off():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    with torch.compiler.set_stance("force_eager"):
        step(rows())


@row("the call of torch_is_turned_off_later.<locals>.<lambda> has not reached Pfeife")
def torch_is_turned_off_later():
    model = net()
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    step(rows())
    with torch.compiler.set_stance("force_eager"):
        step(rows())


@row("the step could not be captured as one graph: it raises RuntimeError(")
def an_error_that_the_step_raises():
    model = net()

    def step(x, wrong):
        if wrong:
            raise RuntimeError(f"of {x.shape[0]} rows")
        return model(x).square().mean()

    compiled = pfeife.compile(step, microbatches=2)
    first = compiled(rows(), False)
    try:
        compiled(rows(), True)
    except ValueError as error:
        assert "'of 2 rows'" in str(error), error
        assert torch.equal(compiled(rows(), False), first)
        raise


@row("the step could not be captured as one graph: it raises KeyError")
def a_step_that_raises():
    model = net()

    def step(x):
        if model.training:
            raise KeyError("label")
        return model(x).mean()

    pfeife.compile(step, microbatches=2)(rows())


@row("the step was traced on the first microbatch of a call")
def a_branch_on_a_value_names_its_line():
    model = net()

    def step(x):
        h = model(x)
        return h.mean() if x.sum().item() > 0 else -h.mean()

    try:
        pfeife.compile(step, microbatches=2)(torch.cat([torch.ones(2, 8), -torch.ones(2, 8)]))
    except ValueError as error:
        assert f'File "{__file__}", line' in str(error), error
        raise


@row()
def capture_then_compile_in_one_process():
    model = net()

    def step(x):
        return model(x).square().mean()

    pfeife.capture(step, rows(2))
    ran = []

    def backend(module, examples):
        ran.append(len(module.graph.nodes))
        return module.forward

    assert torch.equal(torch.compile(step, backend=backend)(rows()), step(rows())) and ran


@row()
def a_compiled_step_inside_of_a_compiled_step():
    model = net()

    def loss(x):
        return model(x).square().mean()

    inner = pfeife.compile(loss, microbatches=2)
    inner(rows())

    def step(x):
        return inner(x) * 2

    expected = eager_accumulation(lambda x: loss(x) * 2, model, [(p,) for p in rows().chunk(2)])
    assert torch.equal(pfeife.compile(step, microbatches=2)(rows()), expected.loss)


@row(ranks=(1, 2))
def a_step_that_logs_warns_and_prints():
    """Dynamo leaves that out; how it compiles for others stays as it was."""
    model, log = net(), logging.getLogger("tests")

    def step(x):
        log.warning("%d rows", x.shape[0])
        logging.info("rows")
        warnings.warn("rows", stacklevel=1)
        print("rows", x.sum())
        return model(x).square().mean()

    other, before = copy.deepcopy(model), torch._dynamo.config.get_config_copy()
    loss = pfeife.compile(step, microbatches=2)(rows())
    assert torch._dynamo.config.get_config_copy() == before
    expected = eager_accumulation(
        lambda x: other(x).square().mean(), other, [(p,) for p in rows().chunk(2)]
    )
    assert torch.equal(loss, expected.loss)
