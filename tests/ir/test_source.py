"""A program's text is a file that computes the same bits."""

import re
import runpy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from share import random_cases
from small import clusters, net

import pfeife
from pfeife import sched
from pfeife.testing import nets


def same(program: pfeife.Program, inputs: list[torch.Tensor], path) -> None:
    path.write_text(program.source())
    written = runpy.run_path(str(path))["Program"]()
    found, expected = written(*inputs), program.module(*inputs)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@random_cases(6)
@given(st.data())
def test_the_text_of_any_level_computes_the_same(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("source") / "program.py"
    one = data.draw(nets(linear=2))
    program = pfeife.capture(lambda x: one(x).square().mean(), torch.ones(3, 4))
    state = pfeife.state_of(program, one)
    values = [
        state.get(port.fqn, torch.ones(port.shape, dtype=port.dtype)) for port in program.inputs
    ]
    same(program, values, path)
    fused = pfeife.fuse()(program)
    same(fused, values, path)


def test_a_program_with_messages_is_a_script_without_pfeife(tmp_path, capsys):
    plan = pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    ranks = pfeife.apply(plan)(clusters(net()))
    path = tmp_path / "program.py"
    path.write_text(ranks.source())
    assert not re.search("^(import|from) pfeife", path.read_text(), re.MULTILINE)
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[0] == "loss torch.float32 []"


def test_a_large_constant_is_refused():
    table = torch.zeros(2**17)
    program = pfeife.capture(lambda x: (x * 2).sum(), torch.ones(2))
    held = program.rewrite(lambda o: None)
    held.module.register_buffer("table", table)
    with held.module.graph.inserting_before(next(iter(held.module.graph.nodes))):
        held.module.graph.get_attr("table")
    with pytest.raises(ValueError, match="constant table has 131072 elements"):
        held.source()


def test_a_script_with_open_sizes(tmp_path, capsys):
    """It runs at those of the capture."""
    x = torch.ones(3, 5)
    for dim in range(2):
        torch._dynamo.mark_dynamic(x, dim)
    program = pfeife.capture(lambda x: (x * x.shape[1]).flatten().tanh(), x)
    path = tmp_path / "program.py"
    path.write_text(program.source())
    runpy.run_path(str(path), run_name="__main__")
    assert "output_0 torch.float32 [15]" in capsys.readouterr().out
