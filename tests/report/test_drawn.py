"""A program as DOT has its calls and messages; graphviz draws it."""

import re
import shutil

import pytest
from small import clusters, net

import pfeife
from pfeife import report, sched


def test_a_program_is_drawn(monkeypatch):
    plan = pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    ranks = pfeife.apply(plan)(clusters(net()))
    text = report.dot(ranks)
    assert len(re.findall("style=dashed", text)) == 3  # F to F and B, B to B
    assert "stage_1_backward\\nrank 1, " in text and '"32 B"' in text
    if shutil.which("dot"):
        assert "stage_1_backward" in report.svg(ranks)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="apt install graphviz"):
        report.svg(ranks)
