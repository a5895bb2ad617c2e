"""List scheduling by a rule: input-backwards, then forwards, then weight-backwards."""

from pfeife.sched.search.dispatch import NEVER, Chooser, Dispatched, Floor, dispatch
from pfeife.sched.search.job_shop import JobShop
from pfeife.sched.search.rules import Rule


def list_schedule(shop: JobShop, rule: Rule) -> Dispatched | None:
    """What a rule gives, nothing left; None if one microbatch alone is too big somewhere."""
    floor = Floor(shop)
    memory = rule.memory or shop.memory
    if any(need > limit for need, limit in zip(floor.alone, memory, strict=True)):
        return None
    return dispatch(floor, _chooser(floor, rule, memory))


# A rank that is free at `now` looks at the next I, W and F of each of its stages, and takes the
# first of these lines that holds (an I frees memory and is waited for, so it never waits itself):
#
#     I   if one is there
#     F   if one is there, has room and is under the cap; no more than `owed` W lie behind;
#         and the next I comes no sooner than `hold` x F        now [--- F ---]    I
#     W   if the next I or F comes no sooner than `gap` x W,    now [- W -]    I or F
#         or an F is stuck without room, or too many W lie behind
#     -   else it sleeps until the next I or F is there
#
# This runs for every operation of every schedule that a search tries, hence one plain loop over the
# rank's stages: the best I, W and F that may start now, and when the next I and F will be there.
def _chooser(floor: Floor, rule: Rule, memory: tuple[float, ...]) -> Chooser:
    shop = floor.shop
    m, count, seconds, whole = shop.microbatches, shop.stages, shop.seconds, shop.whole
    ready, done, room, caps, ahead = floor.ready, floor.done, floor.room, rule.caps, rule.ahead
    gap, hold, owed = rule.gap, rule.hold, rule.owed

    def choose(rank: int, now: float) -> tuple[int, float]:
        best_f = best_i = best_w = -1
        key_f = key_i = key_w = soon_f = soon_i = NEVER
        waiting, stuck = 0, False
        stages = floor.stages[rank]
        for s in stages:
            # Backwards first: they go on when all forwards of the stage are through (`k == m`), and
            # the checks of F below leave the loop.
            k = done[s]
            i, w = s + count, s + 2 * count
            back = done[i]
            if back < k:
                at = ready[i][back]
                if at > now:
                    if at < soon_i:
                        soon_i = at
                elif back + ahead[i] < key_i:
                    key_i, best_i = back + ahead[i], i
            # A backward that is whole has done its W, so it owes none.
            if done[w] < back and not whole[s]:
                waiting += back - done[w]
                if done[w] + ahead[w] < key_w:
                    key_w, best_w = done[w] + ahead[w], w
            if k == m:
                continue
            at = ready[s][k]
            if at > now:
                if at < soon_f:
                    soon_f = at
                continue
            # What enters the rank's first stage comes through all of its others, so the cap is on
            # that one; a W would not help here, so the F is not stuck.
            if s == stages[0] and k - back >= caps[rank]:
                continue
            # Asked last, because it goes over the stages of the rank: only of an F that could
            # start.
            if not room(rank, s, memory[rank]):
                stuck = True
            elif k + ahead[s] < key_f:
                key_f, best_f = k + ahead[s], s
        if best_i >= 0:
            return best_i, now
        # An F may run into the arrival of an I, for which an earlier rank waits: `hold` says by how
        # much, and `owed` how many W may pile up behind forwards.
        if best_f >= 0 and waiting <= owed and soon_i - now >= hold * seconds[best_f]:
            return best_f, now
        # No rank waits for a W: it goes where the wait for the next I or F is long enough for it.
        soon = soon_i if soon_i < soon_f else soon_f
        if best_w >= 0 and (stuck or waiting > owed or soon - now >= gap * seconds[best_w]):
            return best_w, now  # also where an F finds no memory: the W may make room
        return -1, soon

    return choose
