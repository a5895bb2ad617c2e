"""What people look at: comparisons, tables, the command line."""

import json
import subprocess
import sys

import attrs
import pytest
from programs import fused

import pfeife
from pfeife import report
from pfeife.__main__ import main
from pfeife.cost import estimate, machine, machines, memory_curves
from pfeife.data import plain
from pfeife.data.machine import Link, Network
from pfeife.data.schedule import parse_action
from pfeife.data.timeline import Event, MemoryCurve, MemoryPoint, Timeline
from pfeife.report import compare_memory, compare_times


def timeline(*ends: float) -> Timeline:
    """Two actions of one rank."""
    first, last = ends
    return Timeline(
        (
            Event(0, parse_action("0F0"), 0.0, first),
            Event(0, parse_action("0B0"), first, last),
        )
    )


def test_times_are_compared_by_action_and_in_total():
    rows = compare_times(timeline(1.0, 3.0), timeline(2.0, 4.0), timeline(2.0, 5.0))
    assert [(r.rank, r.action and str(r.action)) for r in rows] == [
        (None, None),
        (0, "0F0"),
        (0, "0B0"),
    ]
    assert [(r.predicted, r.measured) for r in rows] == [(3.0, 4.5), (1.0, 2.0), (2.0, 2.5)]
    assert rows[1].ratio == 0.5
    text = report.comparison_table(compare_times(timeline(0.0015, 0.003), timeline(0.002, 0.004)))
    assert "3.00 ms" in text and "0.750" in text and "0F x 1" in text


def test_what_ran_must_be_what_was_predicted():
    other = Timeline((Event(0, parse_action("0F0"), 0.0, 1.0),))
    with pytest.raises(ValueError, match="only predicted: rank 0, action 0B0"):
        compare_times(timeline(1.0, 2.0), other)
    with pytest.raises(ValueError, match="only measured: rank 0, action 0B0"):
        compare_times(other, timeline(1.0, 2.0))


def test_memory_is_compared_by_action_and_in_total():
    action = parse_action("0F0")
    one = MemoryCurve(0, {"parameters": 10}, (MemoryPoint(action, 6, 4),))
    other = MemoryCurve(0, {"parameters": 10}, (MemoryPoint(action, 10, 4),))
    total, single = compare_memory([one], [other])
    assert (total.predicted, total.measured, total.ratio) == (16, 20, 0.8)
    assert (single.action, single.predicted, single.measured) == (action, 6, 10)
    assert "16 B" in report.comparison_table((total, single))
    assert plain.from_json(MemoryCurve, plain.to_json(one)) == one


def test_a_measured_network_changes_the_plan():
    """Slow links put both ends of the widest border onto one rank, or at least cost more."""
    program = pfeife.annotate(estimate(fused("GPT"), machine("cpu-core")))(fused("GPT"))
    sizes, nothing = (0, 1000), (0.0, 0.0)

    def planned(latency: float):
        links = tuple(
            Link(a, b, sizes, (latency, latency + 1e-9), nothing, nothing, 0.0)
            for a, b in ((0, 1), (1, 0))
        )
        return pfeife.sched.plan(
            program,
            machine=machine("cpu-core"),
            microbatches=4,
            stages=2,
            network=Network(links),
        ).step_seconds

    assert planned(1.0) > 2.0 > planned(1e-6)
    seen = Network((Link(0, 1, sizes, (1.0, 3.0), (0.5, 1.5), nothing, 0.0),)).seen_by(
        machine("cpu-core")
    )
    assert (seen.link_latency, seen.link_bandwidth, seen.overlap) == (1.0, 500.0, 0.5)
    assert Network(()).seen_by(seen) == seen


def test_the_machines_on_the_command_line(capsys):
    assert main(["machines"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in machines())
    with pytest.raises(SystemExit):
        main(["no such command"])


def test_the_network_on_the_command_line(tmp_path, capsys):
    """Alone it says what to do; under torchrun it writes what the planner reads."""
    assert main(["bench-network"]) == 2 and "torchrun" in capsys.readouterr().err
    out = tmp_path / "network.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "pfeife", "bench-network"]
    command += ["--out", str(out), "--repeats", "2", "--largest", "4096"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert "0 -> 1" in run.stdout and "residual" in run.stdout
    network = plain.load(Network, out)
    assert {(link.source, link.destination) for link in network.links} == {(0, 1), (1, 0)}
    damaged = json.loads(out.read_text())
    damaged["links"][0]["seconds"][1] = -1.0
    out.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="seconds"):
        plain.load(Network, out)
    with pytest.raises(ValueError, match="network=3"):
        pfeife.backend(network=3)
    with pytest.raises(ValueError, match="seconds"):
        pfeife.backend(network=str(out))


def test_a_plan_says_what_is_held_when():
    """The tables of a plan and of memory name every rank."""
    program = pfeife.annotate(estimate(fused("GPT"), machine("cpu-core")))(fused("GPT"))
    plan = pfeife.sched.plan(program, machine=machine("cpu-core"), microbatches=4, stages=2)
    ranks = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(program)
    curves = memory_curves(ranks, pfeife.sched.lower(plan.schedule, ranks))
    text = report.memory_table(curves)
    assert "saved" in text and "parameters" in text
    assert all(sum(c.at_peak.values()) == max(p.peak for p in c.points) for c in curves)
    bare = [attrs.evolve(curve, at_peak={}) for curve in curves]
    assert report.size(curves[0].peak) in report.memory_table(bare)
