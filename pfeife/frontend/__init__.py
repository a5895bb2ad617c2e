"""From a user's step to a flat program: Dynamo, tracing, arguments, results.

`capture` has the whole way; read it first, then its stops: `dynamo` finds the `forward`,
`arguments` are what goes in (`describe` finds them) and `results` what comes out, `aot/` has the
gradients, of which the `captured` program is made. `batch` cuts a call's arguments, `microbatch`
joins its results; `rows/` derives how. `placements` reads plans that say how parameters are cut
over members.

`trace/` is the other door, which runs the step. `watch/` sees what a step does as it runs,
`checks/` compare what was captured with it, `cache/` keeps it on disk, `deferred/` has tensors
without memory.
"""
