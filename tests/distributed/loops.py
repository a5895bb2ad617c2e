"""Training loops: what lasts from one step to the next."""

import contextlib
import copy
import io
import logging
import os
import re
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from listening import Lines, Terminal
from models import CASES, case
from nodes import two_nodes
from rows import row
from share import WHOLE

import pfeife
from pfeife.cost import machine
from pfeife.runtime.distributed.process_group import world_so_far
from pfeife.testing import eager_accumulation, own_gradients

CPU_CORE = machine("cpu-core")
RANK = int(os.environ.get("RANK", "0"))
ROOT = Path(__file__).parent.parent.parent


@row(ranks=(2,))
def loop() -> None:
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


@row(ranks=(2,), whole=(2,))
def placement_is_kept() -> None:
    """Later graphs of a model run where its parameters were trained, also on folded stages."""
    folded, searched = {"schedule": "zb-v", "stages": 4}, {"schedule": "search", "stages": None}
    more = ({**searched, "loss": 0}, folded) if WHOLE else ()
    for options in ({**folded, "loss": 0}, searched, *more):
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


@row(ranks=(2,))
def steps_that_overlap() -> None:
    """Two forwards before their backwards; forwards that are never differentiated keep nothing."""
    one = case("GPT")
    plain = copy.deepcopy(one.model)
    model = pfeife.compile(one.model, microbatches=2)
    first, second = one.batch(4, 0)[0], one.batch(4, 1)[0]
    for _ in range(2):
        (model(first).sum() + model(second).sum()).backward()
        found = {n: g.clone() for n, g in own_gradients(one.model).items()}
        for parameter in one.model.parameters():
            parameter.grad = None
        plain.zero_grad()
        sum(plain(part).sum() for x in (first, second) for part in x.chunk(2)).backward()
        expected = dict(plain.named_parameters())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name].grad)


@row(ranks=(2,))
def loss_outside() -> None:
    """The model alone is compiled: every rank gets the outputs, gradients are handed back."""
    one = case("GPT")
    plain = copy.deepcopy(one.model)
    model = pfeife.compile(one.model, microbatches=2)
    tokens, targets = one.batch(4)
    logits = model(tokens)
    expected = torch.cat([plain(part) for part in tokens.chunk(2)]).detach()
    assert torch.equal(logits, expected)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = own_gradients(one.model)
    leaf = expected.clone().requires_grad_()
    F.cross_entropy(leaf.flatten(0, 1), targets.flatten()).backward()
    for part, gradient in zip(tokens.chunk(2), leaf.grad.chunk(2), strict=True):
        plain(part).backward(gradient)
    for name, gradient in found.items():
        assert torch.equal(gradient, plain.get_parameter(name).grad), name


@row(ranks=(2,))
def what_is_shown() -> None:
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


@row(ranks=(4,), whole=(4,))
def pipelines_whose_neighbours_are_replicas() -> None:
    """Each pipeline has half of the microbatches, and each rank its stages' gradients of all."""
    for mesh, pipelines in (("2,-2", [(0, 2), (1, 3)]), ("-2,2", [(0, 1), (2, 3)])):
        torch._dynamo.reset()
        one = case("GPT")
        microbatches = [one.batch(2, seed) for seed in range(4)]
        expected = eager_accumulation(one.step, one.model, microbatches)
        step = pfeife.compile(one.step, microbatches=4, stages=2, mesh=mesh)
        loss = step(*(torch.cat(parts) for parts in zip(*microbatches, strict=True)))
        loss.backward()
        torch.testing.assert_close(loss, expected.loss)
        found = own_gradients(one.model)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected.gradients[name])
        names = world_so_far().from_all_ranks(" ".join(found))
        for replica in pipelines:
            first, last = (set(names[rank].split()) for rank in replica)
            assert first and last and first | last == expected.gradients.keys()
            assert [names[rank] for rank in replica] == [names[rank] for rank in pipelines[0]]
        asked, whole = one.model.state_dict(), pfeife.full_state_dict(one.model)
        for name, value in whole.items():
            assert not value.isnan().any() and torch.equal(asked[name], value), name


