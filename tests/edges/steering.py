"""Values that steer a step, wherever they are held: each is that of the call, or is refused. As it
is traced, through Dynamo, and where Dynamo breaks."""

import argparse
import array
import collections
import configparser
import contextvars
import cProfile
import dataclasses
import enum
import functools
import gc
import itertools
import logging
import operator
import os
import pstats
import sys
import threading
import time
import types
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import steered
import torch
from rows import Row, add, row
from torch import nn

import pfeife


class Base:
    factor = 1.0


class Config(Base):
    table: ClassVar = {"factor": 1.0}


class Meta(type):
    factor = 1.0


class OfMeta(metaclass=Meta):
    pass


@dataclasses.dataclass
class Plan:
    factor: float = 1.0
    parts: dict = dataclasses.field(default_factory=lambda: {"factor": 1.0})

    @property
    def half(self):
        return self.factor / 2


class Missing:
    """Has its attributes elsewhere."""

    def __init__(self, values):
        self.values = values

    def __getattr__(self, name):
        return self.values[name]


class Mode(enum.Enum):
    SUM, MEAN = 1.0, 3.0


class Model(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * type(self).factor


ARGS = argparse.Namespace(factor=1.0, name="factor", mode=Mode.SUM, epoch=0)
USER = collections.UserDict(factor=1.0)
TABLE = {"factor": 1.0}
PROXY = types.MappingProxyType(TABLE)
PLAN, MISSING = Plan(), Missing(TABLE)
CONFIG = configparser.ConfigParser()
CONFIG.read_dict({"loss": {"factor": "1.0"}})
CHAIN = collections.ChainMap({}, TABLE)
QUEUE, ARRAY = collections.deque([1.0]), array.array("d", [1.0])
LONG, NUMBERS = [1.0] * 10_001, np.ones(200_000)
VARIABLE = contextvars.ContextVar("factor", default=PLAN)
LOCAL = threading.local()
LOCAL.factor = 1.0
REFERENCE = weakref.ref(PLAN)
LOGGER = logging.getLogger("pfeife.tests.steering")
FACTOR_OF = operator.attrgetter("factor")
NUMBERED, TURNS = itertools.count(1), itertools.cycle((1.0, 2.0))
SEEN = set()
OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
SCHEDULER = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda call: 1.0 + call)


def decorated(step):
    state = types.SimpleNamespace(factor=1.0)

    @functools.wraps(step)
    def wrapper(*args):
        return step(*args) * state.factor

    wrapper.state = state
    return wrapper


@decorated
def one(x):
    return 1.0


@functools.lru_cache
def cached():
    return ARGS.factor


def scale(x, by=PLAN):
    return by.factor


def keyword(*, factor, **others):
    return factor


def numbers():
    for number in range(999):
        yield 2.0 if number > 99 else 1.0


def put(holder, key="factor"):
    """A change of an entry."""
    return lambda value: operator.setitem(holder, key, value)


def name(holder, key="factor"):
    """A change of an attribute."""
    return lambda value: setattr(holder, key, value)


def matched(plan):
    match plan:
        case Plan(factor=1.0):
            return 1.0
        case _:
            return 3.0


def late(holder):
    """A change that gives an attribute which was not there."""

    def change(value):
        if "late" in vars(holder):
            del holder.late
        if value > 1:
            holder.late = value

    return change


def refill(value):
    cached.cache_clear()
    ARGS.factor = value


def moved(value):
    OPTIMIZER.step()
    SCHEDULER.step()


