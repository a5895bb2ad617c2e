"""The checks and conversions of options, and their texts: the same on every rank (data by its
content, a function by its name)."""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import attrs
import torch

from pfeife.compilers import compiler_name
from pfeife.data import plain
from pfeife.data.checks import Check
from pfeife.data.optimizers import Optimizer, optimizer_of
from pfeife.data.plan import Plan
from pfeife.data.schedule import Schedule
from pfeife.factors import Place
from pfeife.passes.compose import LEVELS, Passes
from pfeife.passes.shard import Every
from pfeife.sched import POLICIES
from pfeife.sched.cutting import CutAt, Partition, RecomputePolicy
from pfeife.sched.cutting.recompute_policy import WORDS
from pfeife.sched.families import Family
from pfeife.sched.manual_cuts import check_recomputed


def digest(value: Any) -> str:
    """A short text that is the same for the same decision in every process."""
    text = plain.to_json(value).encode()
    return f"{type(value).__name__} {hashlib.sha256(text).hexdigest()[:16]}"


def described(value: Any) -> str:
    """An option's value as all ranks write it."""
    if isinstance(value, Family):
        return f"family {value} by {compiler_name(value.make)}"
    if attrs.has(type(value)):
        return digest(value)
    return compiler_name(value) if callable(value) else repr(value)


def must_be(
    what: str,
    *,
    words: Sequence[Any] = (),
    kinds: Any = (),
    when: Callable[[Any], bool] | None = None,
) -> Check:
    """The check of an option that is one of some words or of some kinds; `when` decides alone where
    that does not say it. Raises ValueError with what it must be."""

    def check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        # A bool is an int for Python, and no number for people.
        holds = (isinstance(value, kinds) and type(value) is not bool) or value in words
        if not (holds if when is None else when(value)):
            raise ValueError(f"option {attribute.name}={value!r}: must be {what}")

    return check


def one_of(kind: Any) -> Check:
    """The check of a Literal."""
    return must_be(f"one of {list(get_args(kind))}", words=get_args(kind))


def unless_refused(check_value: Callable[[Any], object]) -> Check:
    """What others check."""

    def check(instance: object, attribute: attrs.Attribute, value: Any) -> None:
        try:
            check_value(value)
        except ValueError as error:
            raise ValueError(f"option {error}") from None

    return check


