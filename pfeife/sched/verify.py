"""Proof before running: a schedule computes everything once, in order, and cannot deadlock."""

from collections import Counter, deque

from pfeife.plan import RECEIVES, SENDS, Action, Do, Schedule, received_as
from pfeife.sched.lower import chain, insert_actions


def verify_schedule(schedule: Schedule, *, in_flight: int | None = None) -> Schedule:
    """Returns the schedule if every rank can run it to its end, else raises ValueError.

    Checked: every stage computes every microbatch once, microbatches of a stage in ascending
    order; backward after forward, weight- after input-backward; at most `in_flight` microbatches
    between forward and last backward on a stage; reductions after the last gradient; sends
    match receives on every channel (pair of ranks) in order; no deadlock (a send does not
    block). A schedule of computations alone is taken to be one of a chain of stages.
    """
    _check_counts(schedule)
    for rank, actions in enumerate(schedule.ranks):
        _check_rank(rank, actions, in_flight)
    lowered = any(action.do in SENDS for actions in schedule.ranks for action in actions)
    _check_progress(schedule if lowered else insert_actions(schedule.computing(), chain(schedule)))
    return schedule


def _around(actions: tuple[Action, ...], index: int) -> str:
    near = actions[max(0, index - 2) : index + 3]
    return " ".join(f"[{a}]" if a is actions[index] else str(a) for a in near)


def _check_counts(schedule: Schedule) -> None:
    counts = Counter(a for actions in schedule.ranks for a in actions if a.do.kind)
    twice = [str(action) for action, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"scheduled more than once: {', '.join(twice)}")
    schedule.stage_ranks  # noqa: B018  raises if a stage is split or missing
    backwards = any(a.do in (Do.BACKWARD, Do.WEIGHT_BACKWARD) for a in counts)
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            done = {a.do for a in counts if (a.stage, a.microbatch) == (stage, k)}
            whole = {Do.FORWARD, Do.BACKWARD}, {Do.FORWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD}
            if done not in ([*whole] if backwards else [{Do.FORWARD}]):
                found = ", ".join(sorted(done)) or "nothing"
                raise ValueError(
                    f"stage {stage}, microbatch {k}: {found} is scheduled; expected F and B, or "
                    "F, I and W (or F alone everywhere)"
                )


def _check_rank(rank: int, actions: tuple[Action, ...], in_flight: int | None) -> None:
    done: set[tuple[int, Do, int | None]] = set()
    latest: dict[tuple[int, Do], int] = {}
    flying: Counter[int] = Counter()
    for index, action in enumerate(actions):
        where = f"rank {rank}: {_around(actions, index)}"
        stage, do, k = action.stage, action.do, action.microbatch
        if do.kind:
            before = latest.get((stage, do), -1)
            if k is None or k <= before:
                raise ValueError(f"{where}: microbatches of a stage run in ascending order")
            latest[stage, do] = k
        if do in (Do.BACKWARD, Do.INPUT_BACKWARD) and (stage, Do.FORWARD, k) not in done:
            raise ValueError(f"{where}: a backward comes after its forward")
        if do == Do.WEIGHT_BACKWARD and (stage, Do.INPUT_BACKWARD, k) not in done:
            raise ValueError(f"{where}: a weight-backward comes after its input-backward")
        flying[stage] += (do == Do.FORWARD) - (do in (Do.BACKWARD, Do.WEIGHT_BACKWARD))
        if in_flight is not None and flying[stage] > in_flight:
            raise ValueError(f"{where}: more than {in_flight} microbatches in flight")
        if do in (Do.BACKWARD, Do.WEIGHT_BACKWARD) and (stage, Do.REDUCE_GRAD, None) in done:
            raise ValueError(f"{where}: a gradient comes after its reduction")
        done.add((stage, do, k))


def _check_progress(schedule: Schedule) -> None:
    """Runs all ranks against one another, messages in order on every channel."""
    home = schedule.stage_ranks
    channels: dict[tuple[int, int], deque[Action]] = {}
    position = [0] * len(schedule.ranks)

    def advance(rank: int, action: Action) -> bool:
        """Does an action if it can be done now."""
        if action.do in SENDS:
            assert action.peer is not None
            channel = channels.setdefault((rank, home[action.peer]), deque())
            channel.append(received_as(action))
        elif action.do in RECEIVES:
            assert action.peer is not None
            waiting = channels.get((home[action.peer], rank))
            if not waiting:
                return False
            if waiting[0] != action:
                raise ValueError(
                    f"rank {rank} expects {action} from rank {home[action.peer]}, which sends "
                    f"{waiting[0]} first: {_around(schedule.ranks[rank], position[rank])}"
                )
            waiting.popleft()
        return True

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions) and advance(rank, actions[position[rank]]):
                position[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} waits at {_around(actions, position[rank])}"
        for rank, actions in enumerate(schedule.ranks)
        if position[rank] < len(actions)
    ]
    if stuck:
        raise ValueError("the schedule deadlocks: " + "; ".join(stuck))
    lost = [str(action) for waiting in channels.values() for action in waiting]
    if lost:
        raise ValueError(f"sent but never received: {', '.join(lost)}")
