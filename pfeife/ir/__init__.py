"""The one value that flows through all: a program, and what it means.

`program` has the value (an fx graph with named ports; its fields are in `base`, ports and calls in
`parts`), `verify` checks its form, `evaluate` runs it at every level, in one process. Read these
first; `nodes` is what is asked of one node, `messages` says who reads and makes what, and what goes
from rank to rank, `graph` draws that as networkx has it, `flops` counts operations, `batch` rows
and tokens, `sizes` says what those of a batch are in a call, `from_graph` takes other people's
graphs, `copying` copies graphs node by node (passes are made of it), `rewrite` edits copies, `infer_values` finishes what somebody has edited, `outline` turns
groups of nodes into calls of bodies, `absorb` puts nodes that stand between calls into bodies,
`seeding` says how random numbers are drawn, `statistics` joins those of microbatches, `boundary`
marks a cut in a user's model, `source` writes them as Python, `digest` tells programs apart by a
text, `underflow` which of them lose small gradients.
"""
