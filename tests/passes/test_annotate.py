"""Costs on a program: those of its own calls, all of them."""

import pytest
from programs import CPU_CORE, fused

import pfeife
from pfeife.cost import estimate
from pfeife.data.plan import Costs


def test_annotate_refuses_unknown_calls():
    program = fused("DropoutNet")
    costs = estimate(program, CPU_CORE)
    assert pfeife.annotate(costs)(program).calls[0].seconds == costs.seconds[program.calls[0].node]
    with pytest.raises(ValueError, match=r"\(by hand\) know nothing of \['cluster_0_forward', "):
        pfeife.annotate(Costs("by hand", {}))(program)
