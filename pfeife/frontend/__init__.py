"""From a user's step to a flat program: Dynamo, tracing, arguments, results.

`capture` has the whole way; read it first, then its stops: `dynamo` finds the `forward`,
`arguments` are what goes in (`describe` finds them) and `results` what comes out, `joint` has the
gradients, in which `kernel_numbers` are put into their places, and `descriptors` and `ports` make
the `captured` program of it. `batch` cuts a call's arguments, `microbatch` joins its results;
`rows/` derives how. `placements` reads plans that say how parameters are cut over members.

`trace/` is the other door, which runs the step. `checks/` compare what was captured with the step,
`cache/` keeps it on disk, `deferred/` has tensors without memory.
"""
