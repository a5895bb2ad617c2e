"""The one value that flows through all: a program, and what it means.

`program` has the value (an fx graph with named ports; ports, calls and its fields are in `parts`),
`verify` checks its form, `evaluate` runs it at every level, in one process: `microbatch` says what
one microbatch is, `combine` how they come together. Read these first. `nodes` is what is asked of
one node, `editing/` changes graphs, `messages` says who makes and reads what, and what goes from
rank to rank, `members` what those tell one another that share the work of a stage, `split` how
they cut a tensor, `lockstep` runs them all in one process, `flops` counts operations, `sizes` says
what those of a batch are in a call, `outline` turns groups of nodes into calls of bodies, `seeding`
says how random numbers are drawn, `source` writes a program as Python, `digest` tells programs
apart by a text.
"""
