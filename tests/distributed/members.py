"""Groups of ranks that share the work of a stage: the bits of `evaluate`, which runs all members in
lockstep."""

import copy
import functools
import importlib
import os
import shutil
import tempfile
from operator import attrgetter
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rows import row
from sent import CHEAP_TO_COPY, DEAR_TO_COMPUTE
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import pfeife
from pfeife import sched
from pfeife._torch import is_absent
from pfeife.backend.building.compiled import Compiled
from pfeife.cost import estimate, machine, memory_curves, timing_of
from pfeife.data.link import LinkKind
from pfeife.data.network import Network
from pfeife.data.schedule import Do
from pfeife.factors import Place
from pfeife.integrations.transformers import pipelined
from pfeife.ir.members import (
    ALONE,
    MEANING,
    added_rows,
    addend,
    all_gather,
    all_reduce,
    all_to_all,
    arrived,
    fetched_rows,
    joined_rows,
    own_rows,
    part,
    placed_rows,
    reduce_scatter,
    shift,
)
from pfeife.ir.nodes import is_sized_by_data
from pfeife.lowering.telling import aligned
from pfeife.runtime.distributed.links.collectives import Collectives
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.profile import profile_memory

CPU_CORE = machine("cpu-core")


class Block(nn.Module):
    """Attention with queries, keys and values of one product, and two layers with a dropout."""

    def __init__(self, dropout=0.1, heads=4):
        super().__init__()
        self.dropout, self.heads = dropout, heads
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).chunk(3, -1)
        heads = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in qkv]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout)
        return x + self.down(F.dropout(F.gelu(self.up(x)), self.dropout))


