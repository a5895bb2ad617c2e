"""Schedules that are looked for: `search` is the door, `job_shop` the problem as it sees it.

`run` is one search; read it after these two, then where its orders come from: `seeds` (schedules of
families), `list_schedule` (by rules) and `pattern`, both over `dispatch`, and
`anneal`, which changes orders and has `timing` for what that costs. `pool` keeps the best, `bound`
says how good any order can be, `budget` how long to go on; `placements` and `parallel` share that
between problems and processes, all of which begin with the families.
"""

from pfeife.sched.search.bound import lower_bound
from pfeife.sched.search.search import search_placements, search_schedule

__all__ = ["lower_bound", "search_placements", "search_schedule"]
