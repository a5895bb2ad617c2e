"""The rules of the house that a machine can check: layers, private names, printing, README."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A module may import from the lines above its own, and from its own folder; modules of one line
# stand side by side.
LAYERS = [
    "program seeding boundary plain progress",
    "plan outline _torch",
    "arguments evaluate options wiring clocks",
    "capture passes cost",
    "sched runtime microbatch",
    "compare",
    "report testing call",
    "artifacts",
    "backend __main__",
]
APART = {"passes", "sched", "runtime"}  # what they share lives below them


def parts(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT / "pfeife").with_suffix("").parts


MODULES = sorted(path for path in (ROOT / "pfeife").rglob("*.py") if parts(path) != ("__init__",))


def imported(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "pfeife"
            yield from (f"pfeife.{alias.name}" for alias in node.names) if whole else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer(part: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if part in names.split())


@pytest.mark.parametrize("path", MODULES, ids=lambda path: "/".join(parts(path)))
def test_a_module(path):
    text = path.read_text()
    tree = ast.parse(text)
    me = parts(path)[0]
    for name in imported(tree):
        words = name.split(".")
        assert words[0] != "pickle"
        if words[0] == "pfeife" and words[1] != me:
            assert layer(words[1]) < layer(me), f"{me} imports {name}"
            assert not {me, words[1]} <= APART, f"{me} imports {name}"
        if words[:2] == ["torch", "distributed"]:
            assert parts(path) in {("runtime", "distributed"), ("cost", "network")}
        if any(word.startswith("_") for word in words[1:]) and words[0] == "torch":
            assert me == "_torch" or name == "torch.utils._pytree", f"private {name}"
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"eval", "exec"} and ("print" not in calls or me == "__main__")
    assert ast.get_docstring(tree), "a module says what it is for"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_runs():
    """All snippets, one after another, as one program."""
    program = "\n".join(snippets())
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert snippets() and run.returncode == 0, run.stderr


@pytest.mark.parametrize("launcher", [["--stages", "2"], None])
def test_the_example_trains(launcher):
    """In one process and on two ranks: it exits with an error if a loss differs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / "train_gpt.py"), "--steps", "3"]
    whole = [*command, *example] if launcher is None else [sys.executable, *example, *launcher]
    run = subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert "3 of 3 losses are the same, bit for bit" in run.stdout
