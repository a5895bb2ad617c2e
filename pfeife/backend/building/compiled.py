"""A graph at one shape, ready to run."""

import functools
import logging
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from pfeife import _torch
from pfeife.backend.building.loss_scale import LossScale, loss_scale_of
from pfeife.backend.building.planning import UNEVEN
from pfeife.backend.settings.options import Options
from pfeife.cost import estimate, memory_curves
from pfeife.data.plan import Plan
from pfeife.data.schedule import Schedule
from pfeife.data.timeline import MemoryCurve
from pfeife.data.tried import Tried
from pfeife.data.units import size as in_bytes
from pfeife.frontend.captured import Captured
from pfeife.ir.outline import read_by_backwards
from pfeife.ir.parts import STATE_ROLES, Port, Role, captured_sizes
from pfeife.ir.program import Program
from pfeife.ir.sizes import broken_limit, resized
from pfeife.passes import annotate
from pfeife.passes.compose import History
from pfeife.report import Target
from pfeife.runtime.distributed.state.remote_parameters import UntrainedState
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError
from pfeife.runtime.protocols import Pipeline
from pfeife.sched.cutting.unevenness import unevenness

log = logging.getLogger("pfeife")
_ONE_STAGE = "1 stage, which is no pipeline (several processes of torchrun, or stages=, make one)"


def worst_at(
    program: Program, schedule: Schedule, target: Target, sizes: Mapping[str, int]
) -> MemoryCurve:
    """The memory of the rank that needs most of it where a program's size ports are such
    numbers."""
    optimizer, apart = target.optimizer, target.apart
    curves = memory_curves(resized(program, sizes), schedule, optimizer=optimizer, apart=apart)
    return max(curves, key=lambda curve: curve.peak)


