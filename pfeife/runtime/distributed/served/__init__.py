"""State that another rank asks for, answered where this rank's script rests.

`script_point` counts calls, steps and loads, and says where it rests, or in which collective of its
own it waits; read it first. `state_client` knows which rank has what, `state_server` asks it,
`answering` answers what `reading` finds, by `questions` that `posting` carries; `writes` counts
what scripts write by hand. `saving` and `optimizers` give the state of modules and optimizers whole
to whoever saves it, `deep_copies` what is copied of them, and `exit_barrier` keeps a rank there
whose script has ended.
"""
