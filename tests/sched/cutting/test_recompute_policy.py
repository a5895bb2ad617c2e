"""What to recompute, as somebody asks for it."""

import pytest
import torch
from small import CORE, clusters, compiled, net
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import memory_curves
from pfeife.sched.cutting.memory_limit import curves_of


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("never", [0, 0]),
        ("always", [2, 2]),
        ("except_last", [2, 0]),
        (1, [2, 2]),
        (2, [1, 1]),
        (["blocks.0"], [1, 0]),
    ],
)
def test_what_is_recomputed(recompute, again):
    """By stages, how many of their two blocks."""
    plan = compiled(partition="uniform", stages=2, recompute=recompute).plan
    found = plan.recompute or (pfeife.RecomputeOption(),) * 2
    assert [sum("tanh" in name for name in one.names) for one in found] == again
    assert (plan.step_seconds > compiled(partition="uniform", stages=2).plan.step_seconds) == (
        any(again)
    )


def test_backwards_in_two_parts_recompute_too():
    found = compiled(partition="uniform", stages=2, schedule="zb-h1", recompute=1)
    assert all(option.names for option in found.plan.recompute)


def test_as_much_is_recomputed_as_the_memory_asks_for():
    limits = [
        peaks(compiled(stages=2, schedule="gpipe", recompute=how)) for how in ("never", "always")
    ]
    most, least = limits
    assert least < most
    seconds = []
    for limit in (most, (most + least) // 2, least):
        found = compiled(stages=2, schedule="gpipe", recompute="auto", memory_limit=limit)
        assert peaks(found) <= limit
        seconds.append(found.plan.step_seconds)
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    with pytest.raises(ValueError, match="the best plan found needs"):
        compiled(stages=2, schedule="gpipe", recompute="auto", memory_limit=least - 1)


class Wide(nn.Module):
    """A block that is wide inside: what it computes again takes more than what it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh().sin().tanh())


def test_where_all_at_once_has_no_room_blocks_do_it_one_by_one():
    """Keeping least is not needing least: a stage of six blocks that keeps its input alone has all
    of one microbatch's insides at once, at the end of what it computes again."""
    one = net()
    one.model.blocks = nn.ModuleList(Wide() for _ in range(12))
    program = clusters(one, rows=32)

    def plan(how, limit=None):
        asked = {"machine": CORE, "microbatches": 4, "stages": 2, "schedule": "1f1b"}
        return sched.plan(program, recompute=how, memory_limit=limit, **asked)

    def peak(found) -> int:
        return max(curve.peak for curve in curves_of(program, found))

    whole, blocks = peak(plan("always")), peak(plan(1))
    assert blocks < whole
    assert peak(plan("auto", blocks)) <= blocks


def peaks(found) -> int:
    return max(curve.peak for curve in memory_curves(found.program, found.schedule))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "sometimes"}, "option recompute='sometimes': must be one of"),
        ({"recompute": 0}, "option recompute=0: must be one of"),
        ({"recompute": True}, "option recompute=True: must be one of"),
        ({"recompute": 5}, r"recompute=5: the model has 4 blocks \(modules such as"),
        ({"recompute": ["head"]}, r"no module 'head' computes anything; there are \['blocks.0', "),
        ({"recompute": "always", "schedule": "search"}, "the search decides what to recompute"),
        ({"partition": "uniform", "split_at": {"blocks.1": "end"}}, "both say where to cut"),
    ],
)
def test_wrong_requests_to_recompute_are_refused(options, message):
    one = net()
    with pytest.raises(ValueError, match=message):
        pfeife.compile(one.step, microbatches=4, stages=2, **options)(one.batch(8))
