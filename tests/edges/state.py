"""The state of a model on ranks: whoever trains it, whoever reads it."""

import copy
import io
from functools import partial
from itertools import pairwise, permutations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from listening import said
from models import Wrapped
from rows import Row, add, row
from torch import nn
from torch.utils import _pytree as pytree

import pfeife
from pfeife._torch import is_absent
from pfeife.runtime.distributed.process_group import join_world, world_so_far
from pfeife.runtime.failure import Failure


def layers(*widths, between=nn.Tanh):
    return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), between()) for pair in pairwise(widths)))


def rows(seed, count=4, width=6):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def accumulated(step, *batch, count=2):
    """One device's loss over the same microbatches; gradients are added."""
    total = torch.zeros(())
    for part in zip(*(one.chunk(count) for one in batch), strict=True):
        loss = step(*part) / count
        if loss.requires_grad:
            loss.backward()
        total = total + loss.detach()
    return total


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def stepped(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same_state(model, other):
    found = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        assert torch.equal(found[name], value), name


def trained(steps=1, make=lambda: layers(6, 6, 6, 6), **options):
    """A model after some steps on the ranks, its step, and the same on one device."""
    model = make()
    other = copy.deepcopy(model)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, **options)
    mine, theirs = sgd(model), sgd(other)
    for seed in range(steps):
        step(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        stepped(mine, theirs)
    world = world_so_far()
    if world:  # which warns once of each kind
        world.ownership.gradients.warned.clear()
    return model, step, mine, other, theirs


@row(ranks=(2,), whole=(2,))
def an_evaluation_before_training_that_is_cut_alike():
    """Its state belonged to nobody when it was built: now some rank trains it."""
    model = layers(6, 6, 6, 6)
    other = copy.deepcopy(model)
    cuts = {"2": "begin"}
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, split_at=cuts)
    mine, theirs = sgd(model), sgd(other)
    for seed in range(3):
        with torch.no_grad():
            parts = [other(part).square().mean() / 2 for part in rows(seed).chunk(2)]
            assert torch.equal(step(rows(seed)), parts[0] + parts[1])
        go_on(model, step, mine, other, theirs, seed)


def go_on(model, step, mine, other, theirs, seed=7):
    """A further step of the same, which must be right."""
    loss = step(rows(seed))
    loss.backward()
    assert torch.equal(loss, accumulated(lambda x: other(x).square().mean(), rows(seed)))
    stepped(mine, theirs)
    same_state(model, other)


def refused(call, begins):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith(begins), error
        return
    raise AssertionError(f"was not refused with {begins!r}")


@row(ranks=(2,))
def two_steps_over_one_model_train_it_together():
    """An actor and a critic on one trunk, each with a step of its own."""
    trunk, actor, critic = layers(6, 6, 6), layers(6, 6, 6), layers(6, 6, 6)
    whole = nn.ModuleList([trunk, actor, critic])
    other = copy.deepcopy(whole)

    def losses(models):
        trunk, actor, critic = models
        return (
            lambda x: actor(trunk(x)).square().mean(),
            lambda x, y: F.mse_loss(critic(trunk(x)), y),
        )

    first, second = (pfeife.compile(loss, microbatches=2) for loss in losses(whole))
    mine, theirs = sgd(whole), sgd(other)
    for seed in range(3):
        x, y = rows(seed), rows(seed + 10)
        for step, alone, batch in zip((first, second), losses(other), ((x,), (x, y)), strict=True):
            loss = step(*batch)
            loss.backward()
            assert torch.equal(loss, accumulated(alone, *batch))
            stepped(mine, theirs)
    same_state(whole, other)


@row(ranks=(2,))
def a_gan():
    """The discriminator's step reads the generator before any step has trained it; the
    generator's step goes through the discriminator. Several stages share the discriminator's
    weights, which it uses twice: the sum of their gradients is re-associated."""
    maker, judge = layers(6, 6, 6), layers(6, 6, 6)
    whole = nn.ModuleList([maker, judge])
    other = copy.deepcopy(whole)

    def losses(models):
        maker, judge = models

        def of_judge(x, noise):
            return judge(x).mean() - judge(maker(noise).detach()).mean()

        return of_judge, lambda noise: judge(maker(noise)).mean()

    of_judge, of_maker = (pfeife.compile(loss, microbatches=2) for loss in losses(whole))
    alone = losses(other)
    mine, theirs = [[sgd(model) for model in models] for models in (whole, other)]
    for seed in range(3):
        x, noise = rows(seed), rows(seed + 10)
        loss = of_judge(x, noise)
        loss.backward()
        torch.testing.assert_close(loss.detach(), accumulated(alone[0], x, noise))
        stepped(mine[1], theirs[1])
        loss = of_maker(noise)
        loss.backward()
        torch.testing.assert_close(loss.detach(), accumulated(alone[1], noise))
        stepped(mine[0], theirs[0])
        for optimizer in (mine[1], theirs[1]):
            optimizer.zero_grad()
    found = pfeife.full_state_dict(whole)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(found[name], value)


