"""Every check taken out once: some test must fail without it.

    python benchmarks/mutants.py                        all checks of pfeife/
    python benchmarks/mutants.py --since 924a0f3        those that came after a commit
    python benchmarks/mutants.py pfeife/step.py         those of some files
    python benchmarks/mutants.py --tests tests/test_edges.py    by some tests alone

A check is a `raise`, or a warning to the log. The tests run once on a copy of the tree that notes
which test comes to which check; then each check is taken out of the copy alone, and the tests that
came to it run again, those with the fewest checks first. Prints every check that no test comes to
or misses; exits non-zero if there is one.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs
import pytest
from tqdm import tqdm

HERE = Path(__file__).parent.parent
HITS = "mutant_hits"  # a module of the copy alone
NOTING = """
import os

def hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with open(os.environ["MUTANT_HITS"], "a") as out:
        out.write(f"{number} {test}\\n")
"""
AT_MOST = 8  # tests that may show one missing check
SECONDS = 300  # that they may take


@attrs.frozen
class Check:
    """A statement: its file, its first and last line, from 0."""

    file: str
    first: int
    last: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.first + 1}: {self.text}"


def checks_of(file: str, source: str) -> list[Check]:
    """The checks of a file, each on lines of its own."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(ast.parse(source)):
        warns = isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.warning(")
        if (isinstance(node, ast.Raise) and node.exc is not None) or warns:
            assert node.end_lineno is not None
            text = " ".join(ast.unparse(node).split())
            found.append(Check(file, node.lineno - 1, node.end_lineno - 1, text[:100]))
    return sorted(
        (one for one in found if lines[one.first].strip().startswith(("raise", "log"))),
        key=lambda one: one.first,
    )


def changed_lines(revision: str, file: str) -> set[int]:
    """The lines of a file, from 0, that a commit does not have."""
    command = ["git", "diff", "--unified=0", revision, "--", file]
    text = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout
    found: set[int] = set()
    for begin, count in re.findall(r"^@@ [^+]*\+(\d+)(?:,(\d+))? @@", text, re.MULTILINE):
        found |= set(range(int(begin) - 1, int(begin) - 1 + int(count or 1)))
    return found


def noting(source: str, checks: Iterable[tuple[int, Check]]) -> str:
    """The file with a note before every check."""
    lines = source.splitlines()
    for number, one in checks:
        indent = lines[one.first][: -len(lines[one.first].lstrip())]
        note = f"{indent}__import__({HITS!r}).hit({number}); "
        lines[one.first] = note + lines[one.first].lstrip()
    return "\n".join(lines) + "\n"


def without(source: str, check: Check) -> str:
    """The file without a check."""
    lines = source.splitlines()
    indent = lines[check.first][: -len(lines[check.first].lstrip())]
    lines[check.first : check.last + 1] = [f"{indent}pass"]
    return "\n".join(lines) + "\n"


class NotRun(Exception):
    """Raised where the tests say nothing: their failure would look like a check that is seen."""


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

    def run(self, tests: Sequence[str], seconds: float | None = None) -> bool:
        """Whether the tests pass; they do not if they take longer. Raises NotRun if pytest does
        not find them."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        path = {"PYTHONPATH": str(self.root), "MUTANT_HITS": str(self.hits)}
        with subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, **path},
            stdout=(self.root / "log").open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as running:
            try:
                code = running.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, 9)
                return False
        if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise NotRun((self.root / "log").read_text()[-2000:])
        return code == 0


def hits_of(copy: Copy, checks: Sequence[Check], tests: Sequence[str]) -> dict[int, list[str]]:
    """The tests that come to every check."""
    files = {one.file for one in checks}
    sources = {file: (HERE / file).read_text() for file in files}
    for file, source in sources.items():
        mine = [(number, one) for number, one in enumerate(checks) if one.file == file]
        (copy.root / file).write_text(noting(source, mine))
    if not copy.run(tests):
        raise NotRun((copy.root / "log").read_text()[-2000:])
    for file, source in sources.items():
        (copy.root / file).write_text(source)
    found: dict[int, list[str]] = {}
    for line in copy.hits.read_text().splitlines() if copy.hits.exists() else ():
        number, _, test = line.partition(" ")
        if test and test not in found.setdefault(int(number), []):
            found[int(number)].append(test)
    return found


def verdict(copy: Copy, check: Check, tests: Sequence[str]) -> str:
    """What the tests say without a check."""
    if not tests:
        return "no test comes to it"
    source = (HERE / check.file).read_text()
    (copy.root / check.file).write_text(without(source, check))
    try:
        passed = copy.run(["-x", *tests[:AT_MOST]], SECONDS)
    finally:
        (copy.root / check.file).write_text(source)
    return f"missed by {tests[:AT_MOST]}" if passed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of pfeife/; all unless given")
    parser.add_argument("--since", help="a commit: the checks that came after it")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="what pytest is given")
    parser.add_argument("--hits", type=Path, help="a file for which test comes to which check")
    args = parser.parse_args()
    files = args.files or [str(p.relative_to(HERE)) for p in (HERE / "pfeife").rglob("*.py")]
    checks = [one for file in sorted(files) for one in checks_of(file, (HERE / file).read_text())]
    if args.since:
        new = {file: changed_lines(args.since, file) for file in {one.file for one in checks}}
        checks = [c for c in checks if new[c.file] & set(range(c.first, c.last + 1))]
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        if args.hits and args.hits.exists():
            known = json.loads(args.hits.read_text())
            hits = {at: known.get(str(one), []) for at, one in enumerate(checks)}
        else:
            hits = hits_of(copy, checks, args.tests)
        if args.hits:
            texts = {str(one): hits.get(at, []) for at, one in enumerate(checks)}
            args.hits.write_text(json.dumps(texts, indent=1))
        busy = Counter(test for tests in hits.values() for test in tests)
        left = 0
        for number, check in enumerate(tqdm(checks, disable=not sys.stderr.isatty())):
            tests = sorted(hits.get(number, []), key=busy.__getitem__)
            said = verdict(copy, check, tests)
            if said:
                left += 1
                print(f"{check}\n    {said}", flush=True)
    print(f"{len(checks)} checks, {left} not seen")
    sys.exit(left > 0)


if __name__ == "__main__":
    main()
