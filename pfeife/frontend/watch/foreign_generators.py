"""Draws that no graph has: a step that uses Python's or numpy's random numbers is refused, since a
number that is drawn while it is captured would be that of every later microbatch."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from pfeife import _torch
from pfeife.frontend.watch.gc_objects import living
from pfeife.frontend.watch.user_lines import OURS, line_of
from pfeife.ir.nodes import source_line

_NOT_THE_USERS = (*OURS, random.__file__, "<")


def refusal(where: str, generator: str = "a generator of Python's or numpy's") -> ValueError:
    """What to say of a step that draws from a generator that is not torch's, at a line of it."""
    return ValueError(
        f"{where or 'the step'} draws from {generator}: its microbatches would not get the numbers "
        "that they get in eager. Draw by torch (torch.rand(())), which every microbatch does for "
        "itself, or draw outside of the step and pass the number as an argument"
    )


def check_draws(module: fx.GraphModule) -> None:
    """Raises ValueError for a graph of Dynamo's with such draws.

    Dynamo draws Python's once a call, before all microbatches, and hands them over as arguments;
    in place of numpy's it draws from torch's generator.
    """
    for node in module.graph.nodes:
        if node.op == "placeholder" and _torch.is_drawn(node):
            raise refusal(source_line(node), "Python's random")
        if node.op == "call_function" and _torch.draws_by_numpy(node.target):
            raise refusal(source_line(node), "numpy.random")


@contextlib.contextmanager
def watching() -> Iterator[list[Any]]:
    """Gives a list that has, afterwards, the generators that have moved meanwhile: of those that
    there were before, Python's and numpy's global ones and those that somebody has made. They are
    put back to where they were."""
    moved: list[Any] = []
    before = [(generator, _kept(generator)) for generator in _generators()]
    try:
        yield moved
    finally:
        for generator, state in before:
            if _text(_kept(generator)) != _text(state):
                moved.append(generator)
                _put(generator, state)


def _kept(generator: Any) -> Any:
    """The state of a generator, in its own words; None for the system's, which has none."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    # The legacy kind may keep a number for the next call, which its bit generator does not have.
    return generator.get_state() if hasattr(generator, "get_state") else generator.state


def _put(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.state = state


def drawing_line(run: Callable[[], Any], moved: Sequence[Any]) -> str:
    """The line in which `run` first moves one of these generators, "" if it does not. It is run
    with Python's tracing, which takes several times as long.

    Lines of torch and of the generators themselves do not count:

        line        generators are as they were       remember it
        line        generators have moved             the remembered one did it
    """
    # A line is only known to have drawn when the next one begins, so the last one is remembered.
    before, last, lines = _states(moved), [""], list[str]()

    def looked(frame: FrameType, event: str, argument: Any) -> Any:
        if not lines and _states(moved) != before:
            lines.append(last[0])
        last[0] = line_of(frame.f_back if event == "return" else frame, _NOT_THE_USERS)
        return looked

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        leave = lines or frame.f_code.co_filename.startswith(_NOT_THE_USERS)
        return None if leave else looked(frame, event, argument)

    outer = sys.gettrace()  # a debugger's or a coverage tool's
    sys.settrace(called)
    try:
        run()
    finally:
        sys.settrace(outer)
    if not lines and _states(moved) != before:
        lines.append(last[0])
    return "".join(lines)


def _generators() -> list[Any]:
    """All generators of Python's and numpy's that there are, the common ones also where the garbage
    collector was told to leave them out. If the step has none but those that it makes, it seeds
    them, and draws the same numbers in every microbatch."""
    kinds: tuple[type, ...] = (random.Random,)
    common: list[Any] = [random.random.__self__]  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")  # else nobody draws from it
    if numpy is not None:
        kinds += (numpy.random.RandomState, numpy.random.BitGenerator)
        common.append(numpy.random.random.__self__)
    # sympy's own, which moves as torch compares sizes.
    torchs = _torch.order_of_facts()
    generators = {
        id(generator): generator
        for generator in (*common, *living(*kinds))
        if generator is not torchs
    }
    return list(generators.values())


def _states(generators: Sequence[Any]) -> list[str]:
    return [_text(_kept(generator)) for generator in generators]


def _text(state: Any) -> str:
    """A state as a text that tells it from others: with all bytes of arrays, of which only the
    begin and the end would be printed."""
    return str(
        pytree.tree_map(lambda part: part.tobytes() if hasattr(part, "tobytes") else part, state)
    )
