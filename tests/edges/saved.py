"""`state_dict()` and `load_state_dict()` of an unchanged script, on ranks that train together."""

import copy
import functools
import gc
import io
import os
import time

import torch
import torch.distributed as dist
from rows import row
from share import WHOLE
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import swa_utils
from torch.testing._internal.two_tensor import TwoTensor

import pfeife
from edges.state import PAIR, Tied, accumulated, refused, rows
from pfeife.runtime.distributed.control.posting import leave
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.failure import Failure


def norms():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3))
    )


def grouped(model):
    """Two groups, of which each has parameters of both ranks, in another order than the model's."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": others[::-1], "weight_decay": 0.0}, {"params": weights, "lr": 0.02}]


class Halved(torch.optim.Optimizer):
    """Momentum in a tensor that is made of two, as 8-bit optimizers keep theirs."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                state["momentum"] = TwoTensor(torch.zeros_like(p), torch.zeros_like(p))
            state["momentum"].mul_(0.9).add_(p.grad)
            p.add_(state["momentum"].a, alpha=-0.1)


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(grouped(model), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(grouped(model), lr=0.01, amsgrad=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01),
    "halved": lambda model: Halved(model.parameters()),
}


class Pair:
    """A model on the ranks and its twin on one device, with an optimizer each."""

    def __init__(self, make=norms, optimizer="momentum", **options):
        self.model = make()
        self.twin = copy.deepcopy(self.model)
        self.step = pfeife.compile(self.loss_of(self.model), microbatches=2, **options)
        self.mine, self.theirs = (OPTIMIZERS[optimizer](m) for m in (self.model, self.twin))
        self.seed = 0

    @staticmethod
    def loss_of(model):
        return lambda x: model(x).square().mean()

    def train(self, steps=1):
        for _ in range(steps):
            x = rows(self.seed, 8)
            loss = self.step(x)
            loss.backward()
            assert torch.equal(loss, accumulated(self.loss_of(self.twin), x))
            for optimizer in (self.mine, self.theirs):
                optimizer.step()
                optimizer.zero_grad()
            self.seed += 1

    def check(self):
        alike(self.model.state_dict(), self.twin.state_dict())
        alike(self.mine.state_dict(), self.theirs.state_dict())


def alike(found, expected, at=""):
    """The same keys in the same order, the same types, shapes, dtypes and bits."""
    assert type(found) is type(expected), (at, found, expected)
    if isinstance(found, TwoTensor):
        for part in ("a", "b"):
            alike(getattr(found, part), getattr(expected, part), f"{at}.{part}")
    elif isinstance(found, torch.Tensor):
        kinds = [
            (one.shape, one.dtype, one.stride(), one.requires_grad) for one in (found, expected)
        ]
        assert kinds[0] == kinds[1] and torch.equal(found, expected), (at, found, expected)
    elif isinstance(found, dict):
        assert list(found) == list(expected), (at, list(found), list(expected))
        for key in found:
            alike(found[key], expected[key], f"{at}.{key}")
    elif isinstance(found, list | tuple):
        assert len(found) == len(expected), at
        for index, pair in enumerate(zip(found, expected, strict=True)):
            alike(*pair, f"{at}.{index}")
    else:
        assert found == expected, at


@row(ranks=(2,))
def by_rank_zero_alone():
    """Between any two steps, several times."""
    for optimizer in OPTIMIZERS if WHOLE else ("momentum", "adagrad"):
        pair = Pair(optimizer=optimizer)
        for _ in range(3):
            pair.train()
            if dist.get_rank() == 0:
                pair.check()
                pair.check()


@row(ranks=(2,))
def states_that_are_made_of_other_tensors():
    """They come as what they are, and go on after they were loaded."""
    pair = Pair(optimizer="halved")
    pair.train(2)
    pair.check()
    for optimizer, other in ((pair.mine, pair.theirs), (pair.theirs, pair.mine)):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    pair.train()
    pair.check()


