"""Trains a byte-level GPT on the Python standard library's own source files.

    torchrun --nproc-per-node 2 examples/train_gpt.py     two pipeline ranks
    python examples/train_gpt.py --stages 2               two stages in one process

Then trains the same model on one device by gradient accumulation and compares every loss. With
`--report demo.html` it leaves a page: the plan, what a step was predicted to take and took, memory.
"""

import argparse
import os
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT

import pfeife
from pfeife import report

CONTEXT, ROWS, MICROBATCHES = 64, 16, 4


def library_bytes(limit: int = 2_000_000) -> torch.Tensor:
    """The standard library's modules, one after another, as bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) > limit:
            break
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(text: torch.Tensor, steps: int):
    """The same batches for everybody who asks."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT - 1, (ROWS,), generator=draw)
        windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def loss_fn(model):
    def step(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return step


def accumulate(step, tokens, targets):
    """One device: microbatch after microbatch, as the pipeline promises to compute it."""
    total = 0
    for part in zip(tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
        loss = step(*part) / MICROBATCHES
        loss.backward()
        total = total + loss.detach()
    return total


def train(name, run, model, text, steps, chatty):
    """An ordinary loop; returns its losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, start = [], time.perf_counter()
    for index, (tokens, targets) in enumerate(batches(text, steps)):
        losses.append(run(tokens, targets))
        optimizer.step()
        optimizer.zero_grad()
        if chatty:
            if sys.stderr.isatty():
                bar = "#" * (30 * (index + 1) // steps)
                print(f"\r{name} [{bar:30}] {index + 1}/{steps}\r", end="", file=sys.stderr)
            if index % 20 == 0 or index + 1 == steps:
                rate = (index + 1) / (time.perf_counter() - start)
                print(f"{name} step {index:4}  loss {losses[-1]:.4f}  {rate:5.1f} steps/s   ")
    return losses


def where_it_would_be_faster(built):
    """What the same step is expected to take on GPUs, by estimate."""
    asked = {"machine": "h100-sxm", "microbatches": MICROBATCHES}
    one, two = (
        pfeife.forecast(built.captured.program, ranks=n, **asked).plan.step_seconds for n in (1, 2)
    )
    return (
        f"two ranks that share {os.cpu_count()} CPU cores with everything else are no faster than "
        f"one device. On one H100 a step of this tiny model is expected to take {1e3 * one:.2f} "
        f"ms, on two {1e3 * two:.2f} ms; larger models gain more (pfeife plan --help)"
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--stages", type=int, default=None)
    arguments.add_argument("--report", metavar="FILE", help="where a page about the step goes")
    options = arguments.parse_args()
    torch.set_num_threads(1)  # the same kernels, and so the same bits, for every way to run
    chatty = os.environ.get("RANK", "0") == "0"
    text = library_bytes()

    torch.manual_seed(0)
    model = GPT(CONTEXT)
    step = pfeife.compile(loss_fn(model), microbatches=MICROBATCHES, stages=options.stages)

    def pipelined(tokens, targets):
        loss = step(tokens, targets)
        loss.backward()
        if chatty and len(step.backend.compiled) == 1 and not shown:
            shown.append(step.backend.compiled[0])
            print(f"{report.summary(shown[0].plan, shown[0].program)}")
            print(f"{report.plan_table(shown[0].plan, shown[0].program)}\n")
        return loss.detach()

    shown = []
    losses = train("pipeline  ", pipelined, model, text, options.steps, chatty)
    if options.report:  # all ranks measure a step for it
        step.report(options.report, *next(batches(text, 1)))
    if chatty:  # the check needs one process only
        torch.manual_seed(0)
        alone = GPT(CONTEXT)
        one = loss_fn(alone)
        expected = train(
            "one device", lambda *b: accumulate(one, *b), alone, text, options.steps, True
        )
        same = sum(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        print(f"{same} of {options.steps} losses are the same, bit for bit")
        print(where_it_would_be_faster(shown[0]))
        if options.report:
            print(f"look at {Path(options.report).absolute()}: the plan, both timelines, memory")
        sys.exit(same != options.steps)


if __name__ == "__main__":
    main()
