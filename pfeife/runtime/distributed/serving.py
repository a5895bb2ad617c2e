"""A rank's state for those that ask: threads answer while its script is somewhere else."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from pfeife.data import plain
from pfeife.runtime.distributed.by_hand import ByHand
from pfeife.runtime.distributed.connection import Connection
from pfeife.runtime.distributed.exchanges import Exchanges
from pfeife.runtime.distributed.givens import Givens
from pfeife.runtime.distributed.heartbeat import Doing
from pfeife.runtime.distributed.kept import Kept
from pfeife.runtime.distributed.meeting import Meeting
from pfeife.runtime.distributed.posting import Post
from pfeife.runtime.distributed.questions import Answer, Found, Named, Question, heard, shaped
from pfeife.runtime.distributed.script import Change, Script
from pfeife.runtime.failure import PipelineError, Refusal

if TYPE_CHECKING:
    from pfeife.runtime.distributed.world import World

_QUESTION = 1  # the tag of questions; answers have those that the questions say
_TAGS = 2**29
_PATIENCE = 60.0  # seconds for a script that has not yet written what the one that asks has


class Service:
    """Asks other ranks for state, and answers them, at any moment of the script.

    An answer is of the same point of the script as the question. A rank that has not come there
    yet answers later; one that has gone on refuses, with words. What tells the point is how often
    compiled steps were called, optimizers stepped and state was loaded, and since then how often
    the script has written to what is asked for. What it writes to `.data` or to an optimizer's
    state is not counted: where that is noticed after an answer, `check_given` raises, for the
    answer may have come too early.

    `connection` is one of all ranks, on the CPU, that nothing else uses; `find` gives what answers
    a question, `kept` what that is found in, `by_hand` what the script has written to it.
    """

    def __init__(
        self,
        world: "World",
        connection: Connection,
        find: Callable[[Question], Found],
        kept: Kept,
        by_hand: ByHand,
    ) -> None:
        self.world, self.connection, self.find, self.kept = world, connection, find, kept
        self.post, self.givens = Post(connection), Givens()
        self.by_hand, self.exchanges = by_hand, Exchanges(by_hand)
        by_hand.note()
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

    def tensors(
        self, rank: int, wanted: Mapping[int, torch.Tensor], by_data: bool
    ) -> dict[int, torch.Tensor]:
        """The values that a rank has of tensors which it trains, by their numbers, on the CPU; what
        they are a model's with may have been written to `by_data` here. Raises Refusal if it is not
        at the same point of the script, PipelineError if it is gone."""
        written = self.by_hand.counts(wanted.values())
        question = Question(
            self._tag(), self.script.place, tuple(wanted), written=written, by_data=by_data
        )
        if by_data:  # once more would tell that the answer may have come too late
            self.givens.note(self.by_hand.here(), counted=True)
        values = self._ask(rank, question)[1]
        self.exchanges.note(self.world.rank, rank, wanted, written)
        return dict(zip(wanted, values, strict=True))

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
        self._begin(change)
        self.check_given()

    def _begin(self, change: Change) -> None:
        moment = self.script.place.moment
        self.script.begin(change)
        self.exchanges.close(moment)

    def end_of(self, change: Change, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """After a change of some tensors, all unless given."""
        self.by_hand.note(tensors)
        self.script.end(change)

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A call of a compiled step that all ranks have agreed on."""
        self._begin("calls of compiled steps")
        try:
            self.kept.renew()
            yield
        finally:
            self.end_of("calls of compiled steps")

    def news(self) -> list[str]:
        """What other ranks must know of what was written after state was asked for, a line each."""
        self.exchanges.close(self.script.place.moment)
        return self.exchanges.told()

    def check_given(self) -> None:
        """Raises ValueError if state was written to, unseen, since others were given it."""
        name = self.givens.changed()
        if name:
            raise ValueError(
                f"{name} was written to by its .data, or is an optimizer's and was written to "
                "outside of step() and load_state_dict(), after a rank had asked for a "
                "state_dict(): what it was given may be of another moment. Write to parameters "
                "under torch.no_grad(), which is counted, or call pfeife.full_state_dict(model) "
                "on every rank instead (and to load with torch.distributed.checkpoint.load, which "
                "writes in place, pfeife.Checkpoints.load)"
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
                if tensors:  # what was sent may have changed meanwhile
                    last = plain.from_json(Answer, self.post.text(rank, question.tag))
                    answer = attrs.evolve(answer, refused=last.refused)
            except RuntimeError as error:
                raise self.world.lost(rank, error) from None
        if answer.refused:
            raise Refusal(_refused(rank, answer.refused))
        return answer, tensors

    def _serve(self, reader: int) -> None:
        """On a thread: answers one rank until the connection is cut or that rank is gone."""
        try:
            while True:
                self._reply(reader, self.post.text(reader, _QUESTION))
        except RuntimeError as error:
            self.world.torn[reader] = error

    def _reply(self, reader: int, text: str) -> None:
        question = plain.from_json(Question, text)
        with contextlib.ExitStack() as stack:
            answer, found = self._answer(reader, question, stack)
            self.post.send(reader, question.tag, plain.to_json(answer), found.tensors)
            if found.tensors:
                last = Answer(self._torn(question, found))
                if question.optimizer is None and not last.refused:
                    # Before the reader goes on: then the script may, and close what is noted.
                    wanted = dict(zip(question.tensors, found.tensors, strict=True))
                    self.exchanges.note(reader, self.world.rank, wanted, question.written)
                self.post.send(reader, question.tag, plain.to_json(last))

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
            patience = min(_PATIENCE, self.world.timeout / 2)
            here = Meeting(question, reader, self.find, self.by_hand, script, patience)
            stack.enter_context(script.reading(reader, question.place, self._check, here))
            found = self.find(question)
            self.givens.check(found.named)
            self.givens.note(found.named, counted=question.optimizer is None)
            return Answer("", tuple(map(shaped, found.tensors)), found.states), found
        except PipelineError:
            raise
        except Refusal as error:
            return Answer(str(error)), nothing
        except Exception as error:  # of the state: the one that asks is told
            return Answer(f"{type(error).__name__}: {error}"), nothing

    def _torn(self, question: Question, found: Found) -> str:
        """Why what was sent is not what was there when it was asked for, "" if it is."""
        try:
            self.givens.check(found.named)
        except Refusal as error:
            return str(error)
        counted = question.optimizer is None
        if counted and self.by_hand.counts(found.tensors) != question.written:
            return "it was written to by hand while it was sent"
        return ""

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
