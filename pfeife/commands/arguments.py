"""Options as people write them: numbers with units, names with values, and those that commands
share."""

import argparse
import ast
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PRECISIONS = {  # the type that is computed in, and the one that the optimizer steps, if wider
    "fp32": ("float32", None),
    "bf16": ("bfloat16", None),
    "fp16": ("float16", None),
    "bf16-mixed": ("bfloat16", "float32"),
    "fp16-mixed": ("float16", "float32"),
}
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def count(text: str) -> int:
    """An argument that is a number from 1 on."""
    # `int` alone also takes "1_000", " 7 " and the digits of other scripts.
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def seconds(text: str) -> float:
    """An argument that is a number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} are no seconds, such as 20 or 0.5")
    return number


def bytes_of(text: str) -> int:
    """An argument such as 80GB, 24GiB or 1000000."""
    match = re.fullmatch(
        r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B)?", text, re.ASCII | re.IGNORECASE
    )
    size = float(match[1]) * _UNITS[(match[2] or "").upper()] if match else 0
    if not 1 <= size < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} are no bytes, such as 80GB or 24GiB")
    return int(size)


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE; the value is JSON where it is, else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as hidden_size=4096")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        # Somebody who thinks in Python writes its words, which JSON does not have.
        return name, {"True": True, "False": False, "None": None}.get(value, value)


def shape(text: str) -> tuple[str, tuple[tuple[int, ...], str]]:
    """NAME=SIZExSIZE:DTYPE, the sizes of a tensor without its rows."""
    match = re.fullmatch(r"([\w.]+)=((?:\d{1,9}(?:x\d{1,9})*)?)(?::(\w+))?", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=SIZES:DTYPE, such as sample=4x128x128 or timestep=:int64"
        )
    sizes = tuple(int(size) for size in match[2].split("x") if size)
    return match[1], (sizes, match[3] or "")


def several(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """An argument that is a list with commas."""

    def read(text: str) -> tuple[Any, ...]:
        # Links have figures with a comma in them.
        parts = re.split(r",(?!\d+(?:\.\d+)?(?:ns|us|ms|s)\b)", text)  # 25GB/s,20us is one
        # A dictionary has each once, in the order in which they were typed.
        return tuple(dict.fromkeys(parse(part) for part in parts))

    return read


def one_of(*words: str) -> Callable[[str], str]:
    """An argument that is one of some words."""

    def read(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {list(words)}")
        return text

    return read


def step_arguments(parser: argparse.ArgumentParser, *, lists: bool = False) -> None:
    """Those that say which step; with commas between several, where `lists` are taken."""
    parser.add_argument(
        "what",
        metavar="STEP",
        help="module:function or file.py:function (returns the step and a batch), a class such as "
        "transformers:LlamaConfig, a model's config.json, or a program that --save-program wrote",
    )
    step = parser.add_argument_group("the step")
    step.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        action="append",
        type=setting,
        default=[],
        help="an option of the configuration, or an argument of the function; may be repeated",
    )
    step.add_argument(
        "--batch",
        **_one_or_more(lists, count),
        help="rows of a step; one a microbatch unless given",
    )
    step.add_argument(
        "--sequence",
        **_one_or_more(lists, count),
        help="tokens of a row; 2048 unless given, or the model's most",
    )
    step.add_argument(
        "--input",
        dest="inputs",
        metavar="NAME=SIZES:DTYPE",
        action="append",
        type=shape,
        default=[],
        help="a tensor that a model is given, without its rows: sample=4x128x128, a.b=6:int64",
    )
    step.add_argument(
        "--precision",
        choices=tuple(PRECISIONS),
        help="of the model (fp32, or that of a saved program); -mixed has float32 master weights, "
        "gradients and optimizer beside it",
    )
    # A folder, or none at all: both would contradict each other.
    cache = step.add_mutually_exclusive_group()
    cache.add_argument("--cache", metavar="FOLDER", help="of captures; $XDG_CACHE_HOME/pfeife")
    cache.add_argument("--no-cache", action="store_true", help="capture anew and keep nothing")


class Flag(NamedTuple):
    """A flag of commands that plan: how its text is read, and which option of the table it is. That
    says what it means, unless the flag has words of its own."""

    name: str
    parse: Callable[[str], Any] = str
    metavar: str | None = None
    default: Any = None
    option: str = ""
    help: str = ""
    required: bool = False
    several: bool = True  # whether it may be a list with commas

    def add(self, group: argparse._ArgumentGroup, lists: bool) -> None:
        """Adds the flag to a parser's group."""
        reading = _one_or_more(lists and self.several, self.parse, self.metavar, self.default)
        text = self.help or meanings()[self.option or self.name.replace("-", "_")]
        group.add_argument(f"--{self.name}", **reading, required=self.required, help=text)


