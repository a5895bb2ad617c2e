"""Run by itself or on ranks, `python -m forked 2 tests/generators.py FOLDER`: nothing of Pfeife
moves, seeds or reads a generator of the user's, torch's, numpy's or Python's, but for one draw of a
call that draws. Prints the losses of all calls, which do not depend on the number of processes.
"""

import contextlib
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine, measure
from pfeife.testing import check_pass

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
OPTIONS: dict[str, Any] = {"microbatches": 2, "progress": False}
OPTIONS |= {"stages": 2} if RANKS == 1 else {}
LOSSES: list[float] = []


@contextlib.contextmanager
def unmoved(what: str, draws: int = 0) -> Iterator[None]:
    """All generators are afterwards as they were; torch's but for so many seeds of a step."""
    expected = torch.Generator()
    expected.set_state(torch.get_rng_state())
    others = others_states()
    yield
    for _ in range(draws):
        torch.randint(2**62, (), generator=expected)
    assert torch.equal(torch.get_rng_state(), expected.get_state()), f"{what}: torch's"
    assert others_states() == others, f"{what}: Python's or numpy's"


def others_states() -> tuple[Any, str]:
    state: Any = numpy.random.get_state(legacy=False)
    return random.getstate(), str([state["state"]["pos"], *state["state"]["key"].tolist()])


class Signs(torch.optim.Optimizer):
    """One that is not torch's, and so is tried on ranks."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.sign(), alpha=0.01)


def net(rate: float, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Dropout(rate), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(rate)]
        return nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 8)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    return (values / 64).to(dtype), values.cos().to(dtype)


def calls(rate: float, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Three calls of a step that draws, or of one that does not."""
    model, rows, draws = net(rate, dtype), batch(dtype), int(rate > 0)
    what = f"{options} with dropout {rate}"
    with unmoved(what):
        step = pfeife.compile(
            lambda x, y: F.mse_loss(model(x).float(), y.float()), **OPTIONS, **options
        )
        optimizer = Signs(model.parameters(), {})
    for index in range(3):
        with unmoved(f"call {index} of {what}", draws):
            loss = step(*rows)
        with unmoved(f"what follows call {index} of {what}"):
            loss.backward()
            LOSSES.append(loss.item())
            pfeife.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            model.state_dict()
            pfeife.full_state_dict(model)
            if index == 1:
                model.load_state_dict(model.state_dict())


def the_draw_that_is_stated() -> None:
    """The seed of a call is the one number that is drawn from torch's default generator."""
    model, rows = net(0.5), batch()

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    with unmoved("capture"):
        flat = pfeife.capture(loss_fn, *(one[:4] for one in rows), loss_reduction="mean")
    state = {k: v.clone() for k, v in pfeife.state_of(flat, model).items()}
    step = pfeife.compile(loss_fn, **OPTIONS)
    for _ in range(2):
        before = torch.get_rng_state()
        found = step(*rows)
        torch.set_rng_state(before)
        seed = int(torch.randint(2**62, ()))
        with unmoved("evaluate"):
            parts = list(zip(*(one.chunk(2) for one in rows), strict=True))
            assert torch.equal(found, pfeife.evaluate(flat, state, parts, seed=seed).loss)


def by_name() -> None:
    model, rows = net(0.5), batch()
    for one in rows:
        torch._dynamo.mark_dynamic(one, 0)
    options = {name: value for name, value in OPTIONS.items() if name != "progress"}
    step = torch.compile(lambda x, y: F.mse_loss(model(x), y), backend="pfeife", options=options)
    for _ in range(2):
        with unmoved("the named backend", 1):
            loss = step(*rows)
        with unmoved("its backward"):
            loss.backward()
        LOSSES.append(loss.item())


def outside_and_evaluated() -> None:
    model, (x, y) = net(0.5), batch()
    step = pfeife.compile(model, **OPTIONS)
    for _ in range(2):
        with unmoved("the loss outside", 1):
            out = step(x)
        with unmoved("its backward"):
            F.mse_loss(out, y).backward()
    model.eval()
    with unmoved("evaluation"), torch.no_grad():
        LOSSES.append(F.mse_loss(step(x), y).item())


def saved(folder: Path) -> None:
    model, rows = net(0.0), batch()
    optimizer = torch.optim.AdamW(model.parameters())
    step = pfeife.compile(lambda x, y: F.mse_loss(model(x), y), **OPTIONS)
    with unmoved("checkpoints"):
        checkpoints = pfeife.Checkpoints(folder / "steps", model, optimizer)
        for _ in range(2):
            step(*rows).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(1)
        checkpoints.load()
        LOSSES.append(step(*rows).item())
        pfeife.save_safetensors(model, folder / "model")


def shown() -> None:
    model, rows = net(0.5), batch()

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    with unmoved("explain"):
        str(pfeife.explain(loss_fn, *rows, options={"microbatches": 2, "stages": 2}))


def made() -> None:
    with unmoved("deferred_init, beside what it records"):
        before = torch.get_rng_state()
        with pfeife.deferred_init():
            model = nn.Linear(8, 8)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        nn.Linear(8, 8)
        assert torch.equal(torch.get_rng_state(), after), "deferred_init has drawn something else"
        pfeife.materialize(model)
        torch.set_rng_state(before)


def the_toolkit() -> None:
    model, rows = net(0.5), batch()
    parts = list(zip(*(one.chunk(2) for one in rows), strict=True))
    core = machine("cpu-core")
    with unmoved("the toolkit"):
        flat = pfeife.capture(
            lambda x, y: F.mse_loss(model(x), y), *parts[0], loss_reduction="mean"
        )
        state = {name: one.clone() for name, one in pfeife.state_of(flat, model).items()}
        clusters = check_pass(pfeife.fuse(), flat, state, parts)
        clusters = pfeife.annotate(estimate(clusters, core))(clusters)
        measure(clusters)
        for schedule in ("1f1b", "gpipe"):
            plan = sched.plan(clusters, machine=core, microbatches=2, stages=2, schedule=schedule)
            pfeife.evaluate(pfeife.apply(plan)(clusters), state, parts)
        sched.plan(
            clusters, machine=core, microbatches=2, stages=2, schedule="search", search_work=10_000
        )
        pfeife.move_to_device("cuda")(flat)
        flat.source()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    for rate in (0.5, 0.0):
        calls(rate)
    calls(0.5, capture="trace")
    calls(0.5, torch.float16)
    calls(0.5, schedule="search", search_work=10_000)
    calls(0.5, costs="measure", accumulate="float32", deferred_batch_norm=True)
    calls(0.5, batch="rank0")
    the_draw_that_is_stated()
    by_name()
    outside_and_evaluated()
    saved(folder)
    with unmoved("loaders"):
        LOSSES.extend(float(one.sum()) for one in pfeife.from_rank0([batch()[0]] * 2))
        list(pfeife.data_sampler(range(8)))
    made()
    if RANKS == 1:
        shown()
        the_toolkit()
    print(f"rank {RANK} has the losses {json.dumps(LOSSES)}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
