"""The options `parallel` and `members`, before anything runs."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import pfeife
from pfeife.backend.settings.options import options_from
from pfeife.data.machine import Mesh

PLAN = {"0": "colwise", "1": ColwiseParallel(), "2.weight": 0}


def test_styles_are_told_by_their_names():
    """Ranks compare what they were given as texts: an object of torch's would have an address."""
    texts = options_from({"members": 2, "parallel": PLAN}).texts
    assert texts["parallel"] == "{'0': 'colwise', '1': 'ColwiseParallel', '2.weight': 0}"


def test_a_mesh_gives_the_members():
    options = options_from({"mesh": Mesh(2, 2, members=2), "parallel": PLAN, "microbatches": 2})
    assert (options.members, options.replicas) == (2, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel": PLAN}, "say with members= over how many ranks"),
        ({"attention": "ring"}, "say with members= how many share a stage"),
        ({"attention": "around", "members": 2}, r"must be one of \['gather', 'ring'\]"),
        ({"parallel": ["colwise"]}, "option parallel=.*must be 'auto', 'cut', 'gathered', or a"),
        ({"parallel": PLAN, "members": 2, "cuda_graphs": True}, "leave cuda_graphs out"),
        ({"parallel": PLAN, "members": 3, "mesh": Mesh(1, members=2)}, "which has 2"),
    ],
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(ValueError, match=words):
        options_from(options)


def test_one_process_is_one_member():
    net = nn.Linear(4, 4)
    step = pfeife.compile(lambda x: net(x).mean(), members=2, parallel={"weight": 0})
    with pytest.raises(ValueError, match="the members of a group are processes; start 2 for"):
        step(torch.ones(2, 4))
