"""What every rank knows of the others' progress: vector clocks over a lowered schedule.

Mattern, Virtual Time and Global States of Distributed Systems, 1989.
"""

from collections import deque
from collections.abc import Sequence

from pfeife.data.schedule import RECEIVES, SENDS, Action, Schedule, received_as
from pfeife.lowering.replay import replay

Acknowledged = tuple[dict[int, dict[int, int]], ...]


def acknowledged(schedule: Schedule) -> Acknowledged:
    """When a rank may be sure that what it sent has arrived, without being told.

    Per rank and index of a receive in its actions: for a destination, how many
    more of its messages, in their order, have surely been received by then. Messages that no
    later receive speaks for are not mentioned. Raises ValueError if the schedule deadlocks.
    """
    clocks = _Clocks(schedule)
    replay(schedule.ranks, clocks.advance)
    return clocks.found


class _Clocks:
    """Vector clocks, sent along with every message.

        rank 0   0F0 0SEND_F0 . . . . . . . . . . . . . 0RECV_B0    clock (2, 0), now (2, 3)
        rank 1             `--> 1RECV_F0 1F0 1B0 1SEND_B0 --^       clock (2, 3) at the send

    Then rank 0 knows of three actions of rank 1, and the first of them received its message.
    """

    def __init__(self, schedule: Schedule):
        self.stage_ranks = schedule.stage_ranks
        # clocks[r][q]: how many actions of rank q rank r knows to be done
        self.clocks = [[0] * len(schedule.ranks) for _ in schedule.ranks]
        self.arrives = [
            {action: index for index, action in enumerate(actions) if action.do in RECEIVES}
            for actions in schedule.ranks
        ]
        self.sent: dict[Action, tuple[int, ...]] = {}
        self.waiting: list[dict[int, deque[int]]] = [{} for _ in schedule.ranks]
        self.found: Acknowledged = tuple({} for _ in schedule.ranks)

    def advance(self, rank: int, action: Action) -> int | None:
        """Does an action of a rank, or says which rank it waits for."""
        if action.do in SENDS:
            assert action.peer is not None
            self.sent[received_as(action)] = tuple(self.clocks[rank])
            destination = self.stage_ranks[action.peer]
            arrival = self.arrives[destination][received_as(action)]
            self.waiting[rank].setdefault(destination, deque()).append(arrival)
        elif action.do in RECEIVES:
            if action not in self.sent:
                assert action.peer is not None
                return self.stage_ranks[action.peer]
            self._learn(rank, self.sent.pop(action))
        # Counted after what it has learned: its own clock says how many actions are done.
        self.clocks[rank][rank] += 1
        return None

    def _learn(self, rank: int, clock: Sequence[int]) -> None:
        # that of the receive itself, which is counted after this
        index = self.clocks[rank][rank]
        merged = list(map(max, self.clocks[rank], clock))
        self.clocks[rank] = merged
        for destination, arrivals in self.waiting[rank].items():
            count = 0
            # a clock counts actions, so it is past the index of a receive that is done
            while arrivals and arrivals[0] < merged[destination]:
                arrivals.popleft()
                count += 1
            if count:
                self.found[rank].setdefault(index, {})[destination] = count
