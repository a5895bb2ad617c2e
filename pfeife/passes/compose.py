"""Passes in a row."""

from collections.abc import Callable
from functools import reduce

import attrs

from pfeife.ir.program import Program, verify

Pass = Callable[[Program], Program]


def compose(*passes: Pass) -> Pass:
    """One pass that applies the given ones from left to right."""
    return lambda program: reduce(lambda current, one: one(current), passes, program)


@attrs.frozen(eq=False)
class Recorded:
    """A program and what made it."""

    maker: str
    program: Program

    def __str__(self) -> str:
        return f"# ---- {self.maker} ----\n{self.program}"


def record(program: Program, *passes: Pass) -> tuple[Recorded, ...]:
    """The program before and after every pass, each verified and headed by the pass's name."""
    history = [Recorded("start", program)]
    for one in passes:
        name = getattr(one, "__qualname__", type(one).__name__).split(".")[0]
        history.append(Recorded(name, verify(one(history[-1].program))))
    return tuple(history)
