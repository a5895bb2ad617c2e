"""Proof before running: a schedule computes everything once, in order, and cannot deadlock."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from pfeife.data.schedule import ONCE, RECEIVES, SENDS, Action, Do, Schedule, received_as
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.problem import Problem, transfers
from pfeife.lowering.replay import Reductions, around, reduced, replay


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
    receives on every channel (pair of ranks) in order; nothing twice; no deadlock (of what a rank
    reduces each waits for the one before it, and for all ranks that have it; a send waits for its
    receive if transfers are `blocking`, which the runtime's are not). A schedule of computations
    alone is taken to be one of a chain of stages, or of the problem's.
    """
    stage_ranks = schedule.stage_ranks
    _check_counts(schedule, stage_ranks)
    for rank, actions in enumerate(schedule.ranks):
        _check_rank(rank, actions, stage_ranks, in_flight)
        if problem is not None:
            _check_memory(rank, actions, problem)
    if not any(a.do in SENDS or a.do in RECEIVES for rank in schedule.ranks for a in rank):
        for rank, actions in enumerate(schedule.ranks):
            _check_chain(rank, actions, stage_ranks)
        # Without transfers neighbours on one rank are not seen by the run below: checked apart.
        moves = transfers(problem) if problem is not None else chain(schedule)
        _check_progress(insert_actions(schedule.computing(), moves), blocking)
    else:
        _check_progress(schedule, blocking)
    # Reductions run beside the rest, one after another on every rank: ranks that have them in
    # different orders would wait for each other, which the run above does not see.
    reductions = Reductions[None](schedule)
    replay(reduced(schedule), lambda rank, action: reductions.join(rank, action, None))
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
                f"rank {rank}: {around(actions, index)}: {held:.0f} bytes of activations, the "
                f"limit is {problem.memory[rank]:.0f}"
            )
        held -= costs.freed(action.do) if action.do in _BACKWARDS else 0.0


_BACKWARDS = (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD)
_LAST = (Do.BACKWARD, Do.WEIGHT_BACKWARD)  # after which nothing of a microbatch is left to do
# What comes in the order of the microbatches: an I or W may add to the gradients that a B adds to.
_IN_ORDER = {
    Do.FORWARD: (Do.FORWARD,),
    Do.BACKWARD: (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD),
    Do.INPUT_BACKWARD: (Do.BACKWARD, Do.INPUT_BACKWARD),
    Do.WEIGHT_BACKWARD: (Do.BACKWARD, Do.WEIGHT_BACKWARD),
}
_MAKERS = {
    Do.SEND_F: (Do.FORWARD,),
    Do.SEND_B: (Do.BACKWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD),
}


def _check_counts(schedule: Schedule, stage_ranks: Sequence[int]) -> None:
    done: dict[tuple[int, int | None], set[Do]] = defaultdict(set)
    for action in (a for actions in schedule.computing().ranks for a in actions):
        done[action.stage, action.microbatch].add(action.do)
    # A stage may run some microbatches whole and split others: each must be one of these.
    whole = [{Do.FORWARD, Do.BACKWARD}, {Do.FORWARD, Do.INPUT_BACKWARD, Do.WEIGHT_BACKWARD}]
    if all(kinds == {Do.FORWARD} for kinds in done.values()):
        whole = [{Do.FORWARD}]
    microbatches = schedule.microbatches
    for stage, rank in enumerate(stage_ranks):
        for k in range(microbatches):
            if done[stage, k] not in whole:
                scheduled = (
                    ", ".join(f"{stage}{do}{k}" for do in sorted(done[stage, k])) or "nothing"
                )
                raise ValueError(
                    f"rank {rank}, stage {stage}, microbatch {k}: {scheduled} is scheduled; "
                    "expected F and B, or F, I and W (or F alone everywhere)"
                )


def _check_rank(
    rank: int, actions: tuple[Action, ...], stage_ranks: Sequence[int], in_flight: int | None
) -> None:
    done = _Done(stage_ranks, in_flight)
    for index, action in enumerate(actions):
        wrong = done.wrong(rank, action)
        if wrong is not None:
            raise ValueError(f"rank {rank}: {around(actions, index)}: {wrong}")
        done.note(action)


