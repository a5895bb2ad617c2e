"""The kit for passes is at hand without hypothesis, and sees what a pass must not do."""

import subprocess
import sys

import attrs
import pytest
import torch
from small import net

import pfeife
from pfeife.testing import check_pass

WITHOUT = """
import sys
sys.modules["hypothesis"] = None
from pfeife.testing import check_pass, RandomNet
try:
    from pfeife.testing import nets
except ImportError as error:
    print(error)
"""


def test_only_strategies_need_hypothesis():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=100, check=True
    )
    assert "pfeife.testing.nets needs hypothesis: pip install pfeife[dev]" in run.stdout


def edits_its_input(program):
    program.module.graph.eliminate_dead_code()
    program.module.graph.erase_node(list(program.module.graph.nodes)[-1])
    return program


def test_what_a_pass_must_not_do():
    one = net()
    program = pfeife.capture(one.step, one.batch(2))
    kit = {"state": pfeife.state_of(program, one.model), "microbatches": [one.batch(2)]}

    def doubled(operation):
        if operation.target is torch.ops.aten.tanh.default:
            return operation.make(torch.ops.aten.sin.default, *operation.args)
        return None

    with pytest.raises(AssertionError, match=r"loss differs by up to"):
        check_pass(lambda p: p.rewrite(doubled), program, **kit)
    with pytest.raises(AssertionError, match="returned GraphModule, not a Program"):
        check_pass(lambda p: p.module, program, **kit)
    check_pass(lambda p: p.rewrite(doubled), program, **kit, rounding=None, within=2.0)
    copy = program.rewrite(lambda operation: None)
    with pytest.raises(AssertionError, match="the pass edited its input"):
        check_pass(edits_its_input, attrs.evolve(program, module=copy.module), **kit)