@row(ranks=(2, 3), whole=(2, 3))
def by_another_rank_alone():
    """In one dict, as scripts save it, in a file."""
    pair = Pair()
    last = int(os.environ["WORLD_SIZE"]) - 1
    for _ in range(2):
        pair.train()
        if dist.get_rank() == last:
            file = io.BytesIO()
            whole = {"model": pair.model.state_dict(), "optimizer": pair.mine.state_dict()}
            torch.save(whole, file)
            file.seek(0)
            found = torch.load(file)
            alike(dict(found["model"]), dict(pair.twin.state_dict()))
            alike(found["optimizer"], pair.theirs.state_dict())


@row(ranks=(2, 3), whole=(3,))
def by_all_ranks():
    """Also between backward and the optimizer's step, and right before other state is loaded."""
    pair = Pair()
    pair.train()
    first = [copy.deepcopy((pair.twin.state_dict(), pair.theirs.state_dict())) for _ in range(2)]
    for _ in range(2):
        x = rows(pair.seed, 8)
        pair.step(x).backward()
        accumulated(pair.loss_of(pair.twin), x)
        time.sleep(0.2 * dist.get_rank())
        pair.check()
        pair.mine.step()
        pair.theirs.step()
        time.sleep(0.2 * dist.get_rank())
        pair.check()
        pair.mine.zero_grad()
        pair.theirs.zero_grad()
        pair.seed += 1
    pair.check()
    pairs = ((pair.model, pair.mine), (pair.twin, pair.theirs))
    for (model, optimizer), (state, states) in zip(pairs, first, strict=True):
        model.load_state_dict(state)
        optimizer.load_state_dict(states)  # keeps the tensors
    pair.check()
    pair.train(2)
    pair.check()


@row(ranks=(2, 3), whole=(3,))
def before_a_barrier_of_all():
    pair = Pair(optimizer="adamw")
    for _ in range(2):
        pair.train()
        if dist.get_rank() == 0:
            pair.check()
        dist.barrier()


@row(ranks=(2,))
def of_a_part_that_one_rank_has_whole():
    """That rank asks nobody, and yet lets the other one ask before it changes the part."""
    pair = Pair()
    for rank, at in ((0, 0), (1, 2)):
        pair.train()
        parts = [pair.model[at], pair.twin[at]]
        optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
        time.sleep(0.0 if dist.get_rank() == rank else 0.5)
        alike(parts[0].state_dict(), parts[1].state_dict())
        alike(optimizers[0].state_dict(), optimizers[1].state_dict())
        for part in parts:
            part.load_state_dict({name: 2 * value for name, value in part.state_dict().items()})
    pair.train()
    pair.check()


