"""What members of a group gain by estimate, as the linear program of `shard` decides.

    python benchmarks/member_plans.py             a minute or two, no GPU, no weights
    python benchmarks/member_plans.py --only Mixtral

Models by transformers' configurations, on the meta device in bfloat16, 4,096 tokens, on H100s
(`pfeife machines`): the milliseconds of a microbatch's operations, forward and backward, on one
device and on the members of a group, what these send one another, and how long deciding took.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

import pfeife
from pfeife import report
from pfeife.cost import machine, member_prices
from pfeife.cost.estimate import node_seconds
from pfeife.ir.members import ALONE, MEANING

H100 = machine("h100-sxm")
TOKENS = 4096


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


CASES: dict[str, tuple[Callable[[int], nn.Module], int, int]] = {
    "Llama, 16 layers, 2 members": (llama, 16, 2),
    "Llama, 2 layers, 8 members": (llama, 2, 8),
    "Mixtral, 8 layers, 2 members": (mixtral, 8, 2),
}


def milliseconds(program: pfeife.Program) -> float:
    return 1e3 * sum(node_seconds(node, H100) for node in program.module.graph.nodes)


def row(name: str) -> list[str]:
    build, layers, members = CASES[name]
    with torch.device("meta"):
        model = build(layers).to(torch.bfloat16)
        tokens = torch.ones(1, TOKENS, dtype=torch.long)
    flat = pfeife.capture(lambda x: model(input_ids=x, labels=x).loss, tokens)
    begun = time.perf_counter()
    local = pfeife.shard("auto", members, unknown="gather", prices=member_prices(H100))(flat)
    took = time.perf_counter() - begun
    nodes = [n for n in local.module.graph.nodes if n.target in MEANING.keys() - ALONE]
    told = Counter(node.target.__name__ for node in nodes)
    sent = ", ".join(f"{count} {kind}" for kind, count in told.items())
    return [name, f"{milliseconds(flat):.1f}", f"{milliseconds(local):.1f}", f"{took:.1f}", sent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a part of a case's name")
    asked = parser.parse_args()
    lines = [row(name) for name in CASES if asked.only in name]
    print(report.table(lines, ("case", "ms on one", "ms on members", "s to decide", "sent")))


if __name__ == "__main__":
    main()