RANKS = Flag("ranks", count, help="of all replicas and members", required=True)
MACHINES = [
    Flag(
        "machine",
        metavar="NAME",
        default="h100-sxm",
        help="a shipped one (`pfeife machines` lists them), or the path of its JSON; h100-sxm "
        "unless given",
    ),
    Flag("nodes", count, default=1, help="of equal size; ranks are neighbours in them"),
    Flag("ranks-per-node", count, help="in place of --nodes: they are as many as the ranks need"),
    Flag(
        "inside",
        metavar="LINK",
        help="what joins the ranks of a node: nvlink4, or figures such as 25GB/s,20us",
    ),
    Flag("between", metavar="LINK", help="what joins the nodes: ib-ndr, or figures"),
    Flag("network", metavar="FILE", help="what `pfeife bench-network` has measured", several=False),
    Flag("memory", bytes_of, "BYTES", option="memory_limit"),
]
MICROBATCHES = Flag("microbatches", count, required=True)
PLAN = [  # what is divided, and what the planner may decide
    Flag("replicas", count, default=1),
    Flag("members", count, default=1),
    Flag("parallel", one_of("auto", "cut", "gathered"), "HOW", "auto"),
    Flag("attention", one_of("gather", "ring"), "HOW", "gather"),
    Flag("stages", count),
    Flag(
        "schedule",
        metavar="NAME",
        default="1f1b",
        help="a family (1f1b, gpipe, zb-h1, ...), search, or the CSV of a schedule",
    ),
    Flag(
        "cut-at",
        one_of("anywhere", "blocks"),
        "WHERE",
        "anywhere",
        help="where stages may end, anywhere or blocks: only between those of the model",
    ),
    Flag("search-seconds", seconds, several=False, help="of a search; 20 unless given"),
    Flag(
        "recompute",
        metavar="WHAT",
        help="never, always, except_last, auto (what memory asks for), or a number",
    ),
    Flag(
        "optimizer",
        metavar="NAME",
        help="whose state counts: AdamW, SGD, ... or bytes for each parameter",
    ),
    Flag(
        "data-parallel",
        one_of("average", "shard"),
        "HOW",
        "average",
        help="what replicas do with gradients, average or shard: each owns a part of the "
        "optimizer's state",
    ),
]


def plan_arguments(
    parser: argparse.ArgumentParser, *, lists: bool = False, sized: bool = True
) -> None:
    """Those that say how it is to run; with commas between several, where `lists` are taken;
    with how many ranks and microbatches, unless these are asked for otherwise."""
    machines = parser.add_argument_group("the machines")
    plan = parser.add_argument_group("the plan")
    for group, size, flags in ((machines, RANKS, MACHINES), (plan, MICROBATCHES, PLAN)):
        for flag in [size] * sized + flags:
            flag.add(group, lists)


@functools.cache
def meanings() -> dict[str, str]:
    """What options mean, in a sentence each: of the table of options, which is read and not
    imported, since torch would come with it and take seconds."""
    table = Path(__file__).parent.parent / "backend" / "settings" / "option_table.py"
    nodes = ast.parse(table.read_text()).body
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, ast.ClassDef)]
    rows = re.findall(r"^(\w+): (.*(?:\n    .*)*)", "\n".join(texts), re.MULTILINE)
    sentences = {name: " ".join(text.split()).split(". ")[0].rstrip(".") for name, text in rows}
    # As other flags have it; and "%" is a format for argparse.
    return {n: (text[0].lower() + text[1:]).replace("%", "%%") for n, text in sentences.items()}


def _one_or_more(
    lists: bool, parse: Callable[[str], Any], name: str | None = None, default: Any = None
) -> dict[str, Any]:
    """How an argument is read: a value, or several with commas between them."""
    if not lists:
        return {"metavar": name, "type": parse, "default": default}
    each = None if default is None else (default,)
    return {"metavar": "A,B,...", "type": several(parse), "default": each}


def number_or_text(text: str | None) -> Any:
    """What may be a name or a number."""
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            return text