def _are_all(value: Any, kind: Any) -> bool:
    """Whether a value is a list of such, and not an empty one."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(v, kind) for v in value)


def _is_partition(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("parameters", "uniform") or value.startswith("type:")
    numbers = isinstance(value, tuple) and bool(value) and all(type(v) is int for v in value)
    return value is None or callable(value) or numbers or _are_all(value, str)


def _is_recompute(value: Any) -> bool:
    if type(value) is int:
        return value > 0
    return value is None or _are_all(value, str) or (isinstance(value, str) and value in WORDS)


def _is_place(value: Any) -> bool:
    """Whether a value says where a result stands in what a step returns, or nothing."""
    path = value if isinstance(value, tuple) else (value,)
    return value is None or (bool(path) and all(type(step) in (int, str) for step in path))


count = must_be("a positive integer", when=lambda value: type(value) is int and value >= 1)
flag = must_be("True or False", when=lambda value: isinstance(value, bool))
seconds = [
    must_be("seconds", kinds=int | float),
    must_be("positive", when=lambda value: 0 < value < math.inf),
]
check_partition = must_be(
    "'parameters', 'uniform', 'type:Regex', a list of clusters or of modules at which stages "
    "start, or a function of a Program that gives the stage of every cluster",
    when=_is_partition,
)
check_recompute = must_be(
    f"one of {list(WORDS)}, a number k (the inside of every k-th block), or a list of modules",
    when=_is_recompute,
)
check_loss = must_be("the name, the path or the index of a result, or 'outside'", when=_is_place)
check_devices = must_be(
    "a list such as ['cuda:0', 'cuda:1']",
    when=lambda value: value in (None, ()) or _are_all(value, str | torch.device),
)
check_check = must_be(
    "True, False, or how much your own passes may change results, as a share of the largest value "
    "of each (0.01)",
    when=lambda value: isinstance(value, bool) or (isinstance(value, float) and 0 < value < 1),
)


def check_reduce(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """Ways by the places of results."""
    must_be("a way by index such as {1: 'mean'}", kinds=Mapping)(instance, attribute, value)
    wrong = {place: how for place, how in value.items() if how not in ("mean", "sum")}
    if wrong:
        raise ValueError(f"option reduce={wrong}: must be 'mean' or 'sum'")


def check_folder(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """The path of a folder, which may not be there yet."""
    must_be("the path of a folder", kinds=str | os.PathLike | None)(instance, attribute, value)
    path = Path(value or "")
    # Nothing is made yet: somebody may only ask what would happen.
    there = next((place for place in (path, *path.parents) if os.path.lexists(place)), None)
    if there and not os.path.isdir(there):
        raise ValueError(f"option {attribute.name}={str(value)!r}: {there} is no folder")


def check_schedule(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """A name that is known, or another way to say it."""
    if isinstance(value, str) and value not in ("search", *POLICIES):
        raise ValueError(
            f"option schedule={value!r} is not known; there are {sorted(POLICIES)} and 'search'"
        )
    must_be(
        "the name of a family, a Family, a Schedule, a function of a Problem, or 'search'",
        kinds=str | Family | Schedule | Callable,
    )(instance, attribute, value)


def check_passes(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """Functions by the levels of programs."""
    if not isinstance(value, Mapping) or not set(value) <= set(LEVELS):
        raise ValueError(
            f"option passes={value!r}: must have lists of passes by the level of the programs that "
            f"they change, {list(LEVELS)}, such as {{'flat': [my_pass]}}"
        )
    for level, passes in value.items():
        if not isinstance(passes, tuple) or not all(map(callable, passes)):
            raise ValueError(
                f"option passes: {level!r} has {passes!r}: must be a list of functions of a Program"
            )


# Converters: what is written in several ways is one thing afterwards. Their types are those of the
# keywords of `pfeife.compile`.


def as_partition(partition: Partition | None) -> Partition | None:
    """A list as a tuple."""
    return tuple(partition) if isinstance(partition, list) else partition


def as_borders(borders: CutAt) -> CutAt:
    """A list as a tuple."""
    return tuple(borders) if isinstance(borders, list) else borders


def as_recompute(policy: RecomputePolicy | None) -> RecomputePolicy | None:
    """A list as a tuple."""
    return tuple(policy) if isinstance(policy, list) else policy


def as_devices(devices: Sequence[str | torch.device] | None) -> tuple[Any, ...] | None:
    """A list as a tuple; what is none is refused by the check."""
    return tuple(devices) if isinstance(devices, list) else devices  # type: ignore[return-value]


def dtype_of(name: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name; what is none is refused by the check."""
    dtype = getattr(torch, name, name) if isinstance(name, str) else name
    return dtype if isinstance(dtype, torch.dtype) else name  # type: ignore[return-value]


def optimizer_or_none(optimizer: Optimizer | None) -> Optimizer | None:
    """An optimizer by its name. Raises ValueError for what is none."""
    if optimizer is None:
        return None
    try:
        return optimizer_of(optimizer)
    except ValueError as error:
        raise ValueError(f"option {error}") from None


