"""Families: what the table says of them, and arguments that are bound."""

import pytest

import pfeife
from pfeife import sched
from pfeife.sched.families import gpipe


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
    ours = pfeife.Family("ours", lambda stages, count, ranks=None, size=3: gpipe(stages, size))
    assert ours.bind(size=2)(2, 4) == gpipe(2, 2)
    any_of_them = pfeife.Family("any", lambda s, m, ranks=None, **sizes: gpipe(s, sizes["size"]))
    assert any_of_them.bind(size=2)(2, 4) == gpipe(2, 2)


def test_what_makes_no_schedules_is_refused():
    with pytest.raises(
        ValueError, match=r"family two is made by .* with \(stages, microbatches, ra"
    ):
        pfeife.Family("two", lambda stages, microbatches: gpipe(stages, microbatches))
    with pytest.raises(ValueError, match="the family text made a str, not a Schedule"):
        pfeife.Family("text", lambda stages, count, ranks: "0F0,0B0")(1, 1)
