"""Which ranks train which state, for all programs of this process: they keep to it."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pfeife.data.machine import Mesh
from pfeife.frontend.deferred.tensors import is_waiting, make, standing_for
from pfeife.ir.parts import Role
from pfeife.ir.program import Program
from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.served.deep_copies import DeepCopies
from pfeife.runtime.distributed.served.optimizers import Optimizers
from pfeife.runtime.distributed.served.saving import Saving
from pfeife.runtime.distributed.served.state_client import Asking
from pfeife.runtime.distributed.state.copies import Copies
from pfeife.runtime.distributed.state.derived_state import holders_of
from pfeife.runtime.distributed.state.gradients import Gradients
from pfeife.runtime.distributed.state.owned import (
    Owned,
    Slots,
    check_memory,
    owners_of,
    ranks_of,
    trained_by,
)
from pfeife.runtime.distributed.state.remote_gradients import Norms
from pfeife.runtime.distributed.state.remote_parameters import (
    Foreign,
    Versions,
    where_trained,
)
from pfeife.runtime.distributed.world.step_hooks import StepHooks
from pfeife.runtime.failure import CollectiveError
from pfeife.runtime.peak import give_back


class Ownership:
    """Where state is trained, by the tensors themselves.

    A program that trains a tensor first gives it its owners; every later one computes there what
    uses it. What this rank does not train is `Foreign`: it has no values here.

                   rank 0     rank 1
        blocks.0   trained    absent      Owned(0, "blocks.0", ranks=(0,))
        tied       trained    trained     Owned(1, "tied", ranks=(0, 1))
        average    values     absent      Owned(2, "average", ranks=(0,)), a copy of blocks.0
        frozen     absent     values      Owned(3, "frozen", ranks=(1,)), which alone reads it
        mask       borrowed   borrowed    nobody owns it, all have its values
    """

    def __init__(self) -> None:
        self.known = WeakIdKeyDictionary()
        self.owned: dict[int, Owned] = {}  # by their numbers
        self.shared = Versions()  # of what other ranks train as well
        self.frozen: set[int] = set()  # the numbers of frozen parameters that this rank keeps
        self.cut_before = WeakIdKeyDictionary()  # what was made whole: a step's options, where cut
        self.watched = WeakIdKeyDictionary()  # those whose gradients are guarded
        self.checked: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()
        self.foreign = Foreign(self._spread)
        self.asking = Asking(self.known, self.foreign)
        self.deep_copies = DeepCopies(self.known, self.asking)
        self.saving = Saving(self.asking, self.deep_copies)
        self.optimizers = Optimizers(self.asking)
        self.gradients = Gradients(self.known, self.foreign)
        self.norms = Norms(self.known, self.owned)
        self.copies = Copies(self.known, self.foreign, self.shared)
        self.factors: list[torch.Tensor] = []  # gradients of losses since ranks have compared them
        self.hooks = StepHooks(self.gradients, self.optimizers, self.copies)

    def end(self) -> None:
        """No optimizer's step is seen any more."""
        self.hooks.end()

    def divided(self, ranks: int) -> bool:
        """Whether some of so many ranks lacks state that others train."""
        return any(len(owned.everywhere) < ranks for owned in self.owned.values())

    def owns_any(self, values: Iterable[Any]) -> bool:
        """Whether some rank trains any of these."""
        return any(True for _ in self._among(values))

    def meshes(self, values: Iterable[Any]) -> set[Mesh]:
        """In which meshes any of these are trained."""
        return {owned.mesh for _, owned in self._among(values)}

    def of(self, program: Program, slots: Slots, mesh: Mesh) -> dict[str, frozenset[int]]:
        """The owners of a program's state by canonical names. Raises CollectiveError for those in
        another mesh."""
        ports = [p for p in program.ports(Role.PARAMETER, Role.BUFFER) if p.name in slots]
        owners = {p.fqn: self.known[slots[p.name]] for p in ports if slots[p.name] in self.known}
        for name, owned in owners.items():
            if owned.mesh != mesh:
                raise CollectiveError(
                    f"{name} is trained on {owned.mesh.replicas} replicas of {owned.mesh.ranks} "
                    f"ranks, and this step has replicas={mesh.replicas} of {mesh.ranks}: steps "
                    "that use the same parameters have the same replicas, in the same mesh"
                )
        return {name: frozenset(owned.ranks) for name, owned in owners.items()}

    def _elsewhere(self, program: Program, slots: Slots) -> list[str]:
        """The parameters that a program wants on other members than have them."""
        ports = [p for p in program.ports(Role.PARAMETER) if slots.get(p.name) in self.known]
        return [p.fqn for p in ports if self.known[slots[p.name]].member != p.keeper]

    def replicas(self, program: Program, slots: Slots) -> dict[str, int | None]:
        """The replicas that train a program's parameters by canonical names, None for all; of those
        that have owners."""
        ports = [p for p in program.ports(Role.PARAMETER) if slots.get(p.name) in self.known]
        return {port.fqn: self.known[slots[port.name]].replica for port in ports}

    def settle(
        self,
        program: Program,
        slots: Slots,
        mesh: Mesh,
        modules: Iterable[nn.Module],
        world: Peers,
        carried: Collection[str] = (),
        apart: bool = False,
    ) -> None:
        """Gives what a program trains owners, where it has none (collective): not the ports that
        are `carried`, whose new values are results, on every rank. What no program has trained yet
        must have the same values on every rank, else CollectiveError is raised: then one of them
        was seeded otherwise, or was given another batch, unless replicas have batches that are
        `apart`."""
        # In this order, since what is let go of cannot be had back:
        #
        #   of             what has owners is in this mesh            raises, nothing is changed
        #   _check_alike   the rest has the same values everywhere    raises, nothing is changed
        #   owners_of      each tensor gets its ranks and a number
        #   check_memory   none shares memory across ranks            raises, nothing is changed
        #   _make_own      deferred ones get the values of this rank
        #   _note          foreign ones lose theirs
        owners = self.of(program, slots, mesh)
        elsewhere = self._elsewhere(program, slots)
        if elsewhere:
            raise CollectiveError(
                f"{elsewhere[:3]} ({len(elsewhere)} in all) were cut over the members of groups by "
                "another step and are not by this one, or the other way round: give all steps of a "
                "model the same parallel="
            )
        ports = [port for port in program.inputs if port.role != Role.SIZE]
        new = [p for p in ports if p.name in slots and p.fqn not in owners]
        alike = [port for port in new if port.role != Role.BATCH or not apart]
        _check_alike({port.fqn: standing_for(slots[port.name]) for port in alike}, world)

        left = [port for port in new if port.name not in carried]
        pairs = owners_of(program, left, slots, mesh, len(self.owned))
        # Before anything is let go of: what is refused here leaves all as it was.
        check_memory([*self.known.items(), *pairs])

        foreign = [tensor for tensor, owned in pairs if not owned.holds(world.rank)]
        _make_own([slots[port.name] for port in new], foreign)
        for tensor, owned in pairs:
            self._note(tensor, owned, world.rank)

        self._watch([slots[port.name] for port in trained_by(program)])
        self.saving.watch(modules)
        if pairs:
            self.hooks.install()
            give_back()

    def _watch(self, trained: Iterable[Any]) -> None:
        """Guards the gradients of parameters from now on; they may have been frozen so far."""
        new = [tensor for tensor in trained if tensor in self.known and tensor not in self.watched]
        new = [tensor for tensor in new if tensor.is_leaf and tensor.requires_grad]
        for tensor in new:
            self.watched[tensor] = None
            self.foreign.guard(tensor)

    def _spread(self, owned: Owned, tensors: Sequence[torch.Tensor]) -> None:
        """What was computed of a tensor of other ranks is about to be written into some of this
        rank's: a module that has these may be a moving average, which is where its model is. Raises
        ValueError for what this rank trains, which nobody would have then."""
        for tensor in tensors:
            if tensor in self.known:
                _check_written(self.known[tensor], owned, tensor in self.foreign, self.frozen)
            elif isinstance(tensor, nn.Parameter):
                self.deep_copies.find(owned, tensor, self.saving.watched)

    def number_copies(self, digests: Sequence[str]) -> None:
        """Takes deep copies that all ranks have made, by the digests of each, for state that they
        train together."""
        self.owned.update(self.deep_copies.agree(digests, len(self.owned)))
        self.saving.watch(self.deep_copies.found)
        self.deep_copies.found.clear()

    def adopt(self, program: Program, slots: Slots, mesh: Mesh, world: Peers) -> None:
        """Gives what a script has computed of what ranks train its owners (collective)."""
        ports = program.ports(Role.PARAMETER, Role.BUFFER)
        self.adopt_derived({p.fqn: slots[p.name] for p in ports if p.name in slots}, world, mesh)

    def adopt_derived(
        self, state: Mapping[str, Any], world: Peers, mesh: Mesh | None = None
    ) -> None:
        """The same of tensors by their names, in a mesh, or that of what is trained."""
        if all(len(owned.holders) == world.size for owned in self.owned.values()):
            return
        # All that ranks train is in one mesh: `of` refuses another.
        mesh = mesh or next(iter(self.owned.values())).mesh
        new = {n: value for n, value in state.items() if isinstance(value, torch.Tensor)}
        new = {n: o for n, o in new.items() if o not in self.known and not is_waiting(o)}
        held = holders_of(new, mesh, world)
        for number, (name, (ranks, member)) in enumerate(held.items(), len(self.owned)):
            alike = mesh.replicas == 1 or new[name].requires_grad
            owned = Owned(number, name, ranks, mesh, alike, None, member)
            self._note(new[name], owned, world.rank)

    def _note(self, tensor: torch.Tensor, owned: Owned, rank: int) -> None:
        self.known[tensor] = owned
        # Another rank may ask for what this script has dropped, until all ranks come together.
        self.asking.keep(tensor)
        self.asking.numbered[owned.number] = tensor
        self.owned[owned.number] = owned
        self.copies.used |= owned.replica is not None
        if owned.holds(rank) and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            self.frozen.add(owned.number)
        if not owned.holds(rank):
            self.foreign.add(tensor, owned)
        elif owned.alike and len(owned.holders) > 1:
            self.shared.mark([tensor])
            if not owned.trains(rank):
                self.copies.add(tensor)

    def outdated(self, program: Program, slots: Slots, mesh: Mesh) -> bool:
        """Whether a program of the ranks reads state on ranks that do not train it: another one
        has given that its owners since it was built."""
        if self.checked.get(program) == len(self.owned):
            return False
        owners, ranks = self.of(program, slots, mesh), ranks_of(program)
        if self._elsewhere(program, slots):
            return True
        # Owners are for ever, so only a program can be the one that is wrong.
        if any(ranks.get(name, frozenset()) - owner_ranks for name, owner_ranks in owners.items()):
            return True
        self.checked[program] = len(self.owned)
        return False

    def among(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Those of some arguments that ranks own, by their numbers, in order."""
        numbered = {owned.number: tensor for tensor, owned in self._among(args)}
        return {number: numbered[number] for number in sorted(numbered)}

    def _among(self, values: Iterable[Any]) -> Iterator[tuple[torch.Tensor, Owned]]:
        for value in values:
            if isinstance(value, torch.Tensor) and value in self.known:
                yield value, self.known[value]


def _check_written(target: Owned, written: Owned, absent: bool, frozen: Collection[int]) -> None:
    """Raises ValueError where state of other ranks is written to what this one has, unless that is
    frozen: then it is refused at the next step, on all ranks."""
    if not absent and target.number not in frozen:
        raise ValueError(
            f"{where_trained(written)}, and is written to {target.name}, of which this rank "
            "has the values: then nobody has them. Compute that of "
            "pfeife.full_state_dict(model), which every rank must call, and load what comes "
            "out on every rank"
        )


def _check_alike(state: Mapping[str, Any], world: Peers) -> None:
    wrong = world.differing(state)
    if wrong:
        raise CollectiveError(
            f"{wrong[:3]} ({len(wrong)} in all) are not the same on all ranks. Every rank is "
            "given the whole batch, and seeded alike before the model is made; a copy of "
            "trained parameters is made from pfeife.full_state_dict(model)"
        )


def _make_own(tensors: Iterable[Any], foreign: Iterable[Any]) -> None:
    """Makes the values of those that are deferred, but for what other ranks train."""
    foreign_ids = {id(tensor) for tensor in foreign}
    make([tensor for tensor in tensors if is_waiting(tensor) and id(tensor) not in foreign_ids])
