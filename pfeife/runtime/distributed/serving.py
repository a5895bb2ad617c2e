"""A rank's state for those that ask: threads answer while its script is somewhere else."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from pfeife.data import plain
from pfeife.runtime.distributed.connection import Connection
from pfeife.runtime.distributed.givens import Givens
from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.kept import Kept
from pfeife.runtime.distributed.posting import Post
from pfeife.runtime.distributed.questions import Answer, Named, Question, Value, heard, shaped
from pfeife.runtime.distributed.script import Change, Script
from pfeife.runtime.failure import PipelineError, Refusal

if TYPE_CHECKING:
    from pfeife.runtime.distributed.world import World

_QUESTION = 1  # the tag of questions; answers have those that the questions say
_TAGS = 2**29


@attrs.frozen
class Found:
    """What answers a question: tensors, states that are made of them, and the names of those
    that are a model's."""

    tensors: tuple[torch.Tensor, ...]
    states: tuple[Value | None, ...] = ()
    named: tuple[tuple[str, torch.Tensor], ...] = ()


class Service:
    """Asks other ranks for state, and answers them, at any moment of the script.

    An answer is of the same point of the script as the question. A rank that has not come there
    yet answers later; one that has gone on refuses, with words. What tells the point is how often
    compiled steps were called, optimizers stepped and state was loaded: what the script writes to
    parameters by hand is not seen. If it does so after it has given an answer, `check_given`
    raises, for the answer may have come too early.

    `connection` is one of all ranks, on the CPU, that nothing else uses; `find` gives what answers
    a question, `kept` what that is found in.
    """

    def __init__(
        self,
        world: "World",
        connection: Connection,
        find: Callable[[Question], Found],
        kept: Kept,
    ) -> None:
        self.world, self.connection, self.find, self.kept = world, connection, find, kept
        self.post, self.givens = Post(connection), Givens()
        self.script = Script(lambda reader: world.busy(_Waits("a change of state", reader)))
        self.uneven = ""  # why the ranks' places do not tell the point
        self.tags = itertools.count()
        self.asking = threading.Lock()  # one question at a time
        self.threads = [
            threading.Thread(
                target=self._serve, args=(one,), name=f"pfeife serving {one}", daemon=True
            )
            for one in self.others
        ]
        for thread in self.threads:
            thread.start()

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world.size) if rank != self.world.rank]

    def end(self) -> None:
        """Answers nobody any more, and lets go of the connection."""
        self.connection.cut()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        self.connection.close()

    def tensors(self, rank: int, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """The values that a rank has of tensors which it trains, by their numbers, on the CPU.
        Raises Refusal if it is not at the same point of the script, PipelineError if it is gone."""
        question = Question(self._tag(), self.script.place, tuple(numbers))
        return dict(zip(numbers, self._ask(rank, question)[1], strict=True))

    def states(self, rank: int, named: Named, numbers: Sequence[int]) -> dict[int, Any]:
        """The state that a rank's optimizer has for tensors, by their numbers; without those for
        which there is none. Raises as `tensors`."""
        question = Question(self._tag(), self.script.place, tuple(numbers), named)
        answer, tensors = self._ask(rank, question)
        pairs = zip(numbers, answer.states, strict=True)
        return {number: heard(one, tensors) for number, one in pairs if one is not None}

    def begin(self, change: Change) -> None:
        """Before state changes. If this rank has asked for what was before, the others may be
        about to ask as well: they come first, but do not have longer for it than for a step.
        Raises what `check_given` raises, and PipelineError."""
        asked, place = self.script.asked, self.script.place
        if asked and not self.uneven and self.world.failure is None:
            for rank in self.others:
                self._ask(rank, Question(self._tag(), place, asked=asked))
        self.script.begin(change)
        self.check_given()

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A call of a compiled step that all ranks have agreed on."""
        with self.script.during("calls of compiled steps"):
            self.kept.renew()
            yield

    def check_given(self) -> None:
        """Raises ValueError if state was written to by hand since others were given it."""
        name = self.givens.changed()
        if name:
            raise ValueError(
                f"{name} was written to, outside of optimizer.step() and load_state_dict(), after "
                "another rank had asked for its state_dict(): what it was given may be too old. "
                "Call pfeife.full_state_dict(model) on every rank instead (and to load with "
                "torch.distributed.checkpoint.load, which writes in place, pfeife.Checkpoints.load)"
            )

    def _tag(self) -> int:
        return _QUESTION + 1 + next(self.tags) % _TAGS

    def _ask(self, rank: int, question: Question) -> tuple[Answer, list[torch.Tensor]]:
        if self.uneven:
            raise Refusal(_refused(rank, self.uneven))
        waits, tensors = _Waits("state_dict()", rank), list[torch.Tensor]()
        with self.asking, self.world.busy(waits):
            try:
                self.post.send(rank, _QUESTION, plain.to_json(question))
                answer = plain.from_json(Answer, self.post.text(rank, question.tag))
                for one in answer.tensors:
                    waits.again()
                    tensors.append(self.post.tensor(rank, question.tag, one))
            except RuntimeError as error:
                raise self.world.lost(rank, error) from None
        if answer.refused:
            raise Refusal(_refused(rank, answer.refused))
        return answer, tensors

    def _serve(self, reader: int) -> None:
        """On a thread: answers one rank until the connection is cut or that rank is gone."""
        with contextlib.suppress(RuntimeError):
            while True:
                self._reply(reader, self.post.text(reader, _QUESTION))

    def _reply(self, reader: int, text: str) -> None:
        question = plain.from_json(Question, text)
        with contextlib.ExitStack() as stack:
            answer, found = self._answer(reader, question, stack)
            self.post.send(reader, question.tag, plain.to_json(answer), found.tensors)

    def _answer(
        self, reader: int, question: Question, stack: contextlib.ExitStack
    ) -> tuple[Answer, Found]:
        """An answer and what it is of, which does not change before the `stack` is left."""
        script, nothing = self.script, Found(())
        try:
            if question.asked:
                patience = self.world.timeout
                script.wait_until_asked(question.place, question.asked, patience, self._check)
                return Answer(), nothing
            stack.enter_context(script.reading(reader, question.place, self._check))
            found = self.find(question)
            self.givens.check(found.named)
            with script.changed:  # from then on the script writes nothing by hand
                if not script.rests:
                    self.givens.note(found.named)
            return Answer("", tuple(map(shaped, found.tensors)), found.states), found
        except PipelineError:
            raise
        except Refusal as error:
            return Answer(str(error)), nothing
        except Exception as error:  # of the state: the one that asks is told
            return Answer(f"{type(error).__name__}: {error}"), nothing

    def _check(self) -> None:
        """Raises PipelineError after a failure, of which the script has yet to hear."""
        if self.world.failure is not None:
            raise PipelineError(self.world.failure)


class _Waits:
    """What a rank does that waits for another one, since when."""

    def __init__(self, text: str, rank: int):
        self.text, self.rank = text, rank
        self.again()

    def again(self) -> None:
        """It has got something, and waits for more."""
        self.doing = Doing(self.text, self.rank, time.monotonic())

    def __call__(self) -> Doing:
        return self.doing


def _refused(rank: int, why: str) -> str:
    return (
        f"rank {rank} trains a part of the state, and has none of this point of the script: {why}. "
        "Call state_dict() where all ranks come by and before the next optimizer.step(), or "
        "pfeife.full_state_dict(model) on every rank"
    )