@row(ranks=(2,))
def training_and_validation_in_steps_of_their_own():
    model = layers(6, 6, 6, 6)
    other = copy.deepcopy(model)

    def loss_of(model):
        return lambda x: model(x).square().mean()

    train = pfeife.compile(loss_of(model), microbatches=2, stages=3)
    validate = pfeife.compile(loss_of(model), microbatches=4, loss=0)
    mine, theirs = sgd(model), sgd(other)
    for seed in range(3):
        with torch.no_grad():
            assert torch.equal(
                validate(rows(seed)), accumulated(loss_of(other), rows(seed), count=4)
            )
        loss = train(rows(seed))
        loss.backward()
        assert torch.equal(loss, accumulated(loss_of(other), rows(seed)))
        stepped(mine, theirs)


@row(ranks=(2,), whole=(2,))
def the_string_spelling_compiles_again_after_training():
    model = layers(6, 6, 6, 6)
    other = copy.deepcopy(model)
    step = torch.compile(
        lambda x: model(x).square().mean(),
        backend="pfeife",
        options={"microbatches": 2},
        dynamic=True,
    )
    mine, theirs = sgd(model), sgd(other)
    for seed in range(4):
        if seed == 2:
            for one in (model, other):
                one[0][0].bias.requires_grad_(False)
        loss = step(rows(seed))
        loss.backward()
        assert torch.equal(loss, accumulated(lambda x: other(x).square().mean(), rows(seed)))
        stepped(mine, theirs)
    same_state(model, other)


@row(ranks=(2,))
def batch_norm_is_trained_then_evaluated():
    def make():
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3)))

    model, step, mine, other, theirs = trained(2, make)
    for one in (model, other):
        one.eval()
    run = pfeife.compile(model, microbatches=2)
    with torch.no_grad():
        found = run(rows(5))
        assert torch.equal(found, torch.cat([other(part) for part in rows(5).chunk(2)]))
    for one in (model, other):
        one.train()
    go_on(model, step, mine, other, theirs)


def averages_all(**options):
    """The momentum is one over the number of microbatches so far, which a buffer has."""

    def make():
        norms = (nn.BatchNorm1d(6, momentum=None) for _ in range(3))
        return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), norm) for norm in norms))

    model, step, mine, other, theirs = trained(2, make, **options)
    same_state(model, other)
    for one in (model, other):
        one.eval()
    run = pfeife.compile(model, microbatches=2)
    with torch.no_grad():
        found = run(rows(5))
        assert torch.equal(found, torch.cat([other(part) for part in rows(5).chunk(2)]))
    for one in (model, other):
        one.train()
    go_on(model, step, mine, other, theirs)
    assert {one.captured.door for one in step.backend.compiled} <= {
        options.get("capture", "dynamo")
    }


@row(ranks=(1, 2), whole=(2,))
def batch_norm_that_averages_all():
    averages_all()


@row(ranks=(1, 2), whole=(2,))
def batch_norm_that_averages_all_traced():
    averages_all(capture="trace")


@row(whole=(1,))
def batch_norm_that_averages_all_in_parts():
    averages_all(schedule="zb-h1", recompute="always", costs="measure", stages=3)


@row(whole=(1,))
def batch_norms_of_images_and_volumes_that_average_all():
    for norm, layer, shape in (
        (nn.BatchNorm2d, nn.Conv2d, (4, 2, 5, 5)),
        (nn.BatchNorm3d, nn.Conv3d, (4, 2, 3, 4, 4)),
    ):
        model = nn.Sequential(layer(2, 4, 3, padding=1), norm(4, momentum=None), nn.Flatten())
        other = copy.deepcopy(model)
        step = pfeife.compile(lambda x, model=model: model(x).square().mean(), microbatches=2)
        for seed in range(2):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            loss = step(x)
            loss.backward()
            expected = accumulated(lambda x, other=other: other(x).square().mean(), x)
            assert torch.equal(loss, expected)
        same_state(model, other)


