"""torch.distributed.pipelining beside ours on the same device: a world of one rank."""

import functools
import socket
from collections.abc import Callable
from typing import Any

import splits
import torch
import torch.distributed as dist
from models import Case

import pfeife
from gpu.beside_eager import Rounding, alike
from gpu.clock import in_turn
from gpu.rows import Row, Setting, Skipped
from gpu.timing import REPEATS, Large, eager, large, lowered
from pfeife.runtime.local import LocalPipeline

OTHER = "the peer's stages are cut elsewhere, and its losses divided by itself"


def _world(setting: Setting) -> None:
    if dist.is_initialized():
        return
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, 1, True)
    if setting.cuda:
        torch.cuda.set_device(setting.device)
    dist.init_process_group("nccl" if setting.cuda else "gloo", store=store, rank=0, world_size=1)


def _peer(one: Large, count: int, setting: Setting, losses: list) -> Callable[[], object]:
    """Its step of all stages on this rank, by its public interface."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    case = Case("GPT", one.model, one.step, lambda: one.microbatches[0])
    split = splits.language(case, count)
    place = torch.device(setting.device)
    stages = [PipelineStage(m, index, count, place) for index, m in enumerate(split.stages)]
    kind, given = (ScheduleInterleaved1F1B, stages) if count > 1 else (Schedule1F1B, stages[0])
    schedule = kind(given, len(one.microbatches), loss_fn=split.loss)
    tokens, targets = (torch.cat(tensors) for tensors in zip(*one.microbatches, strict=True))

    def step() -> None:
        losses.clear()
        one.model.zero_grad(set_to_none=True)
        schedule.step(tokens, target=targets, losses=losses, return_outputs=False)

    return step


def beside_peer(setting: Setting, count: int) -> dict[str, Any]:
    _world(setting)
    one, losses = large(setting), list[torch.Tensor]()
    try:
        peer = _peer(one, count, setting, losses)
        peer()
    except Exception as error:
        raise Skipped(f"it does not run {count} stages on one rank: {error}") from error
    theirs = {n: p.grad.clone() for n, p in one.model.named_parameters()}
    program, schedule = lowered(one, count)
    pipeline = LocalPipeline(program, schedule, [torch.device(setting.device)])
    state = pfeife.state_of(program, one.model)
    result = pipeline(state, one.microbatches)
    rounding = Rounding(1e-4 if setting.small else 3e-2, OTHER)
    figures = alike(result.gradients, theirs, rounding)
    works = {
        "peer": peer,
        "ours": functools.partial(pipeline, state, one.microbatches),
        "eager": eager(one),
    }
    times = in_turn(works, setting, REPEATS)
    figures |= {f"{name} ms": 1e3 * taken for name, taken in times.items()}
    return {**figures, "ours of peer": times["ours"] / times["peer"]}


def row(count: int) -> Row:
    name = f"torch.distributed.pipelining, {count} stages on one rank"
    return Row(name, functools.partial(beside_peer, count=count), 90)


ROWS = [row(1), row(4)]
