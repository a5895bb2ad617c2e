"""Whose fault it is that a message does not come: from the ranks' signs of life."""

import math
import time

import attrs

from pfeife.runtime.distributed.liveness.heartbeat import (
    ALL,
    ANSWER,
    BUILDING,
    COLLECTIVE,
    ENDED,
    INTERVAL,
    OUTSIDE,
    Heartbeat,
    Heartbeats,
    Monitor,
    kept_by_torchrun,
)
from pfeife.runtime.failure import Failure

LONGEST = 10  # times the timeout that a rank may prepare something while others wait
_LISTENING = 2.5 * INTERVAL  # seconds in which a rank that lives gives a sign of it


def cause(monitor: Monitor, peer: int | None, error: RuntimeError, doing: str) -> Failure:
    """Why an operation with a rank (None if it is not known which) has failed, while this one was
    `doing` something: what any rank has said by now, or what can be seen. Takes some seconds."""
    # `heard` takes its time, in which a rank that lives gives another sign.
    first, failure = monitor.heartbeats(), monitor.heard(_LISTENING)
    if failure is not None:
        return failure
    second = monitor.heartbeats()
    # An operation of all ranks does not say who is missing: the first one without a sign of life.
    if peer is None:
        peers = [rank for rank in range(monitor.size) if rank != monitor.rank]
        peer = next((rank for rank in peers if not lives(rank, first, second)), peers[0])
    awaited = f"while rank {monitor.rank} waited for it in {doing}"
    if not lives(peer, first, second):
        return _gone(peer, awaited, second, error)
    if (second or {})[peer].doing == ENDED:
        return Failure(peer, "", f"its program has ended {awaited}")
    # Who closes its connections while it lives is finding out why another one is silent.
    broken = f"its connection is closed, though its process lives, {awaited} ({_short(error)})"
    return monitor.heard(ANSWER) or Failure(peer, "", broken)


def lives(rank: int, first: Heartbeats | None, second: Heartbeats | None) -> bool:
    """Whether a rank has given a sign of life between two times of asking for them."""
    now = (second or {}).get(rank)
    return now is not None and now != (first or {}).get(rank)


def wait_until_known(monitor: Monitor, seconds: float) -> None:
    """Until all ranks that live know of the failure, but not longer than so many seconds."""
    start, first = time.monotonic(), monitor.heartbeats()
    while (waited := time.monotonic() - start) < seconds:
        unaware, now = set(range(monitor.size)) - set(monitor.aware()), monitor.heartbeats()
        if waited > _LISTENING:
            unaware = {rank for rank in unaware if lives(rank, first, now)}
        if not unaware:
            return
        time.sleep(0.05)


def _gone(peer: int, awaited: str, beats: Heartbeats | None, error: RuntimeError) -> Failure:
    """Its process has closed the connection."""
    if beats is None and not kept_by_torchrun():
        cause = f"its process is gone, and with it the store of the process group, {awaited}"
        return Failure(0, "", cause)
    beat = (beats or {}).get(peer)
    last = f"; its last sign of life came from {beat.doing}" if beat else ""
    return Failure(peer, "", f"its process is gone {awaited}{last} ({_short(error)})")


@attrs.frozen
class Wait:
    """That `rank` of `size` ranks has waited `seconds` for another one, or for `ALL`, and the
    ranks' signs of life some time ago and now (None: the store did not answer)."""

    rank: int
    size: int
    awaited: int
    seconds: float
    timeout: float
    before: Heartbeats | None
    now: Heartbeats | None

    def failure(self) -> Failure | None:
        """Why there is no use in waiting on, None if there is.

        A rank that lives is waited for while it is outside of a step, and ten times the timeout
        while it prepares one; in a step, or in a collective of its script's own for which all the
        others would have to leave theirs, it must come on within the timeout.
        """
        if self.now is None:
            host = None if kept_by_torchrun() else 0
            return Failure(host, "", f"the store of the process group does not answer; {self}")
        # First whom this rank waits for, whom that one waits for, and so on: 0 -> 2 -> 3. Somebody
        # who is not in the chain may be the reason all the same, where one waits for all.
        chain = self._chain(self.rank)
        remaining = [rank for rank in range(self.size) if rank != self.rank and rank not in chain]
        for rank in (*chain[1:], *remaining):
            beat = self.now.get(rank)
            if beat is None or not lives(rank, self.before, self.now):
                where = beat.doing if beat else ""
                return Failure(rank, where, f"its process gives no sign of life; {self}")
            if beat.waits_for is None and beat.seconds >= self._longest(beat.doing):
                return Failure(rank, beat.doing, f"it is there for {beat.seconds:.0f} s; {self}")
        # Nobody is at fault alone. If all have waited for so long they wait for one another.
        beats = [beat for rank, beat in self.now.items() if rank != self.rank]
        if all(b.waits_for is not None and b.seconds >= self.timeout for b in beats):
            return self._deadlock()
        return None

    def working(self) -> list[tuple[int, Heartbeat]]:
        """The ranks that live and wait for nobody."""
        return [
            (rank, beat)
            for rank, beat in sorted((self.now or {}).items())
            if beat.waits_for is None and rank != self.rank and lives(rank, self.before, self.now)
        ]

    def __str__(self) -> str:
        return f"rank {self.rank} has waited {self.seconds:.0f} s (timeout={self.timeout:g})"

    def _longest(self, doing: str) -> float:
        if doing == OUTSIDE:
            return math.inf
        if doing == ENDED:
            return 0.0
        return (LONGEST if doing.startswith(BUILDING) else 1) * self.timeout

    def _chain(self, start: int) -> list[int]:
        """Who waits for whom, from one rank to one that waits for nobody, for all, or round."""
        chain, at = list[int](), start
        while at != ALL and at not in chain:
            chain.append(at)
            beat = (self.now or {}).get(at)
            waits_for = self.awaited if at == self.rank else beat.waits_for if beat else None
            at = ALL if waits_for is None else waits_for
        return chain

    def _deadlock(self) -> Failure:
        """All ranks wait. Somebody waits for one that waits for all, or they do so in a circle."""
        now = self.now or {}
        those = [rank for rank, beat in now.items() if beat.doing.startswith(COLLECTIVE)]
        if those:
            cause = (
                "it waits there for all, and others for it: every rank comes to the same steps and "
                "collectives, in one order"
            )
            return Failure(min(those), now[min(those)].doing, f"{cause}; {self}")
        waits = {rank: beat.waits_for for rank, beat in now.items()} | {self.rank: self.awaited}
        start = next((rank for rank, awaited in sorted(waits.items()) if awaited != ALL), None)
        chain = self._chain(self.rank if start is None else start)
        last = chain[-1]
        where = now[last].doing if last in now else ""
        if start is not None and waits[last] == ALL:
            return Failure(last, where, f"it waits there for all, and others for it; {self}")
        those = sorted(chain if start is not None else waits)
        return Failure(last, where, f"the ranks {those} wait for one another; {self}")


def _short(error: RuntimeError) -> str:
    """What Gloo says, without the place in its source and its advice."""
    text = str(error).splitlines()[0]
    return text.split("] ", 1)[-1].split(". This is")[0]
