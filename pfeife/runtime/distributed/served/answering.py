"""Answers to those who ask this rank for its state, on threads: given where its script rests."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from pfeife.data import plain
from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.control.posting import NEVER, Post, texts
from pfeife.runtime.distributed.control.questions import Answer, Question, StateEntry
from pfeife.runtime.distributed.served.reading import Pending, Reading
from pfeife.runtime.failure import failure_of
from pfeife.runtime.threads import started

# No tuple is made by `tuple(...)` of a generator on these threads, which takes its last reference
# for granted: a script that calls gc.get_objects() meanwhile has another one, a SystemError.
_Answered = tuple[int, int, Answer, StateEntry]  # to whom, under which tag, what, and what it is of
_TICK = 0.02  # seconds after which who has a question looks whether the script rests by now


class Answering:
    """Answers the questions that come over `post` with what `reading` has for them."""

    def __init__(self, world: Peers, post: Post, reading: Reading) -> None:
        self.world, self.script, self.post, self.reading = world, world.script, post, reading
        self.arrived: list[Pending] = []  # that nobody has looked at
        self.over = threading.Event()
        threads = {"receives questions": self._receive, "answers": self._serve}
        if world.nccl:
            threads["watches the next rank"] = self._watch
        self.threads = [started(name, self._run, work) for name, work in threads.items()]

    def end(self) -> None:
        """Answers nobody any more. The threads end once the connection is cut."""
        with self.script.lock:
            self.over.set()
            self.script.lock.notify_all()

    def join(self) -> None:
        """Waits for the threads, but not for long."""
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(1.0)

    def _run(self, work: Callable[[], None]) -> None:
        """Fails all ranks if a thread's work ends before the service does."""
        try:
            work()
        except Exception as error:
            # Who asked would wait for its timeout otherwise, and be told nothing of why.
            if not self.over.is_set() and self.world.failure is None:
                self.world.stop(failure_of(error, self.world.rank, "an answer to state_dict()"))

    def _receive(self) -> None:
        for text in self._texts():
            question = plain.from_json(Question, text)
            with self.script.lock:
                until = time.monotonic() + self.world.timeout / 2
                self.arrived.append(Pending(question.reader, question, until))
                self.script.lock.notify_all()

    def _texts(self) -> Iterator[str]:
        """Questions, until the service is over, or all ranks have failed."""
        try:
            yield from texts(self.world.letters, self.world.rank)
        except RuntimeError as error:
            if not self.over.is_set() and self.world.failure is None:
                self.world.lost(None, error)

    def _serve(self) -> None:
        pending: list[Pending] = []
        while not self.over.is_set():
            pending, answered = self._answered(pending)
            self._send(answered)

    def _send(self, answered: Sequence[_Answered]) -> None:
        for reader, tag, answer, entry in answered:
            with contextlib.suppress(RuntimeError):  # who asked is gone, and others see to it
                self.post.send(reader, tag, plain.to_json(answer), entry.tensors)

    def _answered(self, before: list[Pending]) -> tuple[list[Pending], list[_Answered]]:
        """Waits for something to answer beside what was there `before`, and answers what can be;
        returns what is left."""
        answered: list[_Answered] = []
        left: list[Pending] = []
        with self.script.lock:
            # The lock is let go of while it waits, and is held while a copy is made: the script
            # comes out of its rest only then.
            self.script.lock.wait_for(lambda: before or self.arrived or self.over.is_set())
            questions = [*before, *self.arrived]
            self.arrived.clear()
            # After a failure who asked hears of it, too.
            for pending in questions if self.world.failure is None else ():
                answer = self.reading.answer(pending)
                if answer is None:
                    left.append(pending)
                else:
                    answered.append((pending.reader, pending.question.tag, *answer))
            # A collective of the script's own begins without a word to this lock: look again.
            if left and not answered:
                self.script.lock.wait(_TICK)
        return left, answered

    def _watch(self) -> None:
        """Notes it when the next rank is gone, which NCCL does not notice."""
        peer = (self.world.rank + 1) % self.world.size
        try:
            self.post.text(peer, NEVER)
        except RuntimeError as error:
            self.world.torn[peer] = error