@row(ranks=(2,))
def of_tied_weights():
    """Both names have one memory, in a file too."""
    torch.manual_seed(0)
    model = Tied()
    step = pfeife.compile(lambda x: model(x).square().mean(), **PAIR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(rows(0)).backward()
    optimizer.step()
    whole = pfeife.full_state_dict(model)
    found = nn.ModuleDict({"within": model}).state_dict()
    alike({name.removeprefix("within."): one for name, one in found.items()}, whole)
    tied = [found[f"within.{name}.weight"].data_ptr() for name in ("first", "last")]
    assert tied[0] == tied[1]
    alike(
        dict(model.middle.state_dict()), {n[7:]: v for n, v in whole.items() if n[:7] == "middle."}
    )


@row(ranks=(2,), whole=(2,))
def with_buffers_that_no_step_reads():
    """Neither of these can be NaN, nor be looked into by strides."""
    model = norms()
    buffers = {
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    for name, value in buffers.items():
        model[0].register_buffer(name, value)
    pfeife.compile(lambda x: model(x).square().mean(), **PAIR)(rows(0)).backward()
    found = pfeife.full_state_dict(model)
    for name, value in buffers.items():
        one, other = (
            each.unbind() if name == "nested" else [each.to_dense() if each.is_sparse else each]
            for each in (found[f"0.{name}"], value)
        )
        pairs = zip(one, other, strict=True)
        assert all(str(mine) == str(theirs) for mine, theirs in pairs), name


@row(ranks=(2,), whole=(2,))
def of_two_optimizers():
    """They are alike but for their parameters, and one is of a model that no rank shares."""
    pair = Pair()
    halves = [[*pair.model[:2].parameters()], [*pair.model[2:].parameters()]]
    others = [[*pair.twin[:2].parameters()], [*pair.twin[2:].parameters()]]
    alone = nn.Linear(2, 2)
    mine, theirs = ([torch.optim.AdamW(one) for one in half] for half in (halves, others))
    for seed in range(2):
        x = rows(seed, 8)
        pair.step(x).backward()
        accumulated(pair.loss_of(pair.twin), x)
        for optimizer in (*mine, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            own = torch.optim.Adam(alone.parameters())
            alone(torch.ones(2)).sum().backward()
            own.step()
            own.state_dict()
            for one, other in zip(mine, theirs, strict=True):
                alike(one.state_dict(), other.state_dict())


@row(ranks=(2,))
def in_the_wrong_moment():
    """Another rank has gone on: words that say so, and what to do; the ranks go on."""
    pair = Pair()
    pair.train()
    for step in (pair.mine.step, lambda: pair.model.load_state_dict(pair.twin.state_dict())):
        x = rows(pair.seed, 8)
        pair.step(x).backward()
        if dist.get_rank() == 0:
            dist.barrier()
            refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none of")
            refused(pair.mine.state_dict, "rank 1 trains a part of the state, and has none of")
            step()
        else:
            step()
            dist.barrier()
    pair.model.load_state_dict(pair.twin.state_dict())
    pair.mine.load_state_dict(copy.deepcopy(pair.theirs.state_dict()))
    pair.mine.zero_grad()
    pair.train()
    pair.check()


@row(ranks=(2,))
def of_a_rank_that_does_not_come_to_rest():
    """It computes, or is in a collective that writes to what it is asked for: words in time."""
    pair = Pair(timeout=4)
    pair.train()
    words = "rank 1 trains a part of the state, and has none of this point of the script: its "
    weight = pair.model[2][0].weight.data
    if dist.get_rank() == 0:
        weight = pair.twin[2][0].weight.data
        refused(pair.model.state_dict, f"{words}script did not come to rest there (before a step")
        dist.barrier()
        refused(pair.model.state_dict, f"{words}script did not come to rest there (before a step")
    else:
        time.sleep(2.5)
        dist.barrier()
    dist.broadcast(weight, 0)
    pair.train()
    pair.check()


@row(ranks=(2,))
def what_one_rank_has_done_alone():
    """The others are at the next call and never come to where it asks."""
    pair = Pair()
    pair.train()
    if dist.get_rank() == 0:
        pair.mine.step()
        refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none of")
    pair.step(rows(0, 8))


def trained_pair():
    """After a step, with this rank's number."""
    pair = Pair()
    pair.train()
    return pair, dist.get_rank()


def each(change, *models):
    """Changes every parameter by hand."""
    for model in models:
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)


@row(ranks=(2,))
def what_is_written_by_hand_before_that():
    """The other rank, which comes to it later, answers when it has written as often and rests; what
    all write after that is no matter."""
    pair, rank = trained_pair()
    for change in (lambda p: p.mul_(0.5), lambda p: p.copy_(p + 1).clamp_(-1, 1)):
        each(change, pair.twin)
        time.sleep(0.2 * rank)
        each(lambda p, change=change: (time.sleep(0.01 * rank), change(p)), pair.model)
        if rank == 0:
            alike(pair.model.state_dict(), pair.twin.state_dict())
        dist.barrier()
    pair.train()
    pair.check()


@row(ranks=(2,))
def averages_that_are_swapped_in_and_out():
    """Right while they are in on both ranks; refused where the other has put back what it had, or
    never does it."""
    pair, rank = trained_pair()
    for stays, right in ((0, True), (0.5, False)):
        kept = [p.detach().clone() for p in pair.model.parameters()]
        each(lambda p: p.mul_(0.5), pair.model, pair.twin)
        if rank == 0:
            time.sleep(stays)
            if right:
                alike(pair.model.state_dict(), pair.twin.state_dict())
            else:
                refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none")
        if right:
            dist.barrier()
        with torch.no_grad():
            torch._foreach_copy_(list(pair.model.parameters()), kept)
        each(lambda p: p.mul_(2), pair.twin)
        pair.train()
    if rank == 0:
        each(lambda p: p.mul_(0.5), pair.model)
        refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none")
        each(lambda p: p.mul_(2), pair.model)
    refused(
        pair.train, "2.0.weight was written to by hand 2 times on rank 0, and 0 times on rank 1"
    )


@row(ranks=(2,))
def what_one_rank_has_written_alone_after_that():
    """What was given is of the moment of the question; the next question is refused."""
    pair, rank = trained_pair()
    if rank == 0:
        alike(pair.model.state_dict(), pair.twin.state_dict())
    dist.barrier()
    for model in (pair.twin, pair.model)[: 1 + rank]:
        with torch.no_grad():
            model[2][0].weight.mul_(0.5)
    if rank == 0:
        refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none of this")
    dist.barrier()
    pair.train()
    pair.check()


@row(ranks=(2,))
def what_is_written_by_data():
    """The other rank has it later, and answers at the next call, where it has come to all of it.
    What the script does to the parameters of one rank alone the other cannot know: refused."""
    pair, rank = trained_pair()

    def all_by_data(model):
        each(lambda p: p.data.mul_(0.5), model)

    def one_by_data(model):
        model[2][0].weight.data[0, 1] = 2.0

    for change in (all_by_data, one_by_data):
        time.sleep(0.2 * rank)
        change(pair.model)
        change(pair.twin)
        if rank == 0 and change is all_by_data:
            alike(pair.mine.state_dict(), pair.theirs.state_dict())  # which nobody has written to
            alike(pair.model.state_dict(), pair.twin.state_dict())
        elif rank == 0:
            refused(
                pair.model.state_dict, "rank 1 trains a part of the state, and has none of this"
            )
        pair.train()
    pair.check()


@row(ranks=(2,))
def a_critic_of_one_rank_is_clamped_by_data():
    """Of its module the rank that trains it has all: nothing shows that it has not written."""
    torch.manual_seed(0)
    maker, critic = nn.Linear(6, 6), nn.Linear(6, 6)
    twins = copy.deepcopy((maker, critic))
    cut = {"split_at": {"critic": "begin"}}
    step = pfeife.compile(lambda x: critic(maker(x)).square().mean(), microbatches=2, **cut)
    for seed in range(3):
        step(rows(seed)).backward()
        accumulated(lambda x: twins[1](twins[0](x)).square().mean(), rows(seed))
        for models in ((maker, critic), twins):
            optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.5)
            optimizer.step()
            optimizer.zero_grad()
            each(lambda p: p.data.clamp_(-0.1, 0.1), models[1])
        if dist.get_rank() == seed % 2:
            alike(critic.state_dict(), twins[1].state_dict())
            alike(maker.state_dict(), twins[0].state_dict())


@row(ranks=(2,))
def an_average_that_one_rank_alone_has_swapped_in():
    """By `.data`, which nobody counts where the values are: the others have not done it."""
    pair, rank = trained_pair()
    if rank == 0:
        for parameter in pair.model.parameters():
            parameter.data.mul_(0.5)
        refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none of this")
        for parameter in pair.model.parameters():
            parameter.data.mul_(2)
    words = "2.0.weight was written to by its .data after"
    refused(pair.train, f"rank 0: ValueError: {words}" if rank else words)


@row(ranks=(2,))
def an_optimizers_state_that_is_written_to_after_that():
    """On the rank that has given it, and on the one that was given it."""
    pair, rank = trained_pair()
    weights = pair.model[0][0].weight, pair.model[2][0].weight
    for late, weight in enumerate(weights):
        if rank == 0:
            pair.mine.state_dict()
        dist.barrier()
        if rank == late:
            pair.mine.state[weight]["momentum_buffer"].zero_()
        name = f"the state of {2 * late}.0.weight was written to outside of step()"
        words = name if rank == late else f"rank {late}: ValueError: {name}"
        refused(lambda: pair.step(rows(0, 8)), words)


@row(ranks=(2,))
def what_is_kept():
    """It stays as it was, on every rank and for all of the state."""
    pair = Pair(optimizer="adamw")
    pair.train()
    kept = pair.model.state_dict(), pair.mine.state_dict()
    before = copy.deepcopy((pair.twin.state_dict(), pair.theirs.state_dict()))
    pair.train()
    alike(kept, before)
    for pairs in ((pair.model, pair.mine), (pair.twin, pair.theirs)):
        for one, state in zip(pairs, copy.deepcopy(before), strict=True):
            one.load_state_dict(state)
    alike(kept, before)
    pair.train()
    pair.check()


@row(ranks=(2,))
def what_is_written_to_what_was_given():
    """On one device it would change the model: an error on all ranks at the next call."""
    pair, rank = trained_pair()
    if rank == 0:
        pair.model.state_dict()["0.0.weight"].zero_()
    words = "0.0.weight in what state_dict() has given was written to"
    refused(lambda: pair.step(rows(0, 8)), f"rank 0: ValueError: {words}" if rank else words)
    if rank == 0:
        pair.mine.state_dict()["state"][0]["momentum_buffer"].zero_()
    words = "the state of 2.1.bias in what state_dict() has given was written to"
    refused(lambda: pair.step(rows(0, 8)), f"rank 0: ValueError: {words}" if rank else words)
    pair.train()
    pair.check()


@row(ranks=(2,))
def the_tensors_themselves():
    """keep_vars=True asks for them."""
    pair = Pair()
    pair.train()
    refused(lambda: pair.model.state_dict(keep_vars=True), "state of other ranks: ")
    pair.check()


@row(ranks=(2,))
def by_the_tools_of_torch():
    """Distributed checkpoints' own functions: whole on every rank, by names."""
    pair = Pair(optimizer="adamw")
    pair.train()
    alike(get_state_dict(pair.model, pair.mine), get_state_dict(pair.twin, pair.theirs))


@row(ranks=(2,), whole=(2,))
def of_an_optimizer_that_is_compiled():
    """Its steps are counted as others are."""
    pair = Pair(optimizer="adamw")
    steps = [torch.compile(one.step, backend="eager") for one in (pair.mine, pair.theirs)]
    for _ in range(3):
        x = rows(pair.seed, 8)
        pair.step(x).backward()
        accumulated(pair.loss_of(pair.twin), x)
        for step in steps:
            step()
        if dist.get_rank() == 0:
            pair.check()
        pair.mine.zero_grad()
        pair.theirs.zero_grad()
        pair.seed += 1


@row(ranks=(2,), whole=(2,))
def of_optimizers_of_single_parameters():
    """Ranks step other ones, each where its parameter is, within a backward that all make."""
    pair, rank = trained_pair()

    def step(parameter, optimizer):
        optimizer.step()
        optimizer.zero_grad()

    mine = [torch.optim.SGD([p], 0.1, momentum=0.9) for p in pair.model.parameters()]
    for own in mine:
        (parameter,) = own.param_groups[0]["params"]
        parameter.register_post_accumulate_grad_hook(functools.partial(step, optimizer=own))
    theirs = [torch.optim.SGD([p], 0.1, momentum=0.9) for p in pair.twin.parameters()]
    for seed in range(3):
        x = rows(seed, 8)
        loss = pair.step(x)
        if rank == 0 and seed == 1:  # the other one goes on with its backward
            refused(pair.model.state_dict, "rank 1 trains a part of the state, and has none of")
        loss.backward()
        accumulated(pair.loss_of(pair.twin), x)
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 or seed == 2:
            alike(pair.model.state_dict(), pair.twin.state_dict())
            alike([own.state_dict() for own in mine], [one.state_dict() for one in theirs])


@row(ranks=(2,))
def of_an_optimizer_whose_state_was_looked_at():
    """That makes an empty entry for what another rank trains, or one of the script's own."""
    pair, rank = trained_pair()
    for model, optimizer in ((pair.model, pair.mine), (pair.twin, pair.theirs)):
        for parameter in model.parameters():
            optimizer.state[parameter]
            optimizer.state[parameter]["seen"] = 1
    if rank == 0:
        pair.check()
    pair.train()
    pair.check()


@row(ranks=(2,))
def many_times():
    """No thread, file descriptor or tensor is left behind. Threads that are about to wait for the
    next question may still have some of the last one."""
    pair = Pair()
    pair.train()

    def resources():
        time.sleep(0.5)  # a thread that has answered lets go of that
        gc.collect()
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        return tensors, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    pair.check()
    before = resources()
    for _ in range(20):
        pair.check()
    after = resources()
    assert all(now <= then + 5 for now, then in zip(after, before, strict=True)), (before, after)


def after(failure, words):
    """Every rank is told of a failure; after the next step state comes over new connections."""
    pair = Pair()
    pair.train()
    failure(join_world(torch.device("cpu")))
    for ask in (pair.model.state_dict, lambda: pair.step(rows(0, 8))):
        try:
            ask()
        except pfeife.PipelineError as error:
            assert words in str(error), error
            break
    else:
        raise AssertionError("the failure was lost")
    pair.train()
    pair.check()


@row(ranks=(2,))
def after_a_failure():
    after(lambda world: world.rank and world.stop(Failure(1, "", "a test")), "a test")


@row(ranks=(2,))
def after_a_question_that_is_none():
    """Who cannot answer says so, instead of keeping quiet."""

    def ask(world):
        if world.rank == 0:
            world.monitor.ask(lambda: leave(world.monitor.store, 1, '{"tag": "one"}'))

    after(ask, "rank 1, an answer to state_dict(): ValueError: ")


@row(ranks=(2,))
def after_the_process_group_is_destroyed():
    """The next step makes another one, and the ranks go on with what they have."""
    pair = Pair()
    pair.train()
    dist.destroy_process_group()
    pair.train()
    pair.check()
    pair.train()


@row(ranks=(2,))
def an_optimizer_that_is_loaded_on_one_rank():
    """After its first step, and before: refused on all."""
    pair = Pair()
    pair.train()
    state = copy.deepcopy(pair.mine.state_dict())
    words = "an optimizer has been given state on ranks [0], and on the others none"
    if dist.get_rank() == 0:
        pair.mine.load_state_dict(state)
    refused(lambda: pair.step(rows(0, 8)), words)
    pair.train()
    again = OPTIMIZERS["momentum"](pair.model)
    if dist.get_rank() == 0:
        again.load_state_dict(state)
    pair.step(rows(0, 8)).backward()
    again.step()
    refused(lambda: pair.step(rows(0, 8)), words)


@row(ranks=(2,))
def what_is_loaded_before_the_first_step():
    """A script that resumes; each rank keeps the optimizer's state for what it trains."""
    pair = Pair(optimizer="adamw")
    pair.train()
    whole = copy.deepcopy((pair.model.state_dict(), pair.mine.state_dict()))
    again = Pair(optimizer="adamw")
    for model, optimizer in ((again.model, again.mine), (again.twin, again.theirs)):
        model.load_state_dict(whole[0])
        optimizer.load_state_dict(copy.deepcopy(whole[1]))
    assert len(again.mine.state) == len(again.theirs.state)
    again.train(2)
    assert len(again.mine.state) < len(again.theirs.state)
    again.check()


@row(ranks=(2,))
def the_average_of_diffusers():
    """It writes `.data`: put into its place, it is evaluated and whole there, and then the model
    comes back."""
    from diffusers.training_utils import EMAModel

    pair = Pair(optimizer="adamw")
    nets = pair.model, pair.twin
    averages = [EMAModel(net.parameters(), decay=0.8, use_ema_warmup=True) for net in nets]
    evaluated = pfeife.compile(lambda x: pair.model(x).square().mean(), microbatches=2)
    for at in range(3):
        pair.train()
        for average, net in zip(averages, nets, strict=True):
            average.step(net.parameters())
            average.store(net.parameters())
            average.copy_to(net.parameters())
        x = rows(at, 8)
        with torch.no_grad():
            wanted = sum(pair.twin(part).square().mean() / 2 for part in x.chunk(2))
            assert torch.equal(evaluated(x), wanted)
        whole = pfeife.full_state_dict(pair.model)
        for name, value in pair.twin.state_dict().items():
            assert torch.equal(whole[name], value), name
        for average, net in zip(averages, nets, strict=True):
            average.restore(net.parameters())
        pair.check()


AVERAGES = {
    "moving": lambda net: swa_utils.AveragedModel(
        net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
    ),
    "slower": lambda net: swa_utils.AveragedModel(
        net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.99)
    ),
    "mean": lambda net: swa_utils.AveragedModel(net, use_buffers=True),
    "by hand": lambda net: copy.deepcopy(net).requires_grad_(False),
}


