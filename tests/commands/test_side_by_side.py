"""Plans that other processes make are those that this one makes."""

import argparse
from pathlib import Path

import pytest

from pfeife.commands import side_by_side
from pfeife.commands.compare import arguments
from pfeife.commands.programs import Captures, changed
from pfeife.commands.side_by_side import each_planned, planned

STEP = """
import torch
def example(batch):
    net = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
    return (lambda x: net(x).square().mean()), torch.ones(batch, 16)
"""


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """Options of six plans of one program, the last of which is refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sided.py").write_text(STEP)
    parser = argparse.ArgumentParser()
    arguments(parser)
    asked = ("--machine", "cpu-core", "--ranks", "2", "--microbatches", "4", "--batch", "8")
    options = parser.parse_args(["sided.py:example", *asked, "--no-cache"])
    alone = {
        name: values[0]
        for name, values in vars(options).items()
        if isinstance(values, tuple) and values
    }
    options = changed(options, **alone, precision="fp32", typed="")
    ways = [{"schedule": name} for name in ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v")]
    return [changed(options, **way) for way in (*ways, {"ranks": 64})]


def test_another_process_makes_the_same_plans(questions, monkeypatch):
    """All plans are those of this process, each once, and refusals are the same."""
    alone = [planned(Captures(None), options) for options in questions]
    assert alone[-1].refused and not any(figures.refused for figures in alone[:-1])
    asked = []
    helpers = side_by_side._helpers
    monkeypatch.setattr(side_by_side, "_WORTHWHILE", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(
        side_by_side, "_helpers", lambda *request: (asked.append(request[-1]), helpers(*request))[1]
    )
    together = dict(each_planned(Captures(None), questions))
    assert asked == [1]  # one process beside this one
    assert [together[number] for number in range(len(questions))] == alone


def test_a_process_that_ends_is_told_of(questions, monkeypatch):
    """Its last words are in the error, and nothing hangs."""
    captures = Captures(None)
    captures.of(questions[0])
    other = '{"nodes": [], "texts": []}'
    monkeypatch.setattr(side_by_side, "save", lambda program, path, _: Path(path).write_text(other))
    with (
        side_by_side._helpers(captures, questions[0], 1) as (helper,),
        pytest.raises(ChildProcessError, match="a process that plans has ended"),
    ):
        helper(questions[0])
