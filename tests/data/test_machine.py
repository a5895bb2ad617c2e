"""Machines and meshes as data: what figures they may have, rates by dtype, transfers."""

import attrs
import pytest
import torch

from pfeife.cost import machine
from pfeife.data.machine import Machine, Mesh

CORE, H100 = machine("cpu-core"), machine("h100-sxm")


def test_mesh():
    assert Mesh(3, 2).size == 6
    for wrong in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="must be positive"):
            Mesh(*wrong)


@pytest.mark.parametrize("known", [CORE, H100], ids=lambda one: one.name)
@pytest.mark.parametrize("field", ["memory_bandwidth", "memory", "link_bandwidth"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_rates_are_positive(known, field, value):
    with pytest.raises(ValueError, match=rf"Machine\.{field} must be positive, not {value}"):
        attrs.evolve(known, **{field: value})
    for rates in ("flops", "peak_flops"):
        with pytest.raises(ValueError, match=rf"Machine\.{rates}\['float32'\] must be positive"):
            attrs.evolve(known, **{rates: value})


@pytest.mark.parametrize("field", ["link_latency", "launch_seconds", "action_seconds", "overlap"])
@pytest.mark.parametrize("value", [-1e-9, float("nan")])
def test_what_is_not_negative(field, value):
    assert getattr(attrs.evolve(CORE, **{field: 0}), field) == 0
    with pytest.raises(ValueError, match=rf"Machine\.{field} must (not be neg|be from 0)"):
        attrs.evolve(CORE, **{field: value})


def test_rates_by_dtype():
    """A number alone is float32's; a dtype without a rate of its own runs at that."""
    simple = Machine("m", 1e14, 1e12, 2**43, 1e11)
    assert simple.flops == {"float32": 1e14}
    assert simple.flops_of(torch.float32) == simple.flops_of(torch.bfloat16) == 1e14
    assert H100.flops_of(torch.bfloat16) == H100.flops["bfloat16"] > H100.flops_of(torch.float32)
    given = {"float32": 1, "float16": 2}
    copied = attrs.evolve(simple, flops=given)
    given["float32"] = 5
    assert copied.flops_of(torch.float32) == 1 and copied.flops_of(torch.float16) == 2


def test_transfers():
    assert CORE.transfer_seconds(0) == CORE.link_latency
    assert attrs.evolve(CORE, link_latency=2.0, link_bandwidth=4.0).transfer_seconds(8) == 4.0
