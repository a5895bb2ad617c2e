"""Whole steps of models, and of random programs: losses, gradients and buffers, bit for bit."""

import copy
import functools
import operator
import os

import torch
import torch.distributed as dist
from hypothesis import Phase, given
from hypothesis import strategies as st
from models import EQUAL_TO_EAGER, case
from rows import Row, add, row
from share import random_cases

import pfeife
from pfeife import sched
from pfeife._torch import is_absent
from pfeife.cost import estimate, machine
from pfeife.ir.messages import messages
from pfeife.ir.nodes import receive, send
from pfeife.runtime.distributed.pipeline import DistributedPipeline
from pfeife.testing import assert_same, eager_accumulation, nets, own_gradients, plans, tied_across

CPU_CORE = machine("cpu-core")


def step_is_that_of_one_device(
    name: str, stages: int, schedule: str, replicas: int = 1, rounding=()
) -> None:
    """Loss everywhere, this rank's gradients and buffers, as eager accumulation has them."""
    one = case(name)
    microbatches = [one.batch(2, seed) for seed in range(4)]
    expected = eager_accumulation(one.step, one.model, microbatches)
    step = pfeife.compile(
        one.step,
        microbatches=4,
        stages=stages,
        schedule=schedule,
        replicas=replicas,
        search_seconds=0.5,
    )
    batch = tuple(torch.cat(parts) for parts in zip(*microbatches, strict=True))
    before = {n: b.clone() for n, b in one.model.named_buffers()}
    loss = step(*batch)
    loss.backward()
    gradients = own_gradients(one.model)
    here = {n: b for n, b in one.model.named_buffers() if not is_absent(b)}  # not elsewhere
    buffers = {n: b for n, b in here.items() if not torch.equal(b, before[n])}
    assert gradients, "every rank has gradients of its own"
    mine = pfeife.Result(
        expected.loss if replicas == 1 else loss.detach(),
        expected.outputs,
        {n: expected.gradients[n] for n in gradients},
        {n: expected.buffers[n] for n in buffers},
    )
    found = pfeife.Result(loss.detach(), expected.outputs, gradients, buffers)
    if replicas > 1:
        torch.testing.assert_close(loss.detach(), expected.loss)
    assert_same(mine, found, one.tied if rounding == () else rounding)
    share(f"{name} {stages} {schedule}", set(gradients), set(expected.gradients))
    share(f"{name} {stages} {schedule}", set(buffers), set(expected.buffers))


