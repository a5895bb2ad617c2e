"""The state of models whose parts ranks have.

`checkpoints` saves and loads it; read it first. `restoring` has the model and optimizers,
`extra_state` what else there is. `full` reads all of it on one rank, `safetensors` writes models
for others, and `values` sees to those of models that were made without.
"""
