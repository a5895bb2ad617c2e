"""`pfeife demo`: something tiny trained on two ranks of this process, and its timeline."""

import argparse
from collections.abc import Sequence
from typing import Any

HELP = "train something tiny on two ranks in this process, and show it"
EXAMPLES = """\
Nothing is needed but pfeife itself. What it runs is printed first.

  pfeife demo
  pfeife demo --html demo.html"""
PROGRAM = """\
    step = pfeife.compile(loss_fn, microbatches=4, stages=2)
    loss = step(inputs, targets); loss.backward(); optimizer.step()"""
STEPS, MICROBATCHES, ROWS, WIDTH = 20, 4, 64, 256


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pfeife demo`."""
    parser.add_argument("--html", metavar="FILE", help="write it as a page (needs pfeife[report])")


def run(options: argparse.Namespace) -> str:
    """What was trained, whether it is what one device trains, and when each rank did what."""
    import torch
    from torch import nn

    from pfeife.backend.step import compile as compiled_step
    from pfeife.commands.answers import writable

    writable(options.html)
    # The same losses on every machine with the same torch.
    torch.manual_seed(0)

    def model() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    pipelined, alone = model(), model()
    alone.load_state_dict(pipelined.state_dict())
    inputs = torch.randn(ROWS, WIDTH)
    targets = inputs.sin().sum(1, keepdim=True)

    def loss_fn(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (pipelined(inputs) - targets).square().mean()

    step = compiled_step(loss_fn, microbatches=MICROBATCHES, stages=2, progress=False)
    optimizer = torch.optim.SGD(pipelined.parameters(), lr=1e-2)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    losses, same = [], 0
    for _ in range(STEPS):
        loss = step(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # One device adds in the same order, a microbatch after the other: one backward of the whole
        # batch would round otherwise, and the losses would not be the same bits.
        expected = torch.zeros(())
        for part in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            part_loss = (alone(part[0]) - part[1]).square().mean() / MICROBATCHES
            part_loss.backward()
            expected = expected + part_loss.detach()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        losses.append(loss.item())
        same += torch.equal(loss.detach(), expected)
    if options.html:
        step.report(options.html, inputs, targets)
    # One, since all calls have the same shapes.
    (built,) = step.backend.compiled
    return _text(built, losses, same)


def _text(built: Any, losses: Sequence[float], same: int) -> str:
    """What was compiled, and what became of the losses, of which so many are the `same`."""
    from pfeife import report
    from pfeife.cost import machine

    target = report.Target(machine("cpu-core"))
    expected_run = report.expected(built.program, built.schedule, target)
    return "\n".join(
        [
            PROGRAM,
            "",
            f"{STEPS} steps: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}; {same} of "
            f"{STEPS} losses are those of one device, bit for bit",
            report.plan_table(built.plan, built.program),
            "",
            "a step (digits are the microbatches of forwards, letters of backwards):",
            report.timeline_chart(expected_run.timeline),
            "",
            "next: pfeife plan --help, or pfeife explain --help",
        ]
    )
