"""Plans of Llama-3-8B for two nodes: what the cutter knows of links, and where it may cut.

    python benchmarks/clusters.py [--between ib-hdr ...] [--microbatches 8] [--cache FOLDER]

Eight H100 a node, NVLink inside. All rows are 1F1B in bfloat16 with a sequence a microbatch, and
are judged by the same simulator on the same links; they differ in the cuts. "slowest link": as if
all links were the one between the nodes, which is what the planner did until November 2026. "own
links": each border has its own. "smaller messages": up to 1 % longer where messages are smaller
(the default). "blocks": cuts between layers alone. "by hand": as many layers a stage. Bytes are
those of a microbatch, both ways: over the widest border, the one between the nodes, and all.
Nothing is allocated. Needs transformers (`pip install 'pfeife[frameworks]'`).
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pfeife
from pfeife import cost, report, sched
from pfeife.sched.cutting import clusters_of, workload_of
from pfeife.sched.cutting.borders import borders

RANKS, NODES = 16, 2


def captured(layers: int, sequence: int, cache: str | None) -> pfeife.Program:
    """The step on one sequence, fused, with the seconds of an H100."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        rope_theta=500000.0,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, sequence, dtype=torch.long)
    flat = pfeife.capture(
        lambda t: model(input_ids=t, labels=t).loss, tokens, loss_reduction="mean", cache=cache
    )
    clusters = pfeife.fuse()(flat)
    return pfeife.annotate(cost.estimate(clusters, cost.machine("h100-sxm")))(clusters)


def by_hand(clusters: pfeife.Program, layers: int) -> list[int]:
    """Stages of as many layers, cut where a layer's input norm starts."""
    each = [layers // RANKS + (stage < layers % RANKS) for stage in range(RANKS)]
    names = [f"model.layers.{at}" for at in list(accumulate(each))[:-1]]
    return list(sched.cutting.split_at(clusters, dict.fromkeys(names, "begin")))


def row(
    name: str,
    make: Callable[[], pfeife.Plan],
    judge: Callable[..., pfeife.Plan],
    sizes: list[int],
) -> tuple[str, ...]:
    start = time.monotonic()
    made = make()
    seconds = time.monotonic() - start
    at = borders(made.stage_of_cluster)
    found = judge(cuts=made.stage_of_cluster)
    return (
        name,
        f"{1e3 * (found.step_seconds or 0):.1f}",
        f"{max(sizes[one] for one in at) / 2**20:.0f}",
        f"{sizes[at[RANKS // NODES - 1]] / 2**20:.0f}",
        f"{sum(sizes[one] for one in at) / 2**20:.0f}",
        f"{seconds:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--between", nargs="+", default=["ib-ndr", "ib-hdr", "ethernet-100"])
    parser.add_argument("--cache", help="a folder for the captured program")
    given = parser.parse_args()
    host = cost.machine("h100-sxm")
    start = time.monotonic()
    clusters = captured(given.layers, given.sequence, given.cache)
    print(f"captured in {time.monotonic() - start:.0f} s, {clusters.units} clusters")
    crossing = clusters_of(workload_of(clusters))
    sizes = [a + b for a, b in zip(crossing.ahead, crossing.back, strict=True)]

    def plan(network: pfeife.Network, **request: object) -> pfeife.Plan:
        asked = {"microbatches": given.microbatches, "ranks": RANKS, "memory_limit": 2**40}
        return sched.plan(clusters, machine=host, network=network, **asked, **request)

    for between in given.between:
        own, slowest = (
            pfeife.Network.of(
                nodes=NODES, ranks_per_node=RANKS // NODES, inside=inside, between=between
            )
            for inside in ("nvlink4", between)
        )
        hand = by_hand(clusters, given.layers)
        cases = {
            "slowest link": partial(plan, slowest, message_tolerance=0.0),
            "own links": partial(plan, own, message_tolerance=0.0),
            "smaller messages": partial(plan, own),
            "blocks": partial(plan, own, cut_at="blocks"),
            "by hand": partial(plan, own, cuts=hand),
        }
        rows = [row(name, make, partial(plan, own), sizes) for name, make in cases.items()]
        head = (between, "step, ms", "widest, MiB", "between nodes, MiB", "all, MiB", "planned, s")
        print(f"\n{report.table(rows, head)}", flush=True)


if __name__ == "__main__":
    main()
