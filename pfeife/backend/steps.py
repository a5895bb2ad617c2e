"""What is built of a graph, by what it is called with, and its calls."""

import contextlib
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
from pfeife.backend.calls.inplace_inputs import agree_on_changed
from pfeife.backend.context import Context
from pfeife.backend.graphs import Graph
from pfeife.backend.settings.options import Options
from pfeife.data.plan import Plan
from pfeife.data.progress import Shown, shown
from pfeife.frontend.arguments import Argument
from pfeife.frontend.deferred.tensors import is_waiting
from pfeife.ir.parts import Role
from pfeife.runtime.distributed.agreement import checksum
from pfeife.runtime.distributed.batches.rank_zero import Sent
from pfeife.runtime.distributed.process_group import join_world
from pfeife.runtime.distributed.state.remote_parameters import version_of
from pfeife.runtime.distributed.state.state_sync import agree_on, news_of
from pfeife.runtime.distributed.world import World
from pfeife.runtime.distributed.wrapped import check_alone
from pfeife.runtime.failure import CollectiveError, PipelineError

log = logging.getLogger("pfeife")
Settle = Callable[[Sequence[tuple[str, torch.Tensor, torch.device]]], None]
_ARGUMENTS = "the arguments of this call"
_MANY = 2  # earlier programs of a step, at which a person should know why there are so many


