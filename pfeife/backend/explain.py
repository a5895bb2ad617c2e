"""`pfeife.explain`: what would become of a step, without training it."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import fx

from pfeife import _torch, report
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.entry import Backend, backend
from pfeife.backend.graph_break_steps import PieceSteps
from pfeife.backend.graphs.graph_breaks import Part, share_of
from pfeife.backend.settings.options import Options
from pfeife.backend.step import CompiledStep
from pfeife.backend.steps import Steps
from pfeife.cost import assumed_rates
from pfeife.data.progress import Shown
from pfeife.frontend.captured import Door, RefusedByBoth, taken
from pfeife.frontend.dynamo import plain_error
from pfeife.frontend.watch.restore import untouched
from pfeife.ir.flops import node_flops
from pfeife.ir.nodes import node_bytes, source_line
from pfeife.ir.parts import Assumption, Kind
from pfeife.ir.program import Program
from pfeife.passes.fuse import module_path

Entry = Literal["pfeife.compile", "torch.compile"]
MOST = 5  # lines of each kind in the text


@attrs.frozen
class ExplainedLine:
    """The clusters that a line of the user's model has made: for a microbatch all compute
    `seconds`, the largest `largest`, in a module of that name."""

    line: str
    module: str
    clusters: int
    seconds: float
    largest: float


@attrs.frozen
class Explanation:
    """What would become of a step; `str` has it on one screen.

    `door` is how the step is captured as one graph, and `why` says so; None where it is not. Then
    `refused` has what each door has said, under "batch" what cannot be cut, and under "backend"
    what ends a call of torch.compile's backend. `premises` are what is taken for granted.

    Of a step that is one graph, `summary` describes the pipeline, `seconds` are those of all
    microbatches by the costs, `stages` is how many there are, `clusters` what they are made of, and
    `lines` the user's lines that have made these, the largest cluster first; `warnings` are what a
    call would warn of.

    Where Dynamo breaks the step, `parts` are its graphs for torch.compile's backend, by the names
    of their functions: what becomes of each, its estimated seconds, and the break that has made it
    (the reason and the line).
    """

    step: str
    door: Door | None
    why: str
    refused: Mapping[str, str] = attrs.field(factory=dict)
    premises: tuple[Assumption, ...] = ()
    summary: str = ""
    seconds: float = 0.0
    stages: int = 0
    clusters: int = 0
    lines: tuple[ExplainedLine, ...] = ()
    warnings: tuple[str, ...] = ()
    parts: tuple[tuple[str, Part], ...] = ()

    @property
    def pipelined(self) -> float:
        """The share of the estimated seconds that is pipelined, from 0 to 1."""
        whole = self.stages > 1 or not self.parts
        return float(bool(self.stages)) if whole else share_of(part for _, part in self.parts)

    @property
    def breaks(self) -> tuple[tuple[str, str], ...]:
        """Why Dynamo breaks the step, and where: each once."""
        return tuple(dict.fromkeys(part.broken for _, part in self.parts if any(part.broken)))

    def __str__(self) -> str:
        return "\n".join(_text(self))


def explain(
    step: Callable[..., Any],
    *batch: Any,
    in_dims: Any = 0,
    entry: Entry = "pfeife.compile",
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """What a call `step(*batch, **kwargs)` would become in one process with these `options`, by
    `pfeife.compile(step, in_dims=in_dims, **options)` or, as `entry` says, by
    `torch.compile(step, backend="pfeife", options=options, dynamic=True)`.

    Nothing is trained, and everything is afterwards as it was: state, gradients, generators, what
    the step's Python has set. Forwards may run as at a first call: of a microbatch for its checks
    (`check=False` leaves them out) and where a traced step asks for values of tensors, and of the
    whole batch where Dynamo breaks the step. A step that is refused is explained, too. Raises
    ValueError for wrong options, TypeError for arguments that the step does not take.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> def step(x):
    ...     return net(x).square().mean()
    >>> found = pfeife.explain(step, torch.ones(8, 4), options={"microbatches": 2, "stages": 2})
    >>> found.why, found.pipelined, found.clusters
    ('step is captured by Dynamo as one graph', 1.0, 2)
    """
    if entry not in ("pfeife.compile", "torch.compile"):
        raise ValueError(f'entry={entry!r}: must be "pfeife.compile" or "torch.compile"')
    own = attrs.evolve(
        backend(**{"in_dims": in_dims, **(options or {})}).options,
        compiler="aot_eager",
        cuda_graphs=False,
        runtime=None,
        progress=False,
    )
    if entry == "pfeife.compile":
        explained = _by_doors(step, own, batch, kwargs)
        if explained.door == "dynamo" or "dynamo" not in explained.refused:
            return explained
    else:
        name = getattr(step, "__qualname__", type(step).__name__)
        explained = Explanation(name, None, f"{name} is compiled by torch.compile")
    # To torch.compile `in_dims` is not given, unless somebody says so in the options.
    by_backend = attrs.evolve(own, in_dims=(options or {}).get("in_dims", 0))
    return _by_backend(step, batch, kwargs, by_backend, explained)


class _Built(Exception):
    """Ends a call where it would run."""

    def __init__(self, compiled: Compiled):
        super().__init__()
        self.compiled = compiled


def _silent() -> Shown:
    """Nothing is shown or logged."""
    log = logging.Logger("pfeife.explain")  # of nobody else
    log.disabled = True
    return Shown(log)


def _by_doors(
    step: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Explanation:
    """What `pfeife.compile` makes of a call, which ends where it would run."""
    guards: list[tuple[Assumption, ...]] = []

    def build(steps: Steps, values: Sequence[Any], options: Options, _: Any) -> list[torch.Tensor]:
        # By an exception, as the call is inside of Dynamo here: nothing of the step runs after
        # that.
        raise _Built(steps.build(values, options, _silent()))

    def seen() -> None:
        guards.append(tuple(Assumption(*guard) for guard in _torch.guards()))

    # The same way as a real call, so that what is explained is what happens.
    compiled = CompiledStep(step, options.in_dims, Backend(options), build, runs=False, seen=seen)
    error: Exception | None
    at: str = "batch"
    try:
        # A trace runs the step's Python, which may set attributes and draw numbers; no values of
        # tensors are changed on this way.
        with untouched(step, {"args": args, "kwargs": kwargs}, values=False):
            outcome = compiled.attempt(args, kwargs, None)
        error, at = outcome.error, outcome.at
    except _Built as built:
        captured = built.compiled.captured
        explained = Explanation(
            compiled.name,
            captured.door,
            taken(compiled.name, captured.door, compiled.refused),
            {"dynamo": str(compiled.refused)} if compiled.refused else {},
            guards[-1] if captured.door == "dynamo" else captured.program.premises,
        )
        return _of_graph(explained, built.compiled)
    except Exception as raised:  # of what is built for a door
        error, at = raised, "trace" if compiled.refused or compiled.door == "trace" else "dynamo"
    # Arguments that the step does not take are a mistake of who asks, and no property of the step.
    if isinstance(error, TypeError) and compiled.cutter.mismatch(args, kwargs):
        raise error
    refused: Mapping[str, str] = {at: str(error)}
    if compiled.refused:
        refused = {"dynamo": str(compiled.refused), **refused}
    if isinstance(error, RefusedByBoth):
        refused = error.doors
    return Explanation(compiled.name, None, f"{compiled.name} is refused", refused)


def _of_graph(explained: Explanation, compiled: Compiled) -> Explanation:
    """The explanation with what is said of a step that is one graph."""
    clusters, warning = compiled.clusters, compiled.captured.warning()
    assumed = assumed_rates(clusters, compiled.target.machine) if compiled.target else ()
    warnings = [warning] if warning and compiled.microbatches > 1 else []
    return attrs.evolve(
        explained,
        summary=f"{compiled.summary}; {report.summary(compiled.plan, compiled.program)}",
        seconds=compiled.seconds,
        stages=compiled.program.units,
        clusters=clusters.units,
        lines=_lines(clusters),
        warnings=(*warnings, *map(str, assumed)),
    )


def _lines(clusters: Program) -> tuple[ExplainedLine, ...]:
    """The user's lines that have made the clusters, that of the largest cluster first."""
    seconds: Counter[int] = Counter()
    heaviest: dict[int, fx.Node] = {}
    for call in clusters.calls:
        seconds[call.unit] += call.seconds or 0.0  # type: ignore[assignment]
        if call.kind == Kind.FORWARD:
            nodes = clusters.body(call).graph.nodes
            made = [node for node in nodes if node.op == "call_function"]
            # A cluster has operations of several lines: the one that computes most of it stands for
            # it.
            heaviest[call.unit] = max(made, key=lambda n: (node_flops(n), node_bytes(n)))
    grouped: dict[str, list[int]] = {}
    for unit, _ in seconds.most_common():
        line = source_line(heaviest[unit]) if unit in heaviest else "no line"
        grouped.setdefault(line, []).append(unit)
    return tuple(
        ExplainedLine(
            line,
            module_path(heaviest[units[0]]) if units[0] in heaviest else "",
            len(units),
            sum(seconds[unit] for unit in units),
            seconds[units[0]],
        )
        for line, units in grouped.items()
    )


