"""What a program has and is asked; `ir.program` adds what is made of one."""

import copy
from collections import Counter
from functools import cached_property
from typing import Any, Self, TypeVar

import attrs
from torch import fx

from pfeife.ir.parts import Assumption, Call, Count, Kind, Port, Reduction, Role, Tracked


@attrs.frozen(eq=False, slots=False)
class ProgramBase:
    """A graph module of one microbatch with its ports; see the module's docstring.

    `calls` says what each call_module node is (empty for a flat graph), `reductions` what
    happens to gradients once a step, and `replicas` over how many pipelines the microbatches
    are spread. `counts` are what the results' means are weighted by. `premises` are what a trace of
    the step has taken for granted; its answers are printed. (Dynamo has guards.) `limits` are what
    was assumed of the values of size ports: expressions of their names that are true.
    """

    module: fx.GraphModule
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    calls: tuple[Call, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    replicas: int = 1
    counts: tuple[Count, ...] = ()
    tracked: tuple[Tracked, ...] = ()
    premises: tuple[Assumption, ...] = attrs.field(default=(), repr=False)
    limits: tuple[Any, ...] = ()

    @cached_property
    def _by_roles(self) -> dict[tuple[Role, ...], tuple[Port, ...]]:
        """What `ports` has answered: every microbatch asks."""
        return {}

    def ports(self, *roles: Role) -> tuple[Port, ...]:
        """The inputs and outputs of any of some roles, in their order."""
        if roles not in self._by_roles:
            ports = (*self.inputs, *self.outputs)
            self._by_roles[roles] = tuple(port for port in ports if port.role in roles)
        return self._by_roles[roles]

    @property
    def averages(self) -> bool:
        """Whether replicas average: each has the mean loss of its own rows. The parts of a loss
        that is a sum are added, and so are those of a gradient if the loss is outside."""
        means = [port for port in self.ports(Role.LOSS) if port.reduction != "sum"]
        return self.replicas > 1 and bool(means)

    @cached_property
    def _by_kind(self) -> dict[tuple[Kind, int], Call]:
        return {(call.kind, call.unit): call for call in reversed(self.calls)}  # the first counts

    def call(self, kind: Kind, unit: int) -> Call:
        """The call that computes a part of a cluster or stage. Raises KeyError if none does."""
        if (kind, unit) not in self._by_kind:
            raise KeyError(f"no call {unit}{kind} in this program")
        return self._by_kind[kind, unit]

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.module.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """The node of the graph with a name, also of a port or call. Raises KeyError for others."""
        if name not in self._by_name:
            raise KeyError(f"no node {name} in the graph")
        return self._by_name[name]

    @property
    def units(self) -> int:
        """How many clusters or stages the program is made of."""
        return 1 + max((call.unit for call in self.calls), default=-1)

    def body(self, call: Call) -> fx.GraphModule:
        """The graph module that a call runs."""
        body = self.module.get_submodule(str(self.node(call.node).target))
        assert isinstance(body, fx.GraphModule)
        return body

    def __copy__(self) -> Self:
        return attrs.evolve(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return attrs.evolve(self, module=copy.deepcopy(self.module, memo))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a program is not pickled, which would lose what its nodes say: pfeife plan "
            "--save-program writes one as JSON, and program.source() as Python"
        )

    def __repr__(self) -> str:
        """Its figures; `print(program)` writes all of it."""
        kinds = Counter(call.kind.value for call in self.calls)
        parts = f"{self.units} units, calls " + " ".join(f"{n}{k}" for k, n in kinds.items())
        ends = [Counter(port.role.value for port in ports) for ports in (self.inputs, self.outputs)]
        inputs, outputs = (
            ", ".join(f"{n} {role}" for role, n in counts.items()) for counts in ends
        )
        what = parts if self.calls else f"flat, {len(self.module.graph.nodes)} nodes"
        return f"Program({what}; takes {inputs}; gives {outputs})"

    def __str__(self) -> str:
        lines = [f"# {port}" for port in self.inputs]
        lines += [f"# -> {port}" for port in self.outputs]
        lines += [f"# {reduction}" for reduction in self.reductions]
        lines += [f"# {line}" for count in self.counts for line in str(count).splitlines()]
        lines += [f"# {norm}" for norm in self.tracked]
        lines += [f"# where {limit}" for limit in self.limits]
        lines += [f"# {premise}" for premise in self.premises if premise.kind == "answer"]
        return "\n".join([*lines, self.module.print_readable(print_output=False)])


AProgram = TypeVar("AProgram", bound=ProgramBase)
