"""What would be frozen where a step is traced: each is right, or refused, through both doors."""

import collections
import contextlib
import copy
import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rows import row
from torch import nn

import pfeife

SCALE = torch.tensor(1.0)
HERE = f'File "{__file__}", line'


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def run(make, change=lambda call: None, door="trace", calls=3):
    """A step of `make` beside its eager twin, which `change` changes between the calls."""
    step, model = make()
    twin, other = make()
    compiled = pfeife.compile(step, microbatches=2, stages=2, capture=door)
    for call in range(calls):
        change(call)
        x = torch.randn(4, 4)
        loss = compiled(x)
        loss.backward()
        expected = sum(twin(x[2 * at : 2 * at + 2]) for at in range(2)) / 2
        expected.backward()
        assert torch.equal(loss, expected.detach()), call
        for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, theirs.grad), call
            one.grad = theirs.grad = None
    assert {one.captured.door for one in compiled.backend.compiled} == {door}
    return compiled


def scaled(factor):
    """Makes steps that multiply the loss."""

    def make():
        model = net()
        return (lambda x: model(x).mean() * factor(model, x)), model

    return make


@row(HERE)
def pythons_random():
    run(scaled(lambda model, x: random.random()))


@row(HERE)
def numpys_random():
    run(scaled(lambda model, x: float(np.random.rand())))


@row("the step could not be traced: the step draws from a generator of its own")
def a_generator_of_ones_own():
    mine = torch.Generator().manual_seed(0)
    run(scaled(lambda model, x: torch.rand((), generator=mine)))


@row()
def all_generators_are_left_as_they_were():
    """Where a step is refused since it draws, its runs have moved nothing."""
    for draw in (random.random, np.random.rand, lambda: float(torch.rand(()) + random.random())):
        step, _ = scaled(lambda model, x, draw=draw: draw())()
        compiled = pfeife.compile(step, microbatches=2, capture="trace")
        states = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
        with contextlib.suppress(ValueError):
            compiled(torch.ones(4, 4))
        assert not compiled.backend.compiled
        now = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
        assert now == states


@row("the step seeds torch's default generator")
def the_default_generator_is_seeded():
    def factor(model, x):
        torch.manual_seed(3)
        return torch.rand(())

    run(scaled(factor))


def signed(model, x):
    return 1.0 if x.sum() > 0 else -1.0


def branching(**options):
    model = net()
    step = pfeife.compile(
        lambda x: model(x).mean() * (1.0 if x.sum() > 0 else -1.0),
        **{"microbatches": 2, "capture": "trace", **options},
    )
    return step, torch.ones(2, 4), -torch.ones(2, 4)


@row("the step was traced on the first microbatch of a call", whole=(1,))
def a_branch_that_the_first_call_takes_both_ways():
    step, up, down = branching()
    step(torch.cat([up, down]))


@row("the step was traced on the first microbatch of a call", whole=(1,))
def a_branch_that_a_later_call_takes_both_ways():
    step, up, down = branching()
    assert step(torch.cat([up, up])).isfinite()
    step(torch.cat([down, up]))


@row(f'File "{__file__}", line', whole=(1,))
def a_branch_that_is_taken_both_ways_and_not_checked():
    step, up, down = branching(check=False)
    step(torch.cat([up, down]))


@row(f'File "{__file__}", line', ranks=(2,))
def a_branch_that_a_later_call_takes_the_other_way_on_ranks():
    """No rank has all parameters by then."""
    step, up, down = branching()
    assert step(torch.cat([up, up])).isfinite()
    step(torch.cat([down, down]))


