"""State that another rank asks for, answered where this rank's script rests.

`script_point` counts calls, steps and loads, and says where it rests; read it first. `collectives`
knows in which of its own operations it waits. `state_client` knows which rank has what,
`state_server` asks it, `answering` answers, by `questions` that `posting` carries; `writes` counts
what scripts write by hand. `saving` and `optimizers` give the state of modules and optimizers whole
to whoever saves it, `deep_copies` what is copied of them, and `exit_barrier` keeps a rank there
whose script has ended.
"""
