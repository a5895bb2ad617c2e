"""Attributes that a step assigns: state that goes from one microbatch to the next."""

import collections
import functools
import operator
import os
import warnings

import torch
from rows import Row, add, row
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pfeife
from pfeife.ir.evaluate import state_of
from pfeife.testing import own_gradients

WIDTH = 4


def rows(seed, count=12):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


class Two(nn.Module):
    """Two layers, so that each of 2 ranks has one."""

    def __init__(self, wrap=lambda layer: layer):
        super().__init__()
        self.first, self.second = (wrap(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x).tanh()).square().mean()


def pair(make):
    """The same model twice."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            models.append(make())
    return models


def same_training(make, attributes=(), same=torch.equal):
    """Some steps against plain accumulation: losses, gradients, state and attributes. The second
    call may compile again, for the hooks of state that ranks train; no later one does."""
    for count in (2, 3):
        model, other = pair(make)
        compiled = pfeife.compile(lambda x, model=model: model(x), microbatches=count)
        built: list[int] = []
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, other)]
        for seed in range(3):
            loss, total = compiled(rows(seed)), torch.zeros(())
            loss.backward()
            for part in rows(seed).chunk(count):
                one = other(part) / count
                one.backward()
                total += one.detach()
            assert same(loss, total), (loss, total)
            same_state(model, other, attributes, same)
            built.append(len(compiled.backend.compiled))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        same_state(model, other, attributes, same)
        assert built[1] == built[2]
        with torch.no_grad():
            loss = compiled(rows(9))
            assert same(loss, sum(other(p) / count for p in rows(9).chunk(count)))
        same_state(model, other, attributes, same)


def same_state(model, other, attributes, same):
    theirs = dict(other.named_parameters())
    for name, gradient in own_gradients(model).items():
        assert same(gradient, theirs[name].grad), name
    found = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        assert same(found[name], value), name
    for name in attributes:
        mine, wanted = operator.attrgetter(name)(model), operator.attrgetter(name)(other)
        assert same(mine, wanted), (name, mine, wanted)


@row(ranks=(1, 2), whole=(2,))
def spectral_norm():
    """Of 2 ranks both use a weight: the sum of its gradients is re-associated."""
    same = torch.allclose if "RANK" in os.environ else torch.equal
    same_training(lambda: Two(parametrizations.spectral_norm), (), same)


@row(ranks=(1, 2), whole=(1,))
def the_older_spectral_norm():
    """Of 2 ranks both use a weight: the sum of its gradients is re-associated."""
    same_training(
        lambda: Two(nn.utils.spectral_norm), ["first.weight", "second.weight"], torch.allclose
    )


@row(ranks=(1, 2), whole=(1,))
def the_older_weight_norm():
    same_training(lambda: Two(nn.utils.weight_norm), ["first.weight", "second.weight"])


class Counting(Two):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.n = self.n + 1
        self.steps = self.steps + 1
        return super().forward(x) * self.n


@row(ranks=(1, 2))
def buffers_that_count():
    same_training(Counting, ["n", "steps"])


class CountingInPlace(Counting):
    def forward(self, x):
        self.n += 1
        self.steps += 1
        return Two.forward(self, x) * self.n


@row(ranks=(1, 2), whole=(1,))
def buffers_that_count_in_place():
    same_training(CountingInPlace, ["n", "steps"])


class Running(Two):
    """A running mean in a plain attribute, and one that is changed in place."""

    def __init__(self):
        super().__init__()
        self.mean, self.peak = torch.zeros(WIDTH), torch.zeros(WIDTH)

    def forward(self, x):
        hidden = self.first(x).tanh()
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.peak += hidden.detach().amax(0)
        return self.second(hidden - self.mean).square().mean()


@row(ranks=(1, 2))
def a_running_mean_in_a_plain_attribute():
    same_training(Running, ["mean", "peak"])


class Caching(Two):
    def forward(self, x):
        hidden = self.first(x).tanh()
        self.norm, self.kept = hidden.detach().norm(), hidden.sum()
        self.row = hidden.detach()[-1]
        self.scale = self.second.weight.detach().abs().max()
        return self.second(hidden).square().mean()


@row(ranks=(1, 2), whole=(1,))
def a_cache_that_is_not_read():
    """The last microbatch's value."""
    same_training(Caching, ["norm", "kept", "row", "scale"])