def share(what: str, mine: set[str], whole: set[str]) -> None:
    """All ranks together have everything."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(mine))
    missing = whole - {name for names in found for name in names}
    assert not missing, f"{what}: no rank has {missing}"


PLANS = {2: [(2, 1), (3, 1), (4, 1), (1, 2)], 4: [(4, 1), (2, 2)]}


def _rows() -> None:
    """A row for every model, number of stages, and schedule; in the share one for every model and
    shape, with families in turn."""
    for ranks, shapes in PLANS.items():
        for i, name in enumerate(EQUAL_TO_EAGER):
            for j, (stages, replicas) in enumerate(shapes):
                if replicas > 1 and name == "BatchNormNet":
                    continue  # replicas keep the statistics of their own microbatches
                families = ["gpipe", "1f1b"]
                if name in ("GPT", "UNet") and replicas == 1:
                    families += ["zb-h1", "zb-v"] if stages == 4 else ["search"]
                rounding = () if replicas == 1 else None
                shared = families[(i + j) % len(families)] if (i - j) % len(shapes) < 1 else ""
                # On 4 ranks one is enough: `replicas.loop` has several stages in each.
                shared = "" if ranks == 4 and name != "UNet" else shared
                shared = "" if ranks == 2 and name == "GPT" else shared  # `loops.loop` trains it
                for schedule in families:
                    given = (name, stages, schedule, replicas, rounding)
                    run = functools.partial(step_is_that_of_one_device, *given)
                    label = f"{name}, {stages} stages, {schedule}, {replicas} replicas"
                    label += f", {ranks} ranks"
                    more = () if schedule == shared else (ranks,)
                    add(globals(), Row(label, run, ranks=(ranks,), whole=more))


_rows()


@random_cases(12, derandomize=True, database=None, phases=[Phase.generate])
@given(st.data())
def _random_programs(data) -> None:
    """Random nets and plans, the same on every rank, on as many ranks as there are."""
    torch._dynamo.reset()
    ranks = int(os.environ["WORLD_SIZE"])  # the first step makes the process group
    net = data.draw(nets(linear=2 * ranks))
    generator = torch.Generator().manual_seed(0)
    microbatches = [(torch.randn(3, 4, generator=generator),) for _ in range(3)]

    def step(x):
        return net(x).square().mean()

    program = pfeife.capture(step, *microbatches[0])
    state = pfeife.state_of(program, net)
    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)
    plan = data.draw(plans(clusters, 3, ranks=ranks))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, sent))
    found = DistributedPipeline(sent, schedule)(state, microbatches)
    expected = eager_accumulation(step, net, microbatches)
    mine = pfeife.Result(
        expected.loss,
        expected.outputs,
        {name: expected.gradients[name] for name in found.gradients},
        {name: expected.buffers[name] for name in found.buffers},
    )
    assert_same(mine, found, tied_across(plan, clusters))
    share("random", set(found.gradients), set(expected.gradients))


@row(ranks=(2, 4), whole=(4,))
def random_programs() -> None:
    _random_programs()


@row(ranks=(2, 4), whole=(4,))
def outputs_of_replicas() -> None:
    """The model alone: results in the order of the batch on every rank, and gradients that arrive
    at them, or half of them."""
    for options in ({}, {"data_parallel": "shard"}):
        torch._dynamo.reset()
        one = case("GPT")
        plain = copy.deepcopy(one.model)
        model = pfeife.compile(one.model, microbatches=4, replicas=2, **options)
        tokens, _ = one.batch(8)
        logits = model(tokens)
        parts = [plain(part) for part in tokens.chunk(4)]
        assert torch.equal(logits, torch.cat(parts).detach())
        weight = torch.linspace(1, 2, 8).reshape(8, *[1] * (logits.dim() - 1))
        (logits * weight).square().mean().backward()
        (torch.cat(parts) * weight).square().mean().backward()
        found = own_gradients(one.model)
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


@row(ranks=(2,))
def parameters_without_influence_on_replicas() -> None:
    """Of other dtypes than the rest: each is reduced as what it is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    kinds = (torch.float64, torch.bfloat16, torch.float32)
    scales = [torch.nn.Parameter(torch.ones(4, dtype=kind)) for kind in kinds]

    def step(x):
        return (model(x) + sum((one * 0).float() for one in scales)).square().mean()

    x = torch.randn(8, 4)
    pfeife.compile(step, microbatches=4, replicas=2)(x).backward()
    for one, kind in zip(scales, kinds, strict=True):
        assert one.grad.dtype == kind and torch.equal(one.grad, torch.zeros(4, dtype=kind))


@row(ranks=(2,))
def messages_that_a_pass_has_made_small() -> None:
    """Between processes they are of the smaller type, with the numbers of one process."""
    one = case("GPT")
    microbatches = [one.batch(2, seed) for seed in range(2)]
    aten = torch.ops.aten._to_copy.default

    def small(operation):
        make, args = operation.make, operation.args
        if operation.target is send:
            halves = [make(aten, value, dtype=torch.bfloat16) for value in args[0]]
            return make(send, tuple(halves), *args[1:])
        if operation.target is operator.getitem and args[0].target is receive:
            part = make(operator.getitem, *args)
            return make(aten, part, dtype=operation.value.dtype)
        return None

    options = {"microbatches": 2, "stages": 2}
    passes = {"ranks": [lambda program: program.rewrite(small, of="calls")]}
    step = pfeife.compile(one.step, **options, passes=passes, check=0.05)
    batch = tuple(torch.cat(parts) for parts in zip(*microbatches, strict=True))
    loss = step(*batch)
    loss.backward()
    program = step.backend.compiled[0].program
    assert {one.dtype for one in sent_values(program)} == {torch.bfloat16}
    expected = pfeife.evaluate(program, pfeife.full_state_dict(one.model), microbatches)
    assert torch.equal(loss, expected.loss)
    for name, gradient in own_gradients(one.model).items():
        assert torch.equal(gradient, expected.gradients[name]), name


def sent_values(program: pfeife.Program) -> list[torch.Tensor]:
    names = [name for message in messages(program) for name in message.values]
    return [program.node(name).meta["val"] for name in names]