@row(ranks=(1, 2))
def batch_norm_that_averages_all_by_name():
    """Dynamo breaks there, and with breaks a call is that of the whole batch."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 6))
    other = copy.deepcopy(model)
    step = torch.compile(
        lambda x: model(x).square().mean(),
        backend="pfeife",
        options={"microbatches": 2},
        dynamic=True,
    )
    mine, theirs = sgd(model), sgd(other)
    for seed in range(4):
        loss = step(rows(seed))
        loss.backward()
        assert torch.equal(
            loss, accumulated(lambda x: other(x).square().mean(), rows(seed), count=1)
        )
        stepped(mine, theirs)
    same_state(model, other)


@row(ranks=(2,), whole=(2,))
def an_evaluation_that_calls_the_model_twice_comes_first():
    model = layers(6, 6, 6, 6)
    other = copy.deepcopy(model)
    evaluate = pfeife.compile(lambda x: model(model(x)), microbatches=2)
    train = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    mine, theirs = sgd(model), sgd(other)
    for seed in range(3):
        with torch.no_grad():
            expected = torch.cat([other(other(part)) for part in rows(seed).chunk(2)])
            assert torch.equal(evaluate(rows(seed)), expected)
        train(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        stepped(mine, theirs)
    same_state(model, other)


@row(ranks=(2,), whole=(2,))
def a_part_is_trained_alone():
    """The other rank has nothing to do."""
    model, _, mine, other, theirs = trained()
    part = pfeife.compile(lambda x: model[0](x).square().mean(), microbatches=2, schedule="zb-h1")
    for seed in range(2):
        loss = part(rows(seed))
        loss.backward()
        assert torch.equal(loss, accumulated(lambda x: other[0](x).square().mean(), rows(seed)))
        stepped(mine, theirs)
    same_state(model, other)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6, bias=False), layers(6, 6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@row(ranks=(2,))
def a_tied_weight_is_trained_where_it_is_used_once():
    """Both ranks that have it get the gradient of a step that uses it on one of them."""
    model, step, mine, other, theirs = trained(1, Tied)
    part = pfeife.compile(lambda x: model.last(x).square().mean(), microbatches=2)
    part(rows(3)).backward()
    accumulated(lambda x: other.last(x).square().mean(), rows(3))
    stepped(mine, theirs)
    loss = step(rows(4))
    torch.testing.assert_close(  # two sums of the tied gradient are re-associated
        loss.detach(), accumulated(lambda x: other(x).square().mean(), rows(4))
    )
    found = pfeife.full_state_dict(model)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(found[name], value)


def takes_up_state_that_is_placed_otherwise(schedule: str) -> None:
    model, _, mine, other, theirs = trained(stages=4, make=lambda: layers(*[6] * 6))
    step = pfeife.compile(
        lambda x: model(x.tanh()).square().mean(),
        microbatches=2,
        schedule=schedule,
        search_seconds=0.3,
    )
    loss = step(rows(3))
    loss.backward()
    assert torch.equal(loss, accumulated(lambda x: other(x.tanh()).square().mean(), rows(3)))
    stepped(mine, theirs)
    same_state(model, other)


for _name in ("zb-v", "search", "interleaved", "dualpipe-v", "loops", "gpipe"):
    _label = f"{_name}_takes_up_state_that_is_placed_otherwise"
    _check = partial(takes_up_state_that_is_placed_otherwise, _name)
    _more = () if _name == "zb-v" else (2,)
    add(globals(), Row(_label, _check, ranks=(2,), whole=_more))


@row("0.0.weight is trained on ranks [0] and", ranks=(2,))
def one_operation_needs_state_of_two_ranks():
    model, *_ = trained(make=lambda: layers(6, 6, 6))
    step = pfeife.compile(lambda x: (x @ (model[0][0].weight + model[1][0].weight)).sum())
    step(rows(0))


@row("0.0.weight is trained on 1 replicas of 2 ranks", ranks=(2,))
def other_replicas():
    model, *_ = trained()
    pfeife.compile(lambda x: model(x).sum(), microbatches=2, replicas=2)(rows(0))


@row("state of other ranks", ranks=(2,))
def the_model_is_run_by_hand():
    model, *_ = trained()
    model(rows(0))


@row("state of other ranks", ranks=(2,))
def a_penalty_outside_of_the_step():
    model, step, *_ = trained()
    loss = step(rows(1)) + 0.1 * sum(p.square().sum() for p in model.parameters())
    loss.backward()


@row("a model whose parameters are trained by several ranks cannot be pickled", ranks=(2,))
def the_model_is_pickled():
    model, *_ = trained()
    torch.save(model, io.BytesIO())


@row(ranks=(1, 2))
def the_full_state_makes_the_model_whole():
    """In a copy, and in the model itself, which goes on to train."""
    model, step, mine, other, theirs = trained(2)
    state = pfeife.full_state_dict(model)
    again = layers(6, 6, 6, 6)
    again.load_state_dict(state)
    assert torch.equal(again(rows(1)), other(rows(1)))
    model.load_state_dict(state)
    assert torch.equal(model(rows(1)), other(rows(1)))
    copy.deepcopy(model)(rows(1))
    go_on(model, step, mine, other, theirs)


@row(ranks=(2,))
def a_checkpoint_is_loaded_on_all_ranks():
    model, step, mine, other, theirs = trained(2)
    saved = layers(6, 6, 6, 6).state_dict()
    model.load_state_dict(saved)
    other.load_state_dict(saved)
    go_on(model, step, mine, other, theirs)
    for one in (model, other):  # past autograd's count of changes
        for name, parameter in one.named_parameters():
            parameter.data.copy_(saved[name])
    go_on(model, step, mine, other, theirs)
    same_state(model, other)


@row(ranks=(2,))
def a_checkpoint_is_loaded_on_one_rank():
    """Refused on all, until all have loaded it."""
    model, step, mine, other, theirs = trained(2)
    saved = layers(6, 6, 6, 6).state_dict()
    for load in (
        lambda: model.load_state_dict(saved),
        lambda: [p.data.copy_(saved[n]) for n, p in model.named_parameters()],
    ):
        if dist.get_rank() == 0:
            load()
        for _ in range(2):
            refused(lambda: step(rows(0)), "2.0.weight has been written to on ranks [0]")
        refused(lambda: pfeife.full_state_dict(model), "2.0.weight has been written to")
        model.load_state_dict(saved)
        other.load_state_dict(saved)
        go_on(model, step, mine, other, theirs)


class Shared(nn.Module):
    """The first rank trains all but a tied layer, which the last one has as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        hidden = pfeife.stage_boundary(self.second(self.first(x).tanh()).tanh())
        return self.first(hidden)