def _by_backend(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    explained: Explanation,
) -> Explanation:
    """The explanation with what torch.compile's backend makes of a call: each graph is built, and
    run as it is."""
    named, parts = Backend(options), dict[Steps, Part]()
    whole: dict[Steps, Compiled] = {}
    refused: list[str] = []

    def seen(module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        try:
            steps = named.steps(module, examples)
        except ValueError as error:
            refused.append(str(error))
            return module.forward

        def run(*values: Any) -> list[Any]:
            try:
                if isinstance(steps, PieceSteps):
                    parts[steps] = steps.explained(values, _silent())
                else:
                    whole[steps] = steps.build(values, options, _silent())
            except ValueError as error:
                refused.append(str(error))
            # The next graph needs real values: what is between them is the step's own Python.
            results = list(module(*values))
            if isinstance(steps, PieceSteps):
                steps.piece.note(results)
            return results

        return run

    try:
        # Here graphs run, so that values may change in place.
        with untouched(step, {"args": args, "kwargs": kwargs}, values=True):
            _torch.named_graphs(step, seen)(*args, **kwargs)
    except Exception as error:  # of the step's own, or of what is asked of a graph
        refused.append(str(plain_error(error)))
    named_parts = tuple((steps.name, part) for steps, part in parts.items())
    explained = attrs.evolve(explained, parts=named_parts)
    if whole and not parts and not explained.stages:
        explained = _of_graph(explained, next(iter(whole.values())))
    if refused:
        explained = attrs.evolve(explained, refused={**explained.refused, "backend": refused[0]})
    return explained


def _text(explained: Explanation) -> Iterator[str]:
    """All of an explanation, a line each."""
    yield explained.why
    for door, refusal in explained.refused.items():
        if refusal not in explained.why:
            yield f"refused ({door}): {refusal}"
    if explained.stages:
        yield f"100 % of it is pipelined: {explained.summary}"
    if explained.stages and explained.lines and explained.seconds:
        yield from _clusters(explained)
    yield from (f"warning: {warning}" for warning in explained.warnings)
    if explained.premises:
        counted = Counter(premise.kind for premise in explained.premises)
        kinds = [f"{count} x {kind}" for kind, count in counted.most_common(MOST)]
        kinds += [f"{len(counted) - MOST} kinds more"] if len(counted) > MOST else []
        yield f"assumed: {', '.join(kinds)}"
        answers = [premise for premise in explained.premises if premise.kind == "answer"]
        yield from _first([f"  {answer}" for answer in answers])
    if explained.parts:
        yield from _parts(explained)


def _clusters(explained: Explanation) -> Iterator[str]:
    """What the model's lines have become, the largest cluster first."""
    total = sum(line.seconds for line in explained.lines)
    largest = explained.lines[0].largest / total
    yield (
        f"{explained.clusters} clusters, the largest with {largest:.1%} of the time, so no more "
        f"than {int(1 / largest)} stages can be even; by lines of the model:"
    )

    def share(seconds: float) -> str:
        return f"{seconds / total:.1%}"

    rows = [
        (line.clusters, share(line.seconds), share(line.largest), line.module, line.line)
        for line in explained.lines
    ]
    yield from _table(rows, ("clusters", "together", "the largest", "module", "line"))


def _parts(explained: Explanation) -> Iterator[str]:
    """What has become of the graphs of a step that Dynamo breaks, and what each break costs."""
    parts, share = explained.parts, 100 * share_of(part for _, part in explained.parts)
    yield (
        f'with backend="pfeife" Dynamo makes {len(parts)} graphs of it, and {share:.0f} % of '
        "their time is pipelined:"
    )
    total = sum(part.seconds or 0.0 for _, part in parts) or 1.0
    shares = ["?" if p.seconds is None else f"{p.seconds / total:.0%}" for _, p in parts]
    rows = [
        (share_of_part, name, part.instead or "is pipelined")
        for share_of_part, (name, part) in zip(shares, parts, strict=True)
    ]
    yield from _table(rows, ("time", "graph", "it"), 2 * MOST)
    yield f"{len(explained.breaks)} breaks, with what is lost by each:"
    lost = dict.fromkeys(explained.breaks, 0.0)
    for part in (part for _, part in parts if part.instead and part.broken in lost):
        lost[part.broken] += (part.seconds or 0.0) / total
    broken = [(f"{share:.0%}", *each) for each, share in lost.items()]
    yield from _table(broken, ("time", "why", "line"))


def _table(
    rows: Sequence[Sequence[object]], head: Sequence[str], shown: int = MOST
) -> Iterator[str]:
    heads, lines, *table = report.table(rows, head).splitlines()
    yield from (f"  {line}" for line in (heads, lines))
    yield from _first([f"  {line}" for line in table], shown)


def _first(lines: Sequence[str], shown: int = MOST) -> Iterator[str]:
    """Some lines, and how many others there are."""
    yield from lines[:shown]
    if len(lines) > shown:
        yield f"  and {len(lines) - shown} more"
