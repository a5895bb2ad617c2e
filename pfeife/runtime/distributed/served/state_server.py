"""A rank's state for those that ask for it, where its script rests.

rank 0                          rank 1
optimizer.step()                optimizer.step()
state_dict()   -- asks -->      ...                       its script runs: no answer yet
               <-- copies --    loss = step(batch)        it rests, until rank 0 comes too
loss = step(batch)
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pfeife.data import plain
from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.control.posting import NEVER, Post, leave
from pfeife.runtime.distributed.control.questions import (
    Answer,
    Named,
    Question,
    StateEntry,
    decoded,
)
from pfeife.runtime.distributed.control.script_point import Change, Rest
from pfeife.runtime.distributed.links.connection import Connection
from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.served.answering import Answering
from pfeife.runtime.distributed.served.reading import Reading
from pfeife.runtime.distributed.served.writes import LateWrites, Writes
from pfeife.runtime.failure import CollectiveError

_TAGS = 2**29


class Service:
    """Asks other ranks for state, and answers them.

    An answer is of the point of the script that the question is of. What tells the point is how
    often compiled steps were called, backwards made, optimizers stepped and state was loaded, and
    since then how often the script has written to what is asked for. A rank answers where its
    script rests: where it waits for others in an operation of Pfeife's or in a collective of its
    own, in its own `state_dict()`, at its end. One that has not come there answers later; one that
    has gone on refuses, and so does one that does not come within half of the world's timeout.

    What is written to `tensor.data`, and to an optimizer's state, nobody counts where the values
    are. If a rank that asks has written so, it is answered where the other one has come at least as
    far. If it does so afterwards, the other may have done it before: `late` notices that. `copies`
    notices what is written to what a script was given.

    `connection` is one of all ranks, on the CPU, that nothing else uses; `find` gives what answers
    a question, `writes` counts what the script has written, `renew` lets go of what nobody else has
    any more, `beside` is what the rank lacks of the state of modules that have some tensors.
    """

    def __init__(
        self,
        world: Peers,
        connection: Connection,
        find: Callable[[Question], StateEntry | None],
        writes: Writes,
        renew: Callable[[], None],
        beside: Callable[[Collection[torch.Tensor]], set[torch.Tensor]],
    ) -> None:
        self.world, self.script, self.writes = world, world.script, writes
        self.connection, self.post = connection, Post(connection)
        self.late, self.copies = LateWrites(), LateWrites()
        self.uneven = ""  # why the ranks' places do not tell the point
        self.tags = itertools.count()
        self.asking = threading.Lock()  # one question at a time
        writes.forget()
        self.renew = renew
        reading = Reading(world, find, writes, self.late, beside)
        self.answering = Answering(world, self.post, reading)

    def end(self) -> None:
        """Answers nobody any more, and lets go of the connection."""
        self.answering.end()
        self.connection.cut()
        self.answering.join()
        self.connection.close()

    def tensors(self, rank: int, wanted: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The values that a rank has of tensors which it trains, by their numbers, on the CPU.
        Raises CollectiveError if it is not at the same point of the script, PipelineError if it is
        gone."""
        written = self.writes.counted(wanted.values())
        by_data = self.writes.by_data(wanted.values())
        question = self._question(by_data, tensors=tuple(wanted), written=written)
        values = self._ask(rank, question)[1]
        return dict(zip(wanted, values, strict=True))

    def states(self, rank: int, named: Named, numbers: Sequence[int]) -> dict[int, Any]:
        """The state that a rank's optimizer has for tensors, by their numbers; without those for
        which there is none. Raises as `tensors`."""
        question = self._question(tensors=tuple(numbers), optimizer=named)
        answer, tensors = self._ask(rank, question)
        pairs = zip(numbers, answer.states, strict=True)
        return {number: decoded(state, tensors) for number, state in pairs if state is not None}

    def begin(self, change: Change) -> None:
        """Before state changes. If this rank has asked for what was before, the others may be
        about to ask as well: they come first, but do not have longer for it than for a step.
        Raises PipelineError."""
        if self.script.now.questions and not self.uneven and self.world.failure is None:
            with self.script.resting(Rest.ASKING):
                for rank in range(self.world.size):
                    if rank != self.world.rank:
                        self._ask(rank, self._question(passing=True))
        # In this order: what was written counts to the place that is about to end.
        self._close(change)
        self.writes.collect()
        self.script.move(change)

    def end_of(self, change: Change, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """After a change of some tensors, all unless given."""
        self.writes.forget(tensors)
        self.script.move(change)

    @contextlib.contextmanager
    def changing(
        self, change: Change, tensors: Iterable[torch.Tensor] | None = None
    ) -> Iterator[None]:
        """While some tensors change, all unless given."""
        self.begin(change)
        try:
            yield
        finally:
            self.end_of(change, tensors)

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """A call of a compiled step, at which all ranks are."""
        # All ranks come to a call, so that nobody is asked first whether it still needs something.
        self._close("calls of compiled steps")
        # Loops may move to another thread between calls, as those of notebooks do.
        self.script.thread = threading.get_ident()
        self.script.move("calls of compiled steps")
        self.renew()
        try:
            yield
        finally:
            self.end_of("calls of compiled steps")

    def _close(self, change: Change) -> None:
        self.late.close()
        if change != "loads of state":  # what is loaded next may be what was written to
            self.copies.close()

    def wrong(self) -> ValueError | None:
        """What the script has written to that it may not write to, once; None if nothing."""
        text = self.late.taken() or self.copies.taken()
        return ValueError(text) if text else None

    def _question(self, by_data: tuple[int, ...] = (), **parts: Any) -> Question:
        tag = NEVER + 1 + next(self.tags) % _TAGS
        return Question(self.world.rank, tag, self.script.point(by_data), **parts)

    def _ask(self, rank: int, question: Question) -> tuple[Answer, list[torch.Tensor]]:
        if self.uneven:
            raise CollectiveError(_refused(rank, self.uneven))
        tensors = list[torch.Tensor]()
        with self.asking, self.world.busy(lambda: Activity("state_dict()")):
            with self.world.waiting(rank):
                self._leave(rank, question)
                answer = plain.from_json(Answer, self.post.text(rank, question.tag))
            for layout in answer.tensors:
                with self.world.waiting(rank):  # it has got something, and waits anew
                    tensors.append(self.post.tensor(rank, question.tag, layout))
        # After `busy`: a refusal is of this rank alone, and fails nobody.
        if answer.refused:
            raise CollectiveError(_refused(rank, answer.refused))
        return answer, tensors

    def _leave(self, rank: int, question: Question) -> None:
        """Raises RuntimeError if the store is gone."""
        monitor, text = self.world.monitor, plain.to_json(question)
        if monitor.ask(lambda: leave(monitor.store, rank, text)) is None:
            raise RuntimeError("the store of the process group does not answer")


def _refused(rank: int, why: str) -> str:
    return (
        f"rank {rank} trains a part of the state, and has none of this point of the script: {why}. "
        "Call state_dict() where all ranks come by and before the next optimizer.step(), or "
        "pfeife.full_state_dict(model) on every rank"
    )
