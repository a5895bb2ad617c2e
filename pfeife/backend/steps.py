"""What is built of a graph, by what it is called with, and its calls."""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from pfeife import _torch
from pfeife.backend.building.artifacts import Artifacts
from pfeife.backend.building.build import build_step
from pfeife.backend.building.builder import Builder
from pfeife.backend.building.compiled import Compiled
from pfeife.backend.building.residence import may_move
from pfeife.backend.calls.autograd import run_step
from pfeife.backend.calls.call_texts import CallTexts, changes, why_once_more
from pfeife.backend.calls.inplace_inputs import agree_on_changed
from pfeife.backend.graphs.step_graph import Graph
from pfeife.backend.settings.options import Options
from pfeife.backend.shared.context import Context
from pfeife.data.progress import Shown, shown
from pfeife.frontend.arguments import Argument
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.batches.rank_zero import Sent
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.world.state_sync import agree_on, news_of
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.distributed.wrapped import check_alone
from pfeife.runtime.failure import CollectiveError, PipelineError

log = logging.getLogger("pfeife")
Settle = Callable[[Sequence[tuple[str, torch.Tensor, torch.device]]], None]
_ARGUMENTS = "the arguments of this call"
_MANY = 3  # programs of a step, at which a person should know why there are so many


@attrs.frozen(eq=False)
class Request:
    """One call of a graph: its arguments, with what builds for its options. `sent` has those that
    rank 0 alone was given; it has `begun` at that moment of the meter."""

    args: Sequence[Any]
    builder: Builder
    world: World | None
    sent: Sent | None
    begun: float

    @property
    def options(self) -> Options:
        """Those of this call."""
        return self.builder.options

    @property
    def rank(self) -> int:
        """Of this process; the first one speaks for all."""
        return self.world.rank if self.world else 0


