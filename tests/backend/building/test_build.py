"""Building shows itself: a bar and a line in the log for each phase."""

import io
import logging
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from listening import PHASES, Terminal
from models import case
from small import compiled

import pfeife
from pfeife import report, sched

LOG = logging.getLogger("pfeife")


def run_shown(monkeypatch, stream, **options):
    """Builds and runs a step of three stages with standard error going to a stream."""
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=3, **options)
    monkeypatch.setattr(sys, "stderr", stream)
    step(*one.batch(4)).backward()
    monkeypatch.undo()
    return step


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_phase_of_a_build_has_a_bar(monkeypatch, replicas):
    terminal = Terminal()
    step = run_shown(monkeypatch, terminal, costs="measure", replicas=replicas)
    seen = terminal.getvalue()
    places = [seen.index(f"pfeife: {label} ...") for label in PHASES]
    assert places == sorted(places)
    count = len(step.backend.compiled[0].schedule.ranks[0])
    assert seen.rpartition("first step ")[2].startswith(f"[{'#' * 30}] {count}/{count}")
    assert re.search(r"measuring \[#{30}\] (\d+)/\1\b", seen)


def test_no_bar_without_a_terminal_or_by_an_option(monkeypatch):
    file, terminal = io.StringIO(), Terminal()
    run_shown(monkeypatch, file)
    torch._dynamo.reset()
    run_shown(monkeypatch, terminal, progress=False)
    assert file.getvalue() == terminal.getvalue() == ""
    with pytest.raises(ValueError, match="progress='no'"):
        pfeife.backend(progress="no")


def test_the_log_has_a_line_a_phase(lines):
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2, costs="measure")
    for seed in range(3):
        step(*one.batch(4, seed)).backward()
    *texts, last, door = [record.getMessage() for record in lines.records]
    assert [text.split(",")[0] for text in texts] == PHASES, "one line each, none for later steps"
    said = (
        r"compiled _words.<locals>.step in [\d.]+ s: 2 stages on 2 ranks, 2 microbatches of 2 rows"
    )
    assert (
        re.fullmatch(said, last)
        and door == "_words.<locals>.step is captured by Dynamo as one graph"
    )
    assert {record.levelno for record in lines.records} == {logging.INFO}
    compiled = step.backend.compiled[0]
    program = compiled.captured.program
    nodes = len(program.module.graph.nodes)
    assert re.fullmatch(
        rf"capturing, [\d.]+ s: {len(program.inputs)} inputs, {len(program.outputs)} outputs, "
        rf"{nodes} nodes",
        texts[0],
    )
    assert texts[1].endswith(f"s: {compiled.clusters.units} clusters")
    assert "s: 1f1b, " in texts[3] and report.summary(compiled.plan, compiled.program) in texts[3]
    assert "at the peak of the worst rank" in texts[3]
    step(*one.batch(8))
    later = [r.getMessage().split(",")[0] for r in lines.records[8:-1]]
    assert later == PHASES, "another shape"


def test_details_are_for_debugging(lines):
    LOG.setLevel(logging.DEBUG)
    one = case("GPT")
    step = pfeife.compile(one.step, microbatches=2, stages=2)
    step(*one.batch(4))
    compiled = step.backend.compiled[0]
    table = report.plan_table(compiled.plan, compiled.program)
    details = [r for r in lines.records if r.levelno == logging.DEBUG]
    assert any(table in record.getMessage() for record in details)


def test_a_loss_outside_is_shown_in_two_parts(monkeypatch, lines):
    one, terminal = case("GPT"), Terminal()
    model = pfeife.compile(one.model, microbatches=2, stages=2)
    tokens, targets = one.batch(4)
    monkeypatch.setattr(sys, "stderr", terminal)
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    monkeypatch.undo()
    labels = [record.getMessage().split(",")[0] for record in lines.records]
    door = "GPT is captured by Dynamo as one graph"
    assert re.fullmatch(r"compiled GPT in [\d.]+ s: 2 stages on 2 ranks", labels[-3])
    assert (labels[-4], *labels[-2:]) == ("first forward", door, "first backward")
    assert len(labels) == len(set(labels))
    count = len(model.backend.compiled[0].schedule.ranks[0])
    assert f"first backward [{'#' * 30}] {count}/{count}" in terminal.getvalue()


def test_a_model_on_the_meta_device_is_planned():
    with torch.device("meta"):
        model, x = (
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
            torch.ones(8, 4),
        )
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4, stages=2)
    assert step(x).is_meta and step.backend.compiled[0].plan.stages == 2


def test_what_was_built_is_written_on_a_page():
    """However many actions and values there are, and without any of them."""
    built = compiled(microbatches=8, stages=4)
    long = sched.families.gpipe(64, 512)
    everything = [built, built.program, built.plan, built.schedule, built.history, long]
    for one in everything:
        text = repr(one)
        assert len(text.splitlines()) <= 40 and len(text) < 6000, type(one)
        assert "tensor(" not in text and "Port(" not in text
    assert "64 ranks, 512 microbatches" in repr(long)
    assert "insert_send_recv" in repr(built) and "4 stages on 4 ranks" in repr(built)