def loaded_on_one_rank(model, step, first):
    """Refused on all by every step, until all have loaded it."""
    saved = {name: value + 0.5 for name, value in pfeife.full_state_dict(model).items()}
    if dist.get_rank() == 0:
        model.load_state_dict(saved)
    for other in (step, step, pfeife.compile(lambda x: model(x).abs().mean(), **PAIR)):
        refused(lambda other=other: other(rows(0)), first)
    refused(lambda: pfeife.full_state_dict(model), first)
    model.load_state_dict(saved)
    return saved


PAIR = {"microbatches": 2, "stages": 2}


@row(ranks=(2,), whole=(2,))
def a_tied_layer_is_loaded_on_one_rank():
    """That rank has no state of others that would show it."""
    torch.manual_seed(0)
    model = Shared()
    step = pfeife.compile(lambda x: model(x).square().mean(), **PAIR)
    mine = sgd(model)
    for seed in range(2):
        step(rows(seed)).backward()
        stepped(mine)
    loaded_on_one_rank(model, step, "first.weight has been written to since the last step")
    other = copy.deepcopy(model)
    assert torch.allclose(step(rows(0)), accumulated(lambda x: other(x).square().mean(), rows(0)))


@row(ranks=(2,))
def a_replica_is_loaded_alone():
    torch.manual_seed(0)
    model, options = layers(6, 6), {"microbatches": 2, "stages": 1, "replicas": 2}
    step = pfeife.compile(lambda x: model(x).square().mean(), **options)
    mine = sgd(model)
    step(rows(0)).backward()
    stepped(mine)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model[0][0].bias.fill_(1.0)
    for _ in range(2):
        refused(lambda: step(rows(0)), "0.0.bias has been written to since the last step")
    with torch.no_grad():
        model[0][0].bias.fill_(1.0)
    step(rows(0)).backward()
    stepped(mine)


@row(ranks=(2,))
def a_replica_loads_what_it_has():
    """Statistics of replicas may differ, and another model's parameters are no matter of this."""
    models, steps, options = [], [], {"microbatches": 2, "stages": 1, "replicas": 2}
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        step = pfeife.compile(lambda x, model=model: model(x).square().mean(), **options)
        mine = sgd(model)
        step(rows(0, 8)).backward()
        stepped(mine)
        models.append(model)
        steps.append(step)
    if dist.get_rank() == 0:
        models[0].load_state_dict({n: value + 1 for n, value in models[0].state_dict().items()})
        models[1].load_state_dict(models[1].state_dict())
    for _ in range(2):
        refused(lambda: steps[0](rows(0, 8)), "0.weight has been written to since the last step")
        steps[1](rows(0, 8))


@row(ranks=(2,))
def an_evaluation_alone_is_loaded_on_one_rank():
    """Nothing is trained, so that nothing is owned."""
    torch.manual_seed(0)
    model = layers(6, 6, 6, 6).requires_grad_(False)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, loss="outside")
    step(rows(0))
    saved = layers(6, 6, 6, 6).state_dict()
    if dist.get_rank() == 0:
        model.load_state_dict(saved)
    for _ in range(2):
        refused(lambda: step(rows(0)), "0.0.weight has been written to since the last step")
    model.load_state_dict(saved)
    assert torch.equal(step(rows(1)), accumulated(lambda x: model(x).square().mean(), rows(1)))