MODEL, ALIVE, ITERATOR = Model(), numbers(), iter([1.0] * 99)
VARIABLES = ("PFEIFE_TEST_STEERING", "PFEIFE_TEST_OTHER")
# What a step reads, and what the loop changes between two calls.
HOLDERS = {
    "a_namespace": (lambda x: ARGS.factor, name(ARGS)),
    "a_class": (lambda x: Config.factor, name(Base)),
    "a_class_that_hides_another": (lambda x: Config.factor, name(Config)),
    "a_dict_of_a_class": (lambda x: Config.table["factor"], put(Config.table)),
    "a_metaclass": (lambda x: OfMeta.factor, name(Meta)),
    "a_module": (lambda x: steered.FACTOR, name(steered, "FACTOR")),
    "a_global_of_an_imported_function": (lambda x: steered.factor(), name(steered, "FACTOR")),
    "a_module_by_a_computed_name": (
        lambda x: getattr(steered, "FACT" + ARGS.name[:0] + "OR"),
        name(steered, "FACTOR"),
    ),
    "a_module_imported_inside": (lambda x: steered.imported_inside(), name(steered, "FACTOR")),
    "a_user_dict": (lambda x: USER["factor"], put(USER)),
    "a_proxy": (lambda x: PROXY["factor"], put(TABLE)),
    "a_chain_map": (lambda x: CHAIN["factor"], put(TABLE)),
    "a_dataclass": (lambda x: PLAN.factor, name(PLAN)),
    "a_property": (lambda x: PLAN.half, name(PLAN)),
    "an_attribute_made_by_getattr": (lambda x: MISSING.factor, put(TABLE)),
    "a_computed_name": (lambda x: getattr(ARGS, ARGS.name), name(ARGS)),
    "a_composed_name": (lambda x: getattr(PLAN, "fac" + ARGS.name[3:]), name(PLAN)),
    "vars": (lambda x: vars(ARGS)["factor"], name(ARGS)),
    "a_dict_of_attributes": (lambda x: PLAN.__dict__["factor"], name(PLAN)),
    "keywords": (lambda x: keyword(**vars(ARGS)), name(ARGS)),
    "as_a_dict": (lambda x: dataclasses.asdict(PLAN)["fac" + ARGS.name[3:]], name(PLAN)),
    "a_getter": (lambda x: FACTOR_OF(ARGS), name(ARGS)),
    "a_getter_of_a_computed_name": (
        lambda x: operator.attrgetter("fac" + ARGS.name[3:])(PLAN),
        name(PLAN),
    ),
    "a_match": (lambda x: matched(PLAN), name(PLAN)),
    "a_default": (lambda x: scale(x), name(PLAN)),
    "a_closure_of_a_decorator": (lambda x: one(x), name(one.state)),
    "a_partial": (functools.partial(lambda by, x: by.factor, PLAN), name(PLAN)),
    "a_cache": (lambda x: cached(), refill),
    "a_parser": (
        lambda x: CONFIG.getfloat("loss", "factor"),
        lambda v: CONFIG.set("loss", "factor", str(v)),
    ),
    "a_deque": (lambda x: QUEUE[0], put(QUEUE, 0)),
    "an_array": (lambda x: ARRAY[0], put(ARRAY, 0)),
    "a_long_list": (lambda x: LONG[-1], put(LONG, -1)),
    "a_large_array": (lambda x: float(NUMBERS[-1]), put(NUMBERS, -1)),
    "a_context_variable": (lambda x: VARIABLE.get().factor, lambda v: VARIABLE.set(Plan(v))),
    "a_value_of_a_thread": (lambda x: LOCAL.factor, name(LOCAL)),
    "a_weak_reference": (lambda x: REFERENCE().factor, name(PLAN)),
    "a_level_of_a_logger": (
        lambda x: 2.0 if LOGGER.isEnabledFor(logging.DEBUG) else 1.0,
        lambda v: LOGGER.setLevel(logging.DEBUG if v > 1 else logging.ERROR),
    ),
    "a_member": (lambda x: ARGS.mode.value, lambda v: setattr(ARGS, "mode", Mode(v))),
    "an_attribute_that_is_new": (lambda x: getattr(PLAN, "late", 1.0), late(PLAN)),
    "a_class_attribute_that_is_new": (lambda x: getattr(Config, "late", 1.0), late(Config)),
    "a_set": (
        lambda x: 3.0 if "factor" in SEEN else 1.0,
        lambda v: SEEN.add("factor") if v > 1 else SEEN.clear(),
    ),
    "arguments_of_the_command": (
        lambda x: float(len(steered.sys.argv)),
        lambda v: put(steered.sys.argv, slice(1, None))(["more"] * int(v)),
    ),
    "a_variable_of_the_environment": (
        lambda x: float(os.environ.get(VARIABLES[0], "1.0")),
        lambda v: put(os.environ, VARIABLES[0])(str(v)),
    ),
    "a_learning_rate": (
        lambda x: OPTIMIZER.param_groups[0]["lr"],
        put(OPTIMIZER.param_groups[0], "lr"),
    ),
    "a_schedule": (lambda x: SCHEDULER.get_last_lr()[0], moved),
    "a_function_that_is_replaced": (
        lambda x: steered.replaced(),
        lambda v: setattr(steered, "replaced", lambda: v),
    ),
    "one_of_many_others": (lambda x: ARGS.factor * MODEL.factor, name(Model)),
}