def plan_of(source: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """A plan, read from its file if that is given. Raises ValueError for a file without one."""
    if not isinstance(source, str | os.PathLike):
        return source
    try:
        return plain.load(Plan, Path(source))
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        reason = str(error)
    raise ValueError(
        f"option plan={str(source)!r}: {reason}; `pfeife plan --out {source}` writes one, and so "
        "does plain.save(step.backend.compiled[0].plan, path)"
    )


def passes_of(value: Passes) -> Passes:
    """Passes by level, in tuples."""
    if not isinstance(value, Mapping):
        return value
    return {
        level: tuple(passes) if isinstance(passes, list | tuple) else passes
        for level, passes in value.items()
    }


def described_passes(value: Passes) -> str:
    """Passes as all ranks write them."""
    return str({level: [described(each) for each in value.get(level, ())] for level in LEVELS})


def boundaries(partition: Partition | CutAt | None) -> dict[str, str]:
    """The modules at which a partition, or a choice of borders, wants clusters to start."""
    named = isinstance(partition, tuple) and all(isinstance(module, str) for module in partition)
    return {str(module): "begin" for module in partition} if named else {}  # type: ignore[union-attr]


def check_parallel(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """Raises ValueError for what is no plan of how parameters are cut."""
    names = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    if not names and (not isinstance(value, str) or value not in get_args(Every)):
        raise ValueError(
            f"option parallel={value!r}: must be 'auto', 'cut', 'gathered', or a mapping from "
            "patterns of modules' names to torch's styles (ColwiseParallel()) or Hugging Face's "
            "words ('colwise'), or from those of parameters' names to dimensions"
        )


def described_parallel(plan: Mapping[str, Any] | str) -> str:
    """A plan as all ranks write it: styles of torch's by their names."""
    if isinstance(plan, str):
        return repr(plan)
    plain = str | int | Place
    return repr(
        {n: how if isinstance(how, plain) else type(how).__name__ for n, how in plan.items()}
    )


def _check_members(options: Any) -> None:
    if options.members == 1 and options.parallel != "auto":
        raise ValueError(
            f"option parallel={described_parallel(options.parallel)} says how parameters are cut: "
            "say with members= over how many ranks"
        )
    if options.members == 1 and options.attention != "gather":
        raise ValueError(
            f"option attention={options.attention!r} says how members read keys and values of one "
            "another: say with members= how many share a stage"
        )
    if options.members > 1 and options.cuda_graphs:
        raise ValueError(
            f"options members={options.members} and cuda_graphs=True: with members bodies are not "
            "recorded; leave cuda_graphs out"
        )


def check_together(options: Any) -> None:
    """Raises ValueError if a given plan or schedule is for other microbatches or stages than are
    asked for. A call with a smaller batch may later run the first of its microbatches."""
    _check_members(options)
    plan, schedule = options.plan, options.schedule
    # The usual one cannot be told from one that was typed.
    if plan is not None and schedule != "1f1b":
        raise ValueError(
            f"options plan and schedule={described(schedule)}: the plan has its schedule"
        )
    for name in ("partition", "recompute"):
        value = getattr(options, name)
        if plan is not None and value is not None:
            raise ValueError(f"options plan and {name}={value!r}: the plan has decided that")
    if options.partition is not None and options.split_at:
        raise ValueError("options partition and split_at: both say where to cut; take one of them")
    if options.cut_at != "anywhere":
        for name in ("partition", "split_at", "plan"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"options cut_at={options.cut_at!r} and {name}: the second one says where to "
                    "cut; leave one of them out"
                )
    # What a search decides cannot be said as well.
    check_recomputed(schedule, options.recompute)
    what, order = ("plan", plan.schedule) if plan is not None else ("schedule", schedule)
    if not isinstance(order, Schedule):
        return
    each = options.microbatches // options.replicas
    of_each = f" for each of {options.replicas} replicas" if options.replicas > 1 else ""
    if order.microbatches != each:
        raise ValueError(
            f"option microbatches={options.microbatches}: that is {each}{of_each}, but the given "
            f"{what} runs {order.microbatches}; pass "
            f"microbatches={order.microbatches * options.replicas}"
        )
    if options.stages not in (None, order.stages):
        other = f", or plan anew for {options.stages}" if plan is not None else ""
        raise ValueError(
            f"option stages={options.stages}: the given {what} has {order.stages} stages; leave "
            f"stages out{other}"
        )
