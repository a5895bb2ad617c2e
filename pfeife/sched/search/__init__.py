"""Schedules that are looked for: `search` is the door, `shop` the problem as the search sees it.

`list_schedule`, `dispatch` and `pattern` make orders from rules, `anneal` changes them, `seeds`
says where it starts, and `bound` how good any order can be.
"""
