"""Passes in a row."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

import attrs

from pfeife.data.progress import Progress
from pfeife.ir.program import Program
from pfeife.ir.verify import verify
from pfeife.passes.changes import Totals, difference, totals

Pass = Callable[[Program], Program]
Passes = Mapping[str, Sequence[Pass]]  # by the level of the programs that they change
LEVELS = ("flat", "clusters", "stages", "ranks")


def compose(*passes: Pass) -> Pass:
    """One pass that applies the given ones from left to right."""
    return lambda program: reduce(lambda current, pass_: pass_(current), passes, program)


@attrs.frozen(eq=False)
class Recorded:
    """A program, what made it, and from what; and the pass itself, if it was one."""

    maker: str
    program: Program
    before: Program | None = attrs.field(default=None, repr=False)
    made_by: Pass | None = attrs.field(default=None, repr=False)

    @property
    def totals(self) -> Totals:
        """Figures of the program: operations, calls, bytes across cuts, seconds."""
        return totals(self.program)

    def diff(self, context: int = 3) -> str:
        """What the pass has changed in the printed program, as `diff -u` writes it; the first one
        of a history has changed nothing."""
        return "" if self.before is None else difference(self.before, self.program, context)

    def __str__(self) -> str:
        return f"# ---- {self.maker} ----\n{self.program}"


class History(tuple[Recorded, ...]):
    """Programs on their way, which print as a line of figures each."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max((len(entry.maker) for entry in self), default=0)
        return "\n".join(f"{entry.maker:{width}}  {entry.totals}" for entry in self)

    __repr__ = __str__


def record(
    program: Program, *passes: Pass, start: str = "start", progress: Progress | None = None
) -> History:
    """The program before and after every pass, each verified and headed by the pass's name.
    `progress` is called with how many of how many passes are done. A history prints its figures,
    and `history[i].diff()` has what a pass has changed.

    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> flat = pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4))
    >>> plan = pfeife.Plan((0, 1), sched.families.one_f_one_b(2, 4))
    >>> history = pfeife.record(flat, pfeife.fuse(), pfeife.partition(plan), start="capture")
    >>> [(entry.maker, entry.program.units) for entry in history]
    [('capture', 0), ('fuse', 2), ('partition', 2)]
    """
    history = [Recorded(start, program)]
    for done, pass_ in enumerate(passes):
        before = history[-1].program
        # Verified one by one, so that an error names the pass that made it, not one that met it
        # later.
        history.append(Recorded(pass_name(pass_), verify(pass_(before)), before, pass_))
        if progress:
            progress(done + 1, len(passes))
    return History(history)


def pass_name(pass_: Pass) -> str:
    """A pass's name, or that of the function that has made it or is called."""
    named = pass_.func if isinstance(pass_, partial) else pass_
    return getattr(named, "__qualname__", type(named).__name__).split(".")[0]
