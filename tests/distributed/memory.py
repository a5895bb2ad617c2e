"""What every rank is said to hold, beside what it holds."""

import functools
import os
from pathlib import Path

import torch
from models import case
from rows import Row, add, row

import pfeife
from pfeife import sched
from pfeife._torch import is_absent
from pfeife.cost import estimate, machine, memory_curves
from pfeife.ir.messages import holders
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.peak import give_back
from pfeife.runtime.profile import profile_memory

CPU_CORE = machine("cpu-core")


def memory_is_as_said(
    name: str, ranks: int = 2, half: bool = False, deferred: bool = False
) -> None:
    """What every rank is said to hold, and does: all actions, all bytes. With `half` it computes in
    bfloat16, and its master weights are in float32."""
    one, replicas = case(name), 2 // ranks
    microbatches = [one.batch(4, seed) for seed in range(4)]
    if half:
        one.model.bfloat16()
    program = pfeife.capture(one.step, *microbatches[0])
    if half:
        program = pfeife.master_weights()(program)
        one.model.float()
    if deferred:
        program = pfeife.defer_batch_norm()(program)
    state = pfeife.state_of(program, one.model)
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    for policy in ("gpipe", "1f1b"):
        plan = sched.plan(
            fused,
            machine=CPU_CORE,
            microbatches=4 // replicas,
            stages=4,
            ranks=ranks,
            schedule=policy,
        )
        for passes, how in (([], "average"), ([pfeife.split_backward()], "shard")):
            sent = pfeife.compose(pfeife.partition(plan), *passes, pfeife.insert_send_recv())(fused)
            given = pfeife.Replicas(replicas, how, bucket_bytes=3000)
            sent = pfeife.dp_wrap(pfeife.Mesh(ranks, replicas), given)(sent)
            schedule = sched.verify_schedule(sched.lower(plan.schedule, sent))
            optimizer = stepped(one.model, sent, int(os.environ["RANK"]) % ranks)
            apart = how == "shard" and replicas > 1  # each is given its own half of the batch
            predicted = memory_curves(sent, schedule, optimizer=optimizer, replica=0, apart=apart)
            pipeline = DistributedPipeline(sent, schedule, apart=apart)
            batch = microbatches[pipeline.given.start : pipeline.given.stop]
            known = pipeline.known(batch)
            measured = profile_memory(pipeline, state, known, optimizer=optimizer)
            for said, found in zip(predicted, measured, strict=True):
                where = f"{name}, {policy}, {len(passes)} splits, rank {said.rank}"
                assert said.held == found.held, f"{where}: {said.held}, {found.held}"
                for point, other in zip(said.points, found.points, strict=True):
                    assert point == other, f"{where}: {point} was predicted, {other} measured"


@row(ranks=(2,))
def a_rank_gives_back_what_others_train() -> None:
    """Their parameters take memory only when they are loaded; the next step gives it back."""
    width, count = 1024, 8
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=2)

    def train() -> None:
        step(torch.ones(4, width)).backward()
        optimizer.step()
        optimizer.zero_grad()

    kept = [one.data for one in model.parameters()]
    train()
    for one, before in zip(model.parameters(), kept, strict=True):
        assert is_absent(one) == is_absent(before)  # nobody reads what is out of date
    del kept
    foreign = [one for one in model.parameters() if is_absent(one)]
    size = sum(one.nbytes for one in foreign)
    assert 0.4 < size / sum(one.nbytes for one in model.parameters()) < 0.6
    for _ in range(2):
        before = taken()
        with torch.no_grad():
            for one in model.parameters():
                one.clamp_(-1, 1)
        assert taken() < before + 0.1 * size
        model.load_state_dict(pfeife.full_state_dict(model))
        assert taken() > before + 0.9 * size
        train()
        give_back()
        assert taken() < before + 0.1 * size and all(map(is_absent, foreign))


def taken() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def stepped(model: torch.nn.Module, program: pfeife.Program, rank: int) -> torch.optim.Optimizer:
    """An optimizer of what a rank of the first replica trains, after a step."""
    users = holders(program)
    names = [n for n, calls in users.items() if any(c.rank == rank for c in calls)]
    others = {one.name for one in program.reductions if one.owner not in (None, 0)}
    names = [name for name in names if name not in others]
    mine = [model.get_parameter(name).detach().clone() for name in names]
    for parameter in mine:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(mine)
    optimizer.step()
    return optimizer


for _name in ("GPT", "TiedGPT", "BatchNormNet", "DropoutNet", "WideNet"):
    _more = () if _name == "WideNet" else (2,)
    add(globals(), Row(_name, functools.partial(memory_is_as_said, _name), ranks=(2,), whole=_more))
for _name in ("GPT", "TiedGPT"):
    _more = () if _name == "TiedGPT" else (2,)
    _check = functools.partial(memory_is_as_said, _name, half=True)
    add(globals(), Row(f"{_name}, master weights", _check, ranks=(2,), whole=_more))
_check = functools.partial(memory_is_as_said, "BatchNormNet", deferred=True)
add(globals(), Row("BatchNormNet, the whole batch", _check, ranks=(2,)))
for _name in ("TiedGPT", "BatchNormNet"):
    _check = functools.partial(memory_is_as_said, _name, ranks=1)
    _more = () if _name == "BatchNormNet" else (2,)
    add(globals(), Row(f"{_name}, two replicas", _check, ranks=(2,), whole=_more))
