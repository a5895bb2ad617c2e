"""The documentation: each block of code runs by itself, and what is said of the code is so."""

import importlib
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from pfeife.__main__ import _parser

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FRAMEWORKS = re.compile("^from (transformers|lightning|pfeife.integrations)", re.MULTILINE)  # slow
THEIRS = [pytest.mark.whole, pytest.mark.filterwarnings("ignore")]
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def blocks(language: str) -> list:
    """The code blocks of a language on all pages: page, line and text."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 1
            marks = THEIRS if FRAMEWORKS.search(block[1]) else []
            found.append(pytest.param(line, block[1], id=f"{page.name}:{line}", marks=marks))
    return found


@pytest.mark.parametrize("line, code", blocks("python"))
def test_a_block_runs_by_itself(line, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(DOCS)
    importlib.reload(importlib.import_module("example_model"))  # the same module for Dynamo
    script = tmp_path / "block.py"
    script.write_text("\n" * line + code)
    runpy.run_path(str(script))


@pytest.mark.parametrize("line, code", blocks("sh"))
def test_a_command_can_be_given(line, code):
    """The shell can parse it, there are the files that it names, and `pfeife` takes its options."""
    parsed = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
    assert not parsed.returncode, parsed.stderr
    for name in re.findall(r"(?:examples|benchmarks|docs)/\w+\.\w+", code):
        assert (ROOT / name).exists(), name
    for command in code.replace("\\\n", " ").splitlines():
        words = shlex.split(command, comments=True)
        if "pfeife" in words:
            _parser().parse_args(words[words.index("pfeife") + 1 :])


def messages() -> list[str]:
    """The messages of the page on troubleshooting: `### ` and a message in backticks."""
    text = (DOCS / "troubleshooting.md").read_text()
    return re.findall(r"^### `+(.*?)`+$", text, re.MULTILINE)


def test_messages_are_those_of_the_code():
    sources = "".join(path.read_text() for path in (ROOT / "pfeife").rglob("*.py"))
    code = re.sub(r"""["']\n\s+f?["']""", "", sources)  # strings that go on in the next line
    found = {message: message.split("...") for message in messages()}
    assert len(found) > 30 and all(max(map(len, parts)) > 15 for parts in found.values())
    assert not [message for message, parts in found.items() if not is_in(code, parts)]


def test_tests_that_are_named_exist():
    named = set[tuple[str, str]]()
    for page in PAGES:
        named |= set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()))
    assert len(named) > 15
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def is_in(code: str, parts: list[str]) -> bool:
    """Whether all parts are in the code, one behind the other and close together."""
    longest = re.escape(max(parts, key=len))
    near = (code[max(0, at.start() - 300) : at.end() + 300] for at in re.finditer(longest, code))
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(one) for one in near)