class Words(nn.Module):
    """Two blocks between a vocabulary and itself."""

    def __init__(self, dropout=0.1, heads=4):
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.blocks = nn.Sequential(Block(dropout, heads), Block(dropout, heads))
        self.head = nn.Linear(16, 24, bias=False)

    def forward(self, tokens):
        logits = self.head(self.blocks(self.words(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


PLACES = {
    **{"*.qkv.*": Place(0, 3), "*.out.weight": 1, "*.up.*": 0, "*.down.weight": 1},
    **{"words.weight": 0, "head.weight": 0},
}


def compared(
    stages: int,
    members: int,
    replicas: int,
    family: str,
    places=PLACES,
    prices=None,
    attention="gather",
    made=None,
    sent=frozenset(),
    rows=1,
    **words,
) -> None:
    """A step on ranks against `evaluate`, of which each has its parts."""
    torch.manual_seed(0)
    model = (made or Words)(**words)
    microbatches = [torch.randint(24, (rows, 12)) for _ in range(4)]
    program = pfeife.capture(
        lambda tokens: model(tokens), microbatches[0], loss_reduction="mean" if made else None
    )
    local = pfeife.compose(
        pfeife.shard(places, members, prices=prices, attention=attention),
        pfeife.fuse(),
        pfeife.split_backward(),
    )(program)
    bodies = [*local.bodies.values()]
    assert sent <= {node.target for body in bodies for node in body.graph.nodes}
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    mesh = pfeife.Mesh(stages, replicas, members=members)
    plan = sched.plan(
        local, machine=CPU_CORE, microbatches=4 // replicas, stages=stages, schedule=family
    )
    wrapped = pfeife.dp_wrap(pfeife.Mesh(stages, replicas))
    beside = pfeife.overlap(timing_of(CPU_CORE))
    ranks = pfeife.compose(pfeife.apply(plan), wrapped, beside)(local)
    assert arrived in {n.target for body in ranks.bodies.values() for n in body.graph.nodes}
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


@row(ranks=(2, 4))
def a_sequence_that_is_cut() -> None:
    """Attention of one head, which is causal: each member has some of the queries, and all keys, or
    its own ones, which go around."""
    members = int(os.environ["WORLD_SIZE"])
    cut = {"places": {}, "prices": DEAR_TO_COMPUTE, "dropout": 0.0, "heads": 1}
    for attention in ("gather", "ring"):
        compared(1, members, 1, "gpipe", attention=attention, **cut)
        if members == 4:
            compared(2, 2, 1, "zb-h1", attention=attention, **cut)


@row(ranks=(4,))
def replicas_of_members() -> None:
    compared(1, 2, 2, "gpipe")


def gives_what_it_means(transport, members, collective, values, *args) -> None:
    """One collective in a graph of its own, of a value of each member; arguments may be lists of
    these as well."""
    graph = fx.Graph()
    each = [value for value in (values, *args) if isinstance(value, list)]
    reads = {id(value): graph.placeholder(f"x{at}") for at, value in enumerate(each)}
    for value in each:
        reads[id(value)].meta = {"val": value[0], "sized_by_data": True}
    own = (reads.get(id(value), value) for value in (values, *args))
    graph.output(graph.call_function(collective, (*own,)))
    body = Collectives(lambda: transport).bound(fx.GraphModule({}, graph))
    member = transport.group.place
    expected = MEANING[collective](values, *args)[member]
    given = body(*(value[member] for value in each))
    assert torch.equal(given, expected), (collective.__name__, args)
    # What is computed of it may depend on how it lies in memory.
    wide = [dim for dim, size in enumerate(expected.shape) if size > 1 and expected.numel()]
    strides = [[each.stride(dim) for dim in wide] for each in (given, expected)]
    assert collective is addend or strides[0] == strides[1], (collective.__name__, args, strides)


@row(ranks=(2, 4))
def each_collective() -> None:
    """Bit for bit, of small and large values, also of sizes that members do not divide."""
    members = int(os.environ["WORLD_SIZE"])
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    program = pfeife.capture(lambda x: model(x).mean(), x)
    local = pfeife.compose(pfeife.shard({"weight": 0}, members), pfeife.fuse())(program)
    local = pfeife.annotate(estimate(local, CPU_CORE))(local)
    plan = sched.plan(local, machine=CPU_CORE, microbatches=1, stages=1)
    ranks = pfeife.apply(plan)(local)
    pipeline = DistributedPipeline(ranks, sched.lower(plan.schedule, ranks))
    check = functools.partial(gives_what_it_means, pipeline.transport.for_step(), members)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((), (3, 5), (257, 129)):
            values = [(torch.randn(shape) * 100).to(dtype) for _ in range(members)]
            check(all_reduce, values, members)
            check(all_reduce, values, members, "max")
            check(addend, values, members)
        values = [(torch.randn(8, 16) * 100).to(dtype) for _ in range(members)]
        check(all_reduce, [value.t() for value in values], members)
        check(all_gather, [value[0, :1].expand(4) for value in values], 0, 1, members)
        values = [(torch.randn(8, 16, 5) * 100).to(dtype) for _ in range(members)]
        for by in (1, -1, members - 1):
            check(shift, values, by, members)
            check(shift, [value.transpose(0, 1) for value in values], by, members)
        for place in ((0, 1), (1, 1), (1, 2)):
            check(reduce_scatter, values, *place, members)
            check(all_gather, values, *place, members)
            check(part, values, *place, members)
            for other in ((0, 1), (1, 2), (1, 4)):
                check(all_to_all, values, *place, *other, members)
        for counts in ([3, 1, 0, 4], [0, 8, 0, 0], [2, 2, 2, 2])[: None if members == 4 else 2]:
            own = [*counts[: members - 1], sum(counts[members - 1 :])]
            rows_are_exchanged(check, members, own, dtype)


def rows_are_exchanged(check, members, counts, dtype) -> None:
    """Of members with so many rows of 8 each, by an index that repeats some and leaves out some."""
    whole = (torch.randn(8, 5) * 100).to(dtype)
    chosen, equal = [*whole.split(counts)], [*whole.chunk(members)]
    starts = [torch.tensor(counts).cumsum(0) - torch.tensor(counts)] * members
    check(own_rows, [whole] * members, starts, 0, members)
    check(own_rows, [whole.t()] * members, starts, 1, members)
    check(joined_rows, chosen, 0, members)
    check(joined_rows, [value.t() for value in chosen], 1, members)
    check(placed_rows, chosen, starts, 0, members)
    index = [torch.tensor([7, 0, 0, 3, 3, 3, 5, 1])] * members
    check(fetched_rows, chosen, index, starts, None, members)
    check(fetched_rows, equal, index, None, starts, members)
    check(added_rows, chosen, equal, index, starts, None, members)
    check(added_rows, equal, chosen, index, None, starts, members)


@row(ranks=(2, 4))
def memory_of_members_is_as_said() -> None:
    """By the account, to the byte; the least of three steps, since torch's threads may still have
    what they worked on."""
    members = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, few, many = Words(), torch.randint(24, (8, 6)), torch.randint(24, (8, 130))
    beside = pfeife.overlap(timing_of(CPU_CORE))
    cut, way = {"*.weight": 0, "*.qkv.weight": Place(0, 3)}, pfeife.compose
    programs = (
        *((PLACES, None, way(), few), (PLACES, None, beside, few), (cut, None, beside, few)),
        *(("cut", None, way(), few), ("cut", None, beside, few)),
        *(("gathered", {}, way(), few), ("cut", {}, way(), few), (cut, {}, beside, few)),
        # Sums of more than 64 KiB are added up in parts.
        *((PLACES, None, way(), many), (PLACES, None, beside, many)),
    )
    for places, keepers, more, tokens in programs:
        program = pfeife.capture(lambda tokens: model(tokens), tokens)
        sharded = pfeife.shard(places, members, keepers=keepers)
        local = pfeife.compose(sharded, pfeife.fuse())(program)
        local = pfeife.annotate(estimate(local, CPU_CORE))(local)
        plan = sched.plan(local, machine=CPU_CORE, microbatches=2, stages=1, schedule="gpipe")
        ranks = more(pfeife.apply(plan)(local))
        schedule = sched.lower(plan.schedule, ranks)
        pipeline = DistributedPipeline(ranks, schedule)
        state = pfeife.state_of(ranks, model, member=pipeline.mesh.member)
        (expected,) = memory_curves(ranks, schedule)
        steps = [profile_memory(pipeline, state, [tokens, tokens])[0] for _ in range(3)]
        points = zip(*(step.points for step in steps), strict=True)
        ports = ranks.ports(pfeife.Role.PARAMETER)
        own = sum(p.given_bytes for p in ports if p.keeper in (None, pipeline.mesh.member))
        peaks = [own + min(step.peak for step in measured) for measured in points]
        of_members: list[list[int]] = [[] for _ in range(members)]
        dist.all_gather_object(of_members, peaks)
        # The account is that of the member which takes most: it keeps most sums of gradients.
        most = [max(each) for each in zip(*of_members, strict=True)]
        held = expected.held["parameters"]
        assert [held + point.peak for point in expected.points] == most, (expected, of_members)


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


PLAN = {
    **{"*.qkv.*": Place(0, 3), "blocks.*.out": "rowwise", "blocks.*.up": ColwiseParallel()},
    **{"blocks.*.down": RowwiseParallel(), "words": RowwiseParallel(), "head": "colwise"},
}


def trained(step, model, batches):
    """Losses and norms of gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for tokens in batches:
        optimizer.zero_grad()
        loss = step(tokens)
        loss.backward()
        yield float(loss.detach())
        yield float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()


def trained_alike(model=None, **options) -> None:
    """A loop as for one device: losses, norms and parameters to within the rounding of sums."""
    torch.manual_seed(0)
    model = (model or Words(dropout=0.0)).double()
    plain = copy.deepcopy(model)
    batches = [torch.randint(24, (8, 6)) for _ in range(3)]
    options = {"parallel": PLAN, **options}
    step = pfeife.compile(lambda tokens: model(tokens), microbatches=4, **options)
    torch.testing.assert_close(
        [*trained(step, model, batches)], [*trained(plain, plain, batches)], rtol=1e-12, atol=0
    )
    (compiled,) = step.backend.compiled
    assert compiled.program.members == step.backend.options.members > 1
    state = pfeife.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@row(ranks=(2, 4))
def a_loop_of_one_stage() -> None:
    trained_alike(members=int(os.environ["WORLD_SIZE"]))


@row(ranks=(2,))
def a_loop_of_compiled_bodies() -> None:
    """By a compiler that is given what lies between collectives and draws."""
    pieces = []

    def compiler(module, examples):
        assert not any(node.target in MEANING for node in module.graph.nodes)
        pieces.append(module)
        return module.forward

    trained_alike(members=2, compiler=compiler, schedule="zb-h1", costs="measure")
    assert len(pieces) > 10, len(pieces)
    trained_alike(members=2, compiler=compiler)


@row(ranks=(2, 4))
def a_loop_that_nobody_has_said_how_to_cut() -> None:
    trained_alike(members=2, parallel="auto", schedule="zb-h1")
    trained_alike(members=2, parallel="cut")


@row(ranks=(2, 4))
def parameters_are_gathered_where_there_is_room() -> None:
    """Of many microbatches, as long as they fit; a plan knows for which program it was made."""
    fast = attrs.evolve(CPU_CORE, link_bandwidth=1e9)

    def trained_with(rows=(64, 64), **options) -> tuple[int, Compiled]:
        """How many parameters are gathered, of a loop as on one device."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).double()
        plain = copy.deepcopy(model)
        step = pfeife.compile(
            lambda x: model(x).square().mean(),
            **{"members": 2, "microbatches": 8, "machine": fast, "optimizer": "AdamW"},
            **options,
        )
        batches = [torch.randn(count, 64).double() for count in rows]
        torch.testing.assert_close(
            [*trained(step, model, batches)],
            [*trained(lambda x: plain(x).square().mean(), plain, batches)],
            **{"rtol": 1e-12, "atol": 0},
        )
        alike(model, plain)
        compiled, *_ = step.backend.compiled
        ports = compiled.program.ports(pfeife.Role.PARAMETER)
        return sum(port.split is None and port.keeper is not None for port in ports), compiled

    def slow_elsewhere(clusters: pfeife.Program) -> pfeife.Costs:
        """Seconds of which rank 0 alone knows that parameters are to be gathered."""
        costs = estimate(clusters, fast)
        gathers = any(p.keeper is not None and p.split is None for p in clusters.inputs)
        times = 1e3 if gathers and dist.get_rank() else 1.0
        seconds = {call: times * each for call, each in costs.seconds.items()}
        return attrs.evolve(costs, seconds=seconds)

    def refuses(program: pfeife.Program) -> pfeife.Program:
        if dist.get_rank():
            raise ValueError("not on this rank")
        return program

    def peak(compiled: Compiled) -> int:
        curves = memory_curves(compiled.program, compiled.schedule, optimizer="AdamW")
        return max(curve.peak for curve in curves)

    gathered, by_time = trained_with()
    none, by_parts = trained_with(parallel="cut")
    assert (gathered, none) == (12, 0) and peak(by_parts) < peak(by_time)
    few, by_room = trained_with(memory_limit=peak(by_parts))
    assert peak(by_room) <= peak(by_parts)
    assert few == 0 or by_room.plan.stages > 1, "other stages may hold what is gathered"
    for known in (
        {"plan": by_time.plan, "rows": (64, 24, 2)},
        {"costs": estimate(by_time.clusters, fast)},
        {"costs": slow_elsewhere},
    ):
        assert trained_with(**known)[0] == 12
    with pytest.raises(ValueError, match="not on this rank"):
        trained_with(passes={"flat": [refuses]})
    with pytest.raises(ValueError, match="the best plan found needs"):
        trained_with(memory_limit=peak(by_parts) // 2)


class Routed(nn.Module):
    """Each word goes to one of four experts, by products that transformers has."""

    def __init__(self):
        super().__init__()
        self.words, self.router = nn.Embedding(24, 16), nn.Linear(16, 4)
        self.experts = nn.ParameterList(torch.randn(4, 16, 16) / 4 for _ in range(2))
        self.head = nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.words(tokens).flatten(0, 1)
        share, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = (expert[:, None] == torch.arange(4)).sum(0).cumsum(0).int()
        product, (up, down) = torch.ops.transformers.grouped_mm_fallback, self.experts
        rows = product(product(x[order], up, ends).relu(), down, ends)
        x = x + rows[order.argsort()] * share[:, None]
        return F.cross_entropy(self.head(x), tokens.flatten())


@row(ranks=(2, 4))
def a_loop_of_experts() -> None:
    """Which have some of their matrices each, with one or two stages."""
    importlib.import_module("transformers.integrations.moe")  # has the operator
    options = {"loss_reduction": "mean", "schedule": "zb-h1", "members": 2}
    trained_alike(Routed(), parallel={"experts.*": 0}, **options)


@row(ranks=(2, 4))
def rows_that_go_to_experts() -> None:
    """And come back, of a batch that is cut: each member is sent those that its experts compute."""
    members = int(os.environ["WORLD_SIZE"])
    importlib.import_module("transformers.integrations.moe")
    cut = {"places": {"experts.*": 0}, "prices": CHEAP_TO_COPY, "made": Routed}
    cut["sent"] = {fetched_rows, added_rows}
    compared(1, members, 1, "gpipe", **cut)
    if members == 4:
        compared(2, 2, 1, "zb-h1", **cut)


class Roomy(nn.Module):
    """Experts with room for some rows each, as GShard has them: what is more is dropped."""

    def __init__(self, experts=4, room=5):
        super().__init__()
        self.room, self.words = room, nn.Embedding(24, 16)
        self.router, self.head = nn.Linear(16, experts, bias=False), nn.Linear(16, 24, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, 16) / 4)

    def forward(self, tokens):
        x = self.words(tokens)
        share, expert = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, len(self.up))
        place = (chosen.cumsum(1) - 1) * chosen
        slots = F.one_hot(place.clamp(max=self.room - 1), self.room) * chosen.unsqueeze(-1)
        slots = (slots * (place < self.room).unsqueeze(-1)).to(x.dtype)
        rows = torch.einsum("btes,btd->ebsd", slots, x)
        hidden = torch.einsum("ebsd,edh->ebsh", rows, self.up).relu()
        made = torch.einsum("ebsh,ehd->ebsd", hidden, self.down)
        x = x + share.unsqueeze(-1) * torch.einsum("btes,ebsd->btd", slots, made)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@row(ranks=(2, 4))
def experts_with_room_for_some_rows() -> None:
    """Of a batch that is cut each member is sent the slots of its experts, of sizes that are known
    beforehand, and gives them back; so are their gradients."""
    members = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    cut = {"up": 0, "down": 0}
    trained_alike(Roomy(), parallel=cut, members=2)
    flat = pfeife.capture(Roomy(), torch.randint(24, (4, 12)), loss_reduction="mean")
    local = pfeife.shard(cut, members, prices=CHEAP_TO_COPY)(flat)
    exchanged = [n for n in local.module.graph.nodes if n.target is all_to_all]
    assert len(exchanged) == 4 and not any(map(is_sized_by_data, exchanged))
    compared(1, members, 1, "gpipe", cut, CHEAP_TO_COPY, made=Roomy, rows=4)


@row(ranks=(4,))
def a_loop_of_stages() -> None:
    trained_alike(members=2, schedule="zb-h1")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    trained_alike(mesh=mesh, recompute="always")  # stages 0 2 and 1 3


@row(ranks=(4,))
def a_parameter_is_reduced_before_it_is_read() -> None:
    """The first stage reads it for the second, where its gradient is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).double()
    plain = copy.deepcopy(model)
    options = {"members": 2, "parallel": {"2.weight": 1}, "schedule": "gpipe"}
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for _ in range(2):
        x = torch.randn(8, 8, dtype=torch.float64)
        for loss in (step(x), plain(x).square().mean()):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    alike(model, plain)


@row(ranks=(4,))
def a_loop_of_replicas() -> None:
    trained_alike(members=2, replicas=2)
    trained_alike(members=2, replicas=2, batch="rank0")


@row(ranks=(4,), whole=(8,))
def replicas_of_members_that_share_out_state() -> None:
    """Each parameter that is cut is trained by one rank of a stage, its keeper in one replica; what
    all members have, by those of one replica."""
    stages = int(os.environ["WORLD_SIZE"]) // 4
    shared_out = {"members": 2, "replicas": 2, "data_parallel": "shard"}
    trained_alike(**shared_out, bucket_bytes=2000, schedule="zb-h1")
    loop = Loop(
        functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3), stages=stages, **shared_out
    )
    loop.train()
    check_trained(loop)


def check_trained(loop: "Loop") -> None:
    """Each parameter that members share is trained by one rank of them, as the account has it."""
    (compiled,) = loop.step.backend.compiled
    states = {n: loop.optimizers[0].state[p] for n, p in loop.model.named_parameters()}
    held = {n: sum(map(attrgetter("nbytes"), state.values())) for n, state in states.items()}
    by_rank: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, held)
    for port in compiled.program.ports(pfeife.Role.PARAMETER):
        trained_on = sum(bool(of_rank[port.fqn]) for of_rank in by_rank)
        whole = compiled.program.members if port.keeper is None else 1
        assert trained_on == whole, port
    # The account is that of the rank which trains most, of those that share a stage.
    curves = memory_curves(compiled.program, compiled.schedule, optimizer="adamw")
    for rank, curve in enumerate(curves):
        sharing = [r for r in range(len(by_rank)) if compiled.pipeline.mesh.place(r)[1] == rank]
        most = max(sum(by_rank[r].values()) for r in sharing)
        assert curve.held["optimizer"] == most, (curve.held, by_rank)


@row(ranks=(2, 4))
def parameters_that_are_gathered_once_a_step() -> None:
    """Each is whole on one member, with its optimizer state, and all have it in a step: nothing is
    sent in a microbatch but sums of the loss, or what layers tell that are cut beside them."""
    everything = {"parallel": "gathered"}
    trained_alike(members=2, **everything, schedule="zb-h1")
    trained_alike(members=2, parallel={"*": "gathered", **PLAN})
    loop = Loop(functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3), **everything)
    loop.train()
    (compiled,) = loop.step.backend.compiled
    bodies = compiled.program.bodies.values()
    told = [n for body in bodies for n in body.graph.nodes if n.target in {*MEANING} - {part}]
    assert all(node.meta["val"].dim() == 0 for node in told), "sums of the loss"
    check_trained(loop)
    reductions = compiled.program.reductions
    assert reductions and not any(each.split for each in reductions), "all members have these"
    if dist.get_world_size() == 4:
        loop = Loop(functools.partial(torch.optim.SGD, lr=0.1), replicas=2, **everything)
        loop.train()


class Seeing(nn.Module):
    """Words behind what an encoder makes of images."""

    def __init__(self):
        super().__init__()
        self.patches, self.language = nn.Linear(12, 16), Words(dropout=0.0)
        self.encoder = nn.Sequential(Block(0.0), Block(0.0))

    def forward(self, images, tokens):
        seen = self.encoder(self.patches(images))
        x = self.language.blocks(torch.cat([seen, self.language.words(tokens)], 1))
        logits = self.language.head(x[:, seen.shape[1] :])
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@row(ranks=(2, 4))
def an_encoder_that_is_whole_before_words_that_are_cut() -> None:
    """Members divide the images, and what they make of these is put together once."""
    torch.manual_seed(0)
    model = Seeing().double()
    plain = copy.deepcopy(model)
    cut = {f"language.{name}": place for name, place in PLAN.items()}
    step = pfeife.compile(
        lambda batch: model(*batch),
        **{"microbatches": 4, "members": 2, "schedule": "zb-h1"},
        parallel={"patches.*": "gathered", "encoder.*": "gathered", **cut},
    )
    batches = [
        (torch.randn(8, 5, 12, dtype=torch.float64), torch.randint(24, (8, 6))) for _ in range(3)
    ]
    torch.testing.assert_close(
        [*trained(step, model, batches)],
        [*trained(lambda batch: plain(*batch), plain, batches)],
        **{"rtol": 1e-12, "atol": 0},
    )
    (compiled,) = step.backend.compiled
    forwards = [c for c in compiled.program.calls if c.kind == pfeife.Kind.FORWARD]
    nodes = [node for call in forwards for node in compiled.program.body(call).graph.nodes]
    sent = [tuple(n.meta["val"].shape) for n in nodes if n.target in {*MEANING} - {*ALONE, arrived}]
    assert [shape for shape in sent if 5 in shape] == [(2, 5, 16)], sent


@row(ranks=(2,))
def what_members_take() -> None:
    """A parameter that is cut is whole on one member, with its gradient and optimizer state; each
    computes with a part of it."""
    torch.manual_seed(0)
    model, tokens = Words(), torch.randint(24, (4, 6))
    step = pfeife.compile(lambda x: model(x), parallel=PLAN, members=2, microbatches=2)
    step(tokens).backward()
    (compiled,) = step.backend.compiled
    (curve,) = memory_curves(compiled.program, compiled.schedule, optimizer="adam")
    ports = {port.fqn: port for port in compiled.program.ports(pfeife.Role.PARAMETER)}
    parameters = dict(model.named_parameters())
    uncut = [p for name, p in parameters.items() if ports[name].split is None]
    by_member = [
        [p for name, p in parameters.items() if ports[name].keeper == member] for member in (0, 1)
    ]
    assert sum(map(len, by_member)) + len(uncut) == len(parameters) and all(by_member)
    for parameter in by_member[1 - dist.get_rank()]:
        assert is_absent(parameter) and is_absent(parameter.grad)
    kept = [*uncut, *by_member[dist.get_rank()]]
    assert not any(is_absent(p) or is_absent(p.grad) for p in kept)
    # The account is that of the member which keeps most.
    most = max(by_member, key=lambda kept: sum(p.nbytes for p in kept))
    assert curve.held["parameters"] == sum(p.nbytes for p in [*uncut, *most])
    steps = 4 * len([*uncut, *most])
    assert curve.held["optimizer"] == 2 * sum(p.nbytes for p in [*uncut, *most]) + steps
    # Parts of all are there from when they are told until they are dropped.
    parts = sum(aligned(port.bytes) for port in ports.values() if port.split)
    assert curve.at_peak["members' parameters"] == parts
    dropped = next(point for point in curve.points if point.action.do == Do.RESHARD)
    (before,) = (point for point in curve.points if point.action.do == Do.REDUCE_GRAD)
    assert before.after - dropped.after == parts


class Orthogonal(torch.optim.Optimizer):
    """As Muon does it: of a gradient as a whole."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                change = p.grad / (p.grad.norm() + 1e-7)
                if p.ndim == 2:
                    change = 1.5 * change - 0.5 * change @ change.T @ change
                p.sub_(change, alpha=0.1)


def alike(model: nn.Module, plain: nn.Module) -> None:
    """They have the same state to within the rounding of sums."""
    state = pfeife.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


class Loop:
    """A step over members beside the same one on one device."""

    def __init__(self, make, **options):
        torch.manual_seed(0)
        self.model = Words(dropout=0.0).double()
        self.plain = copy.deepcopy(self.model)
        self.step = compiled_of(self.model, **options)
        self.optimizers = make(self.model.parameters()), make(self.plain.parameters())
        self.tokens = torch.randint(24, (8, 6))

    def train(self, times: int = 2) -> None:
        """So many steps of both."""
        for _ in range(times):
            for optimizer, step in zip(self.optimizers, (self.step, self.plain), strict=True):
                optimizer.zero_grad()
                step(self.tokens).backward()
                optimizer.step()
        alike(self.model, self.plain)


def compiled_of(model, **options):
    options = {"members": 2, "microbatches": 2, "parallel": PLAN, **options}
    return pfeife.compile(lambda tokens: model(tokens), **options)


@row(ranks=(2, 4))
def state_that_members_share_out() -> None:
    """Whole matrices for an optimizer, a load of what was saved, in a new model too, copies."""
    Loop(Orthogonal).train()
    # The gradient of a key's bias is rounding alone, of which Adam makes steps where eps is small.
    loop = Loop(functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3))
    loop.train()
    saved = copy.deepcopy([loop.model.state_dict(), loop.optimizers[0].state_dict()])
    best = copy.deepcopy(loop.model), copy.deepcopy(loop.plain)
    loop.train()
    alike(*best)
    for model, optimizer in zip((loop.model, loop.plain), loop.optimizers, strict=True):
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
    loop.train()
    loop.model = Words(dropout=0.0).double()
    loop.step = compiled_of(loop.model)
    loop.model.load_state_dict(saved[0])
    loop.plain.load_state_dict(saved[0])
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    loop.optimizers = sgd(loop.model.parameters()), sgd(loop.plain.parameters())
    loop.train()


@row(ranks=(2, 4))
def averages_and_writes_over_members() -> None:
    """A moving average, a write by hand, an evaluation before the first step."""
    loop = Loop(functools.partial(torch.optim.SGD, lr=0.1))
    with torch.no_grad():
        difference = loop.step(loop.tokens) - loop.plain(loop.tokens)
    assert abs(float(difference)) < 1e-12
    averages = [torch.optim.swa_utils.AveragedModel(m) for m in (loop.model, loop.plain)]
    for _ in range(3):
        loop.train(1)
        averages[0].update_parameters(loop.model)
        averages[1].update_parameters(loop.plain)
    alike(*averages)
    with torch.no_grad():
        for model in (loop.model, loop.plain):
            model.blocks[1].up.weight[3:7].mul_(0.5)
    loop.train()


@row(ranks=(2, 4))
def lengths_over_members() -> None:
    """Two programs serve all of them: the second one leaves the length open."""
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    loop = Loop(sgd, parallel="cut", schedule="zb-h1")
    for length in (6, 9, 7, 12, 6, 5):
        loop.tokens = torch.randint(24, (8, length))
        loop.train(1)
    assert len(loop.step.backend.compiled) == 2


@row(ranks=(2, 4))
def lengths_that_members_cut() -> None:
    """Where they divide the length, in one program for all such, also after others, which have one
    of their own."""
    sgd, link = functools.partial(torch.optim.SGD, lr=0.1), LinkKind("fast", 1e12, 1e-9)
    stages = int(os.environ["WORLD_SIZE"]) // 2
    network = Network.of(nodes=stages, ranks_per_node=2, inside=link, between=link)
    options = {"parallel": "gathered", "attention": "ring", "microbatches": 8}
    loop = Loop(sgd, network=network, **options)
    for length in (5, 8, 7, 12, 9, 20):
        loop.tokens = torch.randint(24, (8, length))
        loop.train(1)
        *_, steps = loop.step.backend.graphs.values()
        *_, used = steps.known.values()
        assert bool(used.divided) == (length % 2 == 0)
    assert len(loop.step.backend.compiled) == 3


@row(ranks=(2,))
def members_by_the_name_of_the_backend() -> None:
    torch.manual_seed(0)
    model = Words(dropout=0.0).double()
    plain = copy.deepcopy(model)
    options = {"members": 2, "microbatches": 2}
    step = torch.compile(model, backend="pfeife", options=options, dynamic=True)
    batches = [torch.randint(24, (8, length)) for length in (6, 9, 7)]
    torch.testing.assert_close(
        [*trained(step, model, batches)], [*trained(plain, plain, batches)], rtol=1e-12, atol=0
    )
    alike(model, plain)


@row(ranks=(2, 4))
def a_model_that_torch_has_cut() -> None:
    """Its DTensors are whole again, and cut as they were; who had them before is told."""
    stages = int(os.environ["WORLD_SIZE"]) // 2
    mesh = init_device_mesh("cpu", (stages, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(0)
    plain = Words(dropout=0.0).double()
    styles = {
        **{"words": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel()},
        **{"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()},
    }
    batches = [torch.randint(24, (8, 6)) for _ in range(3)]
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], styles)
    step = pfeife.compile(lambda tokens: model(tokens), microbatches=4, schedule="1f1b")
    torch.testing.assert_close(
        [*trained(step, model, batches)], [*trained(plain, plain, batches)], rtol=1e-12, atol=0
    )
    alike(model, plain)
    evaluate = pfeife.compile(lambda tokens: model(tokens), microbatches=4)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(batches[0]), plain(batches[0]), rtol=1e-12, atol=0)
    (compiled,) = step.backend.compiled
    splits = {port.fqn: port.split for port in compiled.program.ports(pfeife.Role.PARAMETER)}
    assert splits["blocks.0.up.weight"].dim == 0 and splits["blocks.1.down.weight"].dim == 1

    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], styles)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="something still has it as it was, as an optimizer"):
        pfeife.compile(lambda tokens: model(tokens), microbatches=4)
    assert optimizer
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], styles)
    with pytest.raises(ValueError, match=r"members=4: the model is cut already, over 2 ranks"):
        pfeife.compile(lambda tokens: model(tokens), microbatches=4, members=4)
    assert isinstance(model.head.weight, DTensor), "what is refused is as it was"