# What a step does that a trace of it would not, and how the error begins.
HERE = f'File "{__file__}", line'
REFUSED = {
    "a_count_in_a_class": (lambda x: count(Config), "the step changes Config.calls, which was "),
    "a_count_in_a_module": (lambda x: count(steered), "the step changes steered.calls, which was "),
    "a_count_in_a_user_dict": (lambda x: USER.update(n=USER.get("n", 0) + 1), "the step changes"),
    "a_deque_that_grows": (lambda x: QUEUE.append(1.0), "the step changes what is in QUEUE, when"),
    "a_set_that_grows": (lambda x: SEEN.add(len(SEEN)), "the step changes SEEN, a frozenset, when"),
    "an_iterator": (lambda x: next(ITERATOR), "the step changes ITERATOR, a tuple, whenever"),
    "a_generator": (lambda x: next(ALIVE), "the step changes ALIVE, a tuple, whenever it runs"),
    "a_cycle": (lambda x: next(TURNS), HERE),
    "a_count_of_itertools": (
        lambda x: 2.0 if next(NUMBERED) > 99 else 1.0,
        "the step changes NUMBERED, which was 'count(",
    ),
    "the_time_of_day": (lambda x: 2.0 if time.time() < 9 else 1.0, HERE),
    "a_file_that_is_there": (lambda x: 2.0 if Path("none").exists() else 1.0, HERE),
    "a_file_of_numbers": (lambda x: 2.0 if np.fromfile(__file__, "b")[0] == 0 else 1.0, HERE),
    "numbers_of_the_system": (lambda x: 2.0 if os.urandom(4) == b"none" else 1.0, HERE),
}


def count(holder):
    holder.calls = getattr(holder, "calls", 0) + 1
    return 1.0 if holder.calls < 100 else 2.0


def run(read, change, door):
    """Calls a step beside its eager twin, between changes of what it reads."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def step(x):
        out = model(x)
        if door == "auto" and out.isnan().any():  # Dynamo breaks here
            raise RuntimeError("diverged")
        return out.mean() * read(x)

    compiled = pfeife.compile(step, microbatches=2, stages=1, capture=door)
    for value in (1.0, 3.0, 3.0):
        change(value)
        x = torch.randn(4, 4)
        expected = sum(step(part) for part in x.chunk(2)) / 2
        assert torch.equal(compiled(x), expected), value
    return compiled


def refused(read, door):
    """Calls a step that reads what moves by itself."""
    run(lambda x: read(x) or 1.0, lambda value: None, door)


GATE = ("a_namespace", "a_class", "a_module", "a_user_dict", "a_proxy", "a_getter", "a_cache")
for _name, (_read, _change) in HOLDERS.items():
    for _door in ("trace", "auto"):
        _whole = () if _door == "trace" and _name in GATE else (1,)
        _run = functools.partial(run, _read, _change, _door)
        add(globals(), Row(f"{_name}_{_door}", _run, whole=_whole))
for _name, (_read, _words) in REFUSED.items():
    _run = functools.partial(refused, _read, "trace")
    add(globals(), Row(_name, _run, _words, whole=() if _words == HERE else (1,)))


@row(HERE)
def a_file_that_is_open():
    with open(__file__) as file:
        refused(lambda x: 2.0 if file.readline() == "-" else 1.0, "trace")


@row(whole=(1,))
def through_dynamo():
    """Dynamo guards what it reads itself. (It does not for a metaclass; some it does not take.)"""
    others = {"a_metaclass", "a_getter", "an_array", "a_context_variable", "a_schedule"}
    others |= {"a_getter_of_a_computed_name"}
    for called in HOLDERS.keys() - others - {"a_level_of_a_logger"}:
        torch._dynamo.reset()
        run(*HOLDERS[called], "dynamo")


@row()
def what_the_step_does_not_read_changes():
    """The loop's own counts, variables of the environment, and what is in other files."""

    def change(value):
        ARGS.epoch, Config.late, steered.LOSS = value, value, value
        os.environ[VARIABLES[1]] = str(value)

    def read(x):
        return ARGS.factor * Config.factor * float(os.environ.get(VARIABLES[0], "1.0"))

    assert len(run(read, change, "trace").backend.compiled) == 1


@row()
def a_profiler_goes_on():
    """The one that traces is there for the time of a trace, and another one afterwards."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        run(*HOLDERS["a_namespace"], "trace")
    finally:
        profiler.disable()
    assert sys.getprofile() is None
    known = {at[2] for at in pstats.Stats(profiler).stats}
    assert {"compile", "broken"} <= known


@row()
def the_garbage_collector_asks_for_the_time():
    """What it calls in the middle of a step is not the step's: hypothesis has such a clock."""
    seen = []

    def clock(phase, info):
        seen.append(time.perf_counter())

    def step(x):
        gc.collect()
        return net(x).square().mean()

    net, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    gc.callbacks.append(clock)
    try:
        run = pfeife.compile(step, microbatches=2, stages=1, capture="trace", progress=False)
        loss = run(x)
    finally:
        gc.callbacks.remove(clock)
    assert seen and torch.equal(loss, (step(x[:2]) + step(x[2:])) / 2)
