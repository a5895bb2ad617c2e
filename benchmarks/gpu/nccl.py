"""Ranks as processes: NCCL on GPUs, Gloo in its place on a CPU. `ranks` is what they run."""

import functools
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu.rows import Row, Setting, Skipped, Verdict, Wrong
from gpu.workers import Worker

REACTION = 20.0  # seconds in which others must know of a rank that is gone
SHARED = "two ranks on one GPU"


class Ranks:
    """Processes that are the ranks of one world, on a GPU each, or all on the first."""

    def __init__(self, setting: Setting, ranks: int, apart: bool):
        port = _free_port()
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "GPU_ROWS_SMALL": str(int(setting.small)),
            "GPU_ROWS_DEVICE": setting.device.partition(":")[0],
            **({} if apart else {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        }
        command = [sys.executable, str(Path(__file__).with_name("ranks.py"))]
        self.workers = [
            Worker(command, shared | _place(rank, apart), apart=False) for rank in range(ranks)
        ]

    def ask(self, scenario: str, seconds: float) -> list[Verdict]:
        """What every rank says of a scenario."""
        with ThreadPoolExecutor(len(self.workers)) as threads:
            asked = [threads.submit(one.ask, scenario, seconds) for one in self.workers]
            return [one.result() for one in asked]

    @property
    def usable(self) -> bool:
        return all(one.usable for one in self.workers)

    def end(self) -> None:
        for one in self.workers:
            one.end()


def _place(rank: int, apart: bool) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank if apart else 0)}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


_standing: dict[tuple[int, bool], Ranks] = {}  # by how many, and whether each has a GPU


def asked(
    scenario: str, setting: Setting, ranks: int = 2, apart: bool = False, seconds: float = 60.0
) -> list[Verdict]:
    """What the ranks say, which stand ready for the next scenario if all goes well."""
    ready = _standing.get((ranks, apart))
    if ready is None or not ready.usable:
        for other in _standing.values():
            other.end()
        _standing.clear()
        ready = _standing[ranks, apart] = Ranks(setting, ranks, apart)
    said = ready.ask(scenario, seconds)
    if not ready.usable:
        ready.end()
    return said


def agreed(said: Sequence[Verdict]) -> dict[str, Any]:
    """What the ranks say, that of the first where all say the same. Raises Wrong if one is not
    right."""
    for rank, one in enumerate(said):
        if one.verdict != "right":
            raise Wrong(f"rank {rank}: {one.verdict}: {one.why}", **one.figures)
    first = dict(said[0].figures)
    for rank, one in enumerate(said[1:], 1):
        first |= {f"{k}, rank {rank}": v for k, v in one.figures.items() if first.get(k) != v}
    return first


@functools.cache
def _refusal(setting: Setting) -> str:
    """Why two ranks cannot share a GPU, by trying; empty if they can."""
    if not setting.cuda:
        return ""
    said = asked("probe", setting, seconds=45)
    return "; ".join(one.why for one in said if one.verdict != "right")


def alone(setting: Setting) -> dict[str, Any]:
    """A world of one: collectives, a group of its own, its end."""
    return agreed(asked("alone", setting, ranks=1))


def sharing(setting: Setting) -> dict[str, Any]:
    """Whether two ranks may share a GPU, which later rows need."""
    refusal = _refusal(setting)
    if refusal:
        raise Skipped(f"NCCL does not let {SHARED}: {refusal}")
    return agreed(asked("probe", setting))


def two(setting: Setting, scenario: str, apart: bool) -> dict[str, Any]:
    if not apart and _refusal(setting):
        raise Skipped(f"NCCL does not let {SHARED}")
    return agreed(asked(scenario, setting, apart=apart, seconds=75))


def every(setting: Setting, scenario: str) -> dict[str, Any]:
    """A rank on each GPU."""
    return agreed(asked(scenario, setting, len(setting.devices), apart=True, seconds=100))


def lost(setting: Setting, scenario: str, apart: bool) -> dict[str, Any]:
    """Rank 1 is killed or stopped in a step: rank 0 must say so, soon."""
    if not apart and _refusal(setting):
        raise Skipped(f"NCCL does not let {SHARED}")
    ranks = Ranks(setting, 2, apart)
    with ThreadPoolExecutor(2) as threads:
        first, _ = (threads.submit(one.ask, scenario, 60.0) for one in ranks.workers)
        told = first.result()
        ranks.end()  # rank 1 is gone, or stopped
    figures = dict(told.figures)
    if "error" not in figures:
        raise Wrong(f"rank 0 has heard of nothing: {told.verdict} {told.why}")
    if figures["seconds"] > REACTION or "rank 1" not in figures["error"]:
        raise Wrong(f"rank 0 should name rank 1 within {REACTION:.0f} s", **figures)
    return figures


def _row(what: str, scenario: str, apart: bool, run: Any = two) -> Row:
    where = "two GPUs" if apart else "one GPU"
    call = functools.partial(run, scenario=scenario, apart=apart)
    return Row(f"{what}, two ranks on {where}", call, 100, devices=2 if apart else 1)


SCENARIOS = [
    ("a communicator a direction", "directions", two),
    ("GPT by 1f1b", "train GPT 1f1b", two),
    ("a rank that is late", "late", two),
    ("a killed rank", "killed", lost),
    ("a hung rank", "hung", lost),
    ("UNet by zb-h1", "train UNet zb-h1", two),
    ("tied by 1f1b", "train tied 1f1b", two),
    ("BatchNorm by 1f1b", "train BatchNorm 1f1b", two),
    ("dropout by zb-v", "levels dropout zb-v", two),
    ("replicas", "train GPT replicas", two),
    ("memory", "memory", two),
    ("links", "links", two),
]
ROWS = [
    Row("a world of one", alone, 70),
    Row(SHARED, sharing, 100),
    *(
        _row(what, scenario, apart, run)
        for apart in (True, False)
        for what, scenario, run in SCENARIOS
    ),
    *(
        Row(
            f"{what}, a rank on each GPU",
            functools.partial(every, scenario=scenario),
            110,
            devices=3,
        )
        for what, scenario in (
            ("GPT by 1f1b", "train GPT 1f1b"),
            ("tied by 1f1b", "train tied 1f1b"),
        )
    ),
]
