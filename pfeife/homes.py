"""Which stages hold which state: with a rank a process, later programs of a model keep to them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from pfeife.capture import Captured
from pfeife.program import Port, Program, Role, holders
from pfeife.runtime.failure import Refusal
from pfeife.runtime.world import World

At = frozenset[tuple[int, int]]  # (stage, rank)s


class Homes:
    """The stages of each parameter and updated buffer, by the tensors themselves.

    `placed` are the ranks of the stages that they are about, None before there are any.
    """

    def __init__(self) -> None:
        self.known = WeakIdKeyDictionary()
        self.placed: tuple[int, ...] | None = None

    def of(self, program: Program, slots: Mapping[str | None, Any]) -> dict[str, At]:
        """Where earlier programs have put this program's state, by canonical names; `slots` are
        the tensors by the names of ports."""
        ports = program.ports(Role.PARAMETER, Role.BUFFER)
        return {p.fqn: self.known[slots[p.name]] for p in ports if slots[p.name] in self.known}

    def settle(
        self,
        captured: Captured,
        program: Program,
        placed: tuple[int, ...],
        args: Sequence[Any],
        world: World,
    ) -> None:
        """Notes which stages hold which state. What is new here must have the same values on
        every rank: else one of them holds stale ones, or was given another batch."""
        slots = dict(zip(captured.arguments, args, strict=True))
        found = holders(program, Role.PARAMETER, Role.BUFFER)
        homes = {
            port.fqn: frozenset((call.unit, call.rank) for call in found.get(port.fqn, ()))
            for port in _trained(program)
        }
        known = self.of(program, slots)
        fresh = {
            port.fqn: slots[port.name]
            for port in program.inputs
            if port.name in slots
            and (port.fqn not in known or known[port.fqn] != homes.get(port.fqn))
        }
        wrong = world.differing(fresh)
        if wrong:
            raise Refusal(
                f"{wrong[:3]} ({len(wrong)} in all) are not the same on all ranks. Every rank is "
                "given the whole batch, and seeded alike before the model is made; a model that "
                "another compiled step has trained in parts runs with that step's pfeife.compile "
                "or pfeife.backend object"
            )
        for port in _trained(program):
            self.known[slots[port.name]] = homes[port.fqn]
        self.placed = self.placed or placed


def _trained(program: Program) -> list[Port]:
    """State that training changes: parameters, and buffers that are updated."""
    updated = {port.fqn for port in program.ports(Role.BUFFER_UPDATE)}
    ports = program.ports(Role.PARAMETER, Role.BUFFER)
    return [p for p in ports if p.role == Role.PARAMETER or p.fqn in updated]
