"""Which ranks train which state, for all programs of this process: they keep to it."""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pfeife.data.machine import Mesh
from pfeife.frontend.waiting import forsake, is_waiting, make, standing_for
from pfeife.ir.program import Program, Role
from pfeife.runtime.distributed.asking import Asking
from pfeife.runtime.distributed.copies import Copies
from pfeife.runtime.distributed.derived import holders_of
from pfeife.runtime.distributed.elsewhere import Norms
from pfeife.runtime.distributed.foreign import Borrowed, Foreign, Guard, digest, version_of
from pfeife.runtime.distributed.gradients import Gradients, compared
from pfeife.runtime.distributed.nan_memory import give_back
from pfeife.runtime.distributed.optimizers import Optimizers
from pfeife.runtime.distributed.owned import (
    Owned,
    check_memory,
    is_frozen,
    ranks_of,
    trained_by,
)
from pfeife.runtime.distributed.saving import Saving
from pfeife.runtime.distributed.stepping import Stepping
from pfeife.runtime.failure import Refusal

if TYPE_CHECKING:
    from pfeife.runtime.distributed.world import World

Slots = Mapping[str | None, Any]  # tensors by the names of ports


class Ownership:
    """Where state is trained, by the tensors themselves.

    A program that trains a tensor first gives it its owners; every later one computes there what
    uses it. What this rank does not train is `Foreign`: NaN, and guarded.

                   rank 0     rank 1
        blocks.0   trained    NaN         Owned(0, "blocks.0", ranks=(0,))
        tied       trained    trained     Owned(1, "tied", ranks=(0, 1))
        average    values     NaN         Owned(2, "average", ranks=(0,)), a copy of blocks.0
        frozen     NaN        values      Owned(3, "frozen", ranks=(1,)), which alone reads it
        mask       borrowed   borrowed    nobody owns it, all have its values
    """

    def __init__(self) -> None:
        self.known = WeakIdKeyDictionary()
        self.owned: dict[int, Owned] = {}  # by their numbers
        self.shared: dict[int, int] = {}  # versions of what other ranks train as well
        self.frozen: dict[int, int] = {}  # those of frozen parameters that this rank keeps
        self.watched = WeakIdKeyDictionary()  # those whose gradients are noted
        self.checked: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()
        self.foreign = Foreign()
        self.asking = Asking(self.known, self.foreign)
        self.guard = Guard(self.known, self.foreign, self.asking.values)
        self.saving, self.optimizers = Saving(self.asking), Optimizers(self.asking)
        self.gradients = Gradients(self.known, self.foreign)
        self.norms, self.stepping = Norms(self.known, self.owned), Stepping()
        self.copies = Copies(self.known, self.foreign, self.shared)

    def end(self) -> None:
        """No optimizer's step is seen any more."""
        self.stepping.end()
        self.copies.end()
        self.gradients.end()
        self.optimizers.end()

    def divided(self, ranks: int) -> bool:
        """Whether some of so many ranks lacks state that others train."""
        return any(len(owned.everywhere) < ranks for owned in self.owned.values())

    def owns_any(self, values: Iterable[Any]) -> bool:
        """Whether some rank trains any of these."""
        return any(isinstance(one, torch.Tensor) and one in self.known for one in values)

    def meshes(self, values: Iterable[Any]) -> set[Mesh]:
        """In which meshes any of these are trained."""
        known = self.known
        return {known[one].mesh for one in values if isinstance(one, torch.Tensor) and one in known}

    def least(self, ranks: int) -> int:
        """The rank of a pipeline of so many that trains the fewest bytes."""
        bytes_of = [0] * ranks
        for tensor, owned in self.known.items():
            for rank in owned.ranks:
                bytes_of[rank % ranks] += tensor.nbytes
        return bytes_of.index(min(bytes_of))

    def of(self, program: Program, slots: Slots, mesh: Mesh) -> dict[str, frozenset[int]]:
        """The owners of a program's state by canonical names. Raises Refusal for those in another
        mesh."""
        ports = [p for p in program.ports(Role.PARAMETER, Role.BUFFER) if p.name in slots]
        found = {p.fqn: self.known[slots[p.name]] for p in ports if slots[p.name] in self.known}
        for name, owned in found.items():
            if owned.mesh != mesh:
                raise Refusal(
                    f"{name} is trained on {owned.mesh.replicas} replicas of {owned.mesh.ranks} "
                    f"ranks, and this step has replicas={mesh.replicas} of {mesh.ranks}: steps "
                    "that use the same parameters have the same replicas, in the same mesh"
                )
        return {name: frozenset(owned.ranks) for name, owned in found.items()}

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
        world: "World",
        carried: Collection[str] = (),
        apart: bool = False,
    ) -> None:
        """Gives what a program trains owners, where it has none (collective): not the ports that
        are `carried`, whose new values are results, on every rank. What no program has
        trained yet must have the same values on every rank, else Refusal is raised: then one of
        them was seeded otherwise, or was given another batch, unless replicas have batches that
        are `apart`."""
        known = self.of(program, slots, mesh)
        new = [p for p in program.inputs if p.name in slots and p.fqn not in known]
        alike = [port for port in new if port.role != Role.BATCH or not apart]
        wrong = world.differing({port.fqn: standing_for(slots[port.name]) for port in alike})
        if wrong:
            raise Refusal(
                f"{wrong[:3]} ({len(wrong)} in all) are not the same on all ranks. Every rank is "
                "given the whole batch, and seeded alike before the model is made; a copy of "
                "trained parameters is made from pfeife.full_state_dict(model)"
            )
        ranks = ranks_of(program)
        trained = {port.fqn for port in trained_by(program) if slots[port.name].is_leaf}
        wanted = [port for port in new if port.fqn in ranks and port.name not in carried]
        frozen = [port for port in wanted if is_frozen(port, slots[port.name])]
        wanted = [port for port in wanted if port.fqn in trained]
        wanted += frozen if wanted else []
        replica_of = {one.name: one.owner for one in program.reductions}
        pairs = [
            (value, Owned(number, name, tuple(sorted(ranks[name])), mesh, alike, replica))
            for number, port in enumerate(wanted, len(self.owned))
            for name, value in [(port.fqn, slots[port.name])]
            for replica in [replica_of.get(name)]
            for alike in [mesh.replicas == 1 or port.role == Role.PARAMETER]
        ]
        check_memory([*self.known.items(), *pairs])
        foreign = [tensor for tensor, owned in pairs if not owned.holds(world.rank)]
        _make_own([slots[port.name] for port in new], foreign)
        for tensor, owned in pairs:
            self._note(tensor, owned, world.rank)
        self._watch([slots[port.name] for port in trained_by(program)], world.rank)
        modules = tuple(modules)
        self.guard.watch(modules)
        self.saving.watch(modules)
        if pairs:
            self.stepping.install()  # first, so that the others see what the optimizer sees
            self.copies.install()  # before others take the step for done
            self.gradients.install()
            self.optimizers.install()  # last, since the other refuses what this one lets go of
            give_back()

    def _watch(self, trained: Iterable[Any], rank: int) -> None:
        """Notes the gradients of parameters from now on; they may have been frozen so far."""
        new = [one for one in trained if one in self.known and one not in self.watched]
        new = [one for one in new if one.is_leaf and one.requires_grad]
        for one in new:
            self.watched[one] = None
            self.foreign.guard(one)
        self.gradients.watch([one for one in new if self.known[one].trains(rank)])

    def adopt(self, program: Program, slots: Slots, mesh: Mesh, world: "World") -> None:
        """Gives what a script has computed of what ranks train its owners (collective)."""
        ports = program.ports(Role.PARAMETER, Role.BUFFER)
        self.adopt_derived({p.fqn: slots[p.name] for p in ports if p.name in slots}, world, mesh)

    def adopt_derived(
        self, state: Mapping[str, Any], world: "World", mesh: Mesh | None = None
    ) -> None:
        """The same of tensors by their names, in a mesh, or that of what is trained."""
        if all(len(owned.holders) == world.size for owned in self.owned.values()):
            return
        mesh = mesh or next(iter(self.owned.values())).mesh
        new = {n: one for n, one in state.items() if isinstance(one, torch.Tensor)}
        new = {n: o for n, o in new.items() if o not in self.known and not is_waiting(o)}
        held = holders_of(new, mesh, world)
        for number, (name, ranks) in enumerate(held.items(), len(self.owned)):
            alike = mesh.replicas == 1 or new[name].requires_grad
            self._note(new[name], Owned(number, name, ranks, mesh, alike), world.rank)

    def _note(self, tensor: torch.Tensor, owned: Owned, rank: int) -> None:
        self.known[tensor] = owned
        self.asking.kept.add(tensor)
        self.owned[owned.number] = owned
        self.copies.used |= owned.replica is not None
        if owned.holds(rank) and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            self.frozen[owned.number] = version_of(tensor)
        if not owned.holds(rank):
            self.foreign.add(tensor, owned.number, owned.name, owned.ranks)
        elif owned.alike and len(owned.holders) > 1:
            self.shared[owned.number] = version_of(tensor)
            if not owned.trains(rank):
                self.copies.add(tensor)

    def outdated(self, program: Program, slots: Slots, mesh: Mesh) -> bool:
        """Whether a program of the ranks reads state on ranks that do not train it: another one
        has given that its owners since it was built."""
        if self.checked.get(program) == len(self.owned):
            return False
        owners, ranks = self.of(program, slots, mesh), ranks_of(program)
        if any(ranks.get(name, frozenset()) - theirs for name, theirs in owners.items()):
            return True
        self.checked[program] = len(self.owned)
        return False

    def borrowed(
        self, program: Program, names: Sequence[str | None], args: Sequence[Any], rank: int
    ) -> Borrowed:
        """What of a program's state nobody trains; `names` are the arguments' ports."""
        calls = {call.node for call in program.calls if call.rank == rank}
        nodes = {n.name: n for n in program.module.graph.nodes if n.op == "placeholder"}
        ports = {p.name: p.fqn for p in program.ports(Role.PARAMETER, Role.BUFFER)}
        found = [
            (ports[name], place, any(user.name in calls for user in nodes[name].users))
            for place, (name, value) in enumerate(zip(names, args, strict=True))
            if name in ports and value not in self.known
        ]
        fqns, at, read = zip(*found, strict=True) if found else ((), (), ())
        return Borrowed(fqns, at, read, [version_of(args[place]) for place in at])

    def news(self, borrowed: Borrowed | None, args: Sequence[Any]) -> str:
        """What this rank tells the others before it uses `args`, "" if all is as it was: what of
        them has been written to, what has become NaN, by what gradients were scaled."""
        lines = [*self.gradients.news(), *self.optimizers.news(), *self.copies.news()]
        if self.foreign.found:
            lines += [f"changed {number}" for number in self.foreign.changed(args)]
            lines += [f"lost {name}" for name in self._lost(args)]
        lines += [f"shared {ranks} {writes}" for ranks, writes in self._writes(args).items()]
        if borrowed:
            lines += borrowed.news(args, self.known, bool(self.foreign.found))
        return "\n".join(lines)

    def _lost(self, args: Sequence[Any]) -> list[str]:
        """The frozen parameters that were written to here, and have become NaN."""
        found = []
        for number, tensor in self._among(args).items() if self.frozen else ():
            version = version_of(tensor)
            if self.frozen.get(number, version) != version and not tensor.requires_grad:
                if tensor.isnan().any():
                    found.append(self.owned[number].name)
                else:
                    self.frozen[number] = version
        return found

    def _writes(self, args: Sequence[Any]) -> dict[str, str]:
        """How often what other ranks train as well has been written to since the ranks have last
        agreed, by those ranks."""
        groups: dict[str, list[int]] = {}
        for number, tensor in self._among(args).items() if self.shared else ():
            if number in self.shared:
                writes = version_of(tensor) - self.shared[number]
                groups.setdefault(_named(self.owned[number]), []).append(writes)
        return {ranks: digest(writes) for ranks, writes in groups.items() if any(writes)}

    def _among(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Those of some arguments that ranks own, by their numbers, in order."""
        found = [one for one in args if isinstance(one, torch.Tensor) and one in self.known]
        numbered = {self.known[one].number: one for one in found}
        return {number: numbered[number] for number in sorted(numbered)}

    def agree(
        self,
        world: "World",
        news: Sequence[str],
        borrowed: Borrowed | None = None,
        args: Sequence[Any] = (),
    ) -> None:
        """Takes what every rank has told: a checkpoint that all have loaded becomes the state that
        is trained on (collective if there is one). Raises Refusal on all ranks for what would go
        on with wrong numbers."""
        self.asking.service.uneven = ""
        if not any(news):
            return
        if borrowed:
            borrowed.forget(args, self.known)
        told: dict[str, dict[int, list[list[str]]]] = {kind: {} for kind in _KINDS}
        for rank, text in enumerate(news):
            for line in text.splitlines():
                kind, _, rest = line.partition(" ")
                told[kind].setdefault(rank, []).append(rest.split(" "))
        stepped = {rank: one for rank, ((one,),) in told.pop("stepped").items()}
        self.gradients.compare_steps(stepped, world.rank, world.size)
        self.gradients.forget()
        steps = {rank: int(one) for rank, ((one,),) in told.pop("steps").items()}
        self.optimizers.compare(steps, told.pop("loaded"), world.size)
        if not any(told.values()):
            return
        if told["nan"] and borrowed:
            state = {n: args[at] for n, at in zip(borrowed.names, borrowed.at, strict=True)}
            self.adopt_derived(state, world)
            borrowed.forget(args, self.known)
        left = set(borrowed.names) if borrowed else set()
        told["lost"] |= {
            r: [n for n in lines if " ".join(n) in left] for r, lines in told["nan"].items()
        }
        wrong = compared(told["scaled"]) or _spoiled(told["lost"])
        if wrong:
            raise Refusal(wrong)
        mine = self._among(args)
        if told["changed"]:
            changed = {r: {int(n) for (n,) in them} for r, them in told["changed"].items()}
            self._take(changed, mine, world)
        self._compare_shared(told["shared"], mine, world)
        if told["behind"] or self._copied(told["shared"]):
            self.copies.renew(world, mine.values())
        writes = {rank: line for rank, (line,) in told["borrowed"].items()}
        if borrowed and len({str(writes.get(rank)) for rank in range(world.size)}) > 1:
            _check_alike(borrowed.names, [args[place] for place in borrowed.at], world)
        self.shared |= {n: version_of(tensor) for n, tensor in mine.items() if n in self.shared}
        if borrowed:
            borrowed.agreed(args)

    def _compare_shared(
        self,
        told: Mapping[int, Sequence[Sequence[str]]],
        mine: Mapping[int, torch.Tensor],
        world: "World",
    ) -> None:
        """Compares what several ranks train and have not written to as often as one another: one
        of them has loaded a checkpoint alone. `mine` are this rank's tensors by their numbers."""
        writes = {(ranks, rank): one for rank, lines in told.items() for ranks, one in lines}
        for ranks in sorted({ranks for ranks, _ in writes}):
            having = [int(rank) for rank in ranks.split("-")]
            if len({writes.get((ranks, rank)) for rank in having}) > 1:
                theirs = [self.owned[number] for number in mine]
                theirs = [owned for owned in theirs if owned.alike and _named(owned) == ranks]
                tensors = [mine[owned.number] for owned in theirs]
                _check_alike([owned.name for owned in theirs], tensors, world, having)

    def _copied(self, told: Mapping[int, Sequence[Sequence[str]]]) -> bool:
        """Whether some of what ranks have written to is trained by one replica for all."""
        written = {ranks for lines in told.values() for ranks, _ in lines}
        return any(
            owned.replica is not None and _named(owned) in written for owned in self.owned.values()
        )

    def _take(
        self, written: Mapping[int, set[int]], mine: Mapping[int, torch.Tensor], world: "World"
    ) -> None:
        """Compares what ranks have `written` to state of others with what these have. `mine` are
        this rank's tensors by their numbers."""
        numbers = sorted(set().union(*written.values()))
        sums = world.checksums([mine.get(number) for number in numbers])
        for at, number in enumerate(numbers):
            owned = self.owned[number]
            having = {rank for rank, theirs in written.items() if number in theirs}
            having |= {*owned.holders} if owned.alike else set()
            of = {rank: owned.first if owned.alike else owned.nearest(rank) for rank in having}
            others = [rank for rank in having if int(sums[rank][at]) != int(sums[of[rank]][at])]
            if others:
                raise Refusal(
                    f"{owned.name} has been written to on ranks {sorted(written)} since the last "
                    f"step, but ranks {sorted(others)} have other values than rank "
                    f"{of[min(others)]}, "
                    "which trains it: load a checkpoint on every rank, or on none"
                )
        self.foreign.forget(written.get(world.rank, ()))


# News, a line each: the kind, and
#
#     stepped   DIGEST                which optimizers have stepped, and to what they are set
#     steps     COUNT                 how often optimizers have stepped since the last call
#     loaded    state                 an optimizer has been given some
#     changed   NUMBER                what is absent here has been written to, as by a checkpoint
#     nan       NAME                  what nobody trains and this rank reads has become NaN
#     lost      NAME                  so has a frozen parameter that this rank keeps
#     scaled    STEP FACTOR NEAR      by what gradients were multiplied before an optimizer's step
#     behind    copies                not all copies of what other replicas train are theirs
#     shared    RANKS DIGEST          what these ranks train has been written to, how often
#     borrowed  DIGEST                what nobody trains has been written to, how often
_KINDS = (
    *("stepped", "steps", "loaded", "changed", "nan", "lost", "scaled"),
    *("behind", "shared", "borrowed"),
)


def _named(owned: Owned) -> str:
    """Those who have a tensor's values, as news call them."""
    return "-".join(map(str, owned.holders))


def _others(sums: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[int]:
    """The ranks that have other values than the first of them, by checksums."""
    first = int(sums[0])
    return sorted({rank for rank, one in zip(ranks, sums, strict=True) if int(one) != first})


def _check_alike(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    world: "World",
    ranks: Sequence[int] = (),
) -> None:
    """Raises Refusal on all ranks unless some (all if none are given) have the same values
    (collective)."""
    if not names:
        return
    sums = world.checksums(tensors)
    ranks = ranks or range(world.size)
    for at, name in enumerate(names):
        others = _others([sums[rank][at] for rank in ranks], ranks)
        if others:
            raise Refusal(
                f"{name} has been written to since the last step, and ranks {others} have other "
                f"values than rank {ranks[0]}: load a checkpoint on every rank, or on none"
            )


def _spoiled(told: Mapping[int, Sequence[Sequence[str]]]) -> str:
    """What is wrong with state that nobody trains, "" if nothing."""
    named = [(rank, " ".join(line)) for rank, lines in told.items() for line in lines]
    if not named:
        return ""
    rank, name = named[0]
    return (
        f"{name} has become NaN on rank {rank}: the step reads it and no rank trains "
        "it. A copy of parameters that other ranks train, such as their moving average, can only "
        "be made from pfeife.full_state_dict(model), which every rank calls, or is read by a step "
        "of its own, that trains nothing"
    )


def _make_own(tensors: Iterable[Any], foreign: Iterable[Any]) -> None:
    """Makes the values of those that are deferred, but for what other ranks train."""
    others = {id(one): one for one in foreign if is_waiting(one)}
    make([one for one in tensors if is_waiting(one) and id(one) not in others])
    forsake(list(others.values()))
