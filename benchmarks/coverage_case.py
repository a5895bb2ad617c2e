"""One model of the suite: what becomes of it beside plain eager accumulation.

    python benchmarks/coverage_case.py text_decoders gpt2 out.json

`out.json` has what is known so far, written after every phase, for a crash or a hang shall lose
nothing but what comes after it.
"""

import contextlib
import json
import logging
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import coverage_models
import numpy
import torch
from coverage_models.example import Example
from differences import largest, largest_of
from torch import fx, nn
from torch.utils import _pytree as pytree

import pfeife

MICROBATCHES = 3
STEPS = 3
RATE = 0.01
ROUNDING = 1e-4  # of the largest value, beyond which numbers are wrong
SMALL = 1e-3  # of the largest gradient: what is below is as exact as that one is
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
Values = dict[str, torch.Tensor]


@attrs.define
class Row:
    """What is known of a model. `verdict` is "right", "WRONG", "refused", "failed" or "unfit"
    (eager itself fails, does not repeat its numbers, or draws some: a fault of the suite)."""

    family: str
    name: str
    verdict: str = "failed"
    phase: str = "import"
    cause: str = ""
    error: float | None = None  # the largest one relative to eager; 0.0 is bitwise
    compiled_error: float | None = None  # to the same step by aot_eager
    ways: tuple[str, ...] = ()  # in which it was tried
    door: str = ""
    graphs: int | None = None
    breaks: tuple[str, ...] = ()
    balance: float | None = None
    reduction: str = ""
    draws: bool = False  # random numbers, which are others in a pipeline
    eager_seconds: float | None = None
    aot_seconds: float | None = None
    aot_cause: str = ""
    seconds: float | None = None  # of the first call, backward included
    programs: int | None = None  # for all shapes that it was given
    by_size: tuple[str, ...] = ()  # why there is one for each
    warnings: tuple[str, ...] = ()


@attrs.frozen
class Way:
    """How a model is compiled, and the shapes of its steps: how many rows more than its own, and
    whether it is of its other size."""

    stages: int
    schedule: str
    shapes: tuple[tuple[int, bool], ...] = ((0, False),) * STEPS

    def __str__(self) -> str:
        return f"{self.stages} stages, {self.schedule}"


WAYS = (Way(2, "1f1b", ((0, False),) * STEPS + ((1, True),)), Way(3, "zb-h1"))
QUICK = (Way(3, "1f1b", ((0, False),) * 2),)
SIZES = (Way(2, "1f1b", ((0, False), (1, True), (2, False), (3, True))),)


