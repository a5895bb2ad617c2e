"""The edges of a step: what an ordinary script does there, and what must come of it.

A module a topic, with rows (`rows.py`); `tests/test_edges.py` is the table.
"""

TOPICS = (
    "absent",
    "attributes",
    "autocast",
    "autograd",
    "batch",
    "breaks",
    "changed",
    "checkpoints",
    "draws",
    "dynamo",
    "frozen",
    "hang",
    "memory",
    "norms",
    "precision",
    "ranks",
    "recurrent",
    "reductions",
    "saved",
    "sizes",
    "state",
    "steering",
    "values",
    "words",
)
ABOUT_RANKS = ("absent", "checkpoints", "hang", "ranks", "saved", "sizes", "state")
