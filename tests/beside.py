"""Runs a script (`scripts.py`) as it is on ranks, and beside it plain torch on one device.

One device adds up microbatches: `(loss / microbatches)` of each is differentiated, in their order,
and what a call has is added to `.grad`. With replicas each has the statistics of its own
microbatches, as README.md says, so that one device keeps those of each.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from scripts import ELSEWHERE, STATISTICS, TOO_SMALL, WIDTH, Net, Script
from torch import nn

import pfeife
from pfeife.testing import own_gradients

MICROBATCHES = 4
PATIENCE = 30.0  # seconds of a rank with one that has ended
ROWS = 16


@attrs.frozen
class Cell:
    """How a script is run: on so many ranks, `replicas` pipelines of them."""

    ranks: int
    schedule: str
    replicas: int

    @property
    def stages(self) -> int:
        """In one process two, in several one a rank; two for each where the family wants that."""
        each = 2 if self.schedule in ("interleaved", "zb-v") else 1
        return each * (2 if self.ranks == 1 else self.ranks // self.replicas)

    @property
    def divides(self) -> bool:
        """Whether a rank lacks what others train."""
        return self.ranks > self.replicas

    def refuses(self, words: str) -> bool:
        """Whether a script may end with these words here: on ranks, and some where a rank lacks
        what others train, or where two pipelines have statistics of their own."""
        where = {
            ELSEWHERE: self.divides,
            STATISTICS: self.ranks > 1 and self.replicas > 1,
        }
        return where.get(words, self.ranks > 1)

    def rounds(self, script: Script) -> bool:
        """Whether sums are re-associated."""
        return self.replicas > 1 or (script.tied and self.stages > 1)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "microbatches": MICROBATCHES,
            "stages": self.stages,
            "schedule": self.schedule,
            "replicas": self.replicas,
            "progress": False,
            "timeout": PATIENCE,
        }


class Run:
    """What a script is given, and what has been seen of it: its numbers in their order."""

    def __init__(self, script: Script, cell: Cell, rank: int, steps: int):
        self.script, self.cell, self.rank, self.steps = script, cell, rank, steps
        self.dtype = torch.float64 if cell.rounds(script) else torch.float32
        self.seen: list[tuple[str, torch.Tensor]] = []
        self.models: list[nn.Module] = []

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.known(Net(self.script.tied, max(4, self.cell.stages - 2)).to(self.dtype))

    def known(self, model: nn.Module) -> nn.Module:
        """Another one, that the script has made itself."""
        self.models.append(model)
        return model

    def batches(self, steps: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        draws = torch.Generator().manual_seed(1)
        for _ in range(steps or self.steps):
            yield tuple(torch.randn(ROWS, WIDTH, generator=draws).to(self.dtype) for _ in range(2))

    def note(self, *values: torch.Tensor) -> None:
        """What the script prints or logs."""
        self._add("value", *values)

    def see(self, loss: torch.Tensor, model: nn.Module) -> None:
        """The loss of a step and the gradients."""
        self._add("loss", loss)
        for name, gradient in own_gradients(model).items():
            self._add(f"gradient {name}", gradient)

    def turn(self, loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """What most loops do with a loss."""
        loss.backward()
        self.see(loss, model)
        optimizer.step()
        optimizer.zero_grad()

    def whole(self, model: nn.Module) -> None:
        replicas = self.cell.replicas > 1  # each has statistics of its own
        for name, value in (model.state_dict() if replicas else self.full(model)).items():
            self._add(f"state {name}", value)

    def end(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Parameters and buffers, what optimizers keep of each parameter and are set to."""
        self.whole(model)
        for at, optimizer in enumerate(optimizers):
            state = optimizer.state_dict()
            for index in sorted(state["state"], key=str):
                for name, value in state["state"][index].items():
                    self._add(f"optimizer {at}: {name} of {index}", torch.as_tensor(value))

    def _add(self, name: str, *values: torch.Tensor) -> None:
        for value in values:
            torch.equal(value, value)  # reads it
            self.seen.append((name, value.detach().clone()))


