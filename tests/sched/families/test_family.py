"""Families: what the table says of them, and arguments that are bound."""

import pytest

from pfeife import sched


def test_the_table_says_what_its_families_do():
    for name, family in sched.POLICIES.items():
        stage_ranks = family.placement(4, 2)
        order = family(4, 4, stage_ranks)
        split = any(action.do == "I" for rank in order.ranks for action in rank)
        assert (family.name, family.splits) == (name, split)
    assert {name for name, f in sched.POLICIES.items() if not f.seeds} == {
        "naive",
        "breadth-first",
        "loops",
    }


def test_arguments_of_a_family():
    family = sched.POLICIES["loops"].bind(loop_batch=2).bind(prefetch=1)
    assert str(family) == "loops(loop_batch=2, prefetch=1)"
    assert family(2, 4) == sched.families.loops(2, 4, loop_batch=2, prefetch=1)
    with pytest.raises(ValueError, match=r"loops has no arguments \['batch'\]; it has \['loop_b"):
        family.bind(batch=3)