@row(ranks=(2,))
def a_trainer_of_a_model_that_was_loaded_in_parts() -> None:
    """By Hugging Face's tp_plan: as it is trained on one device."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    plain = LlamaForCausalLM(config)
    join_world(torch.device("cpu"))  # then the main rank alone saves
    folder = Path(tempfile.gettempdir(), f"pfeife-tp-plan-{os.environ['MASTER_PORT']}")
    plain.save_pretrained(folder)
    dist.barrier()
    loaded = DistributedConfig(tp_plan="auto")
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=loaded)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (12, 6))]
    arguments = TrainingArguments(
        **{"output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4},
        **{"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True},
        logging_steps=1,
    )
    trainer = pipelined(Trainer, microbatches=2)(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    (compiled,) = trainer._training.backend.compiled
    assert compiled.program.members == 2
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=arguments.learning_rate, weight_decay=0.0)
    for at, batch in enumerate(trainer.get_train_dataloader()):
        if at == len(losses):
            break
        loss = plain(**batch).loss
        assert abs(float(loss.detach()) - losses[at]) < 1e-4, (losses, float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), arguments.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * (1 - at / len(losses))
        optimizer.step()
        optimizer.zero_grad()
    state = pfeife.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


@row(ranks=(4,))
def members_whose_links_are_known() -> None:
    """A step is planned with those between members, not with the slower ones between stages."""
    inside, between = LinkKind("inside", 1e9, 1e-3), LinkKind("between", 1e6, 1e-2)
    network = Network.of(nodes=2, ranks_per_node=2, inside=inside, between=between)
    loop = Loop(functools.partial(torch.optim.SGD, lr=0.1), network=network)
    loop.train(1)
    (compiled,) = loop.step.backend.compiled
    assert compiled.target.machine.link_latency == pytest.approx(inside.latency)
    assert compiled.target.network.link(0, 1) == between


@row(ranks=(2,))
def steps_that_cut_otherwise() -> None:
    """One parameter is whole on one member, and so for all steps."""
    loop = Loop(functools.partial(torch.optim.SGD, lr=0.1))
    loop.train()
    other = compiled_of(loop.model, parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    with pytest.raises(ValueError, match="give all steps of a model the same parallel="):
        other(loop.tokens)
    compiled_of(loop.model)(loop.tokens).backward()
    loop.train()


@row(ranks=(2,))
def a_keeper_that_fails() -> None:
    """What it raises before it has told the parts is told by all, who wait for them."""
    loop = Loop(functools.partial(torch.optim.SGD, lr=0.1))
    loop.train()
    (compiled,) = loop.step.backend.compiled
    ports = compiled.program.ports(pfeife.Role.PARAMETER)
    name = next(port.fqn for port in ports if port.keeper == 1)
    for wrong in (lambda value: value[:1], torch.Tensor.half):
        state = {name: value.detach() for name, value in loop.model.named_parameters()}
        words = "rank 1"
        if dist.get_rank() == 1:
            state[name], words = wrong(state[name]), ""
        with pytest.raises((ValueError, RuntimeError), match=words):
            compiled.pipeline(state, list(loop.tokens.chunk(2)))
        loop.train()


@row(ranks=(2,))
def memory_that_is_read_as_it_lies() -> None:
    """A sum of parts, seen the other way round: on ranks it comes in the order of dimensions."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4, bias=False).double(), torch.randn(6, 8).double()
    plain = copy.deepcopy(model)

    def computed(net):
        return net(x).t().as_strided((3, 5), (5, 1)).square().sum()

    step = pfeife.compile(lambda x: computed(model), members=2, parallel={"weight": 1})
    for net, run in ((model, step), (plain, lambda x: computed(plain))):
        run(x).backward()
        with torch.no_grad():
            net.weight.sub_(net.weight.grad)
    alike(model, plain)


