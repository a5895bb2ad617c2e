"""`step.report`: the page of a step, and what a measured call leaves behind: nothing."""

import sys

import pytest
import small
import torch
from torch import nn

import pfeife


def test_a_report_of_a_step(tmp_path):
    """Nothing is compiled before; measured or not, the page has what there is, and the next call
    computes what it would have."""
    path, batch = tmp_path / "out.html", torch.randn(8, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = pfeife.compile(lambda x: model(x).square().mean(), microbatches=4, stages=2)
    with pytest.raises(ValueError, match="nothing was compiled yet; call the step first"):
        step.report(path)
    torch.manual_seed(1)
    step.report(path, batch)
    page = path.read_text()
    for word in ("step, predicted", "measured ", "Bytes were not measured", "batch_norm"):
        assert word in page
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    loss = step(batch)
    torch.manual_seed(1)
    assert torch.equal(loss, step(batch))
    step.report(path)
    assert "Nothing was measured" in path.read_text()


def test_what_cannot_be_measured_says_so(tmp_path):
    one = small.net()
    step = pfeife.compile(one.step, microbatches=4, stages=2, replicas=2)
    with pytest.raises(ValueError, match="in one process one without replicas"):
        step.report(tmp_path / "out.html", one.batch(8))
    assert not list(tmp_path.iterdir())
    assert torch.isfinite(step(one.batch(8)))


def test_without_plotly_nothing_runs(tmp_path, monkeypatch):
    """The error says what to install, before a step is compiled for it."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    one = small.net()
    step = pfeife.compile(one.step, microbatches=4, stages=2)
    with pytest.raises(ImportError, match=r"drawn by plotly.*pip install 'pfeife\[report\]'"):
        step.report(tmp_path / "out.html", one.batch(8))
    assert not step.backend.compiled