class Recorder(logging.Handler):
    """Keeps what pfeife warns of, and why it takes a program for each size."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []
        self.by_size: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "for each size" in record.getMessage():
            self.by_size.append(record.getMessage())
        elif record.levelno >= logging.WARNING:
            self.texts.append(record.getMessage())


class Wrong(Exception):
    """Numbers that are not those of eager."""


def main(family: str, name: str, out: Path, ways: Sequence[Way] = WAYS) -> None:
    """Examines a model; in other ways than the usual ones not beside torch.compile."""
    row = Row(family, name)
    recorder, log = Recorder(), logging.getLogger("pfeife")
    log.addHandler(recorder)
    log.setLevel(logging.DEBUG)
    try:
        for _ in _examined(row, ways):
            out.write_text(json.dumps(attrs.asdict(row)))
        row.verdict = "right" if row.verdict == "failed" else row.verdict
    except Wrong as error:
        row.verdict, row.cause = "unfit" if row.draws else "WRONG", str(error)
    except (ValueError, pfeife.PipelineError) as error:
        ours = row.phase.startswith("pfeife")
        row.verdict, row.cause = "refused" if ours else "unfit", text(error)
    except Exception as error:
        row.verdict = "unfit" if row.phase == "eager" else "failed"
        row.cause = f"{type(error).__name__}: {text(error)}"
    row.warnings, row.by_size = tuple(recorder.texts), tuple(recorder.by_size)
    out.write_text(json.dumps(attrs.asdict(row)))


def text(error: BaseException) -> str:
    return str(error)[:1500]


def _examined(row: Row, ways: Sequence[Way]) -> Iterator[None]:
    """Fills the row in, and stops after every phase."""
    build = coverage_models.models(row.family)[row.name]
    yield
    row.phase = "eager"
    example = built(build)
    args = drawn(example, 0)
    expected = accumulated(example, args)
    with timed() as seconds:
        accumulated(example, args)
    row.eager_seconds = round(seconds() / MICROBATCHES, 4)
    again = accumulated(built(build), args)
    if not finite(expected):
        row.verdict, row.cause = "unfit", "eager's own numbers are not finite"
        return
    error, where = difference(expected, again)
    if error or not any(name.startswith("grad") for name in expected):
        row.verdict, row.cause = "unfit", f"{where or 'no gradient'}: eager differs from itself"
        return
    row.draws = bool(difference(expected, accumulated(built(build), args, number=8))[0])
    yield
    compiled = None
    if ways is WAYS:
        row.phase = "aot_eager"
        compiled = _by_aot_eager(row, build, args)
        yield
    for way in ways:
        row.phase = f"pfeife, {way}"
        yield
        _piped(row, build, way, compiled)
    row.phase = "end"


def _by_aot_eager(row: Row, build: Callable[[], Example], args: tuple[Any, ...]) -> Values | None:
    """The numbers of torch.compile, with the seconds of its first microbatch."""
    counted: list[fx.GraphModule] = []

    def counting(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        counted.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, examples)  # type: ignore[operator]

    example = built(build)
    step = torch.compile(example.step, backend=counting, dynamic=False)
    try:
        with timed() as seconds:
            step(*cut(example, args)[0]).backward()
        row.aot_seconds, row.graphs = round(seconds(), 2), len(counted)
        if len(counted) != 1:
            row.breaks = _breaks(built(build), cut(example, args)[0])
            return None
        copy_state(built(build).model, example.model)
        return accumulated(attrs.evolve(example, step=step), args)
    except Exception as error:
        row.aot_cause = f"{type(error).__name__}: {text(error)}"
        return None
    finally:
        torch._dynamo.reset()


def _breaks(example: Example, args: tuple[Any, ...]) -> tuple[str, ...]:
    """The first lines of the reasons why the step is not one graph."""
    with contextlib.suppress(Exception):
        torch._dynamo.reset()
        explained = torch._dynamo.explain(example.step)(*args)
        reasons = [str(one.reason).strip().split("\n")[0] for one in explained.break_reasons]
        return tuple(dict.fromkeys(reasons))
    return ()


def _piped(row: Row, build: Callable[[], Example], way: Way, compiled: Values | None) -> None:
    """Some steps as a pipeline, each beside eager from the same state."""
    row.ways = (*row.ways, str(way))
    example = built(build)
    reference = built(example.reference or build)
    step = pfeife.compile(
        example.step,
        in_dims=example.in_dims,
        microbatches=MICROBATCHES,
        stages=way.stages,
        schedule=way.schedule,
        progress=False,
    )
    for number, shape in enumerate(way.shapes):
        row.phase = f"pfeife, {way}, step {number}"
        args = drawn(example, number, *shape)
        copy_state(example.model, reference.model)
        with timed() as seconds:
            found = stepped(example, step, args)
        if not number:
            row.seconds = row.seconds or round(seconds(), 2)
            _describe(row, step)
        row.programs = len(step.backend.compiled)
        expected = accumulated(reference, args, "sum" if row.reduction == "sum" else "mean")
        if not finite(expected):
            return  # eager diverges, and what comes of that cannot be compared
        error, where = difference(expected, found)
        row.error = largest([row.error or 0.0, error])
        if compiled is not None and row.compiled_error is None:
            row.compiled_error = difference(compiled, found)[0]
        if not error <= ROUNDING:
            raise Wrong(f"{where} is off by {error:.1e} of its size, {way}, step {number}")
        for parameter in example.model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(dense(parameter.grad), alpha=RATE)


def _describe(row: Row, step: Any) -> None:
    compiled = step.backend.compiled[0]
    row.door = row.door or getattr(compiled.captured, "door", "dynamo")
    seconds = compiled.plan.stage_seconds
    if seconds and row.balance is None:
        row.balance = round(max(seconds) / (sum(seconds) / len(seconds)), 2)
    losses = [port for port in compiled.program.outputs if port.role == pfeife.Role.LOSS]
    row.reduction = losses[0].reduction or "" if losses else ""


def built(build: Callable[[], Example]) -> Example:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = build()
    example.model.train()
    for module in example.model.modules():
        if isinstance(module, DROPOUTS):
            module.p = 0.0
    return example


def drawn(example: Example, number: int, more: int = 0, other: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(100 + number)
    return example.draw((example.rows + more) * MICROBATCHES, example.sizes[other])


def in_dtype(values: Any, dtype: torch.dtype) -> Any:
    """Values whose floating point tensors are of a dtype."""
    return pytree.tree_map(
        lambda value: (
            value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        ),
        values,
    )


def cut(
    example: Example, args: tuple[Any, ...], count: int = MICROBATCHES
) -> list[tuple[Any, ...]]:
    """The arguments of every microbatch."""
    dims = example.in_dims if isinstance(example.in_dims, tuple) else (0,) * len(args)

    def part(value: Any, dim: int | None, index: int) -> Any:
        if dim is None:
            return value
        return pytree.tree_map(
            lambda one: (
                one.chunk(count, dim)[index] if isinstance(one, torch.Tensor) and one.dim() else one
            ),
            value,
        )

    return [
        tuple(part(value, dim, index) for value, dim in zip(args, dims, strict=True))
        for index in range(count)
    ]


def accumulated(
    example: Example, args: tuple[Any, ...], reduction: str = "mean", number: int = 7
) -> Values:
    """Loss, gradients and buffers of plain accumulation over the microbatches, from a seed."""
    divisor = MICROBATCHES if reduction == "mean" else 1
    seed(number)
    example.model.zero_grad(set_to_none=True)
    losses = []
    for microbatch in cut(example, args):
        loss = example.step(*microbatch) / divisor
        losses.append(loss.detach())
        loss.backward()
    whole = losses[0]
    for loss in losses[1:]:
        whole = whole + loss
    return values_of(example.model, whole)


def stepped(example: Example, step: Callable[..., Any], args: tuple[Any, ...]) -> Values:
    """The same by a compiled step of the whole batch."""
    seed(7)
    example.model.zero_grad(set_to_none=True)
    loss = step(*args)
    loss.backward()
    return values_of(example.model, loss.detach())


def seed(number: int) -> None:
    """All generators that a step may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def values_of(model: nn.Module, loss: torch.Tensor) -> Values:
    """Copies, by names that begin with the kind of value."""
    gradients = {
        f"grad {name}": dense(one.grad).clone()
        for name, one in model.named_parameters()
        if one.grad is not None
    }
    buffers = {f"buffer {name}": one.clone() for name, one in model.named_buffers()}
    parameters = {f"parameter {n}": one.detach().clone() for n, one in model.named_parameters()}
    return {"loss": loss.clone(), **gradients, **buffers, **parameters}


