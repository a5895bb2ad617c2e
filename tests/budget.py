"""Lines of code of each folder of the package, and how many it may have: `python tests/budget.py`.

A commit that needs more raises the number here, and says in its message which capability a user
has for it. Comments, docstrings, blanks and imports are free: nobody saves on these.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "pfeife"
BUDGET = {
    ".": 230,
    "_torch": 1600,
    "backend": 1610,
    "backend/building": 890,
    "backend/calls": 650,
    "backend/doors": 250,
    "backend/settings": 500,
    "backend/state": 440,
    "commands": 1460,
    "compilers": 350,
    "cost": 810,
    "data": 1170,
    "factors": 480,
    "frontend": 1580,
    "frontend/cache": 440,
    "frontend/checks": 770,
    "frontend/deferred": 920,
    "frontend/rows": 1010,
    "frontend/trace": 1580,
    "integrations": 330,
    "ir": 1890,
    "lowering": 1220,
    "passes": 1420,
    "report": 830,
    "report/page": 770,
    "runtime": 830,
    "runtime/distributed": 930,
    "runtime/distributed/batches": 260,
    "runtime/distributed/links": 460,
    "runtime/distributed/liveness": 490,
    "runtime/distributed/served": 1040,
    "runtime/distributed/state": 1110,
    "runtime/local": 250,
    "sched": 740,
    "sched/cutting": 1690,
    "sched/families": 410,
    "sched/search": 1700,
    "testing": 240,
}
_FREE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Those with code on them, without docstrings and imports."""
    free: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        lines = _docstring(node) if isinstance(node, _DOCUMENTED) else None
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines = node
        if lines is not None:
            free |= {*range(lines.lineno, (lines.end_lineno or lines.lineno) + 1)}
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _FREE:
            used |= {*range(token.start[0], token.end[0] + 1)}
    return len(used - free)


def _docstring(node: ast.AST) -> ast.stmt | None:
    first = node.body[0] if node.body else None  # type: ignore[attr-defined]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first if is_text and isinstance(first.value.value, str) else None


def counted() -> Counter[str]:
    """Lines of code by folder."""
    lines: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[path.parent.relative_to(PACKAGE).as_posix()] += code_lines(path.read_text())
    return lines


if __name__ == "__main__":
    for folder, lines in sorted(counted().items(), key=lambda row: -row[1]):
        sys.stdout.write(f"{lines:6} of {BUDGET.get(folder, 0):6}  {folder}\n")
    sys.stdout.write(f"{counted().total():6} of {sum(BUDGET.values()):6}\n")