class Rows(Two):
    def forward(self, x):
        hidden = self.first(x).tanh()
        self.hidden = hidden.detach()
        return self.second(hidden).square().mean()


@row(ranks=(1, 2))
def a_cache_with_rows():
    """It is that of the whole batch."""
    model, other = pair(Rows)
    step = pfeife.compile(lambda x: model(x), microbatches=2)
    step(rows(0)).backward()
    hidden = []
    for part in rows(0).chunk(2):
        other(part)
        hidden.append(other.hidden)
    assert torch.equal(model.hidden, torch.cat(hidden))


class Words(nn.Module):
    """Looks up 12 words; the embedding keeps the norms of those that it hands out below 0.5."""

    def __init__(self, trained):
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, max_norm=0.5).requires_grad_(trained)
        self.rest = Two()

    def forward(self, x):
        return self.rest(self.table(x.abs().mul(3).long().clamp(max=8)).mean(1))


@row(ranks=(1, 2))
def an_embedding_with_max_norm():
    for trained in (True, False):
        same_training(lambda trained=trained: Words(trained))


class Clipped(Two):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
        self.first.bias.data.mul_(0.9)
        return super().forward(x)


@row(ranks=(1, 2))
def weights_that_are_clipped():
    same_training(Clipped)


class Following(Two):
    """The second layer follows the first one, and is not trained."""

    def __init__(self):
        super().__init__()
        self.second.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.second.parameters(), self.first.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            wanted = self.second(x)
        return (self.first(x) - wanted).square().mean()


@row()
def weights_that_follow_others():
    same_training(Following)


@row("the step changes the parameter first.bias in place, which would be another", (2,))
def a_clipped_weight_in_replicas():
    model, _ = pair(Clipped)
    pfeife.compile(lambda x: model(x), microbatches=2, replicas=2)(rows(0))


