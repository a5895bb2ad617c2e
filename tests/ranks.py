"""What one rank does in the distributed tests: torchrun starts it, the tests read its report.

Every check compares with plain PyTorch, run by the rank itself, bit for bit.
"""

import contextlib
import copy
import faulthandler
import gc
import io
import json
import logging
import os
import shutil
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from models import CASES, EQUAL_TO_EAGER, case

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, memory_curves
from pfeife.envelope import APART
from pfeife.program import holders
from pfeife.runtime.distributed import DistributedPipeline
from pfeife.runtime.line import Line
from pfeife.runtime.meeting import join_world
from pfeife.runtime.profile import profile_memory
from pfeife.testing import assert_same, eager_accumulation, nets, plans, tied_across

CPU_CORE = machine("cpu-core")


def check_step(name: str, stages: int, schedule: str, replicas: int = 1, rounding=()) -> None:
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
    gradients = {n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}
    here = {n: b for n, b in one.model.named_buffers() if not b.isnan().any()}  # not elsewhere
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


def check_loop() -> None:
    """A whole training loop with the loss inside: losses equal those of one device."""
    one = case("GPT")
    other = CASES["GPT"](copy.deepcopy(one.model))
    step = pfeife.compile(one.step, microbatches=4, loss=0)
    optimizers = [torch.optim.Adam(c.model.parameters(), lr=0.01) for c in (one, other)]
    for seed in range(4):
        batch = one.batch(8, seed)
        with torch.no_grad():  # runs with the parameters where training has put them
            parts = zip(*(x.chunk(4) for x in batch), strict=True)
            alone = sum(other.step(*part) / 4 for part in parts)
            assert torch.equal(step(*batch), alone), f"without gradients, before step {seed}"
        loss = step(*batch)
        loss.backward()
        total = torch.tensor(0.0)
        for part in zip(*(x.chunk(4) for x in batch), strict=True):
            alone = other.step(*part) / 4
            alone.backward()
            total = total + alone.detach()
        assert torch.equal(loss, total), f"step {seed}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Another compiled step finds the trained parameters where they are.
    again = torch.compile(one.step, backend="pfeife", options={"microbatches": 4}, dynamic=True)
    parts = zip(*(x.chunk(4) for x in one.batch(12)), strict=True)
    assert torch.equal(again(*one.batch(12)), sum(other.step(*part) / 4 for part in parts))


def check_placement_is_kept() -> None:
    """Later graphs of a model run where its parameters were trained, also on folded stages."""
    folded, searched = {"schedule": "zb-v", "stages": 4}, {"schedule": "search", "stages": None}
    for options in ({**folded, "loss": 0}, folded, {**searched, "loss": 0}, searched):
        torch._dynamo.reset()
        one = case("GPT")
        other = CASES["GPT"](copy.deepcopy(one.model))
        step = pfeife.compile(one.step, microbatches=2, search_seconds=0.3, **options)
        optimizers = [torch.optim.SGD(c.model.parameters(), lr=0.5) for c in (one, other)]
        for seed in range(3):
            batch = one.batch(4, seed)
            step(*batch).backward()
            for part in zip(*(x.chunk(2) for x in batch), strict=True):
                (other.step(*part) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            if "loss" in options:  # the same step without gradients
                parts = zip(*(x.chunk(2) for x in batch), strict=True)
                assert torch.equal(step(*batch), sum(other.step(*part) / 2 for part in parts))
            else:  # the model alone
                alone = torch.compile(one.model, backend=step.backend, dynamic=True)
                expected = torch.cat([other.model(part) for part in batch[0].chunk(2)])
                assert torch.equal(alone(batch[0]), expected), options


def check_steps_that_overlap() -> None:
    """Two forwards before their backwards; forwards that are never differentiated keep nothing."""
    one = case("GPT")
    plain = copy.deepcopy(one.model)
    model = pfeife.compile(one.model, microbatches=2)
    first, second = one.batch(4, 0)[0], one.batch(4, 1)[0]
    for _ in range(2):
        (model(first).sum() + model(second).sum()).backward()
        found = {n: p.grad.clone() for n, p in one.model.named_parameters() if p.grad is not None}
        for parameter in one.model.parameters():
            parameter.grad = None
        plain.zero_grad()
        sum(plain(part).sum() for x in (first, second) for part in x.chunk(2)).backward()
        expected = dict(plain.named_parameters())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name].grad)
    pipeline = model.backend.compiled[0].pipeline
    for _ in range(3):
        model(first)
    assert not any(pipeline.transport.leaving.values())