def averaged(average, net):
    """Takes in what a model is now."""
    if isinstance(average, swa_utils.AveragedModel):
        average.update_parameters(net)
        return
    with torch.no_grad():
        for mine, p in zip(average.parameters(), net.parameters(), strict=True):
            mine.mul_(0.9).add_(p, alpha=0.1)


@row(ranks=(2,))
def averages_that_are_older_than_the_first_step():
    """No step evaluates them: each is whole in its `state_dict()` on any one rank, from the call on
    that comes after its first update, though two have the same layout and one is begun later. So is
    a module that was made by itself and loaded. Before that call it is refused."""
    pair = Pair(norms)
    nets = pair.model, pair.twin
    averages = {name: [make(net) for net in nets] for name, make in AVERAGES.items()}
    begun = dict.fromkeys(averages, 0) | {"slower": 2, "loaded": 1}
    for at in range(5):
        pair.train()
        if at == 1:
            averages["loaded"] = [norms() for _ in nets]
            for average, net in zip(averages["loaded"], nets, strict=True):
                average.load_state_dict(net.state_dict())
        updated = [name for name in averages if at >= begun[name]]
        for name in updated:
            for average, net in zip(averages[name], nets, strict=True):
                averaged(average, net)
        if dist.get_rank() == at % 2:
            for name in updated:
                average, wanted = averages[name]
                file = io.BytesIO()
                if at == begun[name]:
                    refused(
                        lambda one=average, into=file: torch.save(one.state_dict(), into),
                        "state of other ranks: ",
                    )
                    continue
                torch.save(average.state_dict(), file)
                file.seek(0)
                alike(torch.load(file), wanted.state_dict(), f"{name} {at}")
        dist.barrier()
    for average, wanted in averages.values():
        alike(pfeife.full_state_dict(average), dict(wanted.state_dict()))