class Steps:
    """What a backend has built of one of Dynamo's graphs: the programs that were used last, by
    shapes, numbers and count of microbatches. All ranks keep the same ones, as they make the same
    calls. `settle` brings state, with its names, to devices before a program runs.

    request ── fits a program that is kept? ── all ranks agree on that ──┬── yes ── run
                                                                         └── no ─── build, keep, run
    """

    def __init__(self, backend: Context, graph: Graph, name: str, settle: Settle | None = None):
        self.backend, self.graph, self.name, self.settle = backend, graph, name, settle
        self.artifacts = Artifacts(_torch.compilation())
        self.known: dict[tuple, Compiled] = {}  # what was used last is the last
        self.texts = CallTexts(graph, name, backend.alike, self._is_computed)
        self.numbers, self.count = WeakIdKeyDictionary(), itertools.count()
        self.builds = itertools.count()
        self.warn_of_drops = functools.cache(self._warn_of_drops)  # once
        self.warn_of_copies = functools.cache(self._warn_of_copies)

    def __call__(
        self, args: Sequence[Any], options: Options | None = None, sent: Sent | None = None
    ) -> list[torch.Tensor]:
        """One call with the whole batch: builds the program if it is not known, and runs it.
        `sent` has those of the arguments that rank 0 alone was given.

        Raises ValueError for what cannot be built, on all ranks; PipelineError when another rank
        fails.
        """
        begun = self.backend.meter.begin()
        world = join_world(_device_of(self.graph, args), self.backend.options.timeout)
        options = options or self.backend.options_for(world)
        builder = self.backend.builder
        if options is not self.backend.options:
            builder = attrs.evolve(builder, options=options)
        request = Request(args, builder, world, sent, begun)
        # Ranks find the same here, as they keep the same programs; where one does not, the
        # agreement below says so.
        key, compiled = self._fitting(request)
        if world is None:
            self.graph.check(args, options)
            return self._run(request, key, compiled, _seed(compiled))
        compiled = builder.unless_outdated(compiled, args, world)
        seed = self._agreed(request, world, compiled, _seed(compiled))
        # Once more, since copies have found their owners by what the others have said.
        compiled = builder.unless_outdated(compiled, args, world)
        with world.service.called():
            return self._run(request, key, compiled, seed)

    def _run(
        self, request: Request, key: tuple, compiled: Compiled | None, seed: int | None
    ) -> list[torch.Tensor]:
        """The call that all ranks make. `seed` is None if none has been drawn for it."""
        begun, logged = time.perf_counter(), set[str]()
        if compiled is not None and compiled.replans(request.args, request.options, request.world):
            self._drop(key)
            logged, compiled = compiled.said, None
        show, earlier = None, list[Mapping[str, str]]()
        if compiled is None:
            show = shown(log, progress=request.options.progress, rank=request.rank)
            calls = (each.asked for each in self.backend.compiled)
            earlier = [call for call in calls if call.get("step") == self.name]
            compiled = self._first(request, key, logged, show)
        else:
            self.known[key] = self.known.pop(key)
            # Before anything runs, since afterwards the caller's tensors are written to.
            agree_on_changed(compiled.captured, request.args, request.world)
        compiled.check_memory(compiled.captured.sizes(request.args, request.options.cut))
        if seed is None:  # else one was drawn for what has been found outdated since
            seed = _seed(compiled)
            if request.world and seed is not None:
                answers = request.world.agreed("", "the seed", number=seed)
                seed = _common_seed(request.world, answers.numbers)
        if self.settle and compiled.devices:
            self.settle(_state_to_settle(self.graph, compiled, request.args))
        options, meter = request.options, self.backend.meter
        results = run_step(
            compiled, options, request.args, meter, request.begun, seed or 0, show, request.sent
        )
        if show:
            took = f"{time.perf_counter() - begun:.2g} s{why_once_more(earlier, compiled.asked)}"
            words = show.who, self.name, took, self._summary(compiled)
            log.log(show.level, "%scompiled %s in %s: %s", *words)
            if not request.rank:
                _warn_of_many(self.name, [*earlier, compiled.asked])
        return results

    def _first(self, request: Request, key: tuple, logged: set[str], show: Shown) -> Compiled:
        """Builds and keeps a program, of whose earlier build some things were `logged`."""
        args, world = request.args, request.world
        with world.building("a step") if world else contextlib.nullcontext():
            # The checks of a first call run the step on its first microbatch, on every rank.
            if request.sent:
                request.sent.everything()
            built = self._built(request.builder, args, world, show)
            compiled = attrs.evolve(built, asked=self.texts.described(args), said=logged)
            agree_on_changed(compiled.captured, args, world)
        self._keep(key, compiled, request)
        return compiled

    def _fitting(self, request: Request) -> tuple[tuple, Compiled | None]:
        """What was built for such a call, under the key that it is kept by; or a key for another
        build, as what there is has assumed something else of the sizes of its arguments."""
        args, options = request.args, request.options
        trained = self._trained(args) if request.world else ()
        key = (options.microbatches, *self.graph.key(args), trained)
        # The one that cuts most first, then what was used last: what cuts nothing fits all sizes.
        known = sorted(reversed(self.known.items()), key=lambda pair: -len(pair[1].divided))
        for program_key, compiled in known:
            if program_key[:-1] == key and not compiled.breaks(args, options.cut):
                return program_key, compiled
        return (*key, next(self.builds)), None

    def build(self, args: Sequence[Any], options: Options, show: Shown) -> Compiled:
        """What a call in one process would run; nothing is run or kept. Raises ValueError for what
        cannot be built."""
        builder = attrs.evolve(self.backend.builder, options=options)
        return self._built(builder, args, None, show)

    def _built(
        self, builder: Builder, args: Sequence[Any], world: World | None, show: Shown
    ) -> Compiled:
        device = _device_of(self.graph, args)
        earlier = [(compiled.clusters, compiled.plan) for compiled in self.backend.compiled]
        return build_step(builder, self.graph, args, world, device, show, self.artifacts, earlier)

    def _summary(self, compiled: Compiled) -> str:
        return compiled.summary

    def _trained(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Which parameters a call has, as numbers: Dynamo has one graph for all modules of a class,
        and each of them is trained on ranks of its own."""
        pairs = zip(self.graph.inputs.arguments, args, strict=True)
        trained = [value for argument, value in pairs if is_trained(argument, value)]
        return tuple(self.numbers.setdefault(tensor, next(self.count)) for tensor in trained)

    def _keep(self, key: tuple, compiled: Compiled, request: Request) -> None:
        """Keeps what was built, and drops what has not been used for longest beyond the limit."""
        self.known[key] = compiled
        self.backend.compiled.append(compiled)
        # The limit is one for each model that the step is called with.
        modules = {trained for *_, trained, _ in self.known}
        if len(self.known) > self.backend.options.max_programs * len(modules):
            self._drop(next(iter(self.known)))
            self.warn_of_drops(request.rank)

    def _warn_of_drops(self, rank: int) -> None:
        most = self.backend.options.max_programs
        if not rank:
            log.warning(
                "%s has been built for more than %d different shapes and numbers: from now on "
                "those that have not come for longest are dropped. Each new one is a build: pass "
                "numbers that change with every call as tensors, and pad what has many lengths "
                "(max_programs=%d)",
                *(self.name, most, most),
            )

    def close(self) -> None:
        """Drops all that was built."""
        for key in list(self.known):
            self._drop(key)

    def _drop(self, key: tuple) -> None:
        dropped, listed = self.known.pop(key), self.backend.compiled
        listed[:] = [compiled for compiled in listed if compiled is not dropped]

    def _agreed(
        self, request: Request, world: World, compiled: Compiled | None, seed: int | None
    ) -> int | None:
        """The seed of rank 0, if any was drawn, once all ranks have said that they are about to do
        the same."""
        args, options = request.args, request.options
        borrowed = compiled.borrowed if compiled else None
        apart = options.batch == "replica"
        # Replicas with batches of their own: the ranks of one must have the same, others may not.
        groups = self.backend.builder.mesh(world).pipelines if apart else ()
        with world.building("the arguments of a step"):
            text, batch, news = "", "", ""
            # What this rank found wrong since the last call, such as a write to state of others, is
            # said here, where all ranks listen.
            refused: Exception | None = world.service.wrong()
            try:
                check_alone(() if compiled else self.graph.inputs.modules, args)
                self.graph.check(args, options)
                text, batch = self.texts.compared(args, compiled, options)
                news = news_of(world.ownership, borrowed, args)
            except (PipelineError, CollectiveError):
                raise
            except Exception as error:
                refused = refused or error  # which the others have to hear, or they would wait
            answers = world.agreed(
                text,
                _ARGUMENTS,
                number=seed or 0,
                note=news,
                refused=refused,
                own=batch,
                groups=groups,
            )
            agree_on(world.ownership, world, answers.notes, borrowed, args)
        if len(groups) > 1 and answers.all_alike and batch:
            self.warn_of_copies(len(groups))
        return None if seed is None else _common_seed(world, answers.numbers)

    def _warn_of_copies(self, replicas: int) -> None:
        log.warning(
            "%s: option batch='replica', and all %d replicas have the same rows: a sum over rows "
            "is %d times as large as it is on one device, and a mean is computed %d times; give "
            "each replica its own (pfeife.data_sampler), or say batch='global'",
            *(self.name, replicas, replicas, replicas),
        )

    def _is_computed(self, value: torch.Tensor) -> bool:
        """Whether an argument is none of the batch's that the caller has made."""
        return False


def _warn_of_many(name: str, calls: Sequence[Mapping[str, str]]) -> None:
    """Where a step is built for so many calls, a person should know why."""
    if len(calls) == _MANY:
        log.warning(
            "%s is compiled for the third time: %s. Each time takes as long as the first: keep "
            "alike what need not change, or say dynamic=True where lengths do",
            *(name, "; ".join(map(changes, calls, calls[1:]))),
        )


def _state_to_settle(
    graph: Graph, compiled: Compiled, args: Sequence[Any]
) -> list[tuple[str, torch.Tensor, torch.device]]:
    """The caller's own state, by its names, and where the program wants it."""
    triples = zip(graph.inputs.arguments, compiled.captured.arguments, args, strict=True)
    return [
        (argument.names[0], value, compiled.devices[name])
        for argument, name, value in triples
        if name and name in compiled.devices and not argument.given and may_move(value)
    ]


def _device_of(graph: Graph, args: Sequence[Any]) -> torch.device:
    """Where the parameters are, or else the first tensor."""
    pairs = zip(graph.inputs.arguments, args, strict=True)
    tensors = [(a.role, v) for a, v in pairs if isinstance(v, torch.Tensor)]
    # Stable: of several parameters, or where there are none, the first tensor counts.
    tensors.sort(key=lambda pair: pair[0] != Role.PARAMETER)
    return tensors[0][1].device if tensors else torch.device("cpu")


def is_trained(argument: Argument, value: Any) -> bool:
    """Whether the step trains an argument: no input that the caller wants a gradient of."""
    tensor = isinstance(value, torch.Tensor) and not argument.given
    return tensor and value.requires_grad and value.is_leaf


def _seed(compiled: Compiled | None) -> int | None:
    """The seed of a call, from torch's default generator, of a program that draws."""
    draws = compiled is not None and compiled.program.ports(Role.SEED)
    return int(torch.randint(2**62, ())) if draws else None


def _common_seed(world: World, seeds: Sequence[int]) -> int:
    if len(set(seeds)) > 1 and not world.warned:
        world.warned = True
        log.warning(
            "rank %d: torch's default generator is in another state on other ranks; all draw from "
            "the seed of rank 0: seed every rank alike (torch.manual_seed) if the step is to be "
            "repeatable",
            world.rank,
        )
    return seeds[0]