def finite(values: Values) -> bool:
    return all(bool(value.isfinite().all()) for value in values.values())


def dense(value: torch.Tensor) -> torch.Tensor:
    return value.to_dense() if value.is_sparse else value


def difference(expected: Values, found: Values) -> tuple[float, str]:
    """The largest difference relative to its value's size, and where it is.

    A gradient that is almost zero beside the largest is judged by that one's exactness; one that
    is missing on a side is zeros.
    """
    gradients = [float(v.abs().max()) for n, v in expected.items() if n.startswith("grad")]
    least = SMALL * max(gradients, default=0.0)
    errors = {}
    for name in dict.fromkeys([*expected, *found]):
        one, two = expected.get(name), found.get(name)
        one = torch.zeros_like(two) if one is None else one  # type: ignore[arg-type]
        two = torch.zeros_like(one) if two is None else two
        if one.shape != two.shape or one.dtype != two.dtype:
            return math.inf, f"{name} ({tuple(one.shape)}, {one.dtype})"
        floor = least if name.startswith("grad") else 0.0
        errors[name] = distance(one, two, floor)
    return largest_of(errors)


def distance(one: torch.Tensor, two: torch.Tensor, floor: float) -> float:
    if torch.equal(one, two) or not one.numel():
        return 0.0
    if not one.is_floating_point() and not one.is_complex():
        return math.inf
    size = max(float(one.abs().max()), floor)
    gap = float((one - two).abs().max())
    return gap / size if size else math.inf


def copy_state(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for kind in ("named_parameters", "named_buffers"):
            values = dict(getattr(source, kind)())
            for name, value in getattr(target, kind)():
                value.data = values[name].detach().clone()


@contextlib.contextmanager
def timed() -> Iterator[Callable[[], float]]:
    start, spent = time.perf_counter(), 0.0
    yield lambda: spent
    spent = time.perf_counter() - start


def warm_up() -> None:
    """Compiles a little, for what the first compilation imports is no part of a model's time."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    torch.compile(lambda x: net(x).mean(), backend="aot_eager")(torch.ones(2, 2)).backward()
    step = pfeife.compile(lambda x: net(x).mean(), microbatches=2, stages=2, progress=False)
    step(torch.ones(4, 2)).backward()


if __name__ == "__main__":
    warm_up()
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