class _Done:
    """What a rank has done, and whether an action may come after it."""

    def __init__(self, stage_ranks: Sequence[int], in_flight: int | None):
        self.stage_ranks, self.in_flight = stage_ranks, in_flight
        self.done: set[tuple] = set()  # the actions' fields, for to hash an action takes longer
        self.latest: dict[tuple[int, Do], int] = {}
        self.flying: Counter[int] = Counter()

    def note(self, action: Action) -> None:
        stage, do, k = action.stage, action.do, action.microbatch
        self.done.add((stage, do, k, action.peer))
        if do.kind:
            assert k is not None
            self.latest[stage, do] = k
            self.flying[stage] += (do == Do.FORWARD) - (do in _LAST)

    def wrong(self, rank: int, action: Action) -> str | None:
        stage, do, k = action.stage, action.do, action.microbatch
        if do in ONCE and k is not None:
            return f"{do.words} is of all microbatches"
        if (stage, do, k, action.peer) in self.done:
            return "scheduled more than once"
        if do.kind:
            return self._computation(stage, do, k)
        if action.peer is not None:
            return self._transfer(rank, action, action.peer)
        return None

    def _computation(self, stage: int, do: Do, k: int | None) -> str | None:
        if k is None or any(
            k <= self.latest.get((stage, computation), -1) for computation in _IN_ORDER[do]
        ):
            return (
                "microbatches of a stage run in ascending order, forwards and backwards each: "
                "gradients are added up as they come, and a sum of floating-point numbers depends "
                "on the order of its terms, so that another one would give other bits than one "
                "device; microbatches are alike, so give the first of them to the first backward"
            )
        if do in (Do.BACKWARD, Do.INPUT_BACKWARD) and (stage, Do.FORWARD, k, None) not in self.done:
            return "a backward comes after its forward"
        if do == Do.WEIGHT_BACKWARD and (stage, Do.INPUT_BACKWARD, k, None) not in self.done:
            return "a weight-backward comes after its input-backward"
        if do == Do.FORWARD and self.flying[stage] == self.in_flight:
            return f"more than {self.in_flight} microbatches in flight"
        if do in _LAST and (stage, Do.REDUCE_GRAD, None, None) in self.done:
            return "a gradient comes after its reduction"
        return None

    def _transfer(self, rank: int, action: Action, peer: int) -> str | None:
        stage_ranks, k = self.stage_ranks, action.microbatch
        if stage_ranks[action.stage] != rank:
            return f"stage {action.stage} runs on rank {stage_ranks[action.stage]}"
        if k is None:
            return "a transfer is of one microbatch"
        if peer >= len(stage_ranks) or stage_ranks[peer] == rank:
            return f"stage {peer} at the other end runs on no other rank"
        makers = _MAKERS.get(action.do)
        if makers and not any((action.stage, maker, k, None) in self.done for maker in makers):
            return "a send comes after the computation of what it sends"
        return None


def _check_chain(rank: int, actions: tuple[Action, ...], stage_ranks: Sequence[int]) -> None:
    """What neighbouring stages of one rank hand each other, without a transfer."""
    done: set[tuple[int, bool, int | None]] = set()
    for index, action in enumerate(actions):
        if action.do not in (Do.FORWARD, Do.BACKWARD, Do.INPUT_BACKWARD):
            continue
        stage, forward, k = action.stage, action.do == Do.FORWARD, action.microbatch
        source = stage - 1 if forward else stage + 1
        here = 0 <= source < len(stage_ranks) and stage_ranks[source] == rank
        if here and (source, forward, k) not in done:
            where = f"rank {rank}: {around(actions, index)}"
            raise ValueError(f"{where}: stage {source} of the same rank comes before")
        done.add((stage, forward, k))


def _check_progress(schedule: Schedule, blocking: bool) -> None:
    """Runs all ranks against one another, messages in order on every channel."""
    stage_ranks = schedule.stage_ranks
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    done = [0] * len(schedule.ranks)

    def advance(rank: int, action: Action) -> int | None:
        peer_rank = stage_ranks[action.peer] if action.peer is not None else rank
        if action.do in SENDS:
            received = received_as(action)
            there = schedule.ranks[peer_rank]
            # a send that blocks ends when the other rank has come to its receive
            if blocking and (done[peer_rank] == len(there) or there[done[peer_rank]] != received):
                return peer_rank
            channels[rank, peer_rank].append(received)
        elif action.do in RECEIVES:
            waiting = channels[peer_rank, rank]
            if not waiting:
                return peer_rank
            # Both ends of a channel match by order alone, as NCCL's do: another order hands out the
            # wrong values where sizes agree, and hangs where they do not.
            if waiting[0] != action:
                raise ValueError(
                    f"rank {rank} expects {action} from rank {peer_rank}, which sends "
                    f"{waiting[0]} first: {around(schedule.ranks[rank], done[rank])}"
                )
            waiting.popleft()
        done[rank] += 1
        return None

    replay(schedule.ranks, advance)
    lost = [
        f"rank {to} has no {action} for what rank {source} sends"
        for (source, to), waiting in channels.items()
        for action in waiting
    ]
    if lost:
        raise ValueError("sent but never received: " + "; ".join(lost))
