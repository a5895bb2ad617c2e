"""Texts of decisions and what accidents make of them."""

import functools
import json
import re

import attrs
from hypothesis import assume
from hypothesis import strategies as st

from pfeife import sched
from pfeife.cost import machine, machines
from pfeife.cost.cache import Measured
from pfeife.data import plain
from pfeife.data.link import Link
from pfeife.data.network import Network
from pfeife.data.plan import Costs, Plan, RecomputeOption
from pfeife.data.schedule import Action, Do
from pfeife.data.timeline import MemoryCurve, MemoryPoint
from pfeife.lowering.lower import chain, insert_actions

ORDER = insert_actions(sched.families.gpipe(2, 2), chain(sched.families.gpipe(2, 2)))
LINK = Link(0, 1, (0, 1000), (1e-6, 2e-6), (1e-7, 1e-7), (0.0, 0.0), 0.5)
VALUES = {
    "plan": Plan(
        (0, 0, 1),
        ORDER,
        ("mask",),
        (1.0, 2.0),
        3.5,
        3.25,
        (RecomputeOption(8, 0.25, ("relu",)), RecomputeOption()),
    ),
    "schedule": ORDER,
    "network": Network((LINK, attrs.evolve(LINK, source=1, destination=0))),
    "nodes": Network.of(nodes=2, ranks_per_node=2, inside="nvlink4", between="ib-ndr"),
    "costs": Costs("measured", {"a": 1.0, "b": 0.5}, {"a": 0.1}, {"b": 0.25}),
    "measured": Measured("aten.mm [4, 4]", 0.5, 0.125, 5, 0.0),
    "timeline": sched.simulate(ORDER, lambda action: 0.5 if action.do.kind else 0.0),
    "memory": MemoryCurve(1, {"parameters": 64}, (MemoryPoint(Action(0, Do.FORWARD, 0), 9, 4),)),
    **{name: machine(name) for name in machines()},
}
TEXTS = {name: plain.to_json(value) for name, value in VALUES.items()}
CSVS = (
    ORDER.to_csv(),
    sched.families.zb_v(4, 4, (0, 1, 1, 0)).to_csv(),
    sched.families.one_f_one_b(3, 4).to_csv(),
)
EXTREMES = (
    *("0", "-1", "1", "-0.0", "0.5", "1e-300", "5e-324", "1e300", "1e999", "-1e308", "NaN"),
    *("Infinity", "true", "null", "9223372036854775807", "9223372036854775808", "1" + "0" * 30),
    *("1" + "0" * 400, "1" + "0" * 4400, "999999999", "-9223372036854775809", "1.0", "007"),
)
TOKENS = (
    *'{}[]",:.-+eE019 \n\r\\\x00@_FBIW',
    *(
        "null",
        "[[",
        "]]",
        "\r\n",
        "\ufeff",
        "\u0663",
        "\\ud800",
        "é",
        '""',
        '"a":',
        "0F0,",
        "[" * 2000,
    ),
)
OTHERS = (None, True, False, 0, -1, 1.5, 2**63, 1e300, "", "x", "\ud800", [], {}, [[]], {"a": 1})
ACCIDENTS = ("flip", "delete", "insert", "double", "truncate", "splice", "number")


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A text after one to three accidents."""
    for _ in range(draw(st.integers(1, 3))):
        at, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        short = min(end, at + draw(st.integers(0, 12)))
        match draw(st.sampled_from(ACCIDENTS)):
            case "flip" if at < len(text):
                flipped = chr(ord(text[at]) ^ 1 << draw(st.integers(0, 6)))
                text = text[:at] + flipped + text[at + 1 :]
            case "delete":
                text = text[:at] + text[short:]
            case "insert":
                text = text[:at] + draw(st.sampled_from(TOKENS)) + text[at:]
            case "double":
                text = text[:end] + text[at:end] + text[end:]
            case "truncate":
                text = text[:at]
            case "splice":
                text = text[:at] + text[end:] + text[at:end]
            case "number":
                found = list(re.finditer(r"-?\d+(\.\d+)?(e[-+]?\d+)?", text))
                if found:
                    one = draw(st.sampled_from(found))
                    new = draw(st.sampled_from(EXTREMES))
                    text = text[: one.start()] + new + text[one.end() :]
    return text


def places(data: object, path: tuple = ()) -> list[tuple]:
    """The paths of all values in JSON data but the outermost."""
    if not isinstance(data, dict | list):
        return []
    found = []
    for key, item in data.items() if isinstance(data, dict) else enumerate(data):
        found += [(*path, key), *places(item, (*path, key))]
    return found


def put(data, path: tuple, value) -> None:
    functools.reduce(lambda inner, key: inner[key], path[:-1], data)[path[-1]] = value


def at(data, path: tuple):
    return functools.reduce(lambda inner, key: inner[key], path, data)


@st.composite
def regrown(draw: st.DrawFn, text: str) -> str:
    """JSON text with other values in it, or two of its own exchanged, doubled or dropped."""
    data = json.loads(text)
    paths = places(data)
    one = draw(st.sampled_from(paths))
    match draw(st.sampled_from(["replace", "swap", "drop", "double"])):
        case "replace":
            put(data, one, draw(st.sampled_from(OTHERS)))
        case "swap":
            other = draw(st.sampled_from(paths))
            assume(one != other[: len(one)] and other != one[: len(other)])
            first, second = at(data, one), at(data, other)
            put(data, one, second)
            put(data, other, first)
        case "drop":
            del at(data, one[:-1])[one[-1]]
        case "double":
            holder = at(data, one[:-1])
            if isinstance(holder, list):
                holder.append(holder[one[-1]])
            else:
                holder[f"{one[-1]}_"] = holder[one[-1]]
    return json.dumps(data)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str]:
    name = draw(st.sampled_from(list(TEXTS)))
    return name, draw(draw(st.sampled_from((damaged, regrown)))(TEXTS[name]))
