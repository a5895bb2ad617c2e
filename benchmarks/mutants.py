"""Faults put in one at a time: some test must fail with each.

    python benchmarks/mutants.py                             every check of pfeife/ taken out
    python benchmarks/mutants.py --since 924a0f3             those that came after a commit
    python benchmarks/mutants.py --faults 150 pfeife/sched pfeife/cost      random faults
    python benchmarks/mutants.py --tests tests/test_edges.py by some tests alone

A check is a `raise`, or a warning to the log. A fault is a comparison, a number, a sign, a
condition or a call that is another one, or left out, drawn with a seed evenly from all statements.
The tests run once on a copy of the tree that notes which test comes to which place; then each
fault is put into the copy alone, and the tests that came to it run again, those with the fewest
places first: at most 8 launches of 32 tests each (`AT_MOST`, `ROWS`). Prints every fault that no
test comes to or sees, with how many of those that come to it were not tried, and apart from these
every fault of which the tests tell nothing: they took too long, or pytest itself failed. Exits
non-zero if there is one of either.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue

import attrs
import pytest
from tqdm import tqdm

HERE = Path(__file__).parent.parent
HITS = "mutant_hits"  # a module of the copy alone
NOTING = """
import os

SEEN = set()

def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (number, test) not in SEEN:
        SEEN.add((number, test))
        with open(os.environ["MUTANT_HITS"], "a") as out:
            out.write(f"{number} {test}\\n")
"""
KINDS = ("seen", "missed", "not told")
SILENT = 0.05  # of the tests, which may fail where places are noted
AT_MOST = 8  # tests that may show one fault; those that share a launch of processes count as one
ROWS = 32  # tests of one launch
SECONDS = 300  # that they may take
# How pytest ends where a test is not there, as where what it imports raises an error.
UNCOLLECTED = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.USAGE_ERROR,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@attrs.frozen
class Fault:
    """A piece of a file, from one (line, column) to another, both from 0, and what comes instead.
    `line` is where the statement begins in which it is."""

    file: str
    line: int
    begin: tuple[int, int]
    end: tuple[int, int]
    was: str
    becomes: str

    def __str__(self) -> str:
        return f"{self.file}:{self.begin[0] + 1}: {_line(self.was)} -> {_line(self.becomes)}"


def _line(text: str) -> str:
    return " ".join(text.split())[:100]


def _fault(file: str, statement: ast.stmt, node: ast.expr | ast.stmt, becomes: str) -> Fault:
    assert node.end_lineno is not None and node.end_col_offset is not None
    begin, end = (node.lineno - 1, node.col_offset), (node.end_lineno - 1, node.end_col_offset)
    return Fault(file, statement.lineno - 1, begin, end, ast.unparse(node), becomes)


def checks_of(file: str, source: str) -> list[Fault]:
    """The checks of a file taken out, where each is on lines of its own."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        warns = isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.warning(")
        if (isinstance(node, ast.Raise) and node.exc is not None) or warns:
            assert isinstance(node, ast.stmt)
            if lines[node.lineno - 1].strip().startswith(("raise", "log")):
                found.append(_fault(file, node, node, "pass"))
    return sorted(found, key=lambda one: one.begin)


def faults_of(file: str, source: str) -> list[list[Fault]]:
    """The random faults of a file: for every statement of a function those that it may have."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for statement in _statements(function.body):
                several = [f for f in _in(file, statement, source.splitlines()) if f]
                if several:
                    found.append(several)
    return found


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements but definitions inside, and raises, which are checks."""
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef | ast.Raise | ast.Assert):
            continue
        yield one
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(one, part, []))
        for handler in getattr(one, "handlers", []):
            yield from _statements(handler.body)


