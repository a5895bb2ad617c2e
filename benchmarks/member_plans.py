"""What members of a group gain by estimate, as the linear program of `shard` decides.

    python benchmarks/member_plans.py             some minutes, no GPU, no weights
    python benchmarks/member_plans.py --only Mixtral

Models by transformers' configurations, on the meta device in bfloat16, 4,096 tokens unless a case
says otherwise, on H100s (`pfeife machines`): the milliseconds of a microbatch's operations, forward
and backward, on one device and on the members of a group, where these wait for what they tell one
another and where it is under way beside what they compute (`overlap`), the most bytes that a member
has in a step, what they send one another, and how long deciding took.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

import attrs
import torch
from torch import nn

import pfeife
from pfeife import report, sched
from pfeife.cost import estimate, machine, member_prices, memory_curves, timing_of
from pfeife.cost.estimate import node_seconds
from pfeife.ir.members import ALONE, MEANING
from pfeife.passes.shard import Attention, Placements

H100 = machine("h100-sxm")


def llama_7b(layers: int) -> nn.Module:
    """7 billion parameters with 32 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))


def llama(layers: int) -> nn.Module:
    """1.1 billion parameters with 22 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            **{"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "use_cache": False},
            num_hidden_layers=layers,
        )
    )


def mixtral(layers: int) -> nn.Module:
    """47 billion parameters with 32 layers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers, use_cache=False))


def qwen3_moe(layers: int) -> nn.Module:
    """30 billion parameters with 48 layers; of 128 experts a token goes to 8."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128, "num_experts": 128}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            num_hidden_layers=layers, moe_intermediate_size=768, use_cache=False, **sizes
        )
    )


@attrs.frozen
class Case:
    """A model of so many layers, cut over members."""

    build: Callable[[int], nn.Module]
    layers: int
    members: int
    tokens: int = 4096
    placements: Placements | Literal["cut"] = "cut"
    attention: Attention = "gather"
    rows: int = 1


def sequence(attention: Attention) -> Case:
    """Nothing but a long sequence is cut."""
    return Case(llama, 2, 8, 65536, {}, attention)


CASES = {
    "Llama, 16 layers, 2 members": Case(llama, 16, 2),
    "Llama, 2 layers, 8 members": Case(llama, 2, 8),
    "Llama 7B, 4 layers, 8 members, 8 rows": Case(llama_7b, 4, 8, rows=8),
    "Mixtral, 8 layers, 2 members": Case(mixtral, 8, 2),
    "Mixtral, 2 layers, 8 members": Case(mixtral, 2, 8),
    "Qwen3-MoE, 2 layers, 8 members": Case(qwen3_moe, 2, 8),
    "Llama, 2 layers, 8 members, 65,536 tokens": sequence("gather"),
    "the same in a ring": sequence("ring"),
}


def milliseconds(program: pfeife.Program) -> float:
    return 1e3 * sum(node_seconds(node, H100) for node in program.module.graph.nodes)


def beside(local: pfeife.Program) -> tuple[float, int]:
    """Milliseconds of a microbatch in which members compute while they send, and the most bytes
    that one has in a step of one microbatch, without an optimizer."""
    clusters = pfeife.fuse()(local)
    clusters = pfeife.annotate(estimate(clusters, H100))(clusters)
    plan = sched.plan(clusters, machine=H100, microbatches=1, stages=1, schedule="gpipe")
    ranks = pfeife.compose(pfeife.apply(plan), pfeife.overlap(timing_of(H100)))(clusters)
    (curve,) = memory_curves(ranks, sched.lower(plan.schedule, ranks))
    return 1e3 * sum(call.seconds or 0.0 for call in ranks.calls), curve.peak


def row(name: str) -> list[str]:
    case = CASES[name]
    with torch.device("meta"):
        model = case.build(case.layers).to(torch.bfloat16)
        tokens = torch.ones(case.rows, case.tokens, dtype=torch.long)
    flat = pfeife.capture(lambda x: model(input_ids=x, labels=x).loss, tokens)
    cut = pfeife.shard(
        case.placements,
        case.members,
        unknown="gather",
        attention=case.attention,
        prices=member_prices(H100),
    )
    begun = time.perf_counter()
    local = cut(flat)
    took = time.perf_counter() - begun
    nodes = [n for n in local.module.graph.nodes if n.target in MEANING.keys() - ALONE]
    told = Counter(node.target.__name__ for node in nodes)
    sent = ", ".join(f"{count} {kind}" for kind, count in told.items())
    hidden, most = beside(local)
    times = (f"{taken:.1f}" for taken in (milliseconds(flat), milliseconds(local), hidden))
    return [name, *times, f"{most / 2**30:.2f}", f"{took:.1f}", sent]


HEAD = (
    *("case", "ms on one", "ms on members", "ms beside", "GiB of a member"),
    *("s to decide", "sent"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of a case's name")
    asked = parser.parse_args()
    lines = [row(name) for name in CASES if asked.only in name]
    print(report.table(lines, HEAD))


if __name__ == "__main__":
    main()