@row()
def a_branch_that_a_later_call_takes_the_other_way():
    """It is traced anew for that call, and what was assumed has left nothing behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 4))
    other = copy.deepcopy(model)

    def loss_of(net, x):
        y = net(x).square().mean()
        return y if x.sum() > 0 else 3 * y

    step = pfeife.compile(lambda x: loss_of(model, x), microbatches=2, stages=2, capture="trace")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for sign in (1, -1, -1, 1):
        x = sign * torch.rand(4, 4, generator=torch.Generator().manual_seed(sign + 1))
        loss = step(x)
        loss.backward()
        expected = [loss_of(other, part) / 2 for part in x.chunk(2)]
        for one in expected:
            one.backward()
        assert torch.equal(loss, sum(expected).detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(step.backend.compiled) == 2
    found = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(found[name], value)


@row(whole=(1,))
def branches_that_all_microbatches_take():
    def factor(model, x):
        if model(x).isnan().any() or not bool((x == x).all()):
            return 5.0
        return 2.0 if int(torch.arange(3).sum()) == 3 else 3.0

    assert len(run(scaled(factor)).backend.compiled) == 1


def branch_on_a_size(model, x):
    """As models ask whether there are labels at all."""
    y, chosen = model(x), (x[:, 0] > -5).nonzero()
    if chosen.size(0) > 0:
        return torch.gather(y, 0, chosen.expand(chosen.size(0), 4)).mean()
    return torch.zeros(())


def turns(model, x):
    """Each turn has another number of rows in each microbatch; there are always two turns."""
    found, y = torch.zeros_like(x), model(x)
    kinds = torch.arange(4)[:, None] == torch.arange(len(x)) % 2
    for kind in kinds.any(1).nonzero():
        (rows,) = torch.where(kinds[kind[0]] & (x[:, 0] > 0))
        found = found.index_add(0, rows, y[rows])
    return found.mean()


def made(loss):
    """Makes steps with this loss."""

    def make():
        model = net()
        return (lambda x: loss(model, x)), model

    return make


@row(whole=(1,))
def a_branch_on_a_size_that_data_decide():
    run(made(branch_on_a_size))


@row("the step was traced on the first microbatch of a call", whole=(1,))
def a_branch_on_a_size_that_a_later_call_takes_both_ways():
    model = net()
    step = pfeife.compile(lambda x: branch_on_a_size(model, x), microbatches=2, capture="trace")
    assert step(torch.ones(4, 4)).isfinite()
    step(torch.cat([torch.ones(2, 4), torch.full((2, 4), -9.0)]))


@row()
def a_loop_over_what_data_choose():
    assert len(run(made(turns)).backend.compiled) == 1


def each_that_is_hit(model, x):
    """As a mixture of experts calls those that some rows have chosen."""
    y, total = model(x), 0.0
    for one in (x > 0).any(0).nonzero():
        total = total + y[:, int(one[0])].mean()
    return total


def rows_that_hit(*counts):
    """A microbatch of two rows for each count, in which so many columns are positive."""
    signs = [torch.where(torch.arange(4) < count, 1.0, -1.0).expand(2, 4) for count in counts]
    return torch.cat(signs)


@row(HERE)
def an_assertion_that_the_first_call_breaks():
    """Torch asserts that there are 4, which another microbatch of the call has not."""
    model = net()
    step = pfeife.compile(lambda x: each_that_is_hit(model, x), microbatches=2, capture="trace")
    step(rows_that_hit(4, 1))


@row(HERE, ranks=(1,), whole=(1,))
def an_assertion_that_a_later_call_breaks():
    model = nn.Sequential(nn.BatchNorm1d(4), net())
    step = pfeife.compile(lambda x: each_that_is_hit(model, x), microbatches=2, capture="trace")
    step(rows_that_hit(4, 4))
    before = copy.deepcopy(model.state_dict())
    try:
        step(rows_that_hit(4, 1))
    finally:
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@row(whole=(1,))
def an_assertion_that_a_later_call_breaks_in_each_microbatch():
    """It is traced anew, as where an answer is another one."""
    model = net()
    step = pfeife.compile(lambda x: each_that_is_hit(model, x), microbatches=2, capture="trace")
    for counts in ((4, 4), (1, 1), (4, 4)):
        x = rows_that_hit(*counts)
        expected = sum(each_that_is_hit(model, part) for part in x.chunk(2)) / 2
        torch.testing.assert_close(step(x), expected)
    assert len(step.backend.compiled) == 2


@row(whole=(1,))
def numbers_beside_a_branch():
    """What nobody asks for is that of each microbatch."""

    def factor(model, x):
        return x.abs().max().item() if x.isfinite().all() else 2.0

    assert len(run(scaled(factor)).backend.compiled) == 1


@row(whole=(1,))
def a_share_that_data_decide():
    """A quotient of whole numbers, asked for before weights that autograd has not seen."""

    def make():
        model = net()

        def step(x):
            share = (x < 9).sum().item() / 10
            return model(nn.functional.dropout(x, share, training=False)).mean() * share

        return step, model

    run(make)


@row(whole=(1,))
def a_choice_by_torchs_random_numbers():
    run(scaled(lambda model, x: [2.0][int(torch.empty(1).uniform_(0.0, 1.0).item())]))


@row(whole=(1,))
def the_larger_of_two_counts():
    def factor(model, x):
        count = (x > 0.5).sum()
        return 2.0 / max(1, count) + 1.0 / min(count.item(), 3 if count.isfinite() else 4)

    run(scaled(factor))


@row(whole=(1,))
def whole_tensors_that_are_compared():
    def factor(model, x):
        return 2.0 if torch.equal(x, x.clone()) and not torch.allclose(x, 2 * x) else 3.0

    run(scaled(factor))


@row(whole=(1,))
def a_module_by_the_text_of_a_number():
    """As a mixture of experts calls those that data have chosen."""

    def make():
        torch.manual_seed(1)
        parts = nn.ModuleDict({f"part_{index}": nn.Linear(4, 4) for index in range(2)})

        def step(x):
            chosen = (x.detach().abs().sum() * torch.arange(1, 3)).gt(0).nonzero()
            found = [parts[f"part_{index[0]}"](x) for index in chosen]
            return torch.stack(found).square().mean()

        return step, parts

    run(make, door="trace")


@row(whole=(1,))
def a_key_that_data_decide():
    run(scaled(lambda model, x: {8: 3.0}[(x < 9).sum().item()]))


@row()
def a_list_of_tensors_that_is_set_anew():
    def make():
        model = net()
        model.anchors = [torch.ones(2), torch.zeros(2)]

        def step(x):
            model.anchors = [one.to(x.dtype) for one in model.anchors]
            return model(x).mean() * sum(model.anchors).sum()

        return step, model

    run(make)


@row(whole=(1,))
def sizes_that_data_decide():
    run(scaled(lambda model, x: x[x[:, 0] > 0].sum()))


class Recurrent(nn.Module):
    """Normalises by statistics and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.cells, self.norm = nn.GRUCell(4, 8), nn.BatchNorm1d(8)
        self.head, self.seen = nn.Linear(8, 4), None

    def forward(self, x):
        state = x.new_zeros(len(x), 8)
        for _ in range(3):
            state = self.cells(x, state)
        self.seen = state.detach()
        return self.head(self.norm(state)).square().mean()


