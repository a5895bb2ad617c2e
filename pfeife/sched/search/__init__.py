"""Schedules that are looked for: `search` is the door, `job_shop` the problem as it sees it.

`list_schedule`, `dispatch` and `pattern` make orders from rules, `anneal` changes them, `seeds`
says where it starts, and `bound` how good any order can be.
"""
