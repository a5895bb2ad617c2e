"""What a program is made of: ports, calls of bodies, what is said of them, and `ProgramBase`, which
has all of it; `ir.program` adds what is made of one."""

import copy
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, Self, TypeVar

import attrs
import torch
from torch import fx

from pfeife import _torch
from pfeife.ir.split import Split


class Role(StrEnum):
    """What a port is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor that the step closes over and nobody trains
    BATCH = "batch"
    SIZE = "size"  # an int, the same in all microbatches of a step: a size of the batch
    SEED = "seed"  # int64 scalar, one per microbatch, from which random operations draw
    TANGENT = "tangent"  # the gradient that arrives at an output
    LOSS = "loss"
    OUTPUT = "output"
    BUFFER_UPDATE = "buffer_update"
    GRADIENT = "gradient"  # of a parameter: summed over microbatches
    BATCH_GRADIENT = "batch_gradient"  # of a batch input: one per microbatch


INPUT_ROLES = (
    *(Role.PARAMETER, Role.BUFFER, Role.CONSTANT, Role.BATCH),
    *(Role.SIZE, Role.SEED, Role.TANGENT),
)
STATE_ROLES = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)


class Kind(StrEnum):
    """What a call computes, in the letters of torch.distributed.pipelining's schedules."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"


@attrs.frozen
class Port:
    """One named input or output of a program.

    `names` are fully qualified names, the canonical one first and the aliases of a tied
    parameter after it. An output's `names` are those of the input that it belongs to: the
    parameter of a gradient, the buffer of an update, the output of a tangent. (What becomes of a
    batch input that the step changes in place is an output of its own.) Several gradient
    ports may share their names: the gradient is their sum in the order of the ports.
    `batch_dim` is the dimension along which microbatches are cut or joined, None where there
    is none or nobody said. `reduction` says how the microbatches of a loss or another result
    without that dimension are put together, None where nobody said: "weighted" is a mean by the
    program's count in `counts`; a "mean" with `counts` holds only where these are even; "same" is
    alike in every microbatch, "last" is that of the last one. Where data decide the size (see
    `is_sized_by_data`), `shape` is the most that it can be. Where the sizes of the batch decide it,
    `sizes` has its sizes as expressions of the names of the size ports, and `shape` those for which
    the program was planned. A parameter that is `held` in a wider type by who runs the program
    (master weights) is cast to its `dtype` once a step. Of a value that is `split` over the members
    of a group, `shape` is that of one member's part; if it has a `keeper`, that member alone is
    given all of it, tells the others their parts, or all of it where it is not split, and has the
    whole gradient. A gradient is `partial` where each member has an addend of it, which are added
    up once a step.
    """

    name: str
    role: Role
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    batch_dim: int | None = None
    reduction: Literal["mean", "sum", "weighted", "same", "last"] | None = None
    counts: tuple[int, ...] = ()
    sized_by_data: bool = False
    held: torch.dtype | None = None
    sizes: tuple[_torch.Size, ...] | None = None
    split: Split | None = None
    keeper: int | None = None
    partial: bool = False

    @property
    def fqn(self) -> str:
        """The canonical one of its names."""
        return self.names[0]

    def shape_at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where the size ports have such values, by their names."""
        return self.shape if self.sizes is None else _torch.sizes_at(self.sizes, sizes)

    @property
    def bytes(self) -> int:
        """Those of its value, as the program computes with it."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def given_dtype(self) -> torch.dtype:
        """In which type the program is given it."""
        return self.dtype if self.held is None else self.held

    @property
    def given_bytes(self) -> int:
        """Those of its value, as the program is given it."""
        return torch.Size(self.given_shape).numel() * self.given_dtype.itemsize

    @property
    def part_bytes(self) -> int:
        """Those of its value, or of a member's part, before it is cast."""
        return torch.Size(self.shape).numel() * self.given_dtype.itemsize

    @property
    def given_shape(self) -> tuple[int, ...]:
        """The shape of its value, as the program is given it."""
        if self.split is None or self.keeper is None:
            return self.shape
        return self.split.whole(self.shape)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        by = " x " if self.sizes else "x"
        dims = by.join(map(str, self.sizes or self.shape)) or "scalar"
        dims = f"at most {dims}" if self.sized_by_data else dims
        tied = f" (= {', '.join(self.names[1:])})" if len(self.names) > 1 else ""
        by = f" by count {', '.join(map(str, self.counts))}" if self.counts else ""
        how = f" {self.reduction}{by}" if self.reduction else ""
        how += f" of {self.held}".replace("torch.", "") if self.held else ""
        how += f", {self.split}" if self.split else ""
        how += f", kept whole by member {self.keeper}" if self.keeper is not None else ""
        return f"{self.name}: {self.role} {self.fqn}{tied} {dtype} {dims} {self.device}{how}"


