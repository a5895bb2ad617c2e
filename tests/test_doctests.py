"""The examples in the docstrings of what people call first."""

import doctest
import sys
from types import ModuleType

import pytest
import torch

import pfeife
from pfeife import cost, sched
from pfeife.ir.editing.copying import copied
from pfeife.ir.messages import messages
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.problem import StageCosts, chain_edges

FIRST = [
    *(pfeife.compile, pfeife.capture, pfeife.evaluate, pfeife.record, pfeife.deferred_init),
    *(pfeife.Checkpoints, pfeife.totals),
    *(pfeife.Program.rewrite, pfeife.Program.replace, pfeife.Program.edit),
    *(pfeife.fuse, pfeife.partition, pfeife.insert_send_recv, pfeife.apply, pfeife.Family),
    *(sched.plan, sched.families.one_f_one_b, sched.search_schedule),
    *(sched.simulate, sched.predict, cost.machine, cost.memory_curves, pfeife.Network.of),
    *(cost.assumed_rates, copied),
]
NAMES = {  # that the examples use without an import
    **{"torch": torch, "pfeife": pfeife, "sched": sched, "messages": messages},
    **{"copied": copied, "Network": pfeife.Network, "cost": cost},
    **{"machine": cost.machine, "estimate": cost.estimate, "memory_curves": cost.memory_curves},
    **{"chain": chain, "insert_actions": insert_actions},
    **{"StageCosts": StageCosts, "chain_edges": chain_edges},
}


@pytest.mark.parametrize("function", FIRST, ids=lambda function: function.__name__)
def test_the_example_of(function, monkeypatch):
    module = ModuleType("example")  # Dynamo looks up a function's globals by the name of its module
    vars(module).update(NAMES)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (found,) = doctest.DocTestFinder(recurse=False).find(function)
    found.globs = vars(module)
    assert found.examples, "it has none"
    wrong: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    runner.run(found, out=wrong.append, clear_globs=False)
    assert not runner.failures, "".join(wrong)
