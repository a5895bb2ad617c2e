"""What the first call of a step is checked for: that its rows are the batch, and that the captured
program computes what the step computes. It costs some forwards of a microbatch, on this rank alone.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from pfeife.frontend.captured import Captured
from pfeife.frontend.checks.runs import Named, Runs, Values
from pfeife.frontend.forward import Forward
from pfeife.frontend.watch.deterministic import Draws, Recorded, close, counts_rows
from pfeife.ir.parts import Port, Role

log = logging.getLogger("pfeife")
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
    runs, single, twice = Runs(step, captured, args), Recorded(), Recorded()
    try:
        results = _tried(
            "the first call is not checked", lambda: runs.by_step(runs.part(0), single)
        )
        if results is None or not all(map(_finite, results.values())):
            return False
        _check_program(runs, results)
        # Of one row there is no other order, and nobody in whose company it could be.
        if runs.rows > 1:
            _check_order(runs, results)
        if runs.rows > 1 and not sure:
            _check_mixing(runs, results)
        # Where rows look at one another, twice the rows are another company, and prove nothing.
        if captured.mixed:
            return runs.rows > 1
        whole = _tried(
            "the step is not tried on twice the rows",
            lambda: _by_twice_the_rows(runs, twice, doubled, counting),
        )
        # Another number alone may be harmless (a shape), another result alone may be rounding.
        operation = counts_rows(single, twice) if whole else ""
        if whole and operation:
            _check_counting(runs, results, whole, operation, decided)
        return runs.rows > 1
    except Draws as draws:
        log.debug("the first call is not checked, since the step draws by %s", draws)
        return False


def _tried(otherwise: str, run: Callable[[], Named]) -> Named | None:
    """What a run gives; None where it fails. On the first microbatch the step itself will say
    where; on twice its rows it may, as where it takes batches of one size alone."""
    try:
        return run()
    except Draws:
        raise
    except Exception as error:
        log.debug("%s, since the step fails: %s", otherwise, error)
        return None


def _check_program(runs: Runs, expected: Named) -> None:
    """Raises ValueError unless the program's forward gives the same."""
    results = runs.by_program(runs.part(0), forward=True)
    for name, value in expected.items():
        if not close(results[name], value):
            raise ValueError(
                f"the captured program computes another {name} than the step on the first "
                f"microbatch: {_short(results[name])} for {_short(value)}; please report it "
                "(check=False leaves this check out)"
            )


def _check_order(runs: Runs, results: Named) -> None:
    """Raises ValueError unless rows in another order give the same, in that order."""
    if _is_in_order(runs, results, runs.cut) or _is_noise(runs, results):
        return
    # A table with as many entries as the batch has rows (positions, say) is the usual reason.
    for alone in runs.cut if len(runs.cut) > 1 else ():
        if _is_in_order(runs, results, [index for index in runs.cut if index != alone]):
            name = runs.port(alone).fqn
            raise ValueError(
                f"in_dims: {name} has as many rows as the batch, but they do not belong to its "
                f"rows: hand it over whole with pfeife.compile(..., in_dims={{{name!r}: None}})"
            )
    names = [runs.port(index).fqn for index in runs.cut]
    raise ValueError(
        f"in_dims: the results of the step depend on the order of the rows of {names}, so they "
        "may not be the batch: say with in_dims of pfeife.compile where it is, or check=False "
        "if the order of the rows matters"
    )


def _is_in_order(runs: Runs, results: Named, among: Collection[int]) -> bool:
    """Whether results have their rows in reverse order if some arguments have."""
    values = runs.part(0)
    for index in among:
        values[index] = values[index].flip(runs.dim(index))

    def reversed_rows(port: Port, value: torch.Tensor) -> torch.Tensor:
        return value if port.batch_dim is None else runs.rows_of(port, value).flip(0)

    def rows(port: Port, value: torch.Tensor) -> torch.Tensor:
        return value if port.batch_dim is None else runs.rows_of(port, value)

    return not any(runs.differing(results, runs.by_step(values), reversed_rows, rows))


