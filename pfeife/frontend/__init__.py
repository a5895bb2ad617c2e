"""From a user's step to a flat program: Dynamo, tracing, arguments, results.

`capture` has the whole way; read it first, then its stops: `dynamo` finds the `forward`,
`arguments` (what goes in) and `results` (what comes out), `joint` (the gradients), in which
`kernel_numbers` are put into their places, `ports`, `captured`. `batch` cuts a call's arguments,
`microbatch` joins its results; `rows/` derives how.

`trace/` is the other door, which runs the step. `checks/` compare what was captured with the step,
`cache/` keeps it on disk, `deferred/` has tensors without memory.
"""
