"""The figures of steps, in one process; on ranks `distributed/loops.py` has a row."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F
from listening import Lines
from models import case
from torch.utils.flop_counter import FlopCounterMode

import pfeife
from pfeife.cost import machine
from pfeife.data import plain
from pfeife.data.figures import StepFigures, mean_of
from pfeife.report import step_line


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_figures_of_calls_that_train():
    """Operations are those that torch counts in eager, also where some are done twice; calls that
    build or evaluate have no figures, and what lies between them counts for nothing."""
    one, seen, core = case("GPT"), [], machine("cpu-core")
    options = {"recompute": "always", "replicas": 2}
    step = pfeife.compile(one.step, microbatches=4, stages=2, on_step=seen.append, **options)
    batch = one.batch(8)
    for _ in range(3):
        step(*batch).backward()
        with torch.no_grad():
            step(*batch)
    assert [figures.step for figures in seen] == [2, 3]
    figures = seen[-1]
    assert figures.flops == counted(lambda: one.step(*batch).backward())
    assert figures.samples == 8 and figures.tokens == batch[0].numel()
    assert figures.peak_seconds == pytest.approx(figures.flops / 96e9 / 4)
    assert figures.machine == core.name and len(figures.peak_bytes) == 1
    assert len(figures.account_bytes) == len(figures.waiting_seconds) == 4
    assert all(0 <= waits <= figures.seconds for waits in figures.waiting_seconds)
    assert figures.peak_bytes[0] > max(figures.account_bytes) > 0
    assert plain.from_json(StepFigures, plain.to_json(figures)) == figures
    assert json.loads(json.dumps(figures.as_dict()))["mfu"] == figures.utilization


def test_a_line_every_so_many_calls():
    """With the loss outside, too: the backward is a part of the call."""
    one, lines, log = case("GPT"), Lines(), logging.getLogger("pfeife")
    model = pfeife.compile(one.model, microbatches=2, stages=2, log_every=2)
    tokens, targets = one.batch(4)
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        for _ in range(5):
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    finally:
        log.removeHandler(lines)
        log.setLevel(logging.NOTSET)
    found = [text for r in lines.records if (text := r.getMessage()).startswith("step ")]
    assert [text.split(":")[0] for text in found] == ["step 2", "step 4"]
    assert all("tokens/s" in text and "rank " in text for text in found), found


def test_an_error_of_the_function_is_the_callers():
    one, calls = case("GPT"), []

    def stop(figures):
        calls.append(figures)
        if len(calls) == 1:
            raise StopIteration("enough")

    step = pfeife.compile(one.step, microbatches=2, on_step=stop)
    step(*one.batch(4))
    with pytest.raises(StopIteration, match="enough"):
        step(*one.batch(4))
    step(*one.batch(4))
    assert [figures.step for figures in calls] == [2, 3]


def test_the_line():
    one = StepFigures(20, 1.0, 0.5, 16, 4096, 3e12, 0.3, "h100", (0.1, 0.3), (2**30,), (2**20,) * 2)
    other = StepFigures(
        21, 2.0, 0.5, 16, 4096, 3e12, 0.3, "h100", (0.1, 0.5), (2**30,), (2**20,) * 2
    )
    assert step_line(mean_of([one, other])) == (
        "step 21: 2 s (0.5 s of it between calls), 2.05k tokens/s, 1.5 TFLOP/s (15 % of 2 x "
        "h100), rank 1 waits 0.4 s, 1.0 GiB at the peak (account 1.0 MiB + 1.0 MiB)"
    )
