"""Proof before running: a schedule computes everything once, in order, and cannot deadlock."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule, received_as
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.problem import Problem, transfers


def verify_schedule(
    schedule: Schedule,
    *,
    in_flight: int | None = None,
    problem: Problem | None = None,
    blocking: bool = False,
) -> Schedule:
    """Returns the schedule if every rank can run it to its end, else raises ValueError.

    Checked: every stage computes every microbatch once, microbatches of a stage in ascending
    order; backward after forward, weight- after input-backward; at most `in_flight` microbatches
    between forward and last backward on a stage; the memory of a `problem` at every moment;
    reductions after the last gradient; sends after the computation of what they send; sends match
    receives on every channel (pair of ranks) in order; nothing twice; no deadlock (a reduction
    waits for all ranks that have it; a send waits for its receive if transfers are `blocking`,
    which the runtime's are not). A schedule of computations alone is taken to be one of a chain
    of stages, or of the problem's.
    """
    home = schedule.stage_ranks
    _check_counts(schedule, home)
    for rank, actions in enumerate(schedule.ranks):
        _check_rank(rank, actions, home, in_flight)
        if problem is not None:
            _check_memory(rank, actions, problem)
    if not any(a.do in SENDS or a.do in RECEIVES for rank in schedule.ranks for a in rank):
        for rank, actions in enumerate(schedule.ranks):
            _check_chain(rank, actions, home)
        moves = transfers(problem) if problem is not None else chain(schedule)
        _check_progress(insert_actions(schedule.computing(), moves), blocking)
    else:
        _check_progress(schedule, blocking)
    return schedule


def _check_memory(rank: int, actions: tuple[Action, ...], problem: Problem) -> None:
    if problem.memory is None:
        return
    held, limit = 0.0, problem.memory[rank] * (1 + 1e-6)
    for index, action in enumerate(actions):
        costs = problem.stages[action.stage]
        held += costs.saved if action.do == Do.FORWARD else 0.0
        if held > limit:
            raise ValueError(
                f"rank {rank}: {_around(actions, index)}: {held:.0f} bytes of activations, the "
                f"limit is {problem.memory[rank]:.0f}"
            )
        held -= costs.freed(action.do) if action.do in _BACKWARDS else 0.0


_BACKWARDS = (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD)
_MAKERS = {
    Do.SEND_F: (Do.FORWARD,),
    Do.SEND_B: (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD),
}


def _around(actions: tuple[Action, ...], index: int) -> str:
    first = max(0, index - 2)
    near = enumerate(actions[first : index + 3], first)
    return " ".join(f"[{a}]" if at == index else str(a) for at, a in near)


def _check_counts(schedule: Schedule, home: Sequence[int]) -> None:
    done: dict[tuple[int, int | None], set[Do]] = defaultdict(set)
    for action in (a for actions in schedule.computing().ranks for a in actions):
        done[action.stage, action.microbatch].add(action.do)
    whole = [{Do.FORWARD, Do.BACKWARD}, {Do.FORWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD}]
    if all(found == {Do.FORWARD} for found in done.values()):
        whole = [{Do.FORWARD}]
    microbatches = schedule.microbatches
    for stage, rank in enumerate(home):
        for k in range(microbatches):
            if done[stage, k] not in whole:
                found = ", ".join(f"{stage}{do}{k}" for do in sorted(done[stage, k])) or "nothing"
                raise ValueError(
                    f"rank {rank}, stage {stage}, microbatch {k}: {found} is scheduled; expected "
                    "F and B, or F, I and W (or F alone everywhere)"
                )


def _check_rank(
    rank: int, actions: tuple[Action, ...], home: Sequence[int], in_flight: int | None
) -> None:
    seen: set[Action] = set()
    done: set[tuple[int, Do, int | None]] = set()
    latest: dict[tuple[int, Do], int] = {}
    flying: Counter[int] = Counter()
    for index, action in enumerate(actions):
        where = f"rank {rank}: {_around(actions, index)}"
        stage, do, k = action.stage, action.do, action.microbatch
        if do == Do.REDUCE_GRAD and k is not None:
            raise ValueError(f"{where}: a reduction is of all microbatches")
        if action in seen:
            raise ValueError(f"{where}: scheduled more than once")
        seen.add(action)
        if do in SENDS or do in RECEIVES:
            _check_transfer(where, rank, action, home)
        makers = _MAKERS.get(do)
        if makers and not any((stage, maker, k) in done for maker in makers):
            raise ValueError(f"{where}: a send comes after the computation of what it sends")
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


def _check_chain(rank: int, actions: tuple[Action, ...], home: Sequence[int]) -> None:
    """What neighbouring stages of one rank hand each other, without a transfer."""
    done: set[tuple[int, bool, int | None]] = set()
    for index, action in enumerate(actions):
        if action.do not in (Do.FORWARD, Do.BACKWARD, Do.INPUT_BACKWARD):
            continue
        stage, forward, k = action.stage, action.do == Do.FORWARD, action.microbatch
        source = stage - 1 if forward else stage + 1
        here = 0 <= source < len(home) and home[source] == rank
        if here and (source, forward, k) not in done:
            where = f"rank {rank}: {_around(actions, index)}"
            raise ValueError(f"{where}: stage {source} of the same rank comes before")
        done.add((stage, forward, k))


def _check_transfer(where: str, rank: int, action: Action, home: Sequence[int]) -> None:
    if home[action.stage] != rank:
        raise ValueError(f"{where}: stage {action.stage} runs on rank {home[action.stage]}")
    if action.microbatch is None:
        raise ValueError(f"{where}: a transfer is of one microbatch")
    assert action.peer is not None
    if action.peer >= len(home) or home[action.peer] == rank:
        raise ValueError(f"{where}: stage {action.peer} at the other end runs on no other rank")


def _check_progress(schedule: Schedule, blocking: bool) -> None:
    """Runs all ranks against one another, messages in order on every channel."""
    home = schedule.stage_ranks
    channels: dict[tuple[int, int], deque[Action]] = {}
    position = [0] * len(schedule.ranks)
    awaited = Counter(a for rank in schedule.ranks for a in rank if a.do == Do.REDUCE_GRAD)
    arrived: dict[Action, set[int]] = defaultdict(set)

    def current(rank: int) -> Action | None:
        actions = schedule.ranks[rank]
        return actions[position[rank]] if position[rank] < len(actions) else None

    def advance(rank: int, action: Action) -> bool:
        """Does an action if it can be done now."""
        if action.do in SENDS:
            assert action.peer is not None
            there = home[action.peer]
            if blocking and current(there) != received_as(action):
                return False
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
        elif action.do == Do.REDUCE_GRAD:
            arrived[action].add(rank)
            return len(arrived[action]) == awaited[action]
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
    lost = [
        f"rank {to} has no {action} for what rank {source} sends"
        for (source, to), waiting in channels.items()
        for action in waiting
    ]
    if lost:
        raise ValueError("sent but never received: " + "; ".join(lost))
