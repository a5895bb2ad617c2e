"""Costs by running the bodies themselves on the target device."""

import functools
import logging
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.compilers import Compiler, example, fingerprint
from pfeife.compilers.piece import inputs
from pfeife.cost.body import CUDA_BLOCK, Body
from pfeife.cost.cache import Measured, find, keep
from pfeife.cost.estimate import sending_seconds
from pfeife.data.machine import Machine
from pfeife.data.plan import Costs
from pfeife.data.progress import Progress
from pfeife.ir.editing.absorb import absorb
from pfeife.ir.editing.copying import Copy, copied
from pfeife.ir.members import MEANING, arrived
from pfeife.ir.nodes import is_number, is_sized_by_data, node_bytes, returned, source_line, value_of
from pfeife.ir.parts import Call, Kind, Role
from pfeife.ir.program import Program

log = logging.getLogger("pfeife")

HELD = 2  # microbatches of which a body's results are held, if a step holds them


def measure(
    program: Program,
    *,
    repeats: int = 5,
    device: torch.device | None = None,
    compiler: Compiler | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> Costs:
    """Seconds of every call: the median of `repeats` runs after one warm-up, with their spread.

    Distinct bodies run in turn, so that each finds the caches as another one has left them, as in
    a step; run alone again and again they come out up to a tenth too fast. What a forward makes
    for a backward is held, as in a step: the next run then writes into other memory, which can
    take a tenth longer. Inputs are made for the bodies (zeros for integers, ones for floats and
    booleans; where data decide a size, such that it is the most that it can be) on `device` (where
    they were captured unless given), so the user's state and random generators are not touched; if
    not all of this fits there at once, inputs are made anew for every run and nothing is held, so
    the whole model need not fit. The adding up of a call's gradients is timed apart. Bodies that
    print the same, with inputs alike, are measured once; with a `cache` folder once for all
    programs, of this device, torch, `compiler` and number of threads. `compiler` has the signature
    of a Dynamo backend; without it bodies run as they are.
    `progress` is called with how many of how many runs are done.

    A member of a group runs without the others: what it is told by these is made up, and what the
    messages take is added by estimate, over the link of the `machine`. Raises ValueError if there
    is none.
    """
    if program.members > 1 and machine is None:
        raise ValueError(
            f"measure: the program is one of {program.members} members, whose messages cannot be "
            "measured by one of them: pass machine=, whose link says what they take"
        )
    program = absorb(program)
    bodies = {call.node: _measured_body(program, call, device, compiler) for call in program.calls}
    distinct = {body.key: body for body in bodies.values()}
    by_key: dict[str, Measured] = {}
    for key in distinct:
        entry = find(cache, key) if cache else None
        if entry is not None and entry.repeats >= repeats:
            by_key[key] = entry
    # Whoever asks for more repeats than were kept measures anew, and keeps those.
    missing = [body for key, body in distinct.items() if key not in by_key]
    measured = _run_in_turn(missing, repeats, compiler, progress)
    by_key |= {entry.key: entry for entry in measured}
    if cache:
        _keep(cache, measured)
    entry_of = {node: by_key[body.key] for node, body in bodies.items()}
    sending = {
        node: sending_seconds(body.module, machine) if machine and program.members > 1 else 0.0
        for node, body in bodies.items()
    }
    return Costs(
        "measured",
        {node: entry.seconds + sending[node] for node, entry in entry_of.items()},
        {node: entry.spread for node, entry in entry_of.items()},
        {node: entry.accumulate for node, entry in entry_of.items() if entry.accumulate},
        {node: entry.inside for node, entry in entry_of.items() if entry.inside},
    )


def _keep(cache: Path, measured: Sequence[Measured]) -> None:
    """Writes entries; without them the next run measures again, and nothing else is lost."""
    try:
        for entry in measured:
            keep(cache, entry)
    except (OSError, ValueError) as error:
        log.warning("cache=%s cannot be written, so the costs are not kept: %s", cache, error)


@attrs.frozen(eq=False)
class _Body:
    """A body to measure; `gradients` says where in its result those of parameters stand, `held`
    of how many runs the results are held."""

    key: str
    module: fx.GraphModule
    gradients: tuple[int, ...]
    device: torch.device
    held: int

    @property
    def bytes(self) -> int:
        """Of the inputs, and of the results that are held."""
        made = sum(map(node_bytes, returned(self.module)))
        return sum(map(node_bytes, inputs(self.module))) + self.held * made

    def arguments(self) -> list[Any]:
        """What the body is run on: something that stands for each of its inputs."""
        return [self._argument(node) for node in inputs(self.module)]

    def _argument(self, node: fx.Node) -> Any:
        """What stands for an input: for a tensor that has a number, that number, for sizes go by
        it; a size itself."""
        if isinstance(node.meta["val"], int):
            return node.meta["val"]
        made = example(node.meta["val"], self.device)
        number = next((user.meta["val"] for user in node.users if is_number(user)), None)
        return made if number is None else made.fill_(number)


def _measured_body(
    program: Program, call: Call, device: torch.device | None, compiler: Compiler | None
) -> _Body:
    body = program.body(call)
    results = returned(program.module)
    ports = {results[port.name] for port in program.ports(Role.GRADIENT)}
    node = program.node(call.node)
    gradients = tuple(sorted(user.args[1] for user in node.users if user in ports))  # type: ignore[type-var]
    where = next((value.device for value in map(value_of, inputs(body)) if value is not None), None)
    name = _name(compiler) if compiler else "eager"
    backward = any(other.kind != Kind.FORWARD for other in program.calls)
    # Without a backward nobody holds what a forward makes: the next run writes where it was.
    held = HELD if backward and call.kind in (Kind.FORWARD, Kind.INPUT_BACKWARD) else 0
    key = f"{name}, held {held}, gradients {gradients}, {_key(body, device)}"
    place = device or where or torch.device("cpu")
    return _Body(key, body, gradients, place, held)  # type: ignore[arg-type]


def _name(compiler: Compiler) -> str:
    qualified = getattr(compiler, "__qualname__", None)
    return f"{compiler.__module__}.{qualified}" if qualified else repr(compiler)


def _run_in_turn(
    bodies: list[_Body], repeats: int, compiler: Compiler | None, progress: Progress | None
) -> list[Measured]:
    """One warm-up and `repeats` rounds over all bodies."""
    if not bodies:
        return []
    # If not all inputs fit at once, none stay: each run then finds colder caches than a step does.
    fits = sum(body.bytes for body in bodies) <= min(_spare(body.device) for body in bodies)
    arguments_of = [body.arguments() if fits else None for body in bodies]
    held = [deque[Sequence[torch.Tensor]](maxlen=body.held if fits else 0) for body in bodies]
    runs_of: list[list[_Ran]] = [[] for _ in bodies]
    with torch.no_grad(), _torch.no_autocast():
        runs: list[Callable] = [
            _alone(compiler(body.module, body.arguments()) if compiler else body.module)
            for body in bodies
        ]
        for turn in range(repeats + 1):
            for index, body in enumerate(bodies):
                arguments = arguments_of[index] or body.arguments()
                runs_of[index].append(_checked(runs[index], arguments, body, held[index]))
                if progress:
                    progress(turn * len(bodies) + index + 1, (repeats + 1) * len(bodies))
    pairs = zip(bodies, runs_of, strict=True)  # the first one makes what a library keeps
    return [_summary(body, ran[1:], repeats) for body, ran in pairs]


def _alone(run: Callable) -> Callable:
    """A body that one member runs without the others: what these tell it is made up."""
    return copied(run, _made_up).module() if isinstance(run, fx.GraphModule) else run


def _made_up(node: fx.Node, copy: Copy) -> fx.Node | None:
    if node.target not in MEANING or node.target is arrived:
        return None
    like = node.meta["val"]

    def made_up(value: torch.Tensor, *rest: Any) -> torch.Tensor:
        return example(like, value.device)

    own = copy.keep(node)
    own.target = made_up
    return own


@attrs.frozen
class _Ran:
    """A run: seconds of the body, and of adding its gradients to others; the most `bytes` that it
    had beside its arguments, 0 where nobody counts."""

    seconds: float
    adding: float
    bytes: int


def _checked(
    run: Callable, arguments: list[torch.Tensor], body: _Body, held: deque[Sequence[torch.Tensor]]
) -> _Ran:
    """As `_timed`. Raises ValueError where made-up data do not lead to sizes that fit."""
    try:
        return _timed(run, arguments, body, held)
    except (RuntimeError, IndexError) as error:
        node = next((n for n in body.module.graph.nodes if is_sized_by_data(n)), None)
        if node is None:
            raise
        raise ValueError(
            f'costs="measure": {source_line(node)} computes a value whose size data decide, and '
            f'made-up data give another one: {error}; take costs="estimate"'
        ) from error


def _timed(
    run: Callable, arguments: list[torch.Tensor], body: _Body, held: deque[Sequence[torch.Tensor]]
) -> _Ran:
    """Runs a body; its results go to the `held`."""
    sums: list[torch.Tensor] = []
    results: Sequence[torch.Tensor] = ()

    def compute() -> None:
        nonlocal results
        results = run(*arguments)

    def accumulate() -> None:
        for total, index in zip(sums, body.gradients, strict=True):
            total.add_(results[index])

    before = _allocated(body.device)
    seconds = _seconds(compute, body.device)
    most = _peak(body.device) - before
    # Made after the run, so that the body's peak is without them.
    sums += [torch.zeros_like(results[index]).contiguous() for index in body.gradients]
    held.append(results)
    return _Ran(seconds, _seconds(accumulate, body.device) if sums else 0.0, most)


def _allocated(device: torch.device) -> int:
    """Bytes that live on a CUDA device; from here on their peak is counted."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """How long the device takes for some work: by events on CUDA, else by the clock."""
    if device.type == "cuda":
        # Between events on the stream: the clock of the host would count launches, too.
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        first.record(torch.cuda.current_stream(device))
        work()
        last.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        return first.elapsed_time(last) / 1e3
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _summary(body: _Body, runs: list[_Ran], repeats: int) -> Measured:
    seconds = [run.seconds for run in runs]
    # What a body took beyond what its graph tells of is what operations need inside themselves.
    graph_peak = Body.of(body.module, CUDA_BLOCK).peak
    # One run has no quartiles.
    lower, _, upper = statistics.quantiles(seconds, n=4) if repeats > 1 else (0.0, 0.0, 0.0)
    return Measured(
        body.key,
        max(statistics.median(seconds), 1e-9),
        max(upper - lower, 0.0),
        repeats,
        statistics.median(run.adding for run in runs),
        max(0, max(run.bytes for run in runs) - graph_peak),
    )


def _spare(device: torch.device) -> int:
    """Bytes of a device that inputs may take up while others are measured: a quarter."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def _key(body: fx.GraphModule, device: torch.device | None) -> str:
    """All that a body's time depends on."""
    values = (value for value in map(value_of, inputs(body)) if value is not None)
    devices = {str(device or value.device) for value in values}
    names = [
        torch.cuda.get_device_name(name) if name.startswith("cuda") else processor()
        for name in sorted(devices)
    ]
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, {names}, {threads} threads\n{fingerprint(body)}"


@functools.cache  # a big machine lists hundreds of cores, and every body asks
def processor(listed: Path = Path("/proc/cpuinfo")) -> str:
    """The model of this machine's CPU: on Linux as `listed`, for there Python knows none."""
    text = listed.read_text() if listed.exists() else ""
    models = {
        value.strip()
        for line in text.splitlines()
        for name, _, value in [line.partition(":")]
        if name.strip() in ("model name", "CPU implementer", "CPU part")  # x86, then ARM
    }
    return ", ".join(sorted(models)) or platform.processor() or platform.machine()