@attrs.frozen(eq=False, slots=False)
class Compiled:
    """One graph at one shape, ready to run: what was captured, decided and built. `history` has the
    programs on the way, `devices` where its state shall live in one process, by its ports, `target`
    what was planned for, `tried` what a search has looked at here, `said` what has been
    logged, `fitting` the sizes that were found to keep to the limit of memory, `asked` the call
    that it was built for, in words by what they are about, and `uncut` what has kept a graph of a
    broken step from being cut."""

    captured: Captured
    clusters: Program
    plan: Plan
    program: Program
    schedule: Schedule
    pipeline: Pipeline
    digest: str  # of the program, the same on every rank
    borrowed: UntrainedState | None = None
    history: History = attrs.field(default=History(), repr=False)
    devices: Mapping[str, torch.device] = attrs.field(factory=dict, repr=False)
    target: Target | None = attrs.field(default=None, repr=False)
    tried: Sequence[Tried] = attrs.field(default=(), repr=False)
    said: set[str] = attrs.field(factory=set, repr=False)
    fitting: list[dict[str, int]] = attrs.field(factory=list, repr=False)
    asked: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    uncut: str = attrs.field(default="", repr=False)

    def __repr__(self) -> str:
        """A page: what was built and decided, and a line for each pass on the way."""
        return f"Compiled({self.summary})\n{self.plan!r}\n{self.history}"

    @property
    def summary(self) -> str:
        """What was built, in a line."""
        ports = self.program.ports(Role.BATCH)
        rows = {p.shape[p.batch_dim] for p in ports if p.batch_dim is not None}
        stages, members = self.program.units, self.program.members
        ranks = len(self.schedule.ranks) * self.program.replicas * members
        each = f" of {min(rows)} rows" if rows else ""
        shared = f", {members} to a stage" if members > 1 else ""
        where = f"{stages} stages on {ranks} ranks{shared}" if stages * ranks > 1 else _ONE_STAGE
        return f"{where}, {self.microbatches} microbatches{each}"

    @property
    def divided(self) -> Mapping[Any, int]:
        """Open sizes that members cut, and the numbers that have to divide them."""
        return _torch.divisors(self.program.limits)

    def breaks(self, args: Sequence[Any], count: int) -> str:
        """What the program, as passes have left it, assumes of the sizes of arguments and is
        otherwise in a call of so many microbatches, "" if nothing."""
        return self.captured.breaks(args, count) or broken_limit(
            self.program, self.captured.sizes(args, count)
        )

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Raises CollectiveError for values of size ports at which a rank would need more than the
        limit of memory; those that were captured and planned are known to fit."""
        limit = self.target.limit if self.target else None
        if not sizes or limit is None or self.target is None:
            return
        fitting = (captured_sizes(self.program), *self.fitting)
        # Memory grows with every size, so what fits with larger ones fits.
        if any(all(fits[name] >= size for name, size in sizes.items()) for fits in fitting):
            return
        worst = worst_at(self.program, self.schedule, self.target, sizes)
        if worst.peak > limit:
            fits = self._most(fitting[-1], sizes)
            raise CollectiveError(
                f"a microbatch of {self._named(sizes)} needs {in_bytes(worst.peak)} on rank "
                f"{worst.rank}, and the limit is {in_bytes(limit)}: of such batches those up to "
                f"{self._named(fits)} fit. Pass smaller batches, or more microbatches"
            )
        self.fitting.append(dict(sizes))

    def uneven_at(self, sizes: Mapping[str, int]) -> str:
        """How much less even the cuts are at sizes than where they were made, in words; "" if that
        is not more than a tenth and a millisecond of a step, or the sizes are not others by a
        factor of two or more, or it was said before."""
        planned, target = captured_sizes(self.program), self.target
        if not sizes or target is None or "cuts" in self.said or self.plan.stages < 2:
            return ""
        # Sizes change a little with every batch: only a factor of two is worth an estimate.
        times = round(math.log2(math.prod(sizes.values()) / math.prod(planned.values())))
        if not times or f"cuts {times}" in self.said:
            return ""
        self.said.add(f"cuts {times}")
        both = self.clusters, resized(self.clusters, sizes)
        priced = [annotate(estimate(program, target.machine))(program) for program in both]
        here, now = (unevenness(program, self.plan.stage_of_cluster) for program in priced)
        seconds = sum(call.seconds or 0.0 for call in priced[1].calls) / self.plan.stages
        # Below a millisecond of a step nobody gains by another plan.
        if now <= UNEVEN * here or (now - here) * seconds * self.microbatches <= 1e-3:
            return ""
        self.said.add("cuts")
        return (
            f"the cuts were made for {self._named(planned)}; at {self._named(sizes)} the slowest "
            f"stage takes {100 * (now / here - 1):.0f} % longer than with cuts for these sizes, by "
            "estimate"
        )

    def replans(self, args: Sequence[Any], options: Options, world: World | None) -> bool:
        """Whether a program is built anew, once, as its cuts are uneven at the sizes of a call: by
        all ranks or none, which estimate the same. Ranks have their state by then, so that cuts
        stay, and only a search or recomputation finds something else."""
        uneven = self.uneven_at(self.captured.sizes(args, options.cut))
        if not uneven:
            return False
        finds_more = world is None or options.schedule == "search" or options.recompute is not None
        replans = finds_more and not options.sizes_hint and options.plan is None
        if not (world and world.rank):
            hint = "say sizes_hint= for those that come most"
            log.warning("%s: %s", uneven, "planned anew for these" if replans else hint)
        return replans

    def _named(self, sizes: Mapping[str, int]) -> str:
        """Sizes by the names that a person knows them by."""
        names = {port.name: port.fqn for port in self.program.ports(Role.SIZE)}
        return ", ".join(f"{names[name]} = {size}" for name, size in sizes.items())

    def _most(self, fits: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
        """The largest sizes that keep to the limit of memory, between such that do and such that do
        not."""
        target = self.target
        assert target is not None and target.limit is not None
        limit, steps = target.limit, max(abs(size - fits[name]) for name, size in sizes.items())

        def at(part: int) -> dict[str, int]:  # of so many parts of the way
            return {n: fits[n] + (size - fits[n]) * part // steps for n, size in sizes.items()}

        def is_too_much(part: int) -> bool:
            return worst_at(self.program, self.schedule, target, at(part)).peak > limit

        # By bisection, since each try walks over the whole schedule.
        return at(bisect_left(range(1, steps), True, key=is_too_much))

    @property
    def microbatches(self) -> int:
        """Into how many the batch of a call is cut, those of all replicas."""
        return self.schedule.microbatches * self.program.replicas

    @property
    def seconds(self) -> float:
        """What all microbatches compute, by the costs of the clusters."""
        return self.microbatches * sum(call.seconds or 0.0 for call in self.clusters.calls)

    @functools.cached_property
    def leaves(self) -> tuple[Port, ...]:
        """The inputs that get gradients here: batch inputs, and parameters whose gradients this
        process makes. The hooks of those of other ranks must not run here."""
        names = {port.fqn for port in self.program.ports(Role.BATCH_GRADIENT)}
        names |= self.pipeline.gradients
        ports = self.program.ports(*STATE_ROLES, Role.BATCH)
        return tuple(port for port in ports if port.fqn in names)

    @functools.cached_property
    def elsewhere(self) -> tuple[Port, ...]:
        """The parameters whose gradients other processes make."""
        here = {port.fqn for port in self.leaves}
        trained = {port.fqn for port in self.program.ports(Role.GRADIENT)} - here
        return tuple(port for port in self.program.ports(Role.PARAMETER) if port.fqn in trained)

    @functools.cached_property
    def loss_scale(self) -> LossScale | None:
        """The gradient that the loss will be given, where the backwards depend on it."""
        return loss_scale_of(self.program) if self.program.ports(Role.LOSS) else None

    @functools.cached_property
    def read_later(self) -> frozenset[str]:
        """The names of the input ports that a backward reads as the call has left them."""
        return read_by_backwards(self.program)