@row(ranks=(1, 2), whole=(1,))
def a_traced_step_trains():
    torch.manual_seed(0)
    model = Recurrent()
    other = copy.deepcopy(model)
    step = pfeife.compile(model, microbatches=2, stages=2, capture="trace")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        loss = step(x)
        loss.backward()
        parts = []
        for part in x.chunk(2):
            parts.append(other(part))
            (parts[-1] / 2).backward()
        # The cell's weights are on two stages, so the sum of their gradients is re-associated.
        torch.testing.assert_close(loss, sum(parts).detach() / 2)
        torch.testing.assert_close(model.seen[2:], other.seen)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(found[name], value)


@row("the step does something else when it runs a second time on the same data")
def the_time():
    run(scaled(lambda model, x: time.time() % 10))


@row()
def the_time_of_a_log():
    """Nobody knows where a number of Python's goes to: it is said what to do instead."""

    def timed(model, x):
        start = time.perf_counter()
        print(f"{time.perf_counter() - start:.1f} s")
        return 1.0

    try:
        run(scaled(timed))
    except ValueError as error:
        assert str(error).startswith(HERE) and "around its call to log that" in str(error), error
    else:
        raise AssertionError("was not refused")


@row(HERE)
def a_file():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "factor"
        path.write_text("1")
        run(scaled(lambda model, x: float(path.read_text())))


@row(whole=(1,))
def the_environment():
    def change(call):
        os.environ["PFEIFE_TEST_FACTOR"] = str(call)

    run(scaled(lambda model, x: float(os.environ["PFEIFE_TEST_FACTOR"])), change)


def counted():
    model = net()
    model.calls = 0

    def step(x):
        model.calls += 1
        return model(x).mean() * model.calls

    return step, model


@row("the step sets model.calls from 1 to 2 whenever it runs", whole=(1,))
def a_counter():
    run(counted)


@row("the step assigns Sequential.calls and then computes something else")
def a_counter_through_dynamo():
    run(counted, door="dynamo")


