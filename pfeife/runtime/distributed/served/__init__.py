"""State that another rank asks for, answered where this rank's script rests.

`state_client` knows which rank has what, `state_server` asks it, `answering` answers what `reading`
finds; read these first. `writes` counts what scripts write by hand. `saving` and `optimizers` give
the state of modules and optimizers whole to whoever saves it, `deep_copies` what is copied of them,
and `exit_barrier` keeps a rank there whose script has ended.
"""
