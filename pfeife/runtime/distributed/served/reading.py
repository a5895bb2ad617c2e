"""Whether this rank's script is where another one's was when it asked, and what it has there."""

import time
from collections.abc import Callable, Collection

import attrs
import torch

from pfeife.runtime.distributed.control.peers import Peers
from pfeife.runtime.distributed.control.questions import Answer, Question, StateEntry, shaped
from pfeife.runtime.distributed.control.script_point import Rest, ScriptCollective, collective_of
from pfeife.runtime.distributed.served.writes import STATE_BY_HAND, LateWrites, Writes
from pfeife.runtime.failure import CollectiveError


@attrs.frozen(eq=False)
class Pending:
    """A question of a rank that has no answer yet, and until when it has time."""

    reader: int
    question: Question
    until: float

    @property
    def is_late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.until


class Reading:
    """Answers questions with the script's lock, so that a rest does not end meanwhile. `find` gives
    what answers one, `writes` counts what the script has written by hand, `late` is told what it
    may not write to any more, `beside` is as in `Service`."""

    def __init__(
        self,
        world: Peers,
        find: Callable[[Question], StateEntry | None],
        writes: Writes,
        late: LateWrites,
        beside: Callable[[Collection[torch.Tensor]], set[torch.Tensor]],
    ) -> None:
        self.world, self.script = world, world.script
        self.find, self.writes, self.late, self.beside = find, writes, late, beside
        self.stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None

    def answer(self, pending: Pending) -> tuple[Answer, StateEntry] | None:
        """An answer, and what it is of; None if the script is not there yet."""
        question = pending.question
        try:
            if question.passing:
                over = self._is_passed(question) or pending.is_late
                return (Answer(), StateEntry()) if over else None
            entry = self._read(pending)
            if entry is not None:
                return Answer("", (*map(shaped, entry.tensors),), entry.states), entry
            if pending.is_late:
                raise CollectiveError(self._never_rested(pending))
        except CollectiveError as error:
            return Answer(str(error)), StateEntry()
        return None

    def _never_rested(self, pending: Pending) -> str:
        seconds = f"within {self.world.timeout / 2:g} s"
        if pending.question.point.by_data:
            return (
                f"rank {pending.reader}, which asks, has written to it by its .data, which nobody "
                "counts, and this rank did not come to where it has surely done so, too (a step or "
                f"a collective of all ranks that rank {pending.reader} comes to later) {seconds}"
            )
        return (
            "its script did not come to rest there (before a step, at a barrier, in its own "
            f"state_dict()) {seconds}"
        )

    def _is_passed(self, question: Question) -> bool:
        """Whether the script asks for nothing any more at the point of a question."""
        script, point = self.script, question.point
        if script.waits_beyond(point, collective_of(script.thread)):
            return True
        here = script.now.place == point.place and script.now.questions >= point.questions
        return here or script.now.place.beyond(point.place)

    def _read(self, pending: Pending) -> StateEntry | None:
        """A copy of what is asked for, None if the script is not there yet. Raises CollectiveError
        if it has gone on, or waits for those behind the one that asks.

        What rests in `Script.resting` stays there as long as the lock is held. A collective of the
        script's own may end meanwhile: then its frame is another one, and the copy is thrown away.
        """
        #   this rank's script                       its place     it is         answer
        #   has not come to the question's point     before it     anywhere      not yet
        #   is there                                 the same      running       not yet
        #   is there, and wrote less to it by hand   the same      at rest       not yet
        #   is there, and wrote as often             the same      at rest       a copy
        #   waits for all ranks behind that point    the same      at rest       a copy, or refused
        #   has stepped, loaded or called since      beyond it     anywhere      refused
        script, question = self.script, pending.question
        point, inside = question.point, collective_of(script.thread)
        beyond = script.waits_beyond(point, inside)
        if script.now.place != point.place:
            if beyond or script.now.place.beyond(point.place):
                raise CollectiveError(
                    f"there have been {script.now.place} by now, and on rank {pending.reader}, "
                    f"which asks, {point.place}"
                )
            return None
        # It is at the place, but runs: it may write to state while that is read.
        if script.now.rest is Rest.NOWHERE and inside is None:
            return None
        entry = self.find(question)
        # A deep copy has no number here before the script has made it, too.
        if entry is None and beyond:
            raise CollectiveError("it has made no such copy of a model")
        if entry is None or not self._has_written_alike(pending, entry, beyond):
            return None
        # Values may have been lost without a count: a write of what another rank has.
        entry.check_here()
        if not self._has_assigned_alike(pending, entry, beyond):
            return None
        if script.now.rest is Rest.NOWHERE and not self._is_readable(inside, question, entry):
            return None
        copied = self._copied(entry)
        # The script may have gone on while the copy was made, and have written to what was copied.
        if script.now.rest is Rest.NOWHERE and not self._still(inside, pending, entry, beyond):
            return None
        # Nobody counts what a script writes to an optimizer's state: from now on it must not.
        if question.optimizer is not None:
            self.late.watch(STATE_BY_HAND, zip(entry.names, entry.tensors, strict=True))
        return copied

    def _is_readable(
        self, inside: ScriptCollective | None, question: Question, entry: StateEntry
    ) -> bool:
        """Whether a collective of the script's own leaves tensors alone. What was written to by
        hand may still be queued on a GPU, and nothing tells when that is over."""
        assert inside is not None
        by_hand = any(question.written) or question.point.by_data
        return not (inside.writes_to(entry.tensors) or (self.stream and by_hand))

    def _copied(self, entry: StateEntry) -> StateEntry:
        """On a GPU on a stream of its own, after what the script had queued when it came to rest:
        in the script's stream a collective may be waiting for the rank that asks."""
        if self.stream is None:
            return entry.copied()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.script.now.queued)
            return entry.copied()

    def _still(
        self, inside: ScriptCollective | None, pending: Pending, entry: StateEntry, beyond: bool
    ) -> bool:
        """Whether the script is still where it was, and has the same tensors there."""
        assert inside is not None
        # The counts first: a script that is still in there afterwards has written nothing since.
        alike = self._has_written_alike(pending, entry, beyond)
        return inside == collective_of(self.script.thread) and alike

    def _has_assigned_alike(self, pending: Pending, entry: StateEntry, beyond: bool) -> bool:
        """Whether the script has written by `.data` as that of the rank which asks, and has come at
        least as far; False if it may yet. Raises CollectiveError if it will not. What ranks write
        to their own tensors so nobody sees: it shows in what they do to those of others in the same
        module, if there are any."""
        if pending.question.optimizer is not None:
            return True
        # What ranks write to their own tensors by `.data` nobody sees, so it is judged by what the
        # same lines of the script do to the absent ones beside them.
        absent = self.beside(entry.tensors)
        point, here = pending.question.point, self.writes.by_data(absent)
        alike = here == point.by_data or not absent
        if not alike and beyond:
            raise CollectiveError(
                f"the script has written to parameters by their .data on rank {pending.reader}, "
                "which asks, and not so here, or the other way round: nobody counts that where the "
                "values are; write to the parameters themselves under torch.no_grad()"
            )
        asks = self.script.now.rest is Rest.ASKING and self.script.now.questions == point.questions
        return alike and (not point.by_data or beyond or asks)

    def _has_written_alike(self, pending: Pending, entry: StateEntry, beyond: bool) -> bool:
        """Whether the script has written to tensors as often as that of the rank which asks; False
        if it may yet. Raises CollectiveError if it will not."""
        question = pending.question
        if question.optimizer is not None:
            return True
        counts = self.writes.counted(entry.tensors)
        for name, count, reader_count in zip(entry.names, counts, question.written, strict=True):
            if count > reader_count or (count < reader_count and (beyond or pending.is_late)):
                raise CollectiveError(
                    f"{name} was written to by hand {count} times since the last change that "
                    f"all make, and on rank {pending.reader}, which asks, {reader_count} times"
                )
        return counts == question.written