class Steps:
    """What a backend has built of one of Dynamo's graphs: the programs that were used last, by
    shapes, numbers and count of microbatches. All ranks keep the same ones, as they make the same
    calls. `settle` brings state, with its names, to devices before a program runs."""

    def __init__(self, backend: Context, graph: Graph, name: str, settle: Settle | None = None):
        self.backend, self.graph, self.name, self.settle = backend, graph, name, settle
        self.artifacts = Artifacts(_torch.compilation())
        self.known: dict[tuple, Compiled] = {}  # what was used last is the last
        self.warned = False
        self.sums = WeakIdKeyDictionary()  # of tensors, with their versions
        self.numbers, self.count = WeakIdKeyDictionary(), itertools.count()
        self.builds = itertools.count()

    def __call__(
        self, args: Sequence[Any], options: Options | None = None, sent: Sent | None = None
    ) -> list[torch.Tensor]:
        """One call with the whole batch: builds the program if it is not known, and runs it.
        `sent` has those of the arguments that rank 0 alone was given.

        Raises ValueError for what cannot be built, on all ranks; PipelineError when another rank
        fails.
        """
        if self.backend.meter.asked:
            self.backend.meter.begin()
        world = join_world(self._device(args), self.backend.options.timeout)
        options = options or self.backend.options_for(world)
        builder = self.backend.builder
        if options is not self.backend.options:
            builder = attrs.evolve(builder, options=options)
        key = (options.microbatches, *self.graph.key(args), self._trained(args) if world else ())
        key, compiled = self._fitting(key, args, options.cut)
        if world and compiled:
            compiled = _unless_outdated(compiled, builder, args, world)
        seed = _seed(compiled)
        if world is None:
            self.graph.check(args, options)
            return self._run(builder, key, compiled, args, world, seed, sent)
        seed = self._agreed(world, args, compiled, options, seed)
        if compiled:  # copies have found their owners
            compiled = _unless_outdated(compiled, builder, args, world)
        with world.service.called():
            return self._run(builder, key, compiled, args, world, seed, sent)

    def _run(
        self,
        builder: Builder,
        key: tuple,
        compiled: Compiled | None,
        args: Sequence[Any],
        world: World | None,
        seed: int | None,
        sent: Sent | None,
    ) -> list[torch.Tensor]:
        """The call that all ranks make. `seed` is None if none has been drawn for it."""
        options = builder.options
        said: set[str] = set()
        if compiled is not None and self._replans(compiled, args, options, world):
            self._drop(key)
            said, compiled = compiled.said, None
        if compiled is not None:
            self.known[key] = self.known.pop(key)
            agree_on_changed(compiled.captured, args, world)
            compiled.check_memory(compiled.captured.sizes(args, options.cut))
            self._settle(compiled, args)
            return run_step(compiled, options, args, self.backend.meter, seed or 0, sent=sent)
        show = shown(log, progress=options.progress, rank=world.rank if world else 0)
        with world.building("a step") if world else contextlib.nullcontext():
            if sent:
                sent.everything()
            began = time.perf_counter()
            built = self._built(builder, args, world, show)
            compiled = attrs.evolve(built, asked=self._described(args), said=said)
            agree_on_changed(compiled.captured, args, world)
        earlier = [one.asked for one in self.backend.compiled if one.asked.get("step") == self.name]
        self._keep(key, compiled, world)
        compiled.check_memory(compiled.captured.sizes(args, options.cut))
        if seed is None:  # else one was drawn for what has been found outdated since
            seed = _seed(compiled)
            if world and seed is not None:
                seed = _common_seed(world, world.agreed("", "the seed", number=seed).numbers)
        self._settle(compiled, args)
        results = run_step(compiled, options, args, self.backend.meter, seed or 0, show, sent)
        took = f"{time.perf_counter() - began:.2g} s{_why(earlier, compiled.asked)}"
        words = show.who, self.name, took, self._summary(compiled)
        log.log(show.level, "%scompiled %s in %s: %s", *words)
        if len(earlier) == _MANY and not (world and world.rank):
            log.warning(
                "%s is compiled for the third time: %s. Each time takes as long as the first: keep "
                "alike what need not change, or say dynamic=True where lengths do",
                *(self.name, "; ".join(map(_changes, earlier, [*earlier[1:], compiled.asked]))),
            )
        return results

    def _described(self, args: Sequence[Any]) -> dict[str, str]:
        """A call in words: what may be otherwise in another one."""
        found = {
            "step": self.name,
            "gradients": "on" if torch.is_grad_enabled() else "off",
            "modules": self.graph.inputs.mode,
        }
        for argument, value in zip(self.graph.inputs.arguments, args, strict=True):
            name = argument.names[0] if argument.names else argument.name
            if isinstance(value, torch.Tensor) and argument.given:
                found[name] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            elif not isinstance(value, torch.Tensor) and argument.role != Role.SIZE:
                found[name] = f"{value!r}"[:80]
        return found

    def _replans(
        self, compiled: Compiled, args: Sequence[Any], options: Options, world: World | None
    ) -> bool:
        """Whether a program is built anew, once, as its cuts are uneven at the sizes of a call: by
        all ranks or none, which estimate the same. Ranks have their state by then, so that cuts
        stay, and only a search or recomputation finds something else."""
        uneven = compiled.uneven_at(compiled.captured.sizes(args, options.cut))
        if not uneven:
            return False
        moves = world is None or options.schedule == "search" or options.recompute is not None
        replans = moves and not options.sizes_hint and not isinstance(options.plan, Plan)
        if not (world and world.rank):
            then = (
                "planned anew for these" if replans else "say sizes_hint= for those that come most"
            )
            log.warning("%s: %s", uneven, then)
        return replans

    def _fitting(
        self, key: tuple, args: Sequence[Any], count: int
    ) -> tuple[tuple, Compiled | None]:
        """What was built for such a call, under the key that it is kept by; or a key for another
        build, as what there is has assumed something else of the sizes of its arguments."""
        for known in reversed([one for one in self.known if one[:-1] == key]):
            if not self.known[known].breaks(args, count):
                return known, self.known[known]
        return (*key, next(self.builds)), None

    def _settle(self, compiled: Compiled, args: Sequence[Any]) -> None:
        """Has the caller's own state, by its names, brought where the program wants it."""
        if not (self.settle and compiled.devices):
            return
        triples = zip(self.graph.inputs.arguments, compiled.captured.arguments, args, strict=True)
        self.settle(
            [
                (argument.names[0], value, compiled.devices[name])
                for argument, name, value in triples
                if name and name in compiled.devices and not argument.given and may_move(value)
            ]
        )

    def build(self, args: Sequence[Any], options: Options, show: Shown) -> Compiled:
        """What a call in one process would run; nothing is run or kept. Raises ValueError for what
        cannot be built."""
        builder = attrs.evolve(self.backend.builder, options=options)
        return self._built(builder, args, None, show)

    def _built(
        self, builder: Builder, args: Sequence[Any], world: World | None, show: Shown
    ) -> Compiled:
        device = self._device(args)
        earlier = [(compiled.clusters, compiled.plan) for compiled in self.backend.compiled]
        return build_step(builder, self.graph, args, world, device, show, self.artifacts, earlier)

    def _summary(self, compiled: Compiled) -> str:
        return compiled.summary

    def _trained(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Which parameters a call has, as numbers: Dynamo has one graph for all modules of a class,
        and each of them is trained on ranks of its own."""
        pairs = zip(self.graph.inputs.arguments, args, strict=True)
        found = [one for argument, one in pairs if is_trained(argument, one)]
        return tuple(self.numbers.setdefault(one, next(self.count)) for one in found)

    def _keep(self, key: tuple, compiled: Compiled, world: World | None) -> None:
        """Keeps what was built, and drops what has not been used for longest beyond the limit."""
        self.known[key] = compiled
        self.backend.compiled.append(compiled)
        modules = {trained for *_, trained, _ in self.known}
        most = self.backend.options.max_programs
        if len(self.known) <= most * len(modules):
            return
        self._drop(next(iter(self.known)))
        if not self.warned and not (world and world.rank):
            log.warning(
                "%s has been built for more than %d different shapes and numbers: from now on "
                "those that have not come for longest are dropped. Each new one is a build: pass "
                "numbers that change with every call as tensors, and pad what has many lengths "
                "(max_programs=%d)",
                *(self.name, most, most),
            )
        self.warned = True

    def close(self) -> None:
        """Drops all that was built."""
        for key in list(self.known):
            self._drop(key)

    def _drop(self, key: tuple) -> None:
        dropped, listed = self.known.pop(key), self.backend.compiled
        listed[:] = [compiled for compiled in listed if compiled is not dropped]

    def _agreed(
        self,
        world: World,
        args: Sequence[Any],
        compiled: Compiled | None,
        options: Options,
        seed: int | None,
    ) -> int | None:
        """The seed of rank 0, if any was drawn, once all ranks have said that they are about to do
        the same."""
        borrowed = compiled.borrowed if compiled else None
        apart = options.batch == "replica"
        groups = self.backend.builder.mesh(world).pipelines if apart else ()
        with world.building("the arguments of a step"):
            text, batch, news = "", "", ""
            refused: Exception | None = world.service.wrong()
            try:
                check_alone(() if compiled else self.graph.inputs.modules, args)
                self.graph.check(args, options)
                text, batch = self._said(args, compiled, options)
                news = news_of(world.ownership, borrowed, args)
            except (PipelineError, CollectiveError):
                raise
            except Exception as error:
                refused = refused or error
            found = world.agreed(
                text,
                _ARGUMENTS,
                number=seed or 0,
                note=news,
                refused=refused,
                own=batch,
                groups=groups,
            )
            agree_on(world.ownership, world, found.notes, borrowed, args)
        return None if seed is None else _common_seed(world, found.numbers)

    def _said(
        self, args: Sequence[Any], compiled: Compiled | None, options: Options
    ) -> tuple[str, str]:
        """All that a call's program and its messages depend on, a line each; and what the ranks of
        one replica have alike, if each replica is given a batch of its own."""
        gradients = f"gradients {'on' if torch.is_grad_enabled() else 'off'}"
        built = f"program {compiled.digest}" if compiled else "a program that is not built yet"
        if compiled and compiled.loss_scale:
            built += f", its loss with the gradient {compiled.loss_scale.value:g}"
        lines = [
            *self.backend.alike,
            f"the step {self.name} in {options.microbatches} microbatches, {gradients}",
            f"{built}, {self.graph.inputs.mode}",
        ]
        own: list[str] = []
        arguments, dims = self.graph.inputs.arguments, self.graph.dims
        for argument, dim, value in zip(arguments, dims, args, strict=True):
            if isinstance(value, torch.Tensor):
                name = argument.names[0]
                where = f"{value.dtype} {list(value.shape)} on {value.device.type}"
                where += ", of a model from deferred_init" if is_waiting(value) else ""
                lines.append(f"{name}: {where}")
                state = argument.role in (Role.PARAMETER, Role.BUFFER)
                trained = state or (dim is None and value.requires_grad)
                trained = trained or (argument.given and options.batch == "rank0")
                if options.compare_batches and not (trained or self._is_computed(value)):
                    values = f"{where}, values with the checksum {self._checksum(value, dim):x}"
                    to = own if dim is not None and options.batch == "replica" else lines
                    to.append(f"{name}: {values}")
        return "\n".join(lines), "\n".join(own)

    def _is_computed(self, value: torch.Tensor) -> bool:
        """Whether an argument is none of the batch's that the caller has made."""
        return False

    def _checksum(self, value: torch.Tensor, dim: int | None) -> int:
        """Of what is the same tensor at every call, such as a mask, it is computed once."""
        version = version_of(value)
        if dim is not None or version < 0:
            return checksum(value)
        if self.sums.get(value, (None, 0))[0] != version:
            self.sums[value] = version, checksum(value)
        return int(self.sums[value][1])

    def _device(self, args: Sequence[Any]) -> torch.device:
        """Where the parameters are, or else the first tensor."""
        pairs = list(zip(self.graph.inputs.arguments, args, strict=True))
        tensors = [(a.role, v) for a, v in pairs if isinstance(v, torch.Tensor)]
        state = [value for role, value in tensors if role == Role.PARAMETER]
        found = [*state, *(value for _, value in tensors)]
        return found[0].device if found else torch.device("cpu")


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What is otherwise in a call than in one before."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    pairs = [(n, after.get(n, "not there"), before.get(n, "not there")) for n in names]
    return ", ".join(f"{name} {now} (before: {then})" for name, now, then in pairs)


def _why(earlier: Sequence[Mapping[str, str]], now: Mapping[str, str]) -> str:
    """Why a step is compiled once more, "" at the first time."""
    if not earlier:
        return ""
    changed = _changes(earlier[-1], now) or "other state, or what it assumes of its arguments"
    return f" (program {len(earlier) + 1} of it, for {changed})"


def is_trained(argument: Argument, value: Any) -> bool:
    """Whether the step trains an argument: no input that the caller wants a gradient of."""
    tensor = isinstance(value, torch.Tensor) and not argument.given
    return tensor and value.requires_grad and value.is_leaf


def _unless_outdated(
    compiled: Compiled, builder: Builder, args: Sequence[Any], world: World
) -> Compiled | None:
    """What was built, if it may run on the mesh that the state has by now."""
    builder.follow(world, args)
    return None if builder.outdated(compiled, args, world) else compiled


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
