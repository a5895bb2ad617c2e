"""A graph at one shape, ready to run."""

import functools
from collections.abc import Mapping, Sequence

import attrs
import torch

from pfeife.backend.loss_scale import LossScale, loss_scale_of
from pfeife.cost import memory_curves
from pfeife.data.plan import Plan
from pfeife.data.schedule import Schedule
from pfeife.data.tried import Tried
from pfeife.frontend.captured import Captured
from pfeife.ir.outline import read_by_backwards
from pfeife.ir.program import STATE_ROLES, Port, Program, Role
from pfeife.ir.sizes import captured_sizes, resized
from pfeife.passes.compose import History
from pfeife.report import Target
from pfeife.runtime.distributed.foreign import Borrowed
from pfeife.runtime.failure import Refusal
from pfeife.runtime.protocols import Pipeline


@attrs.frozen(eq=False, slots=False)
class Compiled:
    """One graph at one shape, ready to run: what was captured, decided and built. `history` has the
    programs on the way, `devices` where its state shall live in one process, by its ports, `target`
    what was planned for, `tried` what a search has looked at here, `said` what has been
    logged, and `fitting` the sizes that were found to keep to the limit of memory."""

    captured: Captured
    clusters: Program
    plan: Plan
    program: Program
    schedule: Schedule
    pipeline: Pipeline
    digest: str  # of the program, the same on every rank
    borrowed: Borrowed | None = None
    history: History = attrs.field(default=History(), repr=False)
    devices: Mapping[str, torch.device] = attrs.field(factory=dict, repr=False)
    target: Target | None = attrs.field(default=None, repr=False)
    tried: Sequence[Tried] = attrs.field(default=(), repr=False)
    said: set[str] = attrs.field(factory=set, repr=False)
    fitting: list[dict[str, int]] = attrs.field(factory=list, repr=False)

    def __repr__(self) -> str:
        """A page: what was built and decided, and a line for each pass on the way."""
        return f"Compiled({self.summary})\n{self.plan!r}\n{self.history}"

    @property
    def summary(self) -> str:
        """What was built, in a line."""
        ports = self.program.ports(Role.BATCH)
        rows = {p.shape[p.batch_dim] for p in ports if p.batch_dim is not None}
        stages, ranks = self.program.units, len(self.schedule.ranks) * self.program.replicas
        each = f" of {min(rows)} rows" if rows else ""
        return f"{stages} stages on {ranks} ranks, {self.microbatches} microbatches{each}"

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Raises Refusal for values of size ports at which a rank would need more than the limit of
        memory; those that were captured and planned are known to fit."""
        limit = self.target.limit if self.target else None
        if not sizes or limit is None or self.target is None:
            return
        known = (captured_sizes(self.program), *self.fitting)
        if any(all(one[name] >= size for name, size in sizes.items()) for one in known):
            return
        optimizer, apart = self.target.optimizer, self.target.apart
        program = resized(self.program, sizes)
        curves = memory_curves(program, self.schedule, optimizer=optimizer, apart=apart)
        worst = max(curves, key=lambda curve: curve.peak)
        if worst.peak > limit:
            raise Refusal(
                f"a microbatch of the sizes {dict(sizes)} needs {worst.peak} bytes on rank "
                f"{worst.rank}, and the limit is {limit} bytes (those that fit: {known[-1]}): pass "
                "smaller batches, or more microbatches"
            )
        self.fitting.append(dict(sizes))

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
        mine = {port.fqn for port in self.leaves}
        trained = {port.fqn for port in self.program.ports(Role.GRADIENT)} - mine
        return tuple(port for port in self.program.ports(Role.PARAMETER) if port.fqn in trained)

    @functools.cached_property
    def loss_scale(self) -> LossScale | None:
        """The gradient that the loss will be given, where the backwards depend on it."""
        return loss_scale_of(self.program) if self.program.ports(Role.LOSS) else None

    @functools.cached_property
    def read_later(self) -> frozenset[str]:
        """The names of the input ports that a backward reads as the call has left them."""
        return read_by_backwards(self.program)