class Warming(Two):
    """Counts its microbatches in a buffer, and does something else in the first three."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        self.n += 1
        return super().forward(x)


class WarmingEarly(Warming):
    def forward(self, x):
        scale = 2 if self.n.item() < 3 else 1
        return super().forward(x) * scale


@row("the step takes another way for other values of n, and changes it", ranks=(1, 2))
def a_count_that_decides():
    model, _ = pair(WarmingEarly)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


@row()
def a_count_that_decides_in_one_microbatch():
    model, other = pair(WarmingEarly)
    step = pfeife.compile(lambda x: model(x))
    for seed in range(5):
        assert torch.equal(step(rows(seed)), other(rows(seed)))


class Normed(Two):
    """A batch norm in a part that is computed again."""

    def __init__(self):
        super().__init__()
        self.norm, self.checkpointed = nn.BatchNorm1d(WIDTH), True

    def forward(self, x):
        hidden = self.first(x)
        hidden = (
            checkpoint(self.norm, hidden, use_reentrant=False)
            if self.checkpointed
            else (self.norm(hidden))
        )
        return self.second(hidden.tanh()).square().mean()


def checkpointed(momentum=0.1, **options):
    """Its statistics are updated once a microbatch, in eager twice."""
    model, other = pair(Normed)
    for one in (model, other):
        one.norm.momentum = momentum
    other.checkpointed = False
    step = pfeife.compile(lambda x: model(x), microbatches=2, **options)
    for seed in range(2):
        step(rows(seed)).backward()
        for part in rows(seed).chunk(2):
            (other(part) / 2).backward()
        same_state(model, other, (), torch.equal)
        for one in (model, other):
            one.zero_grad()


@row()
def a_checkpointed_batch_norm():
    checkpointed()


@row()
def a_checkpointed_batch_norm_that_is_traced():
    """The check of the first call computes it again in eager, and leaves the statistics alone."""
    checkpointed(capture="trace")


@row()
def a_checkpointed_batch_norm_that_averages_all():
    for door in ("dynamo", "trace"):
        checkpointed(None, capture=door)


class Centred(Two):
    """What its first microbatch sets up is said by a flag."""

    def __init__(self):
        super().__init__()
        self.ready = False
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        if not self.ready:
            self.centre.copy_(x.mean(0))
            self.ready = True
        return super().forward(x - self.centre)


class Smoothed(Two):
    """The first microbatch has no mean from before."""

    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        hidden = self.first(x).tanh()
        mean = hidden.detach().mean(0)
        self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return self.second(hidden - self.mean).square().mean()


FIRST = "the step assigns {} and then computes something else, but all microbatches of a call"


@row(FIRST.format("Centred.ready"), ranks=(1, 2))
def a_flag_that_the_first_microbatch_sets():
    model, _ = pair(Centred)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


@row(FIRST.format("Smoothed.mean"))
def a_mean_that_the_first_microbatch_begins():
    model, _ = pair(Smoothed)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


@row()
def a_model_that_was_made_ready_before():
    for make in (Centred, Smoothed):
        model, other = pair(make)
        for one in (model, other):
            one(rows(5))
        loss = pfeife.compile(lambda x, model=model: model(x), microbatches=2)(rows(0))
        parts = [other(part) / 2 for part in rows(0).chunk(2)]
        assert torch.equal(loss, parts[0] + parts[1]), make


class Table(Two):
    """Makes its table at its first call, and again for longer inputs."""

    def __init__(self):
        super().__init__()
        self.length, self.table, self.calls = 0, None, 0

    def forward(self, x):
        self.calls += 1
        if self.length < x.shape[1]:
            self.length, self.table = x.shape[1], torch.arange(float(x.shape[1])).cos()
        return super().forward(x * self.table)


@row(ranks=(1, 2))
def a_table_that_is_made_at_the_first_call():
    model, other = pair(Table)
    step = pfeife.compile(lambda x: model(x), microbatches=2)
    for seed in range(2):
        parts = [other(part) / 2 for part in rows(seed).chunk(2)]
        assert torch.equal(step(rows(seed)), parts[0] + parts[1])
    assert model.calls == 2  # of the step: its Python runs once a call


@row(ranks=(1, 2))
def the_old_value_stays_what_it_was():
    """Who kept the tensor of a step before has its value."""
    model, _ = pair(Counting)
    step, seen = pfeife.compile(lambda x: model(x), microbatches=2), []
    for seed in range(3):
        seen.append(model.n)
        step(rows(seed)).backward()
    assert [one.item() for one in seen] == [0, 2, 4]


@row(ranks=(1, 2))
def a_counter_of_the_steps_own():
    """A cell of the step's closure."""
    for count in (2, 3):
        model, _ = pair(Two)
        total = torch.zeros(())

        def run(x, model=model):
            nonlocal total
            total = total + x.detach().sum()
            return model(x)

        step, wanted = pfeife.compile(run, microbatches=count), torch.zeros(())
        for seed in range(3):
            step(rows(seed)).backward()
            for part in rows(seed).chunk(count):
                wanted = wanted + part.sum()
        assert torch.equal(total, wanted)


@row(ranks=(1, 2))
def a_result_that_depends_on_no_row():
    """It is taken once, beside the loss."""
    model, other = pair(Two)

    def run(x, model):
        return model(x), model.first.weight.detach().abs().sum()

    loss, size = pfeife.compile(lambda x: run(x, model), microbatches=2)(rows(0))
    assert torch.equal(size, run(rows(0), other)[1])
    loss.backward()


