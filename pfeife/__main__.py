"""The command line: `python -m pfeife`, or `pfeife`.

The commands are in `pfeife.commands`. Each imports what it needs when it runs, so that help and
mistakes take no time.
"""

import argparse
import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pfeife.commands import (
    bench_network,
    compare,
    demo,
    explain,
    fit,
    machines,
    plan,
    profile,
    show,
    simulate,
)
from pfeife.version import VERSION

COMMANDS: dict[str, Any] = {
    "demo": demo,
    "plan": plan,
    "compare": compare,
    "fit": fit,
    "simulate": simulate,
    "explain": explain,
    "profile": profile,
    "show": show,
    "machines": machines,
    "bench-network": bench_network,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 2 for a mistake, which is said in a line."""
    parser = _parser()
    typed = sys.argv[1:] if arguments is None else arguments
    # The command as typed is among the options: answers say how somebody else gets them again.
    options = parser.parse_args(typed, argparse.Namespace(typed=shlex.join(["pfeife", *typed])))
    if options.command is None:
        print(parser.format_help().rstrip())
        return 0
    try:
        with _told():
            text = COMMANDS[options.command].run(options)
        if text:
            print(text)
            sys.stdout.flush()  # a closed pipe is to fail here, where that is expected
    except BrokenPipeError:  # who reads has seen enough
        # Python flushes the output once more at its end, which must not fail again. The status is
        # that of a program that SIGPIPE ends (128 + 13), as 130 is that of an interrupted one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"pfeife {options.command}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"pfeife {options.command}: {_by_flags(str(error), options)}", file=sys.stderr)
        return 2
    return 0


def _by_flags(text: str, options: argparse.Namespace) -> str:
    """A message in a line, with the flags of a command in place of Python's names of its options:
    --memory 80000000 for memory_limit=80000000."""

    def flag(match: re.Match[str]) -> str:
        name = {"memory_limit": "memory"}.get(match["name"], match["name"])
        return f"--{name.replace('_', '-')} {match['value']}" if name in options else match[0]

    return re.sub(r"\b(?P<name>[a-z_]+)=(['\"]?)(?P<value>[\w.-]+)\2", flag, " ".join(text.split()))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What takes how long, on standard error; on a terminal there are bars."""
    log, before = logging.getLogger("pfeife"), logging.getLogger("pfeife").level
    lines = logging.StreamHandler(sys.stderr)
    if not sys.stderr.isatty():
        log.addHandler(lines)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(before)  # `main` may be called again in this process, as tests do


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pfeife",
        description="Automatic pipeline parallelism for PyTorch.",
        epilog="`pfeife COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"pfeife {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=module.EXAMPLES,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(own)
    return parser


if __name__ == "__main__":
    sys.exit(main())