def lengthened():
    model, seen = net(), []

    def step(x):
        seen.append(1)
        return model(x).mean() * len(seen)

    return step, model


@row("the step changes the list seen, which a traced step cannot")
def a_list_that_grows():
    run(lengthened)


@row("the step sets seen.0 (to 1 in a first microbatch)")
def a_list_that_grows_through_dynamo():
    run(lengthened, door="dynamo")


def attribute(door):
    models = []

    def make():
        model = net()
        model.factor = 1.0
        models.append(model)
        return (lambda x: model(x).mean() * model.factor), model

    def change(call):
        for model in models:
            model.factor = float(call)

    assert len(run(make, change, door).backend.compiled) == 3


@row(whole=(1,))
def an_attribute():
    attribute("trace")


@row()
def an_attribute_through_dynamo():
    attribute("dynamo")


def hooked(door):
    models = []

    def make():
        models.append(net())
        model = models[-1]
        return (lambda x: model(x).mean()), model

    def change(call):
        for model in models if call == 1 else ():
            model[0].register_forward_hook(lambda module, args, out: out * 2)

    assert len(run(make, change, door).backend.compiled) == 2


def hooked_everywhere(door):
    """One that is there for a call and gone again."""

    def make():
        model = net()
        return (lambda x: model(x).mean()), model

    def double(module, args, out):
        return out * 2 if isinstance(module, nn.Linear) else out

    def change(call):
        if call == 1:
            handles.append(nn.modules.module.register_module_forward_hook(double))
        if call == 2:
            handles.pop().remove()

    handles = []
    try:
        assert len(run(make, change, door).backend.compiled) >= 2
    finally:
        for handle in handles:
            handle.remove()


@row()
def a_hook():
    hooked("trace")


@row()
def a_hook_through_dynamo():
    hooked("dynamo")


@row(whole=(1,))
def a_hook_of_all_modules():
    hooked_everywhere("trace")


@row()
def a_hook_of_all_modules_through_dynamo():
    hooked_everywhere("dynamo")


@row("a hook of a module has been added")
def a_hook_that_torch_compile_does_not_see():
    model = net()
    step = torch.compile(lambda x: model(x).mean(), backend="pfeife")
    step(torch.ones(4, 4))
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    step(torch.ones(4, 4))


@row(whole=(1,))
def a_hook_that_the_first_call_adds():
    """As transformers collects hidden states: each run of a capture must find what it found."""
    models = []

    def make():
        model = net()
        models.append(model)
        model.hooked = False

        def step(x):
            if not model.hooked:
                model.hooked = True
                model[0].register_forward_hook(lambda module, args, out: out * 2)
            return model(x).mean()

        return step, model

    run(make)
    assert [len(model[0]._forward_hooks) for model in models] == [1, 1]


def momentum(door, write):
    """An encoder that follows another one, without gradients."""
    encoders = []

    def make():
        model, keys = net(), net().requires_grad_(False)
        torch._foreach_mul_(list(keys.parameters()), 0.5)
        encoders.append(keys)

        def step(x):
            for key, parameter in zip(keys.parameters(), model.parameters(), strict=True):
                write(key, parameter)
            return (model(x) - keys(x)).square().mean()

        return step, model

    run(make, door=door)
    one, other = (keys.state_dict() for keys in encoders)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def moved(key, parameter):
    key.data = key.data * 0.9 + parameter.data * 0.1


def clipped(key, parameter):
    parameter.data = parameter.data.clamp(-0.4, 0.4)


def shared(key, parameter):
    key.data = parameter.data


@row(whole=(1,))
def data_that_is_set():
    momentum("trace", moved)
    momentum("trace", clipped)


@row()
def data_that_is_set_through_dynamo():
    momentum("dynamo", moved)
    momentum("dynamo", clipped)


@row("the step could not be traced: the step gives two tensors the same memory (File")
def data_that_is_shared():
    momentum("trace", shared)


@row("the step gives two tensors the same memory (File")
def data_that_is_shared_through_dynamo():
    momentum("dynamo", shared)


@row(whole=(1,))
def modes_of_modules():
    models = []

    def make():
        model = nn.Sequential(net(), nn.Dropout(0.0))
        models.append(model)
        return (lambda x: model(x).mean() * (2 if model.training else 1)), model

    def change(call):
        for model in models:
            model.train(call % 2 == 0)

    assert len(run(make, change, calls=4).backend.compiled) == 2


