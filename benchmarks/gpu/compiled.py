"""Stages by Inductor and as CUDA graphs: their numbers, and their time beside torch's own."""

from typing import Any

import torch

import pfeife
from gpu.beside_eager import Rounding, accumulated, alike, deterministic
from gpu.cases import case
from gpu.clock import in_turn
from gpu.rows import Row, Setting
from gpu.timing import FOUR_STAGES, ONE_STAGE, REPEATS, compiled, eager, judged, large, ours, tiny

FUSED = Rounding(1e-3, "Inductor fuses, and adds up in other orders than eager's kernels")
GAIN = 2.0  # times as fast as eager: tiny stages as CUDA graphs


def numbers(setting: Setting, **options: Any) -> dict[str, Any]:
    """A step of compiled stages beside eager."""
    deterministic()
    one = case("GPT", setting)
    batch = one.batch()
    parts = list(zip(*(tensor.chunk(4) for tensor in batch), strict=True))
    wanted = accumulated(one, parts)
    step = pfeife.compile(
        one.step, microbatches=4, stages=2, devices=setting.twice, progress=False, **options
    )
    for _ in range(2):  # the second one replays what the first has captured
        one.model.zero_grad()
        loss = step(*batch)
        loss.backward()
    found = {f"gradient of {n}": p.grad for n, p in one.model.named_parameters()}
    rounding = FUSED if options.get("compiler") == "inductor" else Rounding(0.0, "")
    return alike({"loss": loss.detach(), **found}, wanted, rounding)


def inductor(setting: Setting) -> dict[str, Any]:
    return numbers(setting, compiler="inductor")


def graphs(setting: Setting) -> dict[str, Any]:
    return numbers(setting, cuda_graphs=True)


def graphs_of_inductor(setting: Setting) -> dict[str, Any]:
    return numbers(setting, cuda_graphs=True, compiler="inductor")


def graphs_by_size(setting: Setting) -> dict[str, Any]:
    """Batches of three lengths in one program, each a graph from the time it comes again."""
    deterministic()
    one = case("GPT", setting)
    step = pfeife.compile(
        one.step,
        microbatches=4,
        stages=2,
        devices=setting.twice,
        dynamic=True,
        cuda_graphs=setting.cuda,
        progress=False,
    )
    whole = one.batch()[0].shape[1]
    figures: dict[str, Any] = {}
    for turn, part in enumerate((1, 2, 1, 4, 2, 1, 4, 2)):
        batch = tuple(tensor[:, : whole // part] for tensor in one.batch(seed=turn))
        parts = list(zip(*(tensor.chunk(4) for tensor in batch), strict=True))
        wanted = accumulated(one, parts)
        one.model.zero_grad()
        loss = step(*batch)
        loss.backward()
        found = {f"gradient of {n}": p.grad.clone() for n, p in one.model.named_parameters()}
        figures = alike({"loss": loss.detach(), **found}, wanted)
    return {"calls": 8, "lengths": 3, **figures}


def beside_inductor(setting: Setting) -> dict[str, Any]:
    """The large GPT, compiled as a whole by torch.compile, as one stage and as four by us."""
    one = large(setting)
    works = {
        "torch.compile": eager(one, torch.compile(one.step)),
        "one stage": ours(one, 1, "inductor"),
        "four stages": ours(one, 4, "inductor"),
    }
    times = in_turn(works, setting, REPEATS)
    limits = {"one stage": ONE_STAGE, "four stages": FOUR_STAGES}
    return judged(times, "torch.compile", limits, setting)


def tiny_graphs(setting: Setting) -> dict[str, Any]:
    one = tiny(setting)
    options: dict[str, Any] = {"stages": 2, "devices": [setting.device]}
    works = {
        "eager": eager(one),
        "our graphs": compiled(one, **options, cuda_graphs=setting.cuda),
        "ours": compiled(one, **options),
    }
    times = in_turn(works, setting, REPEATS)
    return judged(times, "eager", {"our graphs": 1 / GAIN}, setting)


ROWS = [
    Row("GPT by Inductor", inductor, 120),
    Row("GPT as CUDA graphs", graphs, 90, cuda=True),
    Row("GPT by sizes as CUDA graphs", graphs_by_size, 90),
    Row("tiny stages as CUDA graphs beside eager", tiny_graphs, 90),
    Row("GPT by Inductor as CUDA graphs", graphs_of_inductor, 120, cuda=True),
    Row("stages in turn beside torch.compile", beside_inductor, 240),
]
