"""Parameters, gradients and optimizers of which each rank trains its own.

`ownership` says who trains what, with one `owned` for each tensor; read these first. `foreign` are
the parameters that are absent here, `elsewhere` the gradients that other ranks have, `gradients`
see that optimizers leave both alone, and `apart` tries whether one takes parameters one by one.
`telling` is what ranks tell one another of all this before a step, `copies` are of what one replica
trains for all, `derived` is what scripts compute of state, `step_hooks` call all that has to do
with an optimizer's step. `shares` are what a rank writes to a checkpoint, by `writing`.
"""
