"""Bytes that a stage keeps."""

import attrs

from pfeife.program import Kind, Program, Role, call_of, holders, node_bytes


@attrs.frozen
class StageMemory:
    """Bytes of one stage: its parameters, and what one microbatch keeps from its forward to its
    backward (values that look at one another's storage are counted each)."""

    parameters: int
    saved: int


def stage_memory(program: Program) -> tuple[StageMemory, ...]:
    """The account of every stage of a partitioned program."""
    sizes = {port.fqn: port.bytes for port in program.ports(Role.PARAMETER)}
    parameters, saved = [0] * program.units, [0] * program.units
    for name, users in holders(program).items():
        for unit in {call.unit for call in users}:
            parameters[unit] += sizes[name]
    calls = {call.node: call for call in program.calls}
    for node in program.module.graph.nodes:
        maker = calls.get(call_of(node).name) if node.op == "call_function" else None
        if maker is None or maker.kind != Kind.FORWARD:
            continue
        late = {
            calls[u.name].unit
            for u in node.users
            if u.name in calls and calls[u.name].kind != Kind.FORWARD
        }
        for unit in late:
            saved[unit] += node_bytes(node)
    return tuple(StageMemory(p, s) for p, s in zip(parameters, saved, strict=True))
