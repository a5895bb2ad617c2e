"""What stages recompute, in the words that users of torchgpipe and DeepSpeed know."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence

import attrs
from torch import fx

from pfeife.data.machine import Machine
from pfeife.data.plan import Plan, RecomputeOption
from pfeife.data.timeline import MemoryCurve
from pfeife.ir.parts import Kind
from pfeife.ir.program import Program
from pfeife.passes import join_backward, partition
from pfeife.passes.fuse import module_path
from pfeife.sched.cutting.cuts import forward_units, is_within
from pfeife.sched.cutting.recompute_choice import choose_recompute, recompute_options
from pfeife.sched.cutting.recompute_greedy import relieved, with_blocks

# "always", "except_last", "never", "auto"; every so many blocks; or modules by their names.
RecomputePolicy = str | int | Sequence[str]
WORDS = ("always", "except_last", "never", "auto")


def with_recompute(
    plan: Plan,
    program: Program,
    how: RecomputePolicy,
    *,
    machine: Machine,
    limit: float | Sequence[float],
    curves: Callable[[Plan], Iterable[MemoryCurve]],
) -> Plan:
    """The plan of a program of clusters with what its stages recompute.

    "always": every stage keeps its inputs alone. "except_last": so does every stage but the last,
    whose backwards follow their forwards at once (torchgpipe means the last microbatch by that; a
    plan recomputes by stages, with all microbatches alike). "never": nothing. A
    number k: the inside of every k-th block, as `torch.utils.checkpoint` around it would (blocks
    are the modules whose names end in a number, such as blocks.3, the outermost ones). Names: the
    inside of these modules. "auto": as little as keeps every rank to `limit` bytes (one for all, or
    one a rank) by its `curves`, the cheapest bytes first. What cannot be done again is kept in any
    case, see `choose_recompute`. Where keeping least leaves no room for what is computed again all
    at once, every block by itself may: that is one of what "auto" tries. Raises ValueError for what
    is none of these, and for names without nodes.
    """
    # What to recompute is decided for whole backwards (see `choose_recompute`).
    split = any(call.kind == Kind.INPUT_BACKWARD for call in program.calls)
    whole = join_backward()(program) if split else program
    staged = partition(plan)(whole)

    def choice(budget: str | Collection[str]) -> tuple[RecomputeOption, ...]:
        return choose_recompute(staged, budget, machine=machine, duplicated=plan.duplicated)

    def options() -> list[list[RecomputeOption]]:
        forwards = _forwards(whole)
        inside = _inside(forwards, _blocks(forwards))
        stage_options = recompute_options(staged, machine, duplicated=plan.duplicated, most=5)
        return with_blocks(stage_options, choice(inside) if inside else ())

    if how == "never":
        return plan
    if how == "auto":
        return relieved(plan, options, limit, curves)
    if how == "always":
        return attrs.evolve(plan, recompute=choice("full"))
    if how == "except_last":
        return attrs.evolve(plan, recompute=(*choice("full")[:-1], choice("none")[-1]))
    check_policy(how)
    forwards = _forwards(whole)
    modules = _every(forwards, how) if isinstance(how, int) else list(how)
    return attrs.evolve(plan, recompute=choice(_inside(forwards, modules)))


def check_policy(how: RecomputePolicy | None) -> None:
    """Raises ValueError for a word that is none of a policy's."""
    if isinstance(how, bool) or (isinstance(how, str) and how not in WORDS):
        raise ValueError(f"recompute={how!r}: must be one of {WORDS}, a number of blocks, or names")


def _forwards(program: Program) -> dict[fx.Node, str]:
    """The forward's operations, with the paths of their modules."""
    return {node: module_path(node) for node in forward_units(program)}


# As short as can be: of blocks within blocks the outer one.
_BLOCK = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")


def _every(forwards: dict[fx.Node, str], step: int) -> list[str]:
    """Every so many of the outermost modules with a number for a name."""
    if step < 1:
        raise ValueError(f"recompute={step}: of the blocks, every first, second, third...")
    blocks = _blocks(forwards)
    if len(blocks) < step:
        raise ValueError(
            f"recompute={step}: the model has {len(blocks)} blocks (modules such as blocks.3)"
        )
    return blocks[step - 1 :: step]


def _blocks(forwards: dict[fx.Node, str]) -> list[str]:
    """The outermost modules with a number for a name."""
    matches = (_BLOCK.match(path) for path in forwards.values())
    return list(dict.fromkeys(match.group() for match in matches if match))


def _inside(forwards: dict[fx.Node, str], modules: Iterable[str]) -> set[str]:
    """The names of what modules compute for themselves; what they hand on is kept."""
    names: set[str] = set()
    for module in modules:
        members = {n for n, path in forwards.items() if is_within(path, module)}
        if not members:
            paths = sorted({path for path in forwards.values() if path})
            raise ValueError(
                f"recompute: no module {module!r} computes anything; there are {paths}"
            )
        inner = (n for n in members if all(u in members for u in n.users if u in forwards))
        names |= {node.name for node in inner}
    return names