def check_a_line_a_direction() -> None:
    """Every direction between two ranks has a process group of its own, which all pipelines of a
    world share."""
    transports = [interleaved()[0].transport for _ in range(2)]
    for one in transports:
        ends = [*one.out.values(), *one.into.values()]
        assert len({id(line.group) for line, _ in [*ends, (one.world.line, 0)]}) == 3
    assert transports[0].out == transports[1].out and transports[0].into == transports[1].into


def interleaved(widths: tuple[int, ...] = (4,) * 5, rows: int = 2) -> tuple:
    """A pipeline of two linear stages a rank, with its state and microbatches."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(*pair) for pair in pairwise(widths)])
    microbatches = [(torch.randn(rows, widths[0]),) for _ in range(4)]
    program = pfeife.capture(lambda x: net(x).square().mean(), *microbatches[0])
    clusters = pfeife.fuse()(program)
    homes = {f"{i}.{name}": frozenset({i}) for i in range(4) for name in ("weight", "bias")}
    plan = pfeife.Plan(sched.follow(clusters, homes)[0], sched.interleaved(4, 4, (0, 1, 0, 1)))
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    pipeline = DistributedPipeline(sent, sched.verify_schedule(sched.lower(plan.schedule, sent)))
    return pipeline, pfeife.state_of(program, net), microbatches


def check_large_and_small_messages() -> None:
    """They keep their order on one channel though another thread sends them from the first large
    one on; what fails there fails the step, and the next one works."""
    pipeline, state, microbatches = interleaved((2, 4, 4, 2**15, 2), rows=8)
    sizes = [one.bytes for one in pipeline.runner.envelopes.values()]
    assert min(sizes) < APART <= max(sizes)
    for _ in range(3):
        found = pipeline(state, microbatches)
        expected = pfeife.evaluate(pipeline.program, state, microbatches)
        mine = {name: expected.gradients[name] for name in found.gradients}
        assert_same(attrs.evolve(expected, gradients=mine), found)
    world = pipeline.transport.world
    for other in pipeline.transport.apart:
        pipeline.transport.out[other][0].cut()
    try:
        pipeline(state, microbatches)
    except pfeife.PipelineError as error:
        assert "its connection is closed" in str(error), error
    else:
        raise AssertionError("what was not sent has arrived")
    assert torch.equal(pipeline(state, microbatches).loss, expected.loss)
    assert pipeline.transport.world is not world


def check_a_thousand_steps() -> None:
    """Nothing grows: tensors, file descriptors, threads."""
    pipeline, state, microbatches = interleaved()

    def resources() -> tuple[int, int, int]:
        gc.collect()
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        return tensors, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    first = pipeline(state, microbatches)
    last = pipeline(state, microbatches)
    before = resources()
    for _ in range(998):
        last = pipeline(state, microbatches)
    after = resources()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    assert torch.equal(first.loss, last.loss)


def check_receive_buffers() -> None:
    """Buffers that are used again hold nothing that anybody still has: every step's results stay
    what they were, and there are no more buffers than before."""
    one = case("WideNet")
    program = pfeife.capture(one.step, *one.batch(4))
    state = pfeife.state_of(program, one.model)
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    plan = sched.plan(fused, machine=CPU_CORE, microbatches=4, stages=4, ranks=2, schedule="1f1b")
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(fused)
    sent = pfeife.dp_wrap(pfeife.Mesh(2))(sent)
    pipeline = DistributedPipeline(sent, sched.verify_schedule(sched.lower(plan.schedule, sent)))
    batches = [[one.batch(4, 10 * step + seed) for seed in range(4)] for step in range(4)]
    found, counts = [], []
    for microbatches in batches:
        found.append(pipeline(state, microbatches))
        counts.append(len(pipeline.transport.buffers.tensors))
    for microbatches, result in zip(batches, found, strict=True):
        expected = pfeife.evaluate(program, state, microbatches)
        mine = {name: expected.gradients[name] for name in result.gradients}
        assert_same(attrs.evolve(expected, gradients=mine), result)
    pipeline(state, batches[0])
    counts.append(len(pipeline.transport.buffers.tensors))
    assert max(counts) == counts[0] > 0, counts


def check_a_cut_after_others() -> None:
    """It ends the wait for a rank that is silent and keeps its connections, also when the others
    have gone already."""
    world = join_world(torch.device("cpu"))
    own = dist.PrefixStore("cut", world.store)
    line = Line(range(world.size), world.device, 60.0, own, "", world.gloo)
    silent = world.size // 2
    work = None if world.rank == silent else line.group.recv([torch.empty(1)], silent, 0)
    for rank in range(world.size):
        if rank == world.rank and work is not None:
            line.cut()
            begun = time.monotonic()
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=5))
            assert time.monotonic() - begun < 4, "nothing has ended the wait"
        world.gather(torch.zeros(1))
        time.sleep(0.1)  # until the others have noticed what this rank has closed
    line.close()


class Overtaken:
    """An operation that completes after a wait for it has timed out, before one looks again."""

    def __init__(self, work: dist.Work):
        self.work, self.is_completed = work, work.is_completed

    def wait(self, *limit):
        try:
            self.work.wait(*limit)
        except RuntimeError:
            while not self.is_completed():
                time.sleep(0.01)
            raise


def check_a_late_collective() -> None:
    """What comes just when a part of the wait is over has come."""
    world = join_world(torch.device("cpu"))
    if world.rank == 1:
        time.sleep(0.8)
    total = torch.ones(1)
    world.wait(Overtaken(world.line.group.allreduce(total)))
    assert total.item() == world.size and world.failure is None


def check_a_refusal_on_one_rank() -> None:
    """What rank 0 decides holds: if it refuses, all do."""

    def refuse() -> str:
        raise ValueError("no plan")

    world = join_world(torch.device("cpu"))
    try:
        world.decided_by_rank_zero(refuse)
    except ValueError as error:
        assert str(error) == "no plan"
    else:
        raise AssertionError("rank 0's refusal was lost")
    assert world.decided_by_rank_zero(lambda: "plan") == "plan"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Lines(logging.Handler):
    """A log handler that keeps what it is given."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def check_what_is_shown() -> None:
    """Bars on rank 0 alone; the log has the same lines everywhere, of a lower level elsewhere."""
    one, lines, stderr, log = case("GPT"), Lines(), sys.stderr, logging.getLogger("pfeife")
    log.addHandler(lines)
    log.setLevel(logging.DEBUG)
    sys.stderr = terminal = Terminal()
    try:
        pfeife.compile(one.step, microbatches=2, costs="measure")(*one.batch(4)).backward()
    finally:
        sys.stderr = stderr
        log.removeHandler(lines)
        log.setLevel(logging.NOTSET)
    first = dist.get_rank() == 0
    shown = terminal.getvalue()
    assert ("first step [" in shown and "measuring [" in shown) if first else not shown, shown
    found = [(r.levelno, r.getMessage()) for r in lines.records if ", " in r.getMessage()]
    level, who = (logging.INFO, "") if first else (logging.DEBUG, f"rank {dist.get_rank()}: ")
    for label in ("capturing", "measuring", "planning", "building", "first step"):
        assert any(at == level and text.startswith(f"{who}{label}, ") for at, text in found), found


