"""The processes that train together, and what they tell one another around each step.

`world` is what they share, `ownership` says who trains what; read these first. `state_sync` is what
ranks tell one another of state before a step, `step_hooks` call all that has to do with an
optimizer's step, `shares` are what a rank writes to a checkpoint, by `writing`. `batch_norms` joins
what those of replicas have found. What all ranks do or none is done `together`.
"""
