"""Other people's loops around a pipelined step. Each module imports its framework, and nothing of
Pfeife imports these modules.

Read `accelerate` first, which makes all processes of torchrun one, then `transformers`, whose
Trainer stands on it; `together` is where ranks wait until a file is written, or hear what the
first one has found. `lightning` is a strategy of Lightning's Trainer: its steps are `logged_step`s.
"""