def check_loss_outside() -> None:
    """The model alone is compiled: every rank gets the outputs, gradients are handed back."""
    one = case("GPT")
    plain = copy.deepcopy(one.model)
    model = pfeife.compile(one.model, microbatches=2)
    tokens, targets = one.batch(4)
    logits = model(tokens)
    expected = torch.cat([plain(part) for part in tokens.chunk(2)]).detach()
    assert torch.equal(logits, expected)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = {n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}
    leaf = expected.clone().requires_grad_()
    F.cross_entropy(leaf.flatten(0, 1), targets.flatten()).backward()
    for part, gradient in zip(tokens.chunk(2), leaf.grad.chunk(2), strict=True):
        plain(part).backward(gradient)
    for name, gradient in found.items():
        assert torch.equal(gradient, plain.get_parameter(name).grad), name


def check_refusals() -> None:
    """Wrong wishes end on every rank, before anything is sent."""
    one = case("GPT")
    world = dist.get_world_size()
    for options, message in (
        ({"stages": world - 1}, "every rank needs a stage"),
        ({"microbatches": 2, "replicas": 2, "stages": world}, ""),
        ({"microbatches": 3}, "does not divide"),
    ):
        torch._dynamo.reset()
        try:
            pfeife.compile(one.step, **options)(*one.batch(4))
        except ValueError as error:
            assert message in str(error), error
        else:
            assert not message, f"{options} was not refused"
    one = case("GPT")
    torch._dynamo.reset()
    try:
        pfeife.compile(one.step, microbatches=2)(*one.batch(4, seed=dist.get_rank()))
    except ValueError as error:
        assert "given the whole batch" in str(error)
    else:
        raise AssertionError("ranks with other rows were not refused")
    torch._dynamo.reset()
    rows = 4 if dist.get_rank() == 0 else 8
    try:
        pfeife.compile(one.step, microbatches=2)(*one.batch(rows))
    except ValueError as error:
        assert "another one than rank 0" in str(error)
    else:
        raise AssertionError("ranks with other batches were not refused")