@row(ranks=(2,))
def figures_of_all_ranks() -> None:
    """Every rank has those of all: who waits for a stage that takes longer, and peaks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Linear(512, 8))
    model.append(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]))
    seen: list[pfeife.StepFigures] = []

    def slow(graph, examples):
        if RANK == 0:
            return graph.forward

        def run(*args):
            time.sleep(0.02)
            return graph.forward(*args)

        return run

    lines, log = Lines(), logging.getLogger("pfeife")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    told = None if RANK else seen.append  # the other rank need not have one
    step = pfeife.compile(
        lambda x: model(x).square().mean(), microbatches=2, compiler=slow, log_every=1, on_step=told
    )
    try:
        for _ in range(3):
            step(torch.ones(4, 8)).backward()
    finally:
        log.removeHandler(lines)
        log.setLevel(logging.NOTSET)
    texts = [record.getMessage() for record in lines.records]
    found = [text.split(":")[0] for text in texts if text.startswith("step ")]
    if RANK:
        assert not found and not seen
        return
    assert found == ["step 2", "step 3"] and [one.step for one in seen] == [2, 3]
    for one in seen:
        assert one.waits_most == 0 and 0.06 < one.waiting_seconds[0] <= one.seconds, one
        assert len(one.peak_bytes) == len(one.account_bytes) == 2
        assert min(one.peak_bytes) > 2**26


@row(ranks=(4,))
def ranks_are_laid_out_by_the_network() -> None:
    """By the first step that trains, also for what was built before it; a step that is given a mesh
    has that. Wide layers: their gradients stay within a node."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    plain, batch, network = copy.deepcopy(model), torch.randn(8, 64), two_nodes()

    def step(x):
        return model(x).square().mean()

    found = pfeife.compile(step, microbatches=4, replicas=2, network=network)
    expected = eager_accumulation(
        lambda x: plain(x).square().mean(), plain, [(p,) for p in batch.chunk(4)]
    )
    for training in (False, True, False, True):
        with torch.set_grad_enabled(training):
            loss = found(batch)
        torch.testing.assert_close(loss, expected.loss)
        if training:
            model.zero_grad()
            loss.backward()
            for name, gradient in own_gradients(model).items():
                torch.testing.assert_close(gradient, expected.gradients[name])
    orders = [one.pipeline.mesh.order for one in found.backend.compiled]
    assert orders[0] == () and set(orders[1:]) == {(0, 2, 1, 3)}, orders
    other = pfeife.compile(lambda x: model(x).sum(), microbatches=4, replicas=2)
    torch.testing.assert_close(other(batch).detach(), plain(batch).sum().detach())
    given = pfeife.compile(
        lambda x: plain(x).square().mean(), microbatches=4, mesh="-2,2", network=network
    )
    torch.testing.assert_close(given(batch), expected.loss)
    orders = [one.backend.compiled[0].pipeline.mesh.order for one in (other, given)]
    assert orders == [(0, 2, 1, 3), (0, 1, 2, 3)]


@row(ranks=(2,))
def an_example() -> None:
    """As torchrun starts it; it compares every loss with those of one device."""
    folder, said, kept = ROOT / "examples", io.StringIO(), (sys.argv, [*sys.path])
    sys.argv = ["train_gpt.py", "--steps", "3"]
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(folder / "train_gpt.py"), run_name="__main__")
    except SystemExit as end:
        assert not end.code, said.getvalue()
    finally:
        sys.argv, sys.path[:] = kept
    assert RANK or "3 of 3 losses are the same, bit for bit" in said.getvalue()
    dist.barrier()


@row(ranks=(2,))
def the_readme() -> None:
    """Its ten lines run under torchrun as they stand there: every rank draws the same."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    script = Path(tempfile.gettempdir()) / f"readme-{os.getppid()}.py"  # of all ranks
    written = script.with_suffix(f".{RANK}")
    written.write_text(block[1])
    written.replace(script)
    torch.manual_seed(RANK)  # as new processes have seeds of their own
    assert runpy.run_path(str(script))["loss"].isfinite()
    dist.barrier()
    script.unlink(missing_ok=True)