@row(ranks=(2,))
def ranks_at_different_calls():
    """One computes where another saves, clips, or runs backward: both say so, and go on."""
    model, step, mine, other, theirs = trained(2)

    calls = {
        "the names in full_state_dict": lambda: pfeife.full_state_dict(model),
        "the arguments of clip_grad_norm_": lambda: pfeife.clip_grad_norm_(model.parameters(), 1.0),
        "the arguments of this call": lambda: step(rows(0)),
    }
    for mine_at, there_at in permutations(calls, 2):
        at = (mine_at, there_at)[dist.get_rank()]
        refused(calls[at], f"rank 1 is at {there_at} and rank 0 at {mine_at}: every rank must")
    for compare in (True, False):
        options = {"loss": "outside", "compare_batches": compare}
        apart = pfeife.compile(lambda x: model(x), microbatches=2, **options)
        results = apart(rows(3)).square().mean()
        backward = {0: results.backward, 1: lambda: step(rows(0))}[dist.get_rank()]
        refused(backward, "rank 1 is at the arguments of this call and rank 0 at the results that")
    go_on(model, step, mine, other, theirs)


@row(ranks=(2,), whole=(2,))
def a_part_of_a_checkpoint_is_loaded_on_all_ranks():
    model, step, mine, other, theirs = trained(2)
    saved = layers(6, 6, 6, 6)[0].state_dict()
    for one in (model, other):
        one[0].load_state_dict(saved)
    go_on(model, step, mine, other, theirs)


@row(ranks=(2,))
def a_teacher_that_follows_by_a_moving_average():
    """Within one step it is kept where that reads it, and without values if its
    parameters come from another rank: refused on all ranks."""
    model, teacher = layers(6, 6, 6, 6), layers(6, 6, 6, 6).requires_grad_(False)

    def loss(x):
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(model(x), wanted)

    step, optimizer = pfeife.compile(loss, microbatches=2), sgd(model)
    step(rows(0)).backward()
    stepped(optimizer)
    before = pfeife.full_state_dict(teacher)
    with torch.no_grad():
        for kept, new in zip(teacher.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.1)
    for _ in range(2):
        refused(lambda: step(rows(1)), ("teacher.", "rank 1: ValueError: teacher."))
    state = pfeife.full_state_dict(model)
    with torch.no_grad():
        for kept, old, new in zip(
            teacher.parameters(), before.values(), state.values(), strict=True
        ):
            kept.copy_(old.lerp(new, 0.1))
    assert step(rows(1)).isfinite()


class Following(nn.Module):
    """Two parts that both read `kept`, the second `shift` as well."""

    def __init__(self):
        super().__init__()
        self.first, self.second = layers(6, 6, 6), layers(6, 6, 6)
        self.kept = nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x):
        return self.second(self.first(x * self.kept)) * self.kept + self.shift


@row(ranks=(2,))
def frozen_state_and_a_buffer_that_follow_a_parameter():
    """Whatever else has no values there, the frozen parameter is."""
    model = Following()
    step = pfeife.compile(
        lambda x: model(x).square().mean(), microbatches=2, split_at={"second": "begin"}
    )
    step(rows(0)).backward()
    stepped(sgd(model))
    with torch.no_grad():
        for follower in (model.kept, model.shift):
            follower.copy_(model.first[0][0].bias)
    refused(lambda: step(rows(1)), ("kept has no values any more", "rank 1: ValueError: kept"))


@row(ranks=(2,))
def what_is_frozen_is_kept_where_it_is_read():
    """Its values are elsewhere alone, saved from there, trained there once it is no longer frozen,
    and looked after where it is not."""
    model = layers(6, 6, 6, 6)
    for layer in (model[0], model[1]):
        layer.requires_grad_(False)
    other = copy.deepcopy(model)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)
    mine, theirs = sgd(model), sgd(other)
    go_on(model, step, mine, other, theirs)
    absent = [name for name, p in model.named_parameters() if is_absent(p)]
    assert len(absent) in (2, 4)
    refused(lambda: model[0 if dist.get_rank() else 2](rows(0)), "state of other ranks: ")
    if dist.get_rank() == 0:
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    dist.barrier()
    for one in (model, other):
        one.load_state_dict({n: 0.5 * v for n, v in other.state_dict().items()})
        one.requires_grad_(True)
    for seed in range(2):
        go_on(model, step, mine, other, theirs, seed)
    refused(lambda: sum(p.square().sum() for p in model.parameters()), "state of other ranks: ")
    for one in (model, other):
        one.zero_grad()
        one[1].requires_grad_(False)
    go_on(model, step, mine, other, theirs)


class Gaps(nn.Module):
    """A table in which something is missing, and a factor that the loop changes."""

    def __init__(self):
        super().__init__()
        self.layers = layers(6, 6, 6, 6)
        self.register_buffer("table", torch.tensor([1.0, torch.nan] * 3))
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        return self.layers(x + self.factor * self.table.nan_to_num())