@row(ranks=(2,))
def a_copy_that_is_written_to_where_it_is():
    """Not yet on the rank that has a part of it, which waits in a barrier before that: it has no
    answer there."""
    pair = Pair()
    pair.train()
    best, expected = copy.deepcopy(pair.model), copy.deepcopy(pair.twin)

    def halve():
        with torch.no_grad():
            for p in (*best.parameters(), *expected.parameters()):
                p.mul_(0.5)

    if dist.get_rank() == 0:
        halve()
        refused(best.state_dict, "rank 1 trains a part of the state, and has none of this point")
        dist.barrier()
    else:
        dist.barrier()
        halve()
    if dist.get_rank() == 0:
        alike(best.state_dict(), expected.state_dict())
    dist.barrier()


@row(ranks=(2,))
def an_average_of_one_rank_alone():
    """Another one, which all ranks have, is not taken for it: both are refused."""
    pair = Pair(norms)
    mine, all_have = copy.deepcopy(pair.model), copy.deepcopy(pair.model)
    for _ in range(2):
        pair.train()
        if dist.get_rank() == 0:
            averaged(mine, pair.model)
        averaged(all_have, pair.model)
    if dist.get_rank() == 0:
        for average in (mine, all_have):
            refused(
                lambda one=average: torch.save(one.state_dict(), io.BytesIO()),
                "state of other ranks: ",
            )
    dist.barrier()