class Odd(nn.Module):
    """A matrix that lies the other way round and is read as it lies, one without elements, and a
    table of which a step reads some rows."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(31, 15).t())
        self.empty = nn.Parameter(torch.zeros(0, 15))
        self.words = nn.Embedding(24, 15, sparse=True)

    def forward(self, tokens):
        rows = self.turned.as_strided((15, 31), (1, 15))
        x = torch.cat([self.words(tokens).flatten(0, 1), self.empty])
        return (x @ rows).tanh().square().mean()


@row(ranks=(2,))
def what_members_do_not_divide() -> None:
    """Is whole on one of them, and on the others in a step, as it lies on that one."""
    for parallel in ("cut", "gathered"):
        torch.manual_seed(0)
        model, tokens = Odd().double(), torch.randint(24, (8, 6))
        plain = copy.deepcopy(model)
        step = pfeife.compile(lambda x, m=model: m(x), members=2, microbatches=2, parallel=parallel)
        for net, run in ((model, step), (plain, plain)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                run(tokens).backward()
                optimizer.step()
        (compiled,) = step.backend.compiled
        ports = compiled.program.ports(pfeife.Role.PARAMETER)
        assert all(port.split is None and port.keeper is not None for port in ports), parallel
        alike(model, plain)


@row(ranks=(2,))
def what_cannot_be_cut() -> None:
    model, x = nn.Linear(4, 3), torch.ones(4, 4)
    for options, words in (
        ({"parallel": {"weight": 0}}, "which 2 members do not divide"),
        ({"parallel": {"other": "colwise"}}, "no module is called 'other'"),
    ):
        step = pfeife.compile(lambda x: model(x).sum(), members=2, loss_reduction="sum", **options)
        with pytest.raises(ValueError, match=words):
            step(x)