@row(ranks=(1, 2), whole=(1,))
def a_table_with_gaps():
    """What is NaN on purpose is not what another rank trains, whatever else is written to."""
    model = Gaps()
    other = copy.deepcopy(model)

    def loss(net, x):
        return net(x).square().mean()

    step = pfeife.compile(partial(loss, model), microbatches=2)
    for seed in range(3):
        found, expected = step(rows(seed)), accumulated(partial(loss, other), rows(seed))
        assert torch.equal(found.detach(), expected)
        model.factor.mul_(0.5)
        other.factor.mul_(0.5)


@row("torch.optim.LBFGS needs all gradients in one process", ranks=(2,))
def lbfgs():
    model, step, *_ = trained()
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = step(rows(0))
        loss.backward()
        return loss

    optimizer.step(closure)


@row(ranks=(1, 2))
def gradients_are_clipped_by_the_norm_of_all():
    model, step, mine, other, theirs = trained(2)
    for seed, kind in enumerate((2.0, float("inf"), 1.0)):
        step(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        norm = pfeife.clip_grad_norm_(model.parameters(), 1e-3, kind)
        expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-3, kind)
        assert torch.equal(norm, expected), kind
        stepped(mine, theirs)
        same_state(model, other)


@row("The total norm of order 2.0 for", ranks=(1, 2))
def gradients_that_are_not_finite_are_not_clipped():
    model, step, *_ = trained()
    for factor in (float("inf"), float("nan")):
        (step(rows(0)) * factor).backward()
        assert not pfeife.clip_grad_norm_(model.parameters(), 1.0).isfinite(), factor
    pfeife.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def by_hand(parameters):
    """The norm as scripts take it themselves."""
    norms = [p.grad.data.norm(2) ** 2 for p in parameters if p.grad is not None]
    return sum(norms) ** 0.5


def in_turn(parameters):
    """What has been told of a gradient is out of date when a view of it is changed."""
    norms = [parameters[at].grad.norm() for at in (0, -1)]
    for parameter in parameters:
        parameter.grad.view(-1).mul_(0.5)
    return [*norms, *(parameters[at].grad.norm() for at in (1, -2))]


def one_by_one(parameters):
    """Each gradient by its own norm, and all by what these are together."""
    norms = [torch.nn.utils.clip_grad_norm_(parameter, 1e-3) for parameter in parameters]
    for parameter in parameters:
        parameter.grad.div_(1 + sum(norms))
    return norms


