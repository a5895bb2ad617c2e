"""Groups of ranks that share the work of a stage: the bits of `evaluate`, which runs all members in
lockstep."""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import row
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.factors import Place
from pfeife.runtime.distributed.pipeline import DistributedPipeline

CPU_CORE = machine("cpu-core")


class Block(nn.Module):
    """Attention with queries, keys and values of one product, and two layers with a dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [each.unflatten(-1, (4, 4)).transpose(1, 2) for each in qkv]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1)
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))


class Words(nn.Module):
    """Two blocks between a vocabulary and itself."""

    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(24, 16), nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 24, bias=False)

    def forward(self, tokens):
        logits = self.head(self.blocks(self.words(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


PLACES = {
    **{"*.qkv.*": Place(0, 3), "*.out.weight": 1, "*.up.*": 0, "*.down.weight": 1},
    **{"words.weight": 0, "head.weight": 0},
}


def compared(stages: int, members: int, replicas: int, family: str) -> None:
    """A step on ranks against `evaluate`, of which each has its parts."""
    torch.manual_seed(0)
    model = Words()
    microbatches = [torch.randint(24, (2, 6)) for _ in range(4)]
    program = pfeife.capture(lambda tokens: model(tokens), microbatches[0])
    local = pfeife.compose(
        pfeife.shard(PLACES, members),
        pfeife.merge_collectives(),
        pfeife.fuse(),
        pfeife.split_backward(),
    )(program)
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    mesh = pfeife.Mesh(stages, replicas, members=members)
    plan = sched.plan(
        local, machine=CPU_CORE, microbatches=4 // replicas, stages=stages, schedule=family
    )
    ranks = pfeife.compose(pfeife.apply(plan), pfeife.dp_wrap(pfeife.Mesh(stages, replicas)))(local)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, ranks))
    expected = pfeife.evaluate(ranks, pfeife.state_of(ranks, model), microbatches, seed=3)
    pipeline = DistributedPipeline(ranks, schedule, mesh=mesh)
    member = pipeline.mesh.member
    result = pipeline(pfeife.state_of(ranks, model, member=member), microbatches, seed=3)
    assert torch.equal(result.loss, expected.loss), (result.loss, expected.loss)
    splits = {port.fqn: port.split for port in ranks.ports(pfeife.Role.GRADIENT)}
    assert result.gradients
    for name, gradient in result.gradients.items():
        whole, split = expected.gradients[name], splits[name]
        part = split.parts(whole)[member] if split else whole
        assert torch.equal(gradient, part), name


@row(ranks=(2, 4))
def one_stage_of_members() -> None:
    compared(1, int(os.environ["WORLD_SIZE"]), 1, "gpipe")


@row(ranks=(4,))
def stages_of_members() -> None:
    for family in ("gpipe", "1f1b", "zb-h1"):
        compared(2, 2, 1, family)


@row(ranks=(4,))
def replicas_of_members() -> None:
    compared(1, 2, 2, "gpipe")


@row(ranks=(2,))
def a_member_that_fails() -> None:
    """What it raises is told by all, who wait for its part of a sum."""
    torch.manual_seed(0)
    model, tokens = Words(), torch.randint(24, (2, 6))
    program = pfeife.capture(lambda tokens: model(tokens), tokens)
    local = pfeife.compose(pfeife.shard(PLACES, 2), pfeife.fuse())(program)
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    plan = sched.plan(local, machine=CPU_CORE, microbatches=1, stages=1)
    ranks = pfeife.apply(plan)(local)
    pipeline = DistributedPipeline(ranks, sched.lower(plan.schedule, ranks))
    state = pfeife.state_of(ranks, model, member=pipeline.mesh.member)
    broken = functools.partial(pipeline, state, [tokens])
    if dist.get_rank() == 1:
        name = "blocks.0.qkv.weight"
        broken = functools.partial(pipeline, {**state, name: state[name][:1]}, [tokens])
    try:
        broken()
    except (ValueError, RuntimeError) as error:
        assert "rank 1" in str(error) or dist.get_rank() == 1, error
    else:
        raise AssertionError("a part of another shape was taken")
    assert torch.isfinite(pipeline(state, [tokens]).loss)