@row()
def captured_and_evaluated():
    for make in (Counting, Running, lambda: Two(parametrizations.spectral_norm)):
        model, other = pair(make)
        program = pfeife.capture(model, rows(0).chunk(3)[0])
        plain = {
            f"self.{name}": getattr(model, name) for name in ("mean", "peak") if name in vars(model)
        }
        plain |= {name.removeprefix("self."): value for name, value in plain.items()}
        found = pfeife.evaluate(program, state_of(program, model, plain), rows(0).chunk(3))
        for part in rows(0).chunk(3):
            other(part)
        theirs = dict(other.named_buffers()) | {
            name: getattr(other, name.removeprefix("self.")) for name in plain
        }
        for name, value in found.buffers.items():
            assert torch.equal(value, theirs[name]), name
        assert found.buffers


class Growing(Two):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1, WIDTH)

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach()])
        return super().forward(x) + self.seen.mean()


class CountingTwice(Counting):
    def forward(self, x):
        self.n += 1
        self.n = self.n * 2
        return Two.forward(self, x) * self.n


@row("the step changes n in place and assigns it anew: do one", ranks=(1, 2))
def a_buffer_that_changes_in_place_and_anew():
    model, _ = pair(CountingTwice)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


@row("the step assigns model.seen anew and reads it in the next microbatch", ranks=(1, 2))
def an_attribute_that_grows():
    model, _ = pair(Growing)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


class Undetached(Running):
    def forward(self, x):
        hidden = self.first(x).tanh()
        self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)
        return self.second(hidden - self.mean).square().mean()


@row("the step assigns model.mean anew, with its gradients,", ranks=(1, 2))
def an_attribute_with_gradients():
    model, _ = pair(Undetached)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


@row("attribute model.first.weight of the step received a gradient", ranks=(1,))
def a_penalty_on_a_cache():
    model, _ = pair(lambda: Two(nn.utils.weight_norm))
    loss = pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))
    (loss + model.first.weight.square().sum()).backward()


class KeepsItsInput(Two):
    def forward(self, x):
        self.x = x
        return super().forward(x)


@row(ranks=(1, 2))
def an_input_that_is_kept():
    model, _ = pair(KeepsItsInput)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))
    assert torch.equal(model.x, rows(0))


class KeepsTheOld(Counting):
    def forward(self, x):
        self.before = self.n
        return super().forward(x)


@row("the step keeps n as model.before, and it is another", ranks=(1, 2))
def an_old_value_that_is_kept():
    model, _ = pair(KeepsTheOld)
    pfeife.compile(lambda x: model(x), microbatches=2)(rows(0))


class Noting(Two):
    """Puts a number into attributes and lists of its own."""

    def __init__(self, number):
        super().__init__()
        self.number, self.last, self.seen, self.notes = number, 0, [], {}

    def forward(self, x):
        self.note(self.number(x))
        return super().forward(x)


class NotesInAnAttribute(Noting):
    def note(self, number):
        self.last = number


class NotesInAList(Noting):
    def note(self, number):
        self.seen.append(number)


class NotesInADict(Noting):
    def note(self, number):
        self.notes["number"] = (number, "a word")


NOTING = (NotesInAnAttribute, NotesInAList, NotesInADict)


def noting(kind, number):
    model, _ = pair(lambda: kind(number))
    compiled = pfeife.compile(lambda x: model(x), microbatches=2)
    for seed in range(3):
        compiled(rows(seed)).backward()
    return model


@row("the step assigns 6 to model.last, which Python has computed from the size", ranks=(1, 2))
def a_number_of_rows_that_is_kept():
    noting(NotesInAnAttribute, lambda x: x.shape[0])


@row("the step assigns 6 to model.seen.0, which Python has computed from the size")
def a_number_of_rows_in_a_list():
    noting(NotesInAList, lambda x: x.shape[0])


@row("the step assigns (6, 'a word') to model.notes.number, which Python has computed")
def a_number_of_rows_in_a_dict():
    noting(NotesInADict, lambda x: x.shape[0])


@row("the step assigns '6 rows' to model.last, which Python has computed from the size")
def a_text_about_the_rows():
    noting(NotesInAnAttribute, lambda x: f"{x.shape[0]} rows")