def _in(file: str, statement: ast.stmt, lines: Sequence[str]) -> Iterator[Fault | None]:
    """The faults of a statement itself, not of those inside."""
    if lines[statement.lineno - 1].strip().startswith("elif"):  # nothing can be noted before it
        return
    if isinstance(statement, ast.Expr):
        if isinstance(statement.value, ast.Call):
            yield _fault(file, statement, statement, "pass")
        return
    if isinstance(statement, ast.If | ast.While):
        yield _fault(file, statement, statement.test, f"(not ({ast.unparse(statement.test)}))")
        values: list[ast.AST] = [statement.test]
    elif isinstance(statement, ast.For):
        values = [statement.iter]
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return):
        values = [statement.value] if statement.value else []
    else:
        return
    for value in values:
        for node in _walk(value):
            yield _changed(file, statement, node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all in it, but for f-strings, whose parts have no places of their own."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _walk(child)


def _changed(file: str, statement: ast.stmt, node: ast.AST) -> Fault | None:
    other: ast.expr | None = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        if not isinstance(node.left, ast.Constant | ast.JoinedStr):
            other = ast.BinOp(node.left, OPERATIONS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        switched = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        other = ast.BoolOp(switched, node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        other = node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        value = node.value
        other = ast.Constant(not value if isinstance(value, bool) else value + 1)
    elif isinstance(node, ast.IfExp):
        other = ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        swap = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
        if node.func.id in ("min", "max") or (node.func.id in swap and not node.keywords):
            other = ast.Call(ast.Name(swap[node.func.id]), node.args, node.keywords)
    if other is None:
        return None
    assert isinstance(node, ast.expr)
    return _fault(file, statement, node, f"({ast.unparse(ast.fix_missing_locations(other))})")


def drawn(files: Sequence[str], count: int, seed: int) -> list[Fault]:
    """So many faults, no two of one statement."""
    several = [one for file in files for one in faults_of(file, (HERE / file).read_text())]
    chooser = random.Random(seed)
    found = [chooser.choice(one) for one in chooser.sample(several, min(count, len(several)))]
    return sorted(found, key=lambda one: (one.file, one.begin))


def changed_lines(revision: str) -> dict[str, set[int]]:
    """By file the lines, from 0, that a commit does not have, in this file or one that it was
    moved from."""
    command = ["git", "diff", "--unified=0", "--find-renames=30%", "-l0", revision]
    text = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    for part in re.split(r"^diff --git ", text, flags=re.MULTILINE)[1:]:
        file = part.partition("\n")[0].rpartition(" b/")[2]
        for begin, count in re.findall(r"^@@ [^+]*\+(\d+)(?:,(\d+))? @@", part, re.MULTILINE):
            lines = range(int(begin) - 1, int(begin) - 1 + int(count or 1))
            found.setdefault(file, set()).update(lines)
    return found


def noting(source: str, faults: Sequence[tuple[int, Fault]]) -> str:
    """The file with a note before the statement of every fault."""
    lines = source.splitlines()
    for number, one in sorted(faults, key=lambda pair: pair[1].line, reverse=True):
        indent = lines[one.line][: -len(lines[one.line].lstrip())]
        lines.insert(one.line, f"{indent}__import__({HITS!r}).hit({number})")
    return "\n".join(lines) + "\n"


def with_fault(source: str, one: Fault) -> str:
    """The file with a fault. Columns count bytes."""
    lines = [line.encode() for line in source.splitlines()]
    (first, left), (last, right) = one.begin, one.end
    lines[first : last + 1] = [lines[first][:left] + one.becomes.encode() + lines[last][right:]]
    return b"\n".join(lines).decode() + "\n"


class NotRun(Exception):
    """Raised where the tests say nothing: their failure would look like a fault that is seen."""


@attrs.frozen
class Verdict:
    """What the tests say of a fault: one of `KINDS`; and why, or by which tests it was missed."""

    kind: str
    text: str = ""


class Copy:
    """A copy of the tracked files, in which the tests run."""

    def __init__(self, root: Path):
        self.root, self.hits = root, root / "hits"
        listed = subprocess.run(
            ["git", "ls-files"], cwd=HERE, capture_output=True, text=True, check=True
        )
        for name in listed.stdout.split():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / name, root / name)
        (root / f"{HITS}.py").write_text(NOTING)

    def run(self, tests: Sequence[str], seconds: float | None = None) -> int | None:
        """pytest's exit code; None if the tests take longer."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        path = {"PYTHONPATH": str(self.root), "MUTANT_HITS": str(self.hits)}
        with subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, **path, "COLUMNS": "1000"},  # so that names are not cut
            stdout=(self.root / "log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as running:
            try:
                return running.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                return None

    def log(self) -> str:
        return (self.root / "log").read_text()


def hits_of(
    copy: Copy, faults: Sequence[Fault], tests: Sequence[str], jobs: int
) -> dict[int, list[str]]:
    """The tests that come to the place of every fault, but for those that fail where it is noted
    (they look at the text of the package) and say nothing. Raises NotRun if these are many."""
    files = {one.file for one in faults}
    sources = {file: (HERE / file).read_text() for file in files}
    for file, source in sources.items():
        mine = [(number, one) for number, one in enumerate(faults) if one.file == file]
        (copy.root / file).write_text(noting(source, mine))
    code = copy.run([*tests, "-rfE", *(["-n", str(jobs)] if jobs > 1 else [])])
    log = copy.log()
    failed = set(re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", log, flags=re.MULTILINE))
    counts = re.findall(r"(\d+) (?:passed|failed|errors?)", log.splitlines()[-1])
    few = code == pytest.ExitCode.TESTS_FAILED and len(failed) <= SILENT * sum(map(int, counts))
    if code != pytest.ExitCode.OK and not few:
        raise NotRun(f"{len(failed)} tests fail before there is a fault: {log[-2000:]}")
    print(f"{len(failed)} tests say nothing: {sorted({one.split('[')[0] for one in failed})}")
    for file, source in sources.items():
        (copy.root / file).write_text(source)
    found: dict[int, list[str]] = {}
    for line in copy.hits.read_text().splitlines() if copy.hits.exists() else ():
        number, _, test = line.partition(" ")
        if test and test not in failed and test not in found.setdefault(int(number), []):
            found[int(number)].append(test)
    return found


def chosen(tests: Sequence[str]) -> list[str]:
    """The first tests, with those that share a launch with them (see tests/rows.py)."""
    launches: dict[str, list[str]] = {}
    for test in tests:
        launches.setdefault(re.sub(r"\[(\w+)\.\w+-([2-9])-.*", r" \1 \2", test), []).append(test)
    return [one for rows in list(launches.values())[:AT_MOST] for one in rows[:ROWS]]


def verdict(copy: Copy, fault: Fault, tests: Sequence[str]) -> Verdict:
    """What the tests say with a fault."""
    if not tests:
        return Verdict("missed", "no test comes to it")
    source, tried = (HERE / fault.file).read_text(), chosen(tests)
    (copy.root / fault.file).write_text(with_fault(source, fault))
    try:
        code = copy.run(["-x", *tried], SECONDS)
        text = copy.log()[-2000:]
        ended = code in UNCOLLECTED and copy.run(["--collect-only", *tried], SECONDS)
    finally:
        (copy.root / fault.file).write_text(source)
    if code is None:
        return Verdict("not told", f"the tests took longer than {SECONDS} s")
    if code == pytest.ExitCode.OK:
        return Verdict("missed", f"by {tried}; {len(tests) - len(tried)} tests were not tried")
    if code == pytest.ExitCode.TESTS_FAILED:
        return Verdict("seen")
    if not ended:
        return Verdict("not told", f"pytest ended with {code}: {text}")
    if copy.run(["--collect-only", *tried]) != pytest.ExitCode.OK:
        raise NotRun(copy.log()[-2000:])
    return Verdict("seen")  # a module that the tests import ends with an error


def verdicts(
    copies: Sequence[Copy], faults: Sequence[Fault], hits: Mapping[int, list[str]]
) -> Iterator[tuple[Fault, Verdict]]:
    """The verdict of every fault, as they come; each copy is tried by one thread at a time."""
    busy = Counter(test for tests in hits.values() for test in tests)
    free = Queue[Copy]()
    for copy in copies:
        free.put(copy)

    def one(number: int) -> tuple[Fault, Verdict]:
        copy = free.get()
        try:
            tests = sorted(hits.get(number, []), key=busy.__getitem__)
            return faults[number], verdict(copy, faults[number], tests)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        running = [pool.submit(one, number) for number in range(len(faults))]
        for done in tqdm(
            as_completed(running), total=len(running), disable=not sys.stderr.isatty()
        ):
            yield done.result()


def files_of(given: Sequence[str]) -> list[str]:
    """The Python files of some files and folders."""
    paths = [HERE / one for one in given or ("pfeife",)]
    files = [p for path in paths for p in (path.rglob("*.py") if path.is_dir() else [path])]
    return sorted({str(path.relative_to(HERE)) for path in files})


def summary(said: Mapping[tuple[str, str], int]) -> str:
    """A row a file, with how many faults of each verdict; and all together."""
    every = {**said, **{("all", k): sum(n for (_, o), n in said.items() if o == k) for k in KINDS}}
    files = [*sorted({file for file, _ in said}), "all"]
    return "\n".join(
        f"{file}: {', '.join(f'{every.get((file, kind), 0)} {kind}' for kind in KINDS)}"
        for file in files
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="or folders of pfeife/; all unless given")
    parser.add_argument("--since", help="a commit: the checks that came after it")
    parser.add_argument("--faults", type=int, help="so many random faults instead of the checks")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="what pytest is given")
    parser.add_argument("--hits", type=Path, help="a file for which test comes to which place")
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested at once")
    args = parser.parse_args()
    files = files_of(args.files)
    if args.faults:
        faults = drawn(files, args.faults, args.seed)
    else:
        faults = [one for file in files for one in checks_of(file, (HERE / file).read_text())]
    if args.since:
        new = changed_lines(args.since)
        lines = {f: set(range(f.begin[0], f.end[0] + 1)) for f in faults}
        faults = [f for f in faults if new.get(f.file, set()) & lines[f]]
    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy(Path(folder) / str(number)) for number in range(args.jobs)]
        if args.hits and args.hits.exists():
            known = json.loads(args.hits.read_text())
            hits = {at: known.get(str(one), []) for at, one in enumerate(faults)}
        else:
            hits = hits_of(copies[0], faults, args.tests, args.jobs)
        if args.hits:
            texts = {str(one): hits.get(at, []) for at, one in enumerate(faults)}
            args.hits.write_text(json.dumps(texts, indent=1))
        said = Counter[tuple[str, str]]()
        for fault, one in verdicts(copies, faults, hits):
            said[fault.file, one.kind] += 1
            if one.kind != "seen":
                print(f"{fault}\n    {one.kind}: {one.text}", flush=True)
    print(summary(said))
    sys.exit(any(kind != "seen" for _, kind in said))


if __name__ == "__main__":
    main()