def check_memory(name: str) -> None:
    """What every rank is said to hold, and does: all actions, all bytes."""
    one = case(name)
    microbatches = [one.batch(4, seed) for seed in range(4)]
    program = pfeife.capture(one.step, *microbatches[0])
    state = pfeife.state_of(program, one.model)
    fused = pfeife.fuse()(program)
    fused = pfeife.annotate(estimate(fused, CPU_CORE))(fused)
    for policy in ("gpipe", "1f1b"):
        plan = sched.plan(
            fused, machine=CPU_CORE, microbatches=4, stages=4, ranks=2, schedule=policy
        )
        for passes in ([], [pfeife.split_backward()]):
            sent = pfeife.compose(pfeife.partition(plan), *passes, pfeife.insert_send_recv())(fused)
            sent = pfeife.dp_wrap(pfeife.Mesh(2))(sent)
            schedule = sched.verify_schedule(sched.lower(plan.schedule, sent))
            optimizer = stepped(one.model, sent)
            predicted = memory_curves(sent, schedule, optimizer=optimizer)
            pipeline = DistributedPipeline(sent, schedule)
            measured = profile_memory(pipeline, state, microbatches, optimizer=optimizer)
            for said, found in zip(predicted, measured, strict=True):
                where = f"{name}, {policy}, {len(passes)} splits, rank {said.rank}"
                assert said.held == found.held, f"{where}: {said.held}, {found.held}"
                for point, other in zip(said.points, found.points, strict=True):
                    assert point == other, f"{where}: {point} was predicted, {other} measured"


def stepped(model: torch.nn.Module, program: pfeife.Program) -> torch.optim.Optimizer:
    """An optimizer of this rank's parameters after a step."""
    homes = holders(program)
    names = [n for n, calls in homes.items() if any(c.rank == dist.get_rank() for c in calls)]
    mine = [model.get_parameter(name).detach().clone() for name in names]
    for parameter in mine:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(mine)
    optimizer.step()
    return optimizer