class Place:
    def __init__(self, rows):
        self.rows = rows


@row("the step assigns 6 to model.last.rows, which Python has computed from the size", whole=(1,))
def a_number_of_rows_in_an_object():
    noting(NotesInAnAttribute, lambda x: Place(x.shape[0]))


@row(ranks=(1, 2), whole=(1,))
def numbers_that_do_not_count_rows():
    for kind in NOTING:
        model = noting(kind, lambda x: x.shape[1])
        assert (model.last, *model.seen, *model.notes.values()) in (
            (WIDTH,),
            (0, WIDTH, WIDTH, WIDTH),
            (0, (WIDTH, "a word")),
        )


class CountingCalls(Two):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@row("this step has been compiled so often", ranks=(1, 2), whole=(1,))
def a_counter_that_compiles_every_call():
    model, _ = pair(CountingCalls)
    compiled = pfeife.compile(lambda x: model(x), microbatches=2, max_programs=5)
    for count in range(100):
        assert model.calls == count <= 5
        compiled(rows(count))


# Tensors that go from microbatch to microbatch, wherever they are kept: the numbers of eager
# accumulation, or an error.


class _Held:
    pass


def _kept_in(place):
    """What steps a tensor on, and gives it; `place` is made with one of zero."""
    held = _Held()
    if place in ("attribute", "__dict__"):
        held.now = torch.zeros(())
    elif place == "dict":
        held.now = {"n": torch.zeros(())}
    elif place in ("list", "an entry of a list"):
        held.now = [torch.zeros(())]
    elif place == "tuple":
        held.now = (torch.zeros(()),)
    elif place == "deque":
        held.now = collections.deque([torch.zeros(())], maxlen=2)

    def step():
        if place == "attribute":
            held.now = held.now + 1
            return held.now
        if place == "__dict__":
            held.__dict__["now"] = held.__dict__["now"] + 1
            return held.__dict__["now"]
        if place == "dict":
            held.now["n"] = held.now["n"] + 1
            return held.now["n"]
        if place == "an entry of a list":
            held.now[0] = held.now[0] + 1
        elif place == "deque":
            held.now.append(held.now[-1] + 1)
        else:
            held.now = type(held.now)(one + 1 for one in held.now)
        return held.now[-1]

    return step


def _steps_on(place):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, more = nn.Linear(4, 4), _kept_in(place)

        def step(x, model=model, more=more):
            return model(x).square().mean() * (1 + more())

        found = []
        one = pfeife.compile(step, microbatches=2, stages=1, capture="dynamo")
        for seed in (1, 2, 3):
            batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            parts = batch.chunk(2)
            loss = one(batch) if compiled else torch.stack([step(part) for part in parts]).mean()
            found.append(loss.detach())
        results.append(torch.stack(found))
    assert torch.allclose(*results, 1e-6, 1e-7), results


_KEPT = ("attribute", "__dict__", "dict")
for _place in (*_KEPT, "list", "an entry of a list", "tuple", "deque"):
    _words = "" if _place in _KEPT else "the step assigns "
    _named = f"a_tensor_that_goes_on_in_{_place.replace(' ', '_')}"
    add(globals(), Row(_named, functools.partial(_steps_on, _place), _words))


@row("the step assigns an entry of a dict and then computes something else")
def a_buffer_that_the_first_microbatch_registers():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def step(x):
        model.register_buffer("n", model.n + 1 if hasattr(model, "n") else torch.zeros(()))
        return model(x).square().mean() * (1 + model.n)

    pfeife.compile(step, microbatches=2)(torch.ones(4, 4))


@row("the step computes something else in its first run, which sets ['model.n']")
def a_trace_of_a_step_that_counts_from_its_first_run():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def step(x):
        model.n = model.n + 1 if hasattr(model, "n") else torch.zeros(())
        return model(x).square().mean() * (1 + model.n)

    pfeife.compile(step, microbatches=2, capture="trace")(torch.ones(4, 4))
