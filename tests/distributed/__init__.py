"""What ranks do, in real processes over Gloo on loopback, beside plain PyTorch in each of them.

A module a topic, with rows (`rows.py`); `tests/test_distributed.py` makes tests of them.
"""

TOPICS = (
    "models",
    "replicas",
    "loops",
    "channels",
    "members",
    "member_state",
    "fully_sharded",
    "refusals",
    "memory",
    "deferred",
    "data",
    "scripts",
)
