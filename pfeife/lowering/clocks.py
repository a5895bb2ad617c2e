"""What every rank knows of the others' progress: vector clocks over a lowered schedule.

Mattern, Virtual Time and Global States of Distributed Systems, 1989.
"""

from collections import deque

from pfeife.data.schedule import RECEIVES, SENDS, Action, Do, Schedule, received_as

Released = tuple[dict[int, dict[int, int]], ...]


def released(schedule: Schedule) -> Released:
    """When a rank may be sure that what it sent has arrived, without being told.

    Per rank and index of a receive (or reduction) in its actions: for a destination, how many
    more of its messages, in their order, have surely been received by then. Messages that no
    later receive speaks for are not mentioned. Raises ValueError if the schedule deadlocks.
    """
    return _Clocks(schedule).run()


class _Clocks:
    def __init__(self, schedule: Schedule):
        self.ranks, self.home = schedule.ranks, schedule.stage_ranks
        # clocks[r][q]: how many actions of rank q rank r knows to be done
        self.clocks = [[0] * len(self.ranks) for _ in self.ranks]
        self.arrives = [
            {action: index for index, action in enumerate(actions) if action.do in RECEIVES}
            for actions in self.ranks
        ]
        self.sent: dict[Action, tuple[int, ...]] = {}
        self.waiting: list[dict[int, deque[int]]] = [{} for _ in self.ranks]
        self.joined: dict[Action, dict[int, tuple[int, ...]]] = {}
        self.sharing: dict[Action, int] = {}
        for actions in self.ranks:
            for action in actions:
                if action.do == Do.REDUCE_GRAD:
                    self.sharing[action] = self.sharing.get(action, 0) + 1
        self.found: Released = tuple({} for _ in self.ranks)

    def run(self) -> Released:
        position = [0] * len(self.ranks)
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.ranks):
                while position[rank] < len(actions) and self._advance(rank, position[rank]):
                    position[rank] += 1
                    self.clocks[rank][rank] = position[rank]
                    moved = True
        if any(at < len(actions) for at, actions in zip(position, self.ranks, strict=True)):
            raise ValueError("the schedule deadlocks; verify_schedule says where")
        return self.found

    def _advance(self, rank: int, index: int) -> bool:
        action = self.ranks[rank][index]
        if action.do in SENDS:
            assert action.peer is not None
            self.sent[received_as(action)] = tuple(self.clocks[rank])
            destination = self.home[action.peer]
            arrival = self.arrives[destination][received_as(action)]
            self.waiting[rank].setdefault(destination, deque()).append(arrival)
        elif action.do in RECEIVES:
            if action not in self.sent:
                return False
            self._learn(rank, index, [self.sent[action]])
        elif action.do == Do.REDUCE_GRAD:
            known = self.joined.setdefault(action, {})
            known[rank] = tuple(self.clocks[rank])
            if len(known) < self.sharing[action]:
                return False
            self._learn(rank, index, list(known.values()))
        return True

    def _learn(self, rank: int, index: int, clocks: list[tuple[int, ...]]) -> None:
        merged = [max(column) for column in zip(self.clocks[rank], *clocks, strict=True)]
        self.clocks[rank] = merged
        for destination, arrivals in self.waiting[rank].items():
            count = 0
            while arrivals and arrivals[0] < merged[destination]:
                arrivals.popleft()
                count += 1
            if count:
                self.found[rank].setdefault(index, {})[destination] = count
