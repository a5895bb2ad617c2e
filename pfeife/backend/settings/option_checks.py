"""Options that are decisions or functions: checked when given, told apart by the same text on every
rank (data by its content, a function by its name)."""

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from pfeife.compilers import compiler_name
from pfeife.data import plain
from pfeife.data.plan import Costs, Plan
from pfeife.data.schedule import Schedule
from pfeife.ir.absorb import absorb
from pfeife.ir.digest import fingerprint
from pfeife.ir.infer_values import settle
from pfeife.ir.program import Program
from pfeife.ir.verify import verify
from pfeife.passes.compose import LEVELS, Pass, Passes, pass_name
from pfeife.sched import POLICIES
from pfeife.sched.cutting import CutAt, Partition, check_cut_at, checked_tolerance
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


def check_schedule(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if isinstance(value, str) and value not in ("search", *POLICIES):
        raise ValueError(
            f"option schedule={value!r} is not known; there are {sorted(POLICIES)} and 'search'"
        )
    if not isinstance(value, str | Family | Schedule) and not callable(value):
        raise ValueError(
            f"option schedule={value!r}: must be the name of a family, a Family, a Schedule, a "
            "function of a Problem, or 'search'"
        )


def plan_of(given: Any) -> Any:
    """A plan, read from its file if that is given."""
    if not isinstance(given, str | os.PathLike):
        return given
    try:
        return plain.load(Plan, Path(given))
    except OSError as error:
        reason = error.strerror
    except ValueError as error:
        reason = str(error)
    raise ValueError(
        f"option plan={str(given)!r}: {reason}; `pfeife plan --out {given}` writes one, and so "
        "does plain.save(step.backend.compiled[0].plan, path)"
    )


def check_plan(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None and not isinstance(value, Plan):
        raise ValueError(
            f"option plan={value!r}: must be a Plan (Plan(stages of the clusters, schedule) is the "
            "shortest one by hand), or the path to its JSON"
        )


def check_costs(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    words = ("estimate", "measure")
    if value not in words and not isinstance(value, Costs) and not callable(value):
        raise ValueError(
            f"option costs={value!r}: must be 'estimate' or 'measure', Costs, or a function of a "
            "Program that gives them"
        )


def passes_of(given: Any) -> Any:
    """Passes by level, in tuples."""
    if not isinstance(given, Mapping):
        return given
    return {k: tuple(one) if isinstance(one, list | tuple) else one for k, one in given.items()}


def check_passes(instance: object, attribute: attrs.Attribute, value: Any) -> None:
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


def described_passes(value: Passes) -> str:
    return str({level: [described(one) for one in value.get(level, ())] for level in LEVELS})


def guarded(passes: Passes) -> Passes:
    """The same passes, what they edit settled, and refused where one does not give a sound program
    with the ports it was given."""
    return {level: tuple(_guarded(level, one) for one in each) for level, each in passes.items()}


def _guarded(level: str, one: Pass) -> Pass:
    name = pass_name(one)

    def run(program: Program) -> Program:
        before = fingerprint(program)
        try:
            result = one(program)
        except Exception as error:
            error.add_note(f"in the pass {name} of the option passes, on the program of {level}")
            raise
        where = f"option passes: {name}, on the program of {level}:"
        if fingerprint(program) != before:
            raise ValueError(
                f"{where} it edited the program that it was given; a pass edits a copy, such as "
                "fx.GraphModule(program.module, copy.deepcopy(program.module.graph))"
            )
        if not isinstance(result, Program):
            raise ValueError(f"{where} it returned {type(result).__name__}, not a Program")
        try:
            result = absorb(settle(verify(result)))
        except ValueError as error:
            raise ValueError(f"{where} {error}") from error
        if (program.inputs, program.outputs) != (result.inputs, result.outputs):
            raise ValueError(f"{where} {_other_ports(program, result)}")
        return result

    functools.update_wrapper(run, one)
    run.__qualname__ = name
    return run


def _other_ports(program: Program, result: Program) -> str:
    before, after = ({*one.inputs, *one.outputs} for one in (program, result))
    names = sorted({port.name for port in before ^ after})
    return (
        f"it has changed the ports {names or 'in their order'}; what goes into a step and comes "
        "out of it stays as it is"
    )


def dtype_of(given: Any) -> Any:
    """A dtype by its name."""
    found = getattr(torch, given, given) if isinstance(given, str) else given
    return found if isinstance(found, torch.dtype) else given


def check_accumulate(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value not in (None, torch.float32, torch.float64):
        raise ValueError(
            f"option accumulate={value!r}: must be 'float32', 'float64', or None for the type of "
            "the parameters"
        )


def check_param_dtype(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"option param_dtype={value!r}: must be 'bfloat16', 'float16', 'float32' (of a model "
            "in float64), or None for the type that the parameters have"
        )


def check_partition(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    listed = isinstance(value, tuple) and bool(value)
    if listed and (all(type(v) is int for v in value) or all(isinstance(v, str) for v in value)):
        return
    words = isinstance(value, str) and (
        value in ("parameters", "uniform") or value.startswith("type:")
    )
    if not words and value is not None and not callable(value):
        raise ValueError(
            f"option partition={value!r}: must be 'parameters', 'uniform', 'type:Regex', a list of "
            "clusters or of modules at which stages start, or a function of a Program that gives "
            "the stage of every cluster"
        )


def check_where(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    """Of cut_at and message_tolerance: what the planner says of them."""
    try:
        if attribute.name == "cut_at":
            check_cut_at(value)
        else:
            checked_tolerance(value)
    except ValueError as error:
        raise ValueError(f"option {error}") from None


def check_recompute(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    listed = isinstance(value, tuple) and bool(value) and all(isinstance(v, str) for v in value)
    counted = type(value) is int and value > 0
    if value is not None and value not in WORDS and not listed and not counted:
        raise ValueError(
            f"option recompute={value!r}: must be one of {list(WORDS)}, a number k (the inside of "
            "every k-th block), or a list of modules"
        )


def check_runtime(instance: object, attribute: attrs.Attribute, value: Any) -> None:
    if value is not None and not callable(value):
        raise ValueError(
            f"option runtime={value!r}: must be a function of (program, schedule, bodies) that "
            "gives a Pipeline, such as a class with its methods"
        )


def boundaries(partition: Partition | CutAt | None) -> dict[str, str]:
    """The modules at which a partition, or a choice of borders, wants clusters to start."""
    named = isinstance(partition, tuple) and all(isinstance(one, str) for one in partition)
    return {str(one): "begin" for one in partition} if named else {}  # type: ignore[union-attr]


def check_together(options: Any) -> None:
    """Raises ValueError if a given plan or schedule is for other microbatches or stages than are
    asked for. A call with a smaller batch may later run the first of its microbatches."""
    plan, schedule = options.plan, options.schedule
    if plan is not None and schedule != "1f1b":
        raise ValueError(
            f"options plan and schedule={described(schedule)}: the plan has its schedule"
        )
    for name in ("partition", "recompute"):
        asked = getattr(options, name)
        if plan is not None and asked is not None:
            raise ValueError(f"options plan and {name}={asked!r}: the plan has decided that")
    if options.partition is not None and options.split_at:
        raise ValueError("options partition and split_at: both say where to cut; take one of them")
    if options.cut_at != "anywhere":
        for name in ("partition", "split_at", "plan"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"options cut_at={options.cut_at!r} and {name}: the second one says where to "
                    "cut; leave one of them out"
                )
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
