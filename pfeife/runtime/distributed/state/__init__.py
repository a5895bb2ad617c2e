"""Parameters, gradients and optimizers of which each rank trains its own.

`ownership` says who trains what, with one `owned` for each tensor; read these first.
`remote_parameters` are the parameters that are absent here, `remote_gradients` the gradients that
other ranks have, `gradients` see that optimizers leave both alone, and `optimizer_probe` tries
whether one takes parameters one by one. `state_sync` is what ranks tell one another of all this
before a step, `copies` are of what one replica trains for all, `derived_state` is what scripts
compute of state, `step_hooks` call all that has to do with an optimizer's step. `shares` are what a
rank writes to a checkpoint, by `writing`.
"""