@row(ranks=(1, 2))
def torch_itself_clips_by_the_norm_of_all():
    """Each rank asks the others for the norms of their gradients; one that many of them have does
    not change by that. What torch, or a script, does to all gradients is done where they are."""
    model, step, mine, other, theirs = trained(2)
    clips = [
        lambda p: torch.nn.utils.clip_grad_norm_(p, 1e-3),
        lambda p: torch.nn.utils.clip_grad_norm_(p, 1e6),  # is told, and changes nothing
        lambda p: torch.nn.utils.clip_grad_norm_(p, 1e-3, float("inf"), foreach=True),
        lambda p: torch.nn.utils.clip_grad_value_(p, 1e-4),
        lambda p: (by_hand(p), torch.nn.utils.clip_grad_norm_(p, 1e-3, 1.0)),
        lambda p: [one.grad.mul_(0.5) for one in p] and by_hand(p),
        in_turn,
        lambda p: [torch.nn.utils.clip_grad_norm_(p[i::2], 1e-3) for i in range(2)],
        # What is asked for, its owner may have changed already.
        lambda p: [torch.nn.utils.clip_grad_norm_(p[:2], 1e-3), by_hand(p[2:])],
        one_by_one,
        lambda p: [(q.grad.data.norm(), q.grad.data.mul_(0.5))[0] for q in p],
        lambda p: [torch.mul(q.grad, 0.5, out=q.grad) for q in p] and by_hand(p),
    ]
    for seed, clip in enumerate(clips):
        step(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        results = [pytree.tree_leaves(clip(list(net.parameters()))) for net in (model, other)]
        for found, expected in zip(*results, strict=True):
            assert found is None or torch.equal(found, expected), seed
        stepped(mine, theirs)
        same_state(model, other)


@row(ranks=(2,))
def a_norm_of_what_its_owner_has_changed_before_it_is_told():
    """Of an order that nobody has asked for: in the next step it is taken before any change."""
    model, step, *_ = trained()

    def by_torch(parameter):
        torch.nn.utils.clip_grad_norm_(parameter, 1e-3, 3.0)

    def unversioned(parameter):
        torch.linalg.vector_norm(parameter.grad, 4.0)
        parameter.grad.data.mul_(0.5)

    for attempt, clip in enumerate((by_torch, by_torch, unversioned, unversioned)):
        step(rows(attempt)).backward()

        def clipped(clip=clip):
            for parameter in model.parameters():
                clip(parameter)

        if attempt % 2 == 0 and dist.get_rank() == 1:
            refused(clipped, "the norm of the gradient of 0.0.weight is asked for on a rank that")
        else:
            clipped()


@row("the norm of the gradient of", ranks=(2,))
def a_norm_of_gradients_that_have_changed_places():
    """Both of each pair are trained on one rank."""
    model, step, *_ = trained(make=lambda: layers(6, 6, 6, 6, 6), split_at={"2": "begin"})
    step(rows(0)).backward()
    biases = [part[0].bias for part in model]
    for one, other in (biases[:2], biases[2:]):
        assert is_absent(one) == is_absent(other)
        one.grad, other.grad = other.grad, one.grad
    torch.nn.utils.get_total_norm([bias.grad for bias in biases])


@row("the norm of the gradient of", ranks=(2,))
def a_norm_of_what_has_been_written_to_its_data():
    """Its owner may have done as much by then, or not yet."""
    model, step, *_ = trained()
    step(rows(0)).backward()
    first, *_, last = model.parameters()
    for parameter in (first, last):
        parameter.grad.data.mul_(7)
        torch.linalg.vector_norm(parameter.grad)


@row(ranks=(2,))
def what_is_computed_into_tensors_that_are_given():
    """Of a gradient that another rank has nothing is computed here; nor is what it goes into."""
    model, step, *_ = trained()
    step(rows(0)).backward()
    narrow = torch.ones(1)
    for parameter in model.parameters():
        kept = torch.ones_like(parameter)
        torch.mul(parameter.grad, 2.0, out=kept)
        assert is_absent(kept) == is_absent(parameter.grad)
        if is_absent(parameter.grad):
            refused(lambda p=parameter: torch.mul(p.grad, 2.0, out=narrow), "aten.mul")


@row(ranks=(1, 2), whole=(2,))
def norms_of_gradients_that_several_calls_add_to():
    """(One device adds up microbatches, we what each call has: rounding.)"""
    model, step, mine, other, theirs = trained()
    for seed in range(3):
        step(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        found, expected = (by_hand(net.parameters()) for net in (model, other))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    stepped(mine, theirs)


@row(ranks=(2,))
def norms_after_the_optimizer_has_stepped():
    """As who logs them reads them: gradients stay until zero_grad()."""
    model, step, mine, other, theirs = trained()
    step(rows(0)).backward()
    accumulated(lambda x: other(x).square().mean(), rows(0))
    mine.step()
    theirs.step()
    assert torch.equal(by_hand(model.parameters()), by_hand(other.parameters()))
    mine.zero_grad(set_to_none=False)
    assert by_hand(model.parameters()) == 0


@row(ranks=(1, 2))
def an_optimizer_by_hand():
    """Its momentum of what other ranks train is theirs, too."""
    model, step, _, other, _ = trained()
    moved = {}
    for seed in range(3):
        step(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        for parameter in (*model.parameters(), *other.parameters()):
            average = moved.setdefault(parameter, torch.zeros_like(parameter.grad))
            average.mul_(0.9).add_(parameter.grad)
            parameter.data -= 0.1 * (average + 0.01 * parameter.grad.sign())
            parameter.grad = None
        same_state(model, other)


@row(ranks=(2,))
def what_else_is_read_of_gradients_of_other_ranks():
    model, step, *_ = trained()
    step(rows(0)).backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    reads = [
        *(lambda g: g.abs().mean(), lambda g: (2 * g).norm(), lambda g: (g * g).sum().item()),
        *(
            lambda g: g.isnan().any(),
            lambda g: torch.isfinite(g).all(),
            lambda g: bool(g.max() > 0),
        ),
        lambda g: torch.stack([g, g]),
    ]
    memory = "what looks for its memory, as saving does, reads "
    refused(lambda: torch.save(kept, io.BytesIO()), memory)
    refused(model.share_memory, (memory, "state of other ranks: "))
    kept = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    for read in reads:
        for grads in (kept, [parameter.grad for parameter in model.parameters()]):
            refused(lambda g=grads, r=read: [r(one) for one in g], ("aten.", "a norm of what"))


@row("rank 1 is at a norm of gradients", ranks=(2,))
def one_rank_alone_takes_a_norm():
    model, step, *_ = trained()
    step(rows(0)).backward()
    if torch.distributed.get_rank():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    step(rows(1))


@row(ranks=(1, 2))
def an_optimizer_that_calls_the_step():
    model, step, mine, other, theirs = trained()

    def closure(loss, optimizer, seed):
        optimizer.zero_grad()
        total = loss(rows(seed))
        if total.requires_grad:
            total.backward()

    def eager(x):
        return accumulated(lambda x: other(x).square().mean(), x)

    for seed in range(3):
        mine.step(partial(closure, step, mine, seed))
        theirs.step(closure=partial(closure, eager, theirs, seed))
        assert torch.equal(by_hand(model.parameters()), by_hand(other.parameters()))
        same_state(model, other)


@row(ranks=(2,))
def an_optimizer_is_stepped_on_one_rank():
    """An error where each parameter has an optimizer of its own would be a mistake: a warning."""
    _, step, mine, *_ = trained()
    rank = torch.distributed.get_rank()
    with said() as found:
        for seed in range(3):
            step(rows(seed)).backward()
            if rank == 0 or seed == 0:
                stepped(mine)
    expected = "rank 1 has stepped no optimizer" if rank else "rank 0 has stepped SGD"
    assert [text.startswith(expected) for text in found] == [True], found


@row(ranks=(2,))
def an_optimizer_of_another_model_is_stepped_on_one_rank():
    """It is no concern of the other ranks."""
    _, step, mine, *_ = trained()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    with said() as found:
        for seed in range(3):
            step(rows(seed)).backward()
            stepped(mine)
            if torch.distributed.get_rank() == 0:
                other.step()
    assert not found, found


@row(ranks=(2,))
def optimizers_of_single_parameters_in_backward():
    """Each is stepped where its parameter is."""
    model, step, *_ = trained()
    own = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for parameter, optimizer in own.items():
        parameter.register_post_accumulate_grad_hook(lambda p, one=optimizer: one.step())
    with said() as found:
        for seed in range(3):
            model.zero_grad()
            step(rows(seed)).backward()
        step(rows(3)).backward()
    assert not [text for text in found if "stepped" in text], found


@row(ranks=(2,), whole=(2,))
def gradients_are_scaled_alike():
    """A scaler, a division by hand, a limit for each value."""
    model, step, mine, other, theirs = trained(2)
    changes = (
        lambda gradient: gradient.div_(3),
        lambda gradient: gradient.clamp_(-1e-4, 1e-4),
        lambda gradient: gradient.mul_(0.25).clamp_(-1e-4, 1e-4),
    )
    for seed, change in enumerate(changes):
        step(rows(seed)).backward()
        accumulated(lambda x: other(x).square().mean(), rows(seed))
        for one in (model, other):
            for parameter in one.parameters():
                if parameter.grad is not None:
                    change(parameter.grad)
        stepped(mine, theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(step(rows(5))).backward()
    accumulated(lambda x: other(x).square().mean(), rows(5))
    scaler.step(mine)
    scaler.update()
    mine.zero_grad()
    stepped(theirs)
    go_on(model, step, mine, other, theirs)


def part_of(optimizer, rank):
    """The state that one of two ranks has."""
    (group,), state = optimizer.param_groups, optimizer.state_dict()
    own = rank == dist.get_rank()
    kept = [at for at, one in enumerate(group["params"]) if is_absent(one) != own]
    return state | {"state": {index: state["state"][index] for index in kept}}


@row("the optimizer has state for", ranks=(2,))
def optimizer_state_of_another_rank():
    _, step, mine, *_ = trained(2)
    mine.load_state_dict(part_of(mine, 1 - dist.get_rank()))
    step(rows(0)).backward()
    mine.step()


@row("0.weight and 2.weight share memory, but are two tensors", ranks=(2,))
def two_parameters_in_one_memory():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = nn.Parameter(model[0].weight.data)
    pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)(rows(0))


@row(ranks=(2,))
def owners_outlive_a_failure():
    model, step, mine, other, theirs = trained(2)
    if dist.get_rank() == 1:
        join_world(torch.device("cpu")).stop(Failure(1, "", "a test"))
    try:
        step(rows(0))
    except pfeife.PipelineError as error:
        assert "a test" in str(error), error
    else:
        raise AssertionError("the failure was lost")
    go_on(model, step, mine, other, theirs)
    again = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2, stages=3)
    go_on(model, again, mine, other, theirs)


@row(ranks=(2,))
def the_model_alone_is_compiled_again_after_training():
    """Dynamo traces the hooks that guard its state, and makes the same graph on all ranks."""
    for compiled in (
        lambda model: pfeife.compile(model, microbatches=2),
        lambda model: (
            model.compile(
                backend="pfeife", options={"microbatches": 2}, dynamic=True, fullgraph=True
            )
            or model
        ),
    ):
        model = Wrapped(layers(6, 6, 6, 6))
        other = copy.deepcopy(model)
        run = compiled(model)
        mine, theirs = sgd(model), sgd(other)
        for seed in range(3):
            run(rows(seed)).square().mean().backward()
            accumulated(lambda x: other(x).square().mean(), rows(seed))  # noqa: B023
            with torch.no_grad():
                found = run(rows(seed, 8))
            assert torch.equal(found, torch.cat([other(part) for part in rows(seed, 8).chunk(2)]))
            stepped(mine, theirs)
        found = pfeife.full_state_dict(model)
        for name, value in other.state_dict().items():
            torch.testing.assert_close(found[name], value)  # backward is of the whole mean