@row()
def a_closure_over_another_tensor():
    scale = torch.tensor(1.0)

    def make():
        model = net()
        return (lambda x: model(x).mean() * scale), model

    def change(call):
        nonlocal scale
        scale = torch.tensor(float(call))

    assert len(run(make, change).backend.compiled) == 1


@row()
def a_global_tensor():
    def change(call):
        global SCALE
        SCALE = torch.tensor(float(call))

    assert len(run(scaled(lambda model, x: SCALE), change).backend.compiled) == 1


@row()
def a_tensor_that_is_changed_in_place():
    scale = torch.ones(())
    assert len(run(scaled(lambda model, x: scale), scale.fill_).backend.compiled) == 1


@row("the step reads a tensor [] that is in no module, list, dict or variable")
def a_tensor_in_a_tuple():
    both = (torch.ones(()), torch.ones(()) * 2)
    run(scaled(lambda model, x: both[1]))


class Plan:
    """An object of a user's."""

    __slots__ = ("factor", "more")

    def __init__(self):
        self.factor, self.more = 0.0, {"factor": 1.0}

    def value(self):
        return self.factor + self.more["factor"]


@row(whole=(1,))
def what_objects_hold():
    plan, queue, seen = Plan(), collections.deque([1.0]), set()
    array, defaults = np.ones(1), [1.0]

    def factor(model, x, given=defaults):
        return plan.value() * queue[0] * (len(seen) + 1) * float(array[0]) * given[0]

    def change(call):
        [
            lambda: None,
            lambda: setattr(plan, "factor", 2.0),
            lambda: plan.more.update(factor=3.0),
            lambda: queue.append(queue.pop() + 1),
            lambda: seen.add(1),
            lambda: array.fill(2.0),
            lambda: defaults.append(defaults.pop() + 1),
        ][call]()

    assert len(run(scaled(factor), change, calls=7).backend.compiled) == 7


@row()
def what_fails_only_if_it_is_compiled():
    def factor(model, x):
        known = None if torch.compiler.is_compiling() else torch.ones(())
        return known + 1  # as models that make their masks in eager alone

    run(scaled(factor))


@row()
def a_module_that_the_step_converts_to_what_it_is():
    run(scaled(lambda model, x: model.to(x.dtype)[0].to(x.device).bias.detach().mean()))


@row("the step sets requires_grad of model.0.weight")
def a_part_that_is_frozen():
    def factor(model, x):
        model[0].weight.requires_grad_(False)
        return 1.0

    run(scaled(factor))


@row()
def the_step_is_left_as_it_was():
    model = net()
    before = copy.deepcopy(model.state_dict())
    names = {name: set(vars(module)) for name, module in model.named_modules()}
    pfeife.compile(lambda x: model(x).mean(), microbatches=2, capture="trace")(torch.ones(4, 4))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert names == {name: set(vars(module)) for name, module in model.named_modules()}
    assert all(isinstance(one, nn.Parameter) for one in model.parameters())


def by_module(part, trained):
    part.requires_grad_(trained)


def by_parameters(part, trained):
    for one in part.parameters():
        one.requires_grad = trained


def compiled_here(step):
    return pfeife.compile(step, microbatches=2)


def compiled_by_name(step):
    options = {"microbatches": 2}
    return torch.compile(step, backend="pfeife", dynamic=True, options=options)


@row(ranks=(1, 2), whole=(1,))
def what_is_trained_is_another_part_later():
    """Thawed and frozen, and thawed: torch up to 2.11 does not look at that by itself."""
    setting = torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
    for compiled, change in ((compiled_here, by_module), (compiled_by_name, by_parameters)):
        model = nn.Sequential(net(), nn.Linear(4, 4))
        other = copy.deepcopy(model)
        step = compiled(lambda x, model=model: model(x).square().mean())
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
        for call, trained in enumerate((False, True, False, True)):
            change(model[0], trained)
            change(other[0], trained)
            for seed in range(2):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
                loss = step(x)
                loss.backward()
                parts = [other(part).square().mean() / 2 for part in x.chunk(2)]
                for part in parts:
                    part.backward()
                assert torch.equal(loss, sum(parts).detach()), (compiled, call, seed)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        found = pfeife.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())
    assert torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags == setting
