"""Where to cut, on which ranks, and what to compute again where memory is short.

`workload` has the figures of clusters and of the stages that cuts make of them; read it first, then
`cuts` (the best stages of a chain), `partitions` (by hand, or as DeepSpeed says it) and `layouts`
(stages on ranks). `recompute_choice` finds what a stage computes again for a number of bytes,
`recompute_policy` what people ask for by a word; `account` and `room` keep plans to the memory.
"""