@attrs.frozen
class Call:
    """One call of a body in the graph: its node, what it computes, for which cluster or stage.

    `rank` is None before a plan has placed the stages, `seconds` before `annotate`;
    `accumulate_seconds` is what adding its gradients to those of earlier microbatches takes,
    `inside_bytes` what its operations need inside of themselves, which no graph tells.
    """

    node: str
    kind: Kind
    unit: int
    rank: int | None = None
    seconds: float | None = None
    accumulate_seconds: float = 0.0
    inside_bytes: int = 0


@attrs.frozen
class Reduction:
    """Once a step, after the last gradient: what becomes of one parameter's gradient.

    The parts that `ranks` of one pipeline hold are added in the order of the ranks, then those of
    so many `members` that have addends, then over `replicas` pipelines in their order, and divided
    by these if it is to `average`.
    Those with one `bucket` travel together; without a number, each alone. The sum goes to the
    replica that is its `owner`, None: to all; of their members to its `keeper`, None: to all. Of a
    gradient that is `split` over members the keeper puts the parts together, as sums are there.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    replicas: int = 1
    members: int = 1
    average: bool = False
    bucket: int | None = None
    owner: int | None = None
    keeper: int | None = None
    split: Split | None = None


@attrs.frozen(eq=False)
class Count:
    """How much a microbatch counts in a mean, such as its targets that are not ignored: a graph
    from batch ports by name to a scalar; `line` is where the user's model divides by it.
    `empty_is_zero`: where there is nothing to count, gradients are zero rather than nan."""

    module: fx.GraphModule
    line: str
    empty_is_zero: bool = False

    def __str__(self) -> str:
        return f"count in {self.line}: {self.module.code.strip()}"


@attrs.frozen
class Tracked:
    """A batch norm that tracks all microbatches of a step: the names of its running mean and
    variance, and of the buffer that counts the batches. Their updates are what a microbatch has
    found of its own, of so many `elements` a channel (perhaps an expression of size ports); the
    step puts them together at its end, see `ir.combine`. Without a `momentum` it is one over
    that count."""

    mean: str
    variance: str
    count: str | None
    elements: _torch.Size
    momentum: float | None


@attrs.frozen
class Assumption:
    """Something that a captured step takes for granted; where it does not hold, the step is
    captured anew, or refused. `kind` is a word for such ones."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@attrs.frozen(eq=False, slots=False)
class ProgramBase:
    """A graph module of one microbatch with its ports; see the module's docstring.

    `calls` says what each call_module node is (empty for a flat graph), `reductions` what
    happens to gradients once a step, and `replicas` over how many pipelines the microbatches
    are spread. `counts` are what the results' means are weighted by. `premises` are what a trace of
    the step has taken for granted; its answers are printed. (Dynamo has guards.) `limits` are what
    was assumed of the values of size ports: expressions of their names that are true. With several
    `members` it is the program of one of a group that shares the work, see `ir.members`.
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
    members: int = 1

    @cached_property
    def _by_roles(self) -> dict[tuple[Role, ...], tuple[Port, ...]]:
        """What `ports` has answered: every microbatch asks."""
        return {}

    def ports(self, *roles: Role) -> tuple[Port, ...]:
        """The inputs and outputs of any of some roles, in their order."""
        # A cache in a frozen class, which is sound as its fields never change: `attrs.evolve` makes
        # another program, with a cache of its own.
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

    @property
    def bodies(self) -> dict[str, fx.GraphModule]:
        """The bodies by the targets of their calls; calls may share one."""
        return {str(self.node(call.node).target): self.body(call) for call in self.calls}

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
        return f"Program({what}; takes {inputs}; gives {outputs}; all of it: print())"

    def __str__(self) -> str:
        """All of it: ports, the graph and every body, with shapes and lines of the model."""
        lines = [f"# {port}" for port in self.inputs]
        lines += [f"# -> {port}" for port in self.outputs]
        lines += [f"# {reduction}" for reduction in self.reductions]
        lines += [f"# {line}" for count in self.counts for line in str(count).splitlines()]
        lines += [f"# {norm}" for norm in self.tracked]
        lines += [f"# where {limit}" for limit in self.limits]
        lines += [f"# {premise}" for premise in self.premises if premise.kind == "answer"]
        return "\n".join([*lines, self.module.print_readable(print_output=False)])


def captured_sizes(program: ProgramBase) -> dict[str, int]:
    """What the size ports were when the program was captured, by their names."""
    return {port.name: program.node(port.name).meta["val"] for port in program.ports(Role.SIZE)}


AProgram = TypeVar("AProgram", bound=ProgramBase)
