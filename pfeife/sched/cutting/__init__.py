"""Where to cut, and what to compute again: `workload` (the clusters' figures) first, then `cuts`
(stages of a chain), `layouts` (stages on ranks), `recompute`, `account` and `room` (under a memory
limit).
"""
