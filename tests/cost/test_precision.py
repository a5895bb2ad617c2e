"""A dtype that a machine's profile lacks is said, with the rate that stands in for it."""

import attrs
import pytest
import torch
from torch import nn

import pfeife
from pfeife import sched
from pfeife.cost import assumed_rates, estimate, machine

V100 = machine("v100-sxm2-32gb")


def clusters_of(dtype: torch.dtype) -> pfeife.Program:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 8, dtype=dtype), nn.ReLU(), nn.Linear(8, 8, dtype=dtype))
        x = torch.ones(2, 8, dtype=dtype)
    clusters = pfeife.fuse()(pfeife.capture(lambda x: net(x).sum(), x))
    return pfeife.annotate(estimate(clusters, V100))(clusters)


@pytest.mark.parametrize(
    ("name", "dtype", "assumed"),
    [
        ("v100-sxm2-32gb", torch.bfloat16, ("bfloat16",)),
        ("v100-sxm2-32gb", torch.float16, ()),
        ("v100-sxm2-32gb", torch.float32, ()),
        ("h100-sxm", torch.bfloat16, ()),
        ("cpu-core", torch.bfloat16, ()),
    ],
)
def test_what_a_profile_lacks(name, dtype, assumed):
    found = assumed_rates(clusters_of(dtype), machine(name))
    assert tuple(one.dtype for one in found) == assumed
    assert all(one.share == 1.0 and one.rate == V100.flops["float32"] for one in found)


def test_a_profile_may_tell_of_any_dtype():
    """float8 is known where the file has it."""
    program = clusters_of(torch.bfloat16)
    known = attrs.evolve(V100, flops={**V100.flops, "bfloat16": 1e13, "float8_e4m3fn": 1e15})
    assert assumed_rates(program, known) == ()


def test_plans_and_explanations_say_it(lines):
    program = clusters_of(torch.bfloat16)
    sched.plan(program, machine=V100, microbatches=2, stages=2)
    said = "machine v100-sxm2-32gb has no rate for bfloat16, in which 100% of the operations are"
    assert sum(said in record.getMessage() for record in lines.records) == 1
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    options = {"microbatches": 2, "stages": 2, "machine": "v100-sxm2-32gb"}
    found = pfeife.explain(lambda x: net(x).float().sum(), x, options=options)
    assert any(said in warning for warning in found.warnings) and said in str(found)
