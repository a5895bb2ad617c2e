"""Pipelines side by side: the loop of one device, gradients averaged or shared out.

The device that everything is compared with adds up as replicas do: the microbatches of each in
their order, then the two sums. So no sum has other addends, or in another order, but that of a
weight that several stages use, and all else is the same bits.
"""

import copy
import functools
import os

import torch
from edges.checkpoints import in_plain_torch, one_folder, twins_alike
from edges.saved import OPTIMIZERS, Pair
from edges.state import layers
from models import case
from rows import Row, add, row
from share import WHOLE
from torch import nn

import pfeife
from pfeife import sched
from pfeife._torch import is_absent
from pfeife.cost import estimate, machine
from pfeife.data.schedule import Do
from pfeife.report import compare_times
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.profile import profile
from pfeife.testing import assert_same, eager_accumulation

CPU_CORE = machine("cpu-core")
RANK = int(os.environ.get("RANK", "0"))


def add_up(one, batch, microbatches: int, replicas: int = 2) -> torch.Tensor:
    """The loss of one device, and its gradients beside those that the model has."""
    halves = zip(*(x.chunk(replicas) for x in batch), strict=True)
    found = []
    for half in halves:
        parts = zip(*(x.chunk(microbatches // replicas) for x in half), strict=True)
        found.append(eager_accumulation(one.step, one.model, list(parts)))
    for name, parameter in one.model.named_parameters():
        mean = sum(part.gradients[name] for part in found) / replicas
        parameter.grad = mean if parameter.grad is None else parameter.grad + mean
    return sum(part.loss for part in found) / replicas


def close(found, expected, near: bool, what: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), what
        for key, value in expected.items():
            close(found[key], value, near, f"{what} {key}")
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            close(one, other, near, what)
    elif isinstance(expected, torch.Tensor) and near:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda m: what + m)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), what
    else:
        assert found == expected, what


def loop(name: str, stages: int, schedule: str, how: str) -> None:
    """Losses, clipped norms, parameters and optimizer state of every rank, and in the end no more
    optimizer state than a share."""
    one = case(name)
    other, near = one.copy(), name == "TiedGPT" and stages > 1
    step = pfeife.compile(
        one.step,
        microbatches=4,
        stages=stages,
        schedule=schedule,
        replicas=2,
        data_parallel=how,
        bucket_bytes=2000,
    )
    make = torch.optim.AdamW if not near else functools.partial(torch.optim.SGD, momentum=0.9)
    optimizers = [make(each.model.parameters(), 0.01) for each in (one, other)]
    slower = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    for seed in range(4):
        calls = 2 if seed == 2 else 1  # gradients of several calls add up
        for call in range(calls):
            batch = one.batch(8, seed + 10 * call)
            loss, alone = step(*batch), add_up(other, batch, 4)
            loss.backward()
            close(loss.detach(), alone, near, f"loss {seed}")
        clip = pfeife.clip_grad_norm_ if seed % 2 else nn.utils.clip_grad_norm_
        norms = [clip(each.model.parameters(), 0.5) for each in (one, other)]
        close(*norms, near, f"norm {seed}")
        for each, scheduler in zip(optimizers, slower, strict=True):
            each.step()
            each.zero_grad()
            scheduler.step()
        if how == "shard":  # what was trained elsewhere is here
            with torch.no_grad():
                parts = [
                    other.step(*part) for part in zip(*(x.chunk(4) for x in batch), strict=True)
                ]
                expected = ((parts[0] + parts[1]) / 2 + (parts[2] + parts[3]) / 2) / 2
                torch.testing.assert_close(step(*batch), expected)
    kept = sum(len(state) > 0 for state in optimizers[0].state.values())
    close(one.model.state_dict(), other.model.state_dict(), near, "parameters")
    close(*(each.state_dict() for each in optimizers), near, "state of the optimizer")
    count = sum(1 for p in one.model.parameters() if not is_absent(p))
    assert 0 < kept < count if how == "shard" else kept == count, (kept, count)


for _ranks, _name, _stages, _schedule, _how, _shared in (
    (2, "GPT", 1, "1f1b", "shard", True),
    (2, "TiedGPT", 1, "gpipe", "average", False),
    (4, "GPT", 2, "zb-h1", "shard", False),
    (4, "TiedGPT", 2, "1f1b", "shard", True),
    (4, "UNet", 4, "interleaved", "average", False),
):
    _label = f"{_name}, {_stages} stages, {_schedule}, {_how}"
    _check = functools.partial(loop, _name, _stages, _schedule, _how)
    _more = () if _shared else (_ranks,)
    add(globals(), Row(_label, _check, ranks=(_ranks,), whole=_more))


@row(ranks=(4,), whole=(4,))
def the_same_bits_whatever_is_reduced_together() -> None:
    """Four addends: a ring would add those of other places of a bucket in another order. Every
    bucket size, with and without overlap; what is reduced beside the rest is seen."""
    one = case("TiedGPT")
    microbatches = [one.batch(2, seed) for seed in range(4)]
    program = pfeife.capture(one.step, *microbatches[0])
    state = pfeife.state_of(program, one.model)
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    for ranks, stages, how in [(1, 3, "average"), (1, 3, "shard"), *[(2, 4, "shard")] * WHOLE]:
        mesh = pfeife.Mesh(ranks, 4 // ranks)
        each = 4 // mesh.replicas
        plan = sched.plan(fused, machine=CPU_CORE, microbatches=each, stages=stages, ranks=ranks)
        sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
        kept: dict[str, torch.Tensor] = {}
        for size, overlap in ((1, True), (3000, True), (3000, False), (2**20, True)):
            whole = pfeife.dp_wrap(mesh, pfeife.Replicas(mesh.replicas, how, size))(sent)
            schedule = sched.verify_schedule(sched.lower(plan.schedule, whole, overlap=overlap))
            pipeline = DistributedPipeline(whole, schedule, mesh=mesh)
            found = pipeline(state, microbatches)
            expected = pfeife.evaluate(whole, state, microbatches)
            mine = {n: g for n, g in expected.gradients.items() if n in pipeline.gradients}
            assert mine and set(found.gradients) == set(mine)
            timeline = profile(pipeline, state, microbatches)
            assert compare_times(sched.predict(whole, schedule, CPU_CORE), timeline)
            reduced = [event for event in timeline.events if event.action.do == Do.REDUCE_GRAD]
            assert reduced and all(event.end > event.start for event in reduced)
            assert_same(pfeife.Result(expected.loss, found.outputs, mine, {}), found, one.tied)
            bits = {n: g for n, g in found.gradients.items() if n in one.tied}
            kept = kept or bits
            assert all(torch.equal(bits[n], kept[n]) for n in bits)


@row(ranks=(2,))
def scaled_gradients_that_overflow_on_one_replica() -> None:
    """The GradScalers of both leave the step out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step(x):
        return model(x).square().mean()

    run = pfeife.compile(step, microbatches=2, replicas=2, data_parallel="shard")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for huge in (False, True, False):
        x = torch.ones(4, 4) * (1e30 if huge else 1)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(run(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert all(same) if huge else not any(same)
    assert scaler.get_scale() == 2.0**9


@row(ranks=(2,))
def steps_over_parts_of_a_model_that_is_shared_out() -> None:
    """Each keeps to the owners that the first has given; one that averages does too."""
    torch.manual_seed(0)
    parts = [nn.Linear(6, 6) for _ in range(4)]
    alone = [nn.Linear(6, 6) for _ in range(4)]
    for mine, theirs in zip(parts, alone, strict=True):
        theirs.load_state_dict(mine.state_dict())

    def loss(layers, x):
        for layer in layers:
            x = layer(x).tanh()
        return x.square().mean()

    given = {"microbatches": 2, "replicas": 2, "stages": 1}
    steps = [
        pfeife.compile(lambda x: loss(parts[1:], x), data_parallel="shard", **given),
        pfeife.compile(lambda x: loss(parts, x), data_parallel="shard", **given),
        pfeife.compile(lambda x: loss(parts[2:], x), **given),
    ]
    wholes = [lambda x: loss(alone[1:], x), lambda x: loss(alone, x), lambda x: loss(alone[2:], x)]
    optimizers = [
        torch.optim.SGD([p for layer in layers for p in layer.parameters()], 0.5, 0.9)
        for layers in (parts, alone)
    ]
    for turn in range(6):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(turn))
        steps[turn % 3](x).backward()
        for part in x.chunk(2):
            (wholes[turn % 3](part) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(parts, alone, strict=True):
            close(mine.state_dict(), theirs.state_dict(), False, f"turn {turn}")


@row(ranks=(2,))
def what_a_script_does_to_copies() -> None:
    """Trained by hand, loaded, run by hand; a checkpoint of one rank alone is refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    alone = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    alone.load_state_dict(model.state_dict())
    given = {"microbatches": 2, "replicas": 2, "data_parallel": "shard"}
    run = pfeife.compile(lambda x: model(x).square().mean(), **given)
    saved = {n: torch.full_like(v, 0.1) for n, v in model.state_dict().items()}
    for seed in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        loss = run(x)
        loss.backward()
        expected = sum(alone(part).square().mean() / 2 for part in x.chunk(2))
        assert torch.equal(loss.detach(), expected.detach()), seed
        expected.backward()
        for parameter in (*model.parameters(), *alone.parameters()):
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.5)
            parameter.grad = None
        if seed == 2:
            model.load_state_dict(saved)
            alone.load_state_dict(saved)
    x = torch.ones(2, 6)
    run(x)
    with torch.no_grad():
        assert torch.equal(model(x), alone(x)), "the model by hand"
    if RANK == 0:
        model.load_state_dict(saved)
    try:
        run(x)
    except ValueError as error:
        assert "has been written to since the last step" in str(error), error
    else:
        raise AssertionError("one rank has loaded another state")


@row(ranks=(2,))
def a_checkpoint_of_what_is_shared_out() -> None:
    """Given whole to one rank that asks, written by its owners, loaded whole, by plain torch, and
    into replicas that average."""
    make, given = functools.partial(layers, 6, 6, 6), {"replicas": 2, "stages": 1}
    pair = Pair(make, "adamw", data_parallel="shard", **given)
    pair.train(2)
    if RANK == 0:
        pair.check()
    pair.train()
    pair.mine.load_state_dict(pair.mine.state_dict())
    pair.train()
    assert 0 < len(pair.mine.state) < len(pair.theirs.state)
    with one_folder() as folder:
        pfeife.Checkpoints(folder, pair.model, pair.mine).save(4)
        join_world(torch.device("cpu")).from_all_ranks("written")
        saved = folder / "step-00000004"
        model = make()
        optimizer = OPTIMIZERS["adamw"](model)
        in_plain_torch(saved, model, optimizer)
        twins_alike(pair, model, optimizer)
        again = Pair(make, "adamw", **given)
        assert pfeife.Checkpoints(folder, again.model, again.mine).load(saved) == 4
        again.twin.load_state_dict(pair.twin.state_dict())
        again.theirs.load_state_dict(copy.deepcopy(pair.theirs.state_dict()))
        again.seed = 4
        for each in (again, pair):
            each.train(2)
            each.check()


@row(ranks=(2,))
def a_penalty_on_copies() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    run = pfeife.compile(
        lambda x: model(x).square().mean(), microbatches=2, replicas=2, data_parallel="shard"
    )
    run(torch.ones(4, 6)).backward()
    loss = run(torch.ones(4, 6)) + sum(p.square().sum() for p in model.parameters())
    name = "0.bias is trained by rank 1" if RANK == 0 else "0.weight is trained by rank 0"
    try:
        loss.backward()
    except ValueError as error:
        assert f"{name}, and something outside" in str(error), error
    else:
        raise AssertionError("each replica has gradients of its own")


@row("rank 1 is at the arguments of this call and rank 0 at optimizer.step() of", ranks=(2,))
def an_optimizer_that_steps_on_one_rank() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    run = pfeife.compile(
        lambda x: model(x).square().mean(), microbatches=2, replicas=2, data_parallel="shard"
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run(torch.ones(4, 6)).backward()
    if RANK == 0:
        optimizer.step()
    run(torch.ones(4, 6))
