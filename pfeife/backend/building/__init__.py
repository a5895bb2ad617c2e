"""From a captured graph to a pipeline of it.

`builder` is what all builds with some options have in common, `task` one of them, and `build` the
way from a graph to a step that can run, which is `compiled`; read these first. `capturing` and
`assembling` are its first and last phase, `planning` asks the planner, `layout` which ranks are
pipelines, `residence` has state of one process where it is used. `sharding` cuts a stage over
the members of a group. `loss_scale` knows with which gradient of the loss a step is called.
`sync_batch_norm` refuses norms that join other processes, `own_passes` passes of the caller's that
compute something else, and `artifacts` writes what was decided.
"""
