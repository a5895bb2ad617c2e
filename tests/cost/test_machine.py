"""Machines: profiles whose every figure has a source, names that are found or refused."""

import json
from importlib import resources

import attrs
import pytest
import torch
from torch import nn

import pfeife
from pfeife.cost import default_machine, machine, machines
from pfeife.cost.machine import machine_called
from pfeife.data import plain
from pfeife.data.machine import Machine

CORE, H100 = machine("cpu-core"), machine("h100-sxm")
aten = torch.ops.aten


def test_names():
    assert {"cpu-core", "v100-sxm2-32gb", "a100-sxm-80gb", "h100-sxm", "h200-sxm"} < set(machines())
    assert {"b200-hgx", "mi300x", "rtx-4090", "l40s"} < set(machines())
    assert list(machines()) == sorted(machines())


@pytest.mark.parametrize("name", machines())
def test_a_shipped_profile(name):
    """Every figure that somebody wrote down has a source; what is sustained is below the peak."""
    profile = machine(name)
    assert profile.name == name
    defaults = Machine("", 1.0, 1.0, 1, 1.0)
    for field in attrs.fields(Machine):
        figure = field.name not in ("name", "device_names", "sources")
        if figure and getattr(profile, field.name) != getattr(defaults, field.name):
            source = profile.sources[field.name]
            assert "https://" in source or source.startswith("Assumed"), field.name
    assert set(profile.flops) == set(profile.peak_flops) >= {"float32", "float64"}
    for dtype, rate in profile.flops.items():
        assert 0.3 * profile.peak_flops[dtype] < rate <= profile.peak_flops[dtype], dtype
    if name != "cpu-core":
        assert profile.peak_memory_bandwidth and profile.device_names
        assert 0.5 < profile.memory_bandwidth / profile.peak_memory_bandwidth <= 1
        assert profile.link_bandwidth < profile.memory_bandwidth
        assert profile.flops["float16"] > profile.flops["float32"]
    written = plain.to_json(profile)
    assert plain.from_json(Machine, written) == profile
    assert plain.to_json(plain.from_json(Machine, written)) == written
    assert "http" not in str(profile), "the sources are not part of what is printed"


def test_damaged_profiles_are_refused():
    """What an editor might do to a file that a person made from a shipped one."""
    text = (resources.files("pfeife.cost") / "machines" / "h100-sxm.json").read_text()
    assert plain.from_json(Machine, text) == H100
    float32 = '"float32": 53000000000000.0'
    for old, new, message in (
        (float32, '"float23": 5', r"flops: \['float23'\] are no dtypes; .* 'bfloat16'"),
        (f"{float32},", "", r"flops must have 'float32', .* there are \['bfloat16'"),
        (float32, '"float32": -1', r"Machine\.flops\['float32'\] must be positive, not -1"),
        (float32, '"float32": "5"', r"Machine\.flops\.float32: expected a finite float"),
        ('"peak_flops": {', '"peak_flops": {"half": 1,', r"peak_flops: \['half'\] are no dtypes"),
        ('"link_latency"', '"latency"', r"unknown fields \['latency'\]"),
        ('"link_latency"', '"overlap": 2, "link_latency"', "overlap must be from 0 to 1, not 2"),
        ('"link_latency"', '"overlap": null, "link_latency"', "overlap: expected a finite float"),
        ('"memory": 8', '"memory": -8', "memory must be positive, not -8"),
        ('"peak_memory_bandwidth": 3', '"peak_memory_bandwidth": -3', "bandwidth must be positive"),
        ('"sources": {', '"sources": {"colour": "red",', r"sources: \['colour'\] are no fields"),
        ('"sources": {', '"sources": {"memory": 3,', "a field twice"),
        ("}\n}\n", "}\n", "this is not JSON"),
    ):
        assert old in text, old
        with pytest.raises(ValueError, match=message):
            plain.from_json(Machine, text.replace(old, new, 1))


def test_names_and_paths(tmp_path):
    """A name that is none is answered with the names there are; a file is read as strictly."""
    with pytest.raises(ValueError, match=r"'H100-smx' is no file and none of \[.*'cpu-core'.*\]; "):
        machine("H100-smx")
    with pytest.raises(ValueError, match="the nearest is 'h100-sxm'"):
        machine("H100-smx")
    with pytest.raises(ValueError, match="is no file and none of"):
        machine(tmp_path / "none.json")
    mine = attrs.evolve(H100, name="mine", flops={"float32": 1.0, "float16": 3.0}, overlap=0.25)
    plain.save(mine, tmp_path / "mine.json")
    assert machine(tmp_path / "mine.json") == machine(str(tmp_path / "mine.json")) == mine
    (tmp_path / "mine.json").write_text(json.dumps({"name": "mine"}))
    with pytest.raises(ValueError, match=r"mine\.json: Machine: .*missing fields \['flops', "):
        machine(tmp_path / "mine.json")


def test_gpus_are_known_by_name():
    for called, name in {
        "Tesla V100-SXM2-16GB": "v100-sxm2-32gb",
        "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
        "NVIDIA H100 80GB HBM3": "h100-sxm",
        "NVIDIA H200": "h200-sxm",
        "NVIDIA B200": "b200-hgx",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA GeForce RTX 4090": "rtx-4090",
        "NVIDIA L40S": "l40s",
    }.items():
        assert machine_called(called) == machine(name)
    for called in ("NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA L40", ""):
        assert machine_called(called) is None


def test_the_machine_that_a_device_belongs_to():
    here = default_machine(torch.device("cpu"))
    assert here.memory > 2**28
    assert attrs.evolve(here, memory=CORE.memory, sources=CORE.sources) == CORE
    beyond = torch.device("cuda", torch.cuda.device_count())
    assert default_machine(beyond) == default_machine(torch.device("meta")) == H100
    if torch.cuda.is_available():
        gpu = default_machine(torch.device("cuda"))
        assert gpu.memory == torch.cuda.get_device_properties(0).total_memory


def test_a_machine_as_an_option(tmp_path):
    """By its name or file, wrong ones are refused before anything is captured."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(4, 4)
    plain.save(H100, tmp_path / "mine.json")
    seconds = []
    for given in ("h100-sxm", H100, tmp_path / "mine.json", "cpu-core"):
        step = pfeife.compile(lambda x: model(x).square().sum(), stages=2, machine=given)
        step(x).backward()
        seconds.append(step.backend.compiled[0].plan.stage_seconds)
        torch._dynamo.reset()
    assert seconds[0] == seconds[1] == seconds[2] != seconds[3]
    with pytest.raises(ValueError, match="'h1000' is no file and none of"):
        pfeife.backend(machine="h1000")
    with pytest.raises(ValueError, match="option machine=5: must be a Machine, the name of one"):
        pfeife.backend(machine=5)
