"""What the first call of a step is checked for: that its rows are the batch, and that the captured
program computes what the step computes. It costs some forwards of a microbatch, on this rank alone.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from pfeife import _torch
from pfeife.frontend.captured import Captured
from pfeife.frontend.checks.deterministic import (
    Draws,
    Expected,
    Recorded,
    Unseeded,
    close,
    counts_rows,
)
from pfeife.frontend.forward import Forward
from pfeife.ir.nodes import has_effects
from pfeife.ir.parts import Port, Role
from pfeife.ir.program import Program
from pfeife.ir.sizes import with_sizes

log = logging.getLogger("pfeife")
Values = list[Any]
_STATISTICS = ("batch_norm", "instance_norm")


# Runs the step on the first microbatch twice over, as one, and records it; state with these names
# is written to, and so a copy of it.
Doubled = Callable[[Recorded, Collection[str]], Sequence[torch.Tensor]]


def check_first_call(
    step: Forward,
    captured: Captured,
    args: Sequence[Any],
    sure: bool,
    doubled: Doubled | None = None,
    decided: bool = False,
    counting: Collection[int] = (),
) -> bool:
    """Whether all could be checked. Raises ValueError if the order of the rows matters, or if the
    program computes something else than the `step`, both beyond rounding, or if rows depend on one
    another where nobody is `sure` that they are the batch; or if a number that counts the rows of a
    microbatch decides a result.

    `args` are those of a call with the whole batch, two microbatches or more. `doubled` runs the
    step where it is not its forward that does: a graph has the numbers of its own sizes. It is
    `decided` where the caller has said how losses are put together; the arguments at the indices
    `counting` are the number of rows itself. What cannot be
    compared is left: draws without an expected value, results that are not finite, rows of which
    a microbatch has one only.
    """
    runs = Runs(step, captured, args)
    try:
        single = Recorded()
        results = runs.first(single)
        if results is None or not all(_finite(value) for value in results):
            return False
        runs.check_program(results)
        if runs.rows > 1:
            runs.check_order(results)
        if runs.rows > 1 and not sure:
            runs.check_mixing(results)
        if not captured.mixed:
            runs.check_counting(results, single, doubled, decided, counting)
        return runs.rows > 1
    except Draws as draws:
        log.debug("the first call is not checked, since the step draws by %s", draws)
        return False


class Runs:
    """Runs of a step's forward on parts of a batch."""

    def __init__(self, step: Forward, captured: Captured, args: Sequence[Any]):
        self.step, self.captured, self.args = step, captured, args
        self.ports = captured.ports
        self.cut = [i for i, port in enumerate(self.ports) if port and port.batch_dim is not None]
        sizes = {
            port.shape[port.batch_dim] for port in self.ports if port and port.batch_dim is not None
        }
        self.rows = sizes.pop() if len(sizes) == 1 else 1
        outputs = {port.name: port for port in captured.program.outputs}
        names = (*captured.results, *captured.changed.values())
        self.results = [outputs[name] for name in names]

    def __call__(self, values: Values, mode: Expected | None = None) -> list[torch.Tensor]:
        """The results, and what becomes of arguments that the step changes in place; neither these
        nor buffers are changed."""
        changed = self.captured.changed
        copies = [
            value.clone() if port and (port.role == Role.BUFFER or port.name in changed) else value
            for port, value in zip(self.ports, values, strict=True)
        ]
        with mode or Expected():  # gradients inside of the step are asked for as ever
            results = list(self.step.run(*copies))
        slots = self.captured.slots(copies)
        return [*results, *(slots[name] for name in changed)]

    def first(self, record: Recorded) -> list[torch.Tensor] | None:
        """The results of the first microbatch; None if it fails: the step will say where."""
        try:
            return self(self.part(0), record)
        except Draws:
            raise
        except Exception as error:
            log.debug("the first call is not checked, since the step fails: %s", error)
            return None

    def part(self, index: int) -> Values:
        """The arguments of a microbatch. A traced step is run as it is, and may ask which tensors
        have gradients."""
        values = self.captured.part(self.args, index)
        for port, value, argument in zip(self.ports, values, self.args, strict=True):
            if port and self.captured.door == "trace":
                value.requires_grad_(argument.requires_grad)
        return values

    def permuted(self, values: Values, among: Iterable[int]) -> Values:
        """The same with the rows of some arguments in reverse order."""
        chosen = set(among)
        return [
            value.flip(port.batch_dim) if port and index in chosen else value
            for index, (value, port) in enumerate(zip(values, self.ports, strict=True))
        ]

    def check_program(self, expected: Sequence[torch.Tensor]) -> None:
        """Raises ValueError unless the program's forward gives the same."""
        program = self.captured.program
        results = forward_of(program)(self.captured.slots(self.part(0)))
        for port, value in zip(self.results, expected, strict=True):
            other = results[port.name]
            if not close(other, value):
                raise ValueError(
                    f"the captured program computes another {port.name} than the step on the first "
                    f"microbatch: {_short(other)} for {_short(value)}; please report it "
                    "(check=False leaves this check out)"
                )

    def check_order(self, results: Sequence[torch.Tensor]) -> None:
        """Raises ValueError unless rows in another order give the same, in that order."""
        values = self.part(0)
        if self._same(results, self(self.permuted(values, self.cut))) or self._is_noise(results):
            return
        for alone in self.cut if len(self.cut) > 1 else ():
            rest = [index for index in self.cut if index != alone]
            if self._same(results, self(self.permuted(values, rest))):
                name = self._name(alone)
                raise ValueError(
                    f"in_dims: {name} has as many rows as the batch, but they do not belong to its "
                    f"rows: hand it over whole with pfeife.compile(..., in_dims={{{name!r}: None}})"
                )
        names = [self._name(index) for index in self.cut]
        raise ValueError(
            f"in_dims: the results of the step depend on the order of the rows of {names}, so they "
            "may not be the batch: say with in_dims of pfeife.compile where it is, or check=False "
            "if the order of the rows matters"
        )

    def check_counting(
        self,
        results: Sequence[torch.Tensor],
        single: Recorded,
        doubled: Doubled | None,
        decided: bool,
        counting: Collection[int],
    ) -> None:
        """Raises ValueError if a number that counts the rows of a microbatch decides a result, as
        Python computes it of `len(x)`: it is another one for the whole batch.

            a0 a1          x.clamp(max=len(x)) is bounded by 2
            a0 a1 a0 a1    here by 4, which no rule about sums and means sees

        With the same rows twice all statistics stay as they are, whatever mixes the rows, but for
        numbers. Both have to be seen: an operation with another number, and another result.
        """
        twice = Recorded()
        written = [port.fqn for port in self.captured.program.ports(Role.BUFFER)]
        try:
            whole = doubled(twice, written) if doubled else self(self._twice(counting), twice)
        except Draws:
            raise
        except Exception as error:  # as where a step takes batches of one size alone
            log.debug("the step is not tried on twice the rows, since it fails: %s", error)
            return
        operation = counts_rows(single, twice)
        if not operation:
            return
        # `doubled` has no arguments that the step changes in place.
        for port, value, other in zip(self.results, results, whole, strict=False):
            if port.role == Role.LOSS and decided:
                continue
            expected = _put_together(port, value)
            if expected is None or not (_finite(other) and _finite(value)):
                continue
            if expected.shape == other.shape and close(expected, other):
                continue
            if self._is_noise(results):
                return
            what = "loss" if port.role == Role.LOSS else f"result {port.fqn}"
            raise ValueError(
                f"the {what} depends on a number that counts the rows of a microbatch, which "
                f"{operation} is given (computed of len(x) or x.shape[0], say): twice the rows "
                f"make it {_told(other)} instead of {_told(expected)}. One device would compute it "
                "of the whole batch. Hand the number over as an argument, or say "
                "loss_reduction= if it is meant (check=False leaves this check out)"
            )

    def _twice(self, counting: Collection[int]) -> Values:
        """The arguments of the first microbatch with all rows twice."""
        values = self.part(0)
        for index in counting:
            values[index] *= 2
        for index in self.cut:
            values[index] = torch.cat([values[index]] * 2, self._dim(index))
        return values

    def _is_noise(self, results: Sequence[torch.Tensor]) -> bool:
        """Whether last bits decide the results, as where a batch norm divides by the deviation of
        almost equal values: another order of the rows, in which sums round otherwise, may then give
        anything."""
        other = self([_nudged(value) for value in self.part(0)])
        return not all(close(first, second) for _, first, second in self._returned(results, other))

    def check_mixing(self, results: Sequence[torch.Tensor]) -> None:
        """Raises ValueError if a row gives something else in the company of other rows."""
        mixed = self._mixed(self.rows // 2)
        targets = [str(node.target) for node in self.captured.program.module.graph.nodes]
        # By convention rows may depend on one another by a batch norm. A loss that no rule knows
        # has no rows to compare, so it is refused where nobody is sure of the batch.
        statistics = any(word in target for target in targets for word in _STATISTICS)
        for port, before, after in self._returned(results, self(mixed)):
            unknown = port.role == Role.LOSS and port.name in self.captured.unknown
            if not unknown and (statistics or self._alike(port, before, after)):
                continue
            names = [self._name(index) for index in self.cut]
            raise ValueError(
                f"the rows of {names} (dimension {self._dim(self.cut[0])}) depend on one another, "
                "as negatives from a batch do, or places if the batch is in another dimension: say "
                "where it is with in_dims of pfeife.compile, or check=False if it is there"
            )

    def _mixed(self, size: int) -> Values:
        """The first rows of the first microbatch with the last ones of the second.

        microbatch 0    a0 a1 a2 a3        mixed    a0 a1 b2 b3
        microbatch 1    b0 b1 b2 b3        in which a0 and a1 must come out as they did
        """
        left, right = self.part(0), self.part(1)
        mixed = [*left]
        for index in self.cut:
            dim, sizes = self._dim(index), [size, self.rows - size]
            first, last = left[index].split(sizes, dim)[0], right[index].split(sizes, dim)[1]
            mixed[index] = torch.cat([first, last], dim)
        return mixed

    def _alike(self, port: Port, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether two results have the same first rows, if they have any."""
        if port.batch_dim is None:
            return True
        size = self.rows // 2
        return close(self._rows(port, first)[:size], self._rows(port, second)[:size])

    def _same(
        self, results: Sequence[torch.Tensor], reversed_results: Sequence[torch.Tensor]
    ) -> bool:
        """Whether rows in reverse order gave `reversed_results`, if they gave `results` in their
        own."""
        return all(
            close(first, second)
            if port.batch_dim is None
            else close(self._rows(port, first), self._rows(port, second).flip(0))
            for port, first, second in self._returned(results, reversed_results)
        )

    def _returned(
        self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
    ) -> list[tuple[Port, torch.Tensor, torch.Tensor]]:
        """Two runs' results, without those that the step only assigns to attributes."""
        assigned = {n for n in self.captured.kept if not self.captured.is_returned(n)}
        triples = zip(self.results, first, second, strict=True)
        return [triple for triple in triples if triple[0].name not in assigned]

    def _rows(self, port: Port, value: torch.Tensor) -> torch.Tensor:
        """A result with its rows in front, each of which may have several places along the
        dimension of the batch."""
        assert port.batch_dim is not None
        return value.movedim(port.batch_dim, 0).unflatten(0, (self.rows, -1))

    def _dim(self, index: int) -> int:
        """Where the batch is in an argument that is cut."""
        port = self.ports[index]
        assert port is not None and port.batch_dim is not None
        return port.batch_dim

    def _name(self, index: int) -> str:
        port = self.ports[index]
        assert port is not None
        return port.fqn


def forward_of(program: Program) -> Callable[[dict[str, Any]], dict[str, torch.Tensor]]:
    """The loss and the outputs of a flat program, from its inputs by the names of their ports."""
    graph = fx.Graph()
    wanted = [port.name for port in program.ports(Role.LOSS, Role.OUTPUT)]
    results: Any = graph.graph_copy(program.module.graph, {})
    graph.output({name: results[name] for name in wanted})
    graph.eliminate_dead_code(has_effects)
    module = _torch.graph_module(program.module, graph)

    def run(values: dict[str, Any]) -> dict[str, torch.Tensor]:
        values = with_sizes(program, values)
        arguments = [values.get(port.name) for port in program.inputs]
        with torch.no_grad(), _torch.no_autocast(), Expected():
            outputs: dict[str, torch.Tensor] = Unseeded(module).run(*arguments)
        return outputs

    return run


def _nudged(value: Any) -> Any:
    """A tensor with another last bit in every second element."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    second = torch.arange(value.numel(), device=value.device).view(value.shape) % 2
    return value * (1 + second * torch.finfo(value.dtype).eps)


def _finite(value: torch.Tensor) -> bool:
    if value.is_meta:
        return False  # there is nothing to compare
    return not value.is_floating_point() or bool(value.isfinite().all())


def _put_together(port: Port, value: torch.Tensor) -> torch.Tensor | None:
    """A result of two microbatches that both have this one; None where nobody says how they are put
    together."""
    if port.batch_dim is not None:
        return torch.cat([value, value], port.batch_dim)
    if port.reduction == "sum":
        return value + value
    return value if port.reduction in ("mean", "weighted", "same") else None


def _told(value: torch.Tensor) -> str:
    """A value, or its shape where it has rows."""
    return _short(value) if value.dim() == 0 else f"{list(value.shape)} with {_short(value)}"


def _short(value: torch.Tensor) -> str:
    return f"{value.item():.6g}" if value.dim() == 0 else f"values of up to {value.abs().max():.6g}"