def check_compilers() -> None:
    """Every rank compiles its own stages, by Inductor; if one cannot, all refuse."""
    if shutil.which("g++"):
        one = case("DropoutNet")
        for compiler in ("aot_eager", "inductor"):
            torch._dynamo.reset()
            step = pfeife.compile(one.step, microbatches=2, compiler=compiler)
            torch.manual_seed(0)  # of the draws
            loss = step(*one.batch(4))
            loss.backward()
            found = {n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}
            if compiler == "aot_eager":
                expected = {"loss": loss.detach()} | {n: g.clone() for n, g in found.items()}
            one.model.zero_grad()
        for name, value in expected.items():
            torch.testing.assert_close(value, (found | {"loss": loss.detach()})[name])

    def fails_on_one(graph, examples):
        if dist.get_rank() == 1:
            raise RuntimeError("no lowering")
        return graph

    torch._dynamo.reset()
    one = case("GPT")
    try:
        pfeife.compile(one.step, microbatches=2, compiler=fails_on_one)(*one.batch(4))
    except ValueError as error:
        assert str(error).startswith("rank 1: compiler=") and "no lowering" in str(error)
    else:
        raise AssertionError("a rank without compiled stages went on")


@settings(max_examples=10, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(st.data())
def check_random(data) -> None:
    """Random nets and plans, the same on every rank, on as many ranks as there are."""
    torch._dynamo.reset()
    net = data.draw(nets(linear=2 * dist.get_world_size()))
    generator = torch.Generator().manual_seed(0)
    microbatches = [(torch.randn(3, 4, generator=generator),) for _ in range(3)]

    def step(x):
        return net(x).square().mean()

    program = pfeife.capture(step, *microbatches[0])
    state = pfeife.state_of(program, net)
    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, CPU_CORE))(clusters)
    plan = data.draw(plans(clusters, 3, ranks=dist.get_world_size()))
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


def checks(world: int) -> dict:
    """What is run in a world of this size, by name."""
    plans = [(2, 1), (3, 1), (4, 1), (1, 2)] if world == 2 else [(4, 1), (2, 2)]
    found = {"random programs": check_random}
    for name in EQUAL_TO_EAGER:
        for stages, replicas in plans:
            if replicas > 1 and name == "BatchNormNet":
                continue  # replicas keep the statistics of their own microbatches
            families = ["gpipe", "1f1b"]
            if name in ("GPT", "UNet") and replicas == 1:
                families += ["zb-h1", "zb-v"] if stages == 4 else ["search"]
            for schedule in families:
                rounding = () if replicas == 1 else None
                arguments = (name, stages, schedule, replicas, rounding)
                found[f"{name}, {stages} stages, {schedule}, {replicas} replicas"] = (
                    lambda arguments=arguments: check_step(*arguments)
                )
    if world == 2:
        found |= {
            "loop": check_loop,
            "loss outside": check_loss_outside,
            "placement is kept": check_placement_is_kept,
            "a thousand steps": check_a_thousand_steps,
            "a line a direction": check_a_line_a_direction,
            "large and small messages": check_large_and_small_messages,
            "steps that overlap": check_steps_that_overlap,
            "receive buffers": check_receive_buffers,
            "a late collective": check_a_late_collective,
            "a refusal on one rank": check_a_refusal_on_one_rank,
            "refusals": check_refusals,
            "compilers": check_compilers,
            "what is shown": check_what_is_shown,
        }
        for name in ("GPT", "TiedGPT", "BatchNormNet", "DropoutNet", "WideNet"):
            found[f"{name}, memory"] = lambda name=name: check_memory(name)
    else:
        found["a cut after others"] = check_a_cut_after_others
    return found


def main(report: Path) -> None:
    torch.set_num_threads(1)
    join_world(torch.device("cpu"))
    done = []
    for name, check in checks(int(os.environ["WORLD_SIZE"])).items():
        faulthandler.dump_traceback_later(100, exit=True)  # a hang shows where
        torch._dynamo.reset()
        check()
        done.append(name)
    faulthandler.cancel_dump_traceback_later()
    (report / f"rank{os.environ['RANK']}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
