"""A plan by hand keeps to where state is trained."""

import functools

import pytest
from small import CORE, clusters

import pfeife
from pfeife import sched
from pfeife.sched import adopt_plan
from pfeife.sched.cutting.memory_limit import curves_of


def test_a_plan_keeps_to_where_state_is_trained():
    program, plan = clusters(), pfeife.Plan((0, 0, 1, 1), sched.families.one_f_one_b(2, 4))
    first = program.ports(pfeife.Role.PARAMETER)[0].fqn
    adopt = functools.partial(
        adopt_plan.adopted,
        plan,
        program,
        microbatches=4,
        memory_limit=CORE.memory,
        curves=functools.partial(curves_of, program),
    )
    assert adopt(owners={first: frozenset({0, 1})}) == plan
    with pytest.raises(ValueError, match=rf"{first} on ranks \[0\], .* it on ranks \[1\]"):
        adopt(owners={first: frozenset({1})})
