"""What a plan is expected to do, in words: its advice is about what it loses most by."""

import functools
import itertools

import attrs
import pytest
import torch
from torch import nn

import pfeife
from pfeife import report
from pfeife.cost import machine
from pfeife.data.advice import advice
from pfeife.data.forecast import KINDS
from pfeife.data.link import LinkKind, link_kind
from pfeife.data.network import Network
from pfeife.forecasting import Question


@functools.cache
def program(*widths: int):
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairs))
    flat = pfeife.forecasting.flat_program(
        lambda x: net(x).square().mean(), torch.ones(64, widths[0])
    )
    return flat


def forecast(*widths: int, **question):
    given = {"machine": "cpu-core", "ranks": 2, "microbatches": 2} | question
    return pfeife.forecast(program(*widths), **given).forecast


EVEN = (512,) * 9


@pytest.mark.parametrize(
    ("widths", "question", "said", "better"),
    [
        (EVEN, {}, "the pipeline fills and empties for ", {"microbatches": 16}),
        ((8, 512, 512, 8), {"microbatches": 32}, "rank 1 computes 1.", {"ranks": 1}),
        (EVEN, {"microbatches": 32, "rate": 1e5}, "messages take ", {"rate": 1e10}),
        (
            *(EVEN, {"microbatches": 32, "rate": 1e7, "members": 2, "parallel": "cut"}),
            *("members of a stage wait for one another", {"members": 1, "ranks": 1}),
        ),
        (
            *(EVEN, {"microbatches": 32, "rate": 1e7, "members": 2, "parallel": "gathered"}),
            *(
                "parameters are told and gradients reduced for 78% of the step: join the members",
                {"rate": 1e8},
            ),
        ),
        (EVEN, {"microbatches": 64, "rate": 1e10}, "ranks compute for ", {}),
    ],
)
def test_what_is_advised_makes_it_better(widths, question, said, better):
    """By the seconds of a microbatch on a rank."""

    def asked(rate=1e10, **more):
        link = LinkKind("a link", bandwidth=rate, latency=1e-6, overlap=1.0)
        ranks = more.get("ranks", 2)
        return forecast(*widths, network=Network.of(ranks_per_node=ranks, inside=link), **more)

    def spent(found):
        return found.step_seconds * found.ranks / found.microbatches

    found, other = asked(**question), asked(**question | better)
    assert advice(found).startswith(said), report.forecast_summary(found)
    assert spent(other) < 0.95 * spent(found) if better else spent(other) == spent(found)


@pytest.mark.parametrize(("replicas", "how"), [(1, "average"), (2, "average"), (2, "shard")])
def test_only_what_is_not_done_yet_is_advised(replicas, how):
    """Ranks that compute again to save memory: replicas may share out state, if they do not."""
    asked = {"recompute": "always", "microbatches": 64, "data_parallel": how}
    text = advice(forecast(*EVEN, ranks=2 * replicas, replicas=replicas, **asked))
    assert "computes again" in text
    assert ("data_parallel of shard" in text) == (replicas == 2 and how == "average")


def test_tables_fit_where_they_are_shown():
    found = forecast(*EVEN, optimizer="AdamW")
    wide, narrow = report.forecast_table(found), report.forecast_table(found, 70)
    tables = narrow.split("\n\n")[:2]
    assert (
        max(len(line) for one in tables for line in one.splitlines() if "rest:" not in line) <= 70
    )
    assert "rest: " in narrow and "rest" not in wide and "(2.0 MiB)" not in wide


def test_members_of_a_group():
    """The model is that of all of them, which wait for one another."""
    flat = program(*EVEN)
    one, two = (
        pfeife.forecast(
            flat, machine="cpu-core", ranks=2 * members, members=members, microbatches=2
        ).forecast
        for members in (1, 2)
    )
    assert (two.members, two.world) == (2, 4) and one.members == 1
    assert two.parameters == one.parameters and two.parameter_bytes == one.parameter_bytes
    assert two.flops == one.flops and two.utilization < 1
    told, computed = two.stages[0].telling_seconds, two.stages[0].forward_seconds
    assert 0 < told < computed + two.stages[0].backward_seconds
    assert "members wait" in report.forecast_table(two)
    assert "members wait" not in report.forecast_table(one)
    parts = {kind: sum(w.seconds for w in two.waits if w.kind == kind) for kind in KINDS}
    assert parts["members"] > 0 and sum(parts.values()) == pytest.approx(two.step_seconds)
    assert "members" not in {wait.kind for wait in one.waits}
    assert "2 x 2 ranks" in report.forecast_summary(two)


def test_members_share_parameters_as_takes_least():
    """Of many microbatches of few rows parameters are gathered, where there is room for that; with
    one they are cut."""
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    flat = pfeife.capture(lambda x: net(x).square().mean(), torch.zeros(32, 256))
    core = attrs.evolve(machine("cpu-core"), link_bandwidth=1e9)

    def told(parallel, microbatches, **limit):
        question = {"machine": core, "ranks": 2, "members": 2, "parallel": parallel, **limit}
        return pfeife.forecast(flat, microbatches=microbatches, **question)

    def gathered(outlook):
        ports = outlook.ranks.ports(pfeife.Role.PARAMETER)
        return sum(port.keeper is not None and port.split is None for port in ports)

    cut, every, best = (told(way, 64) for way in ("cut", "gathered", "auto"))
    least = min(cut.forecast.step_seconds, every.forecast.step_seconds)
    assert best.forecast.step_seconds <= least
    assert (gathered(cut), gathered(best)) == (0, 8)
    assert gathered(told("auto", 1)) == 0
    peak = cut.forecast.peak_bytes
    assert peak < best.forecast.peak_bytes
    assert gathered(told("auto", 64, memory_limit=peak)) == 0
    with pytest.raises(ValueError, match="the best plan found needs"):
        told("auto", 64, memory_limit=peak // 2)
    for known in (cut, best):  # a plan knows for which program it was made
        assert gathered(told("auto", 64, plan=known.plan)) == gathered(known)


def test_members_have_links_of_their_own():
    """They are neighbours: what joins the nodes is between stages alone, where nodes hold them."""
    slow = LinkKind("slow", bandwidth=1e6, latency=1e-3)
    bandwidths = []
    for each in (2, 1):
        nodes = {"nodes": 4 // each, "ranks_per_node": each}
        network = Network.of(**nodes, inside="nvlink4", between=slow)
        question = Question(ranks=4, members=2, microbatches=2, network=network)
        bandwidths.append(question.on.link_bandwidth)
    assert bandwidths == [link_kind("nvlink4").bandwidth, slow.bandwidth]
    with pytest.raises(ValueError, match="is a group of 2 ranks, and 1 rep"):
        Question(ranks=3, members=2, microbatches=2)
