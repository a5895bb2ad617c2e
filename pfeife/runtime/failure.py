"""What went wrong, where: the one account of a failure that every rank gives."""

import linecache
import traceback
from types import FrameType

import attrs
from torch import fx

from pfeife.data.schedule import Action
from pfeife.ir.nodes import find_node, source_line

_LONGEST = 2000  # characters of a cause that travel to the other ranks


@attrs.frozen
class Failure:
    """Why a pipeline has stopped.

    `rank` is the one to blame, None if nobody knows; `where` the action that it was in; `cause`
    what happened there; `source` the line of the user's model if there is one.
    """

    rank: int | None
    where: str
    cause: str
    source: str = ""

    def __str__(self) -> str:
        who = "an unknown rank" if self.rank is None else f"rank {self.rank}"
        where = f", {self.where}" if self.where else ""
        source = f" ({self.source})" if self.source else ""
        return f"{who}{where}: {self.cause}{source}"


class PipelineError(RuntimeError):
    """A pipeline over several processes has stopped; `failure` says whose fault it is."""

    def __init__(self, failure: Failure):
        super().__init__(
            f"{failure}. Every rank has stopped this step, and nothing of it was applied. The next "
            "step connects the ranks anew if all of them come to it; else start the processes "
            "again (torchrun --max-restarts does) and load a checkpoint"
        )
        self.failure = failure


class CollectiveError(ValueError):
    """What all ranks refuse together, before it runs: nothing is broken, and they may go on."""


def describe(action: Action) -> str:
    """An action in words: its text form, what it is, for which stage and microbatch."""
    microbatch = "" if action.microbatch is None else f", microbatch {action.microbatch}"
    return f"action {action} ({action.do.words} of stage {action.stage}{microbatch})"


def explain(error: BaseException, rank: int, action: Action) -> None:
    """Notes on an exception where in the schedule and in the user's model it was raised."""
    error.add_note(f"on rank {rank}, in {describe(action)}")
    source = model_line(error)
    if source:
        error.add_note(f"for {source}")


def failure_of(error: BaseException, rank: int, where: str) -> Failure:
    """What the other ranks are told of an exception on this one."""
    cause = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    text = cause[0] if len(cause) == 1 else " ".join([cause[0], *_lines(error)])
    plain_text = text[:_LONGEST].encode("utf-8", "backslashreplace").decode()
    return Failure(rank, where, plain_text, model_line(error))


def _lines(error: BaseException) -> list[str]:
    """The lines of an error after its first one, without the notes."""
    return [line.strip() for line in str(error).splitlines()[1:4]]


def model_line(error: BaseException) -> str:
    """The line of the user's model whose operation raised an exception, "" if none did."""
    # The innermost frame of a graph counts: outer ones call it.
    source = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule):
            source = _line_of_node(module, frame, line) or source
    return source


def _line_of_node(module: fx.GraphModule, frame: FrameType, line: int) -> str:
    """fx writes a node a line, `name = target(...)`, or `name: "annotation" = ...`."""
    text = linecache.getline(frame.f_code.co_filename, line, frame.f_globals)
    name = text.split("=")[0].split(":")[0].strip()
    try:
        return source_line(find_node(module, name))
    except KeyError:
        return ""