def _is_noise(runs: Runs, results: Named) -> bool:
    """Whether last bits decide the results, as where a batch norm divides by the deviation of
    almost equal values: another order of the rows, in which sums round otherwise, may then give
    anything."""
    return any(runs.differing(results, runs.by_step([_nudged(value) for value in runs.part(0)])))


def _check_mixing(runs: Runs, results: Named) -> None:
    """Raises ValueError if a row gives something else in the company of other rows."""
    size, captured = runs.rows // 2, runs.captured
    others = runs.by_step(_mixed(runs, size))

    def first_rows(port: Port, value: torch.Tensor) -> torch.Tensor:
        return value.new_empty(0) if port.batch_dim is None else runs.rows_of(port, value)[:size]

    # A loss that no rule knows has no rows to compare, so it is refused where nobody is sure of the
    # batch. By convention rows may depend on one another by a batch norm.
    unknown = any(port.name in captured.unknown for port in captured.program.ports(Role.LOSS))
    targets = [str(node.target) for node in captured.program.module.graph.nodes]
    statistics = any(word in target for target in targets for word in _STATISTICS)
    if unknown or (not statistics and any(runs.differing(results, others, first_rows, first_rows))):
        names = [runs.port(index).fqn for index in runs.cut]
        raise ValueError(
            f"the rows of {names} (dimension {runs.dim(runs.cut[0])}) depend on one another, "
            "as negatives from a batch do, or places if the batch is in another dimension: say "
            "where it is with in_dims of pfeife.compile, or check=False if it is there"
        )


def _mixed(runs: Runs, size: int) -> Values:
    """The first rows of the first microbatch with the last ones of the second.

    microbatch 0    a0 a1 a2 a3        mixed    a0 a1 b2 b3
    microbatch 1    b0 b1 b2 b3        in which a0 and a1 must come out as they did
    """
    mixed, right = runs.part(0), runs.part(1)
    for index in runs.cut:
        dim, rest = runs.dim(index), right[index].shape[runs.dim(index)] - size
        first, last = mixed[index].narrow(dim, 0, size), right[index].narrow(dim, size, rest)
        mixed[index] = torch.cat([first, last], dim)
    return mixed


def _by_twice_the_rows(
    runs: Runs, record: Recorded, doubled: Doubled | None, counting: Collection[int]
) -> Named:
    """The results of the first microbatch with all rows twice."""
    captured = runs.captured
    if doubled:  # without what becomes of arguments that the step changes in place
        written = [port.fqn for port in captured.program.ports(Role.BUFFER)]
        return dict(zip(captured.results, doubled(record, written), strict=False))
    values = runs.part(0)
    for index in counting:
        values[index] *= 2
    for index in runs.cut:
        values[index] = torch.cat([values[index]] * 2, runs.dim(index))
    return runs.by_step(values, record)


def _check_counting(
    runs: Runs, results: Named, whole: Named, operation: str, decided: bool
) -> None:
    """Raises ValueError if a number that counts the rows of a microbatch decides a result, as
    Python computes it of `len(x)`: it is another one for the whole batch.

        a0 a1          x.clamp(max=len(x)) is bounded by 2
        a0 a1 a0 a1    here by 4, which no rule about sums and means sees

    With the same rows twice all statistics stay as they are, whatever mixes the rows, but for
    numbers. Both have to be seen: an `operation` with another number, and another result.
    """
    for name, other in whole.items():
        port = runs.outputs[name]
        if port.role == Role.LOSS and decided:
            continue
        expected = _put_together(port, results[name])
        if expected is None or not _finite(other):
            continue
        if expected.shape == other.shape and close(expected, other):
            continue
        # Asked last, since it is one more run.
        if _is_noise(runs, results):
            return
        what = "loss" if port.role == Role.LOSS else f"result {port.fqn}"
        raise ValueError(
            f"the {what} depends on a number that counts the rows of a microbatch, which "
            f"{operation} is given (computed of len(x) or x.shape[0], say): twice the rows "
            f"make it {_told(other)} instead of {_told(expected)}. One device would compute it "
            "of the whole batch. Hand the number over as an argument, or say "
            "loss_reduction= if it is meant (check=False leaves this check out)"
        )


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
