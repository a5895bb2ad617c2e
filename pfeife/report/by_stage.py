"""What a program's stages hold and send, from which tables, forecasts and pages are made."""

from pfeife.ir.messages import holders, messages
from pfeife.ir.program import Program


def held_names(program: Program, stages: int) -> list[list[str]]:
    """The names of the parameters that each stage uses."""
    names: list[list[str]] = [[] for _ in range(stages)]
    # One that several stages use (tied embeddings) is held, and counted, by each of them.
    for name, calls in holders(program).items():
        for unit in {call.unit for call in calls}:
            names[unit].append(name)
    return names


def sent_bytes(program: Program, stages: int) -> list[int]:
    """The bytes that each stage sends for a microbatch, forward and back."""
    sent = [0] * stages
    for message in messages(program):
        sent[message.sender.unit] += message.bytes
    return sent
