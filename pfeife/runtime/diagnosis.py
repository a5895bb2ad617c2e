"""Whose fault it is that a message does not come: from the ranks' signs of life."""

from pfeife.runtime.failure import Failure
from pfeife.runtime.lifeline import ALL, ANSWER, BEAT, Beats, Lifeline, kept_by_torchrun

_LISTENING = 2.5 * BEAT  # seconds in which a rank that lives gives a sign of it


def cause(
    lifeline: Lifeline,
    peer: int | None,
    waited: float,
    timeout: float,
    error: RuntimeError,
    doing: str,
) -> Failure:
    """Why nothing came from a rank (None if it is not known which) for `waited` seconds, in which
    this one was `doing` something: what any rank has said by now, or what can be seen. Takes some
    seconds."""
    first, said = lifeline.beats(), lifeline.heard(_LISTENING)
    if said is not None:
        return said
    second = lifeline.beats()
    if peer is None:
        others = [rank for rank in range(lifeline.size) if rank != lifeline.rank]
        peer = next((rank for rank in others if not lives(rank, first, second)), others[0])
    if waited >= 0.9 * timeout:
        limit = f"rank {lifeline.rank} has waited {waited:.0f} s (timeout={timeout:g})"
        return _silent(peer, limit, first, second)
    awaited = f"while rank {lifeline.rank} waited for it in {doing}"
    if not lives(peer, first, second):
        return _gone(peer, awaited, second, error)
    # Who closes its connections while it lives is finding out why another one is silent.
    broken = f"its connection is closed, though its process lives, {awaited} ({_short(error)})"
    return lifeline.heard(ANSWER) or Failure(peer, "", broken)


def lives(rank: int, first: Beats | None, second: Beats | None) -> bool:
    """Whether a rank has given a sign of life between two times of asking for them."""
    now = (second or {}).get(rank)
    return now is not None and now != (first or {}).get(rank)


def _gone(peer: int, awaited: str, beats: Beats | None, error: RuntimeError) -> Failure:
    """Its process has closed the connection."""
    if beats is None and not kept_by_torchrun():
        cause = f"its process is gone, and with it the store of the process group, {awaited}"
        return Failure(0, "", cause)
    beat = (beats or {}).get(peer)
    last = f"; its last sign of life came from {beat.doing}" if beat else ""
    return Failure(peer, "", f"its process is gone {awaited}{last} ({_short(error)})")


def _silent(peer: int, limit: str, first: Beats | None, second: Beats | None) -> Failure:
    """Nothing came in time: follows who waits for whom."""
    if first is None or second is None:
        host = None if kept_by_torchrun() else 0
        cause = "the store of the process group, which its process keeps, does not answer"
        return Failure(peer if host is None else host, "", f"{cause}; {limit}")
    at, seen = peer, set[int]()
    while at not in seen:
        seen.add(at)
        now = second.get(at)
        if now is None or not lives(at, first, second):
            where = now.doing if now else ""
            return Failure(at, where, f"its process gives no sign of life; {limit}")
        if now.waits_for in (None, ALL):
            cause = f"it has been there for {now.seconds:.0f} s; {limit}"
            return Failure(at, now.doing, cause)
        at = now.waits_for
    where = second[at].doing
    return Failure(at, where, f"the ranks {sorted(seen)} wait for one another; {limit}")


def _short(error: RuntimeError) -> str:
    """What Gloo says, without the place in its source and its advice."""
    text = str(error).splitlines()[0]
    return text.split("] ", 1)[-1].split(". This is")[0]
