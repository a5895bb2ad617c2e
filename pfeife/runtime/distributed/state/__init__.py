"""Parameters, gradients and optimizers of which each rank trains its own.

A tensor that ranks train is `owned`, and one of the `remote_parameters` where others do; read these
first. `remote_gradients` are the gradients that other ranks have, `gradients` see that optimizers
leave both alone, and `optimizer_probe` tries whether one takes parameters one by one. `copies` are
of what one replica trains for all, `derived_state` is what scripts compute of state. `whole_state`
tells members of a group their parts of what one of them keeps.
"""