class Ours(Run):
    """By pfeife."""

    def compile(self, step: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return pfeife.compile(step, **self.cell.options)

    def full(self, model: nn.Module) -> dict[str, Any]:
        return pfeife.full_state_dict(model)


class Plain(Run):
    """By torch alone, all on this rank."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.buffers: dict[tuple[nn.Module, int], list[Any]] = {}

    def compile(self, step: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(*batch: torch.Tensor) -> torch.Tensor:
            leaves = dict.fromkeys(p for model in self.models for p in model.parameters())
            trained = [p for p in leaves if p.requires_grad] if torch.is_grad_enabled() else []
            if not trained:
                return _joined(self._parts(step, batch))
            return _Accumulated.apply(lambda: self._parts(step, batch), *trained)

        return run

    def full(self, model: nn.Module) -> dict[str, Any]:
        """Of what scripts may have written by hand, which every rank asks for."""
        return model.state_dict()

    def _parts(self, step: Callable[..., Any], batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of all microbatches; losses are divided by their number."""
        rows = list(zip(*(one.chunk(MICROBATCHES) for one in batch), strict=True))
        each, mine = MICROBATCHES // self.cell.replicas, self._replica()
        found = []
        self._begun()
        for replica in range(self.cell.replicas):
            self._swap(mine, replica)
            found += [step(*part) for part in rows[replica * each : (replica + 1) * each]]
            self._swap(replica, mine)
        return [one if one.dim() else one / MICROBATCHES for one in found]

    def _replica(self) -> int:
        return self.rank // (self.cell.ranks // self.cell.replicas) if self.cell.ranks > 1 else 0

    @torch.inference_mode(False)
    def _swap(self, out: int, into: int) -> None:
        """Puts the statistics of one replica away, and those of another in their place: as tensors,
        since graphs of autograd have the others."""
        for model in self.models if out != into else ():
            places = [(m, name) for m in model.modules() for name in m._buffers]
            self.buffers[model, out] = [m._buffers[name] for m, name in places]
            kept = self.buffers.setdefault((model, into), copied(self.buffers[model, out]))
            for (module, name), value in zip(places, kept, strict=True):
                module._buffers[name] = value

    def _begun(self) -> None:
        """Replicas begin with the same statistics, in one process at each call."""
        for model in self.models:
            for replica in range(self.cell.replicas):
                if replica != self._replica() and self.cell.ranks == 1:
                    self.buffers[model, replica] = copied(model.buffers())
                elif replica != self._replica():
                    self.buffers.setdefault((model, replica), copied(model.buffers()))


def copied(buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().clone() for one in buffers]


class _Accumulated(torch.autograd.Function):
    """What microbatches give, and their gradients one after another."""

    @staticmethod
    def forward(ctx, parts, *trained):
        with torch.enable_grad():
            ctx.parts, ctx.trained = parts(), trained
        return _joined([one.detach() for one in ctx.parts])

    @staticmethod
    def backward(ctx, given):
        arrived = given.chunk(len(ctx.parts)) if given.dim() else [None] * len(ctx.parts)
        total: list[torch.Tensor | None] = [None] * len(ctx.trained)
        hooks = [one._backward_hooks for one in ctx.trained]  # which run once a call
        for one in ctx.trained:
            one._backward_hooks = None
        for part, tangent in zip(ctx.parts, arrived, strict=True):
            found = torch.autograd.grad(
                part, ctx.trained, tangent, retain_graph=True, allow_unused=True
            )
            total = [_plus(one, other) for one, other in zip(total, found, strict=True)]
        for one, kept in zip(ctx.trained, hooks, strict=True):
            one._backward_hooks = kept
        if given.dim():
            return None, *total
        return None, *(None if one is None else one * given for one in total)


def _plus(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if parts[0].dim():
        return torch.cat([*parts])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@attrs.frozen
class Verdict:
    """What became of a script in a cell, on one rank: "right" (with the largest `error`, 0.0 where
    all bits are the same), "refused", "WRONG", or "ended" by another rank. `gradients` are the
    names of those that were seen here, `wanted` of those on one device."""

    kind: str
    error: float = 0.0
    text: str = ""
    gradients: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


def judged(script: Script, cell: Cell, rank: int, steps: int = 20) -> Verdict:
    """Runs a script on this rank, both ways; `steps` are as many as the table has. Collective."""
    ours, plain = Ours(script, cell, rank, steps), Plain(script, cell, rank, steps)
    script.run(plain)
    try:
        script.run(ours)
    except ValueError as error:
        said = script.refused and script.refused in str(error) and cell.refuses(script.refused)
        said = said or (script.small and TOO_SMALL in str(error) and cell.stages > 2)
        return Verdict("refused" if said else "WRONG", text=f"{type(error).__name__}: {error}")
    except pfeife.PipelineError as error:
        return Verdict("ended", text=f"{type(error).__name__}: {error}")
    return compared(ours, plain)


def compared(ours: Run, plain: Run) -> Verdict:
    """By what was seen of both, in the same order; gradients of other ranks are not seen."""
    worst, at = 0.0, 0
    wanted = [name for name, _ in plain.seen if name.startswith("gradient")]
    for name, value in ours.seen:
        while at < len(plain.seen) and plain.seen[at][0] != name:
            if not plain.seen[at][0].startswith("gradient"):
                return Verdict("WRONG", text=f"{plain.seen[at][0]} is missing, at {name}")
            at += 1
        if at == len(plain.seen):
            return Verdict("WRONG", text=f"{name} is not there on one device")
        other = plain.seen[at][1]
        at += 1
        if value.shape != other.shape or value.dtype != other.dtype:
            return Verdict("WRONG", text=f"{name}: {value.dtype} {[*value.shape]}")
        error = _error(value, other)
        if not error <= (ours.script.limit if ours.cell.rounds(ours.script) else 0.0):
            return Verdict("WRONG", error, f"{name} (value {at}) differs by {error:.1e}")
        worst = max(worst, error)
    rest = [name for name, _ in plain.seen[at:] if not name.startswith("gradient")]
    if rest:
        return Verdict("WRONG", text=f"{rest[0]} is missing")
    seen = tuple({name: None for name, _ in ours.seen if name.startswith("gradient")})
    return Verdict("right", worst, "", seen, tuple(dict.fromkeys(wanted)))


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference in units of the largest value; NaN if one is, and the other not."""
    if torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all()):
        return 0.0
    top = float(other.abs().max())
    return float((one - other).abs().max()) / (top or 1.0)


def summed(verdicts: Sequence[Verdict]) -> Verdict:
    """That of all ranks: the worst one. A gradient that no rank has seen is wrong."""
    order = ("WRONG", "refused", "ended", "right")
    worst = min(verdicts, key=lambda one: order.index(one.kind))
    if worst.kind == "ended":
        return attrs.evolve(worst, kind="WRONG")
    if worst.kind != "right":
        return worst
    seen = {name for one in verdicts for name in one.gradients}
    lost = [name for one in verdicts for name in one.wanted if name not in seen]
    if lost:
        return Verdict("WRONG", text=f"no rank has {lost[0]}")
    return copy.copy(max(verdicts, key=lambda one: one.error))
