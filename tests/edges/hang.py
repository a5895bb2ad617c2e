"""Waits that must end, or go on: dead, stuck and busy ranks, interrupts, the environment."""

import contextlib
import copy
import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from rows import row
from torch import nn

import pfeife
from pfeife.backend.building.artifacts import Artifacts
from pfeife.backend.building.build import build_step
from pfeife.backend.building.builder import Builder
from pfeife.backend.settings.options import Options
from pfeife.data.progress import shown
from pfeife.frontend.capture import capture
from pfeife.frontend.captured import Captured
from pfeife.testing import eager_accumulation, own_gradients

LOG = logging.getLogger("pfeife")
SILENCE = 4.0  # seconds


def small(**options):
    """A model of two layers, its step and the compiled one, and a batch of four rows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def step(x):
        return model(x).square().mean()

    return model, step, pfeife.compile(step, microbatches=2, **options), x


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """What is logged as a warning or worse."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    LOG.addHandler(handler)
    try:
        yield found
    finally:
        LOG.removeHandler(handler)


def alone(model, step, x):
    return eager_accumulation(step, model, [(part,) for part in x.chunk(2)]).loss


@row(ranks=(2,))
def a_rank_that_is_busy_before_a_step_is_waited_for():
    model, step, compiled, x = small(timeout=SILENCE)
    expected = alone(model, step, x)
    compiled(x)
    with warnings() as said:
        if dist.get_rank() == 1:
            time.sleep(2 * SILENCE)
        assert torch.equal(compiled(x), expected)
    waits = [one for one in said if one.startswith("rank 0 has waited") and "for rank 1" in one]
    assert any("it is in the program outside of a step" in one for one in waits) == (
        dist.get_rank() == 0
    ), said


@row(ranks=(2,))
def a_rank_that_is_busy_before_its_backward_is_waited_for():
    """The other one waits for a message of it, not for all."""
    model, _, _, x = small()
    reference = copy.deepcopy(model)
    compiled = pfeife.compile(model, microbatches=2, timeout=SILENCE)
    compiled(x).sum().backward()
    with warnings() as said:
        loss = compiled(x).square().mean()
        if dist.get_rank() == 1:  # it has the loss, so its backward comes first
            time.sleep(2 * SILENCE)
        model.zero_grad()
        loss.backward()
    sum(reference(part).square().sum() / x.numel() for part in x.chunk(2)).backward()
    for name, gradient in own_gradients(model).items():
        assert torch.allclose(gradient, reference.get_parameter(name).grad)
    assert any("rank 0 has waited" in one for one in said) == (dist.get_rank() == 0), said


@row(ranks=(2,))
def a_step_on_one_rank_against_a_collective_on_the_other():
    """As `if rank == 0: evaluate()`, then a barrier: both are told, and go on. Others that are late
    for a barrier, or for a step because of one, are waited for."""
    model, step, compiled, x = small(timeout=SILENCE)
    expected = alone(model, step, x)
    compiled(x)
    rank = dist.get_rank()
    if rank == 0:
        time.sleep(2 * SILENCE)
    dist.barrier()
    begin = time.monotonic()
    with warnings() as said:
        if rank == 0:
            try:
                compiled(x)
                raise AssertionError("the step went on")
            except pfeife.PipelineError as error:
                said.append(str(error))
            time.sleep(1)  # the other one hears of it while it waits
        dist.barrier()
    assert time.monotonic() - begin < 3 * SILENCE
    words = "a collective of the script's own: torch.distributed.barrier: it waits there for all"
    assert any(words in text for text in said), said
    if rank == 1:
        try:
            compiled(x)
            raise AssertionError("the failure was lost")
        except pfeife.PipelineError as error:
            assert words in str(error), error
    assert torch.equal(compiled(x), expected)


@row(ranks=(2,))
def the_users_own_collectives_keep_their_timeout():
    _, _, compiled, x = small(timeout=30)
    compiled(x)
    ours = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    assert ours == dist.distributed_c10d._get_default_timeout("gloo"), ours


SCRIPT = """
import atexit, logging, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

folder, how, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
if rank == 0:
    atexit.register(os._exit, 1)  # registered first, so it runs last, after Pfeife's

import torch
from torch import nn
import pfeife

left = [100]


@torch.library.custom_op("edges::work", mutates_args=())
def work(x: torch.Tensor) -> torch.Tensor:
    left[0] -= 1
    while rank == 1 and left[0] == 0:
        (folder / "inside").touch()
        time.sleep(1)
    while rank == 0 and left[0] == 0 and not (folder / "inside").exists():
        time.sleep(0.01)
    if left[0] == 0 and how == "at once":
        os._exit(1)
    if left[0] == 0:
        raise OSError("no more memory")
    return x.clone()


work.register_fake(torch.empty_like)
work.register_autograd(lambda ctx, gradient: gradient)
torch.manual_seed(0)
first, second = nn.Linear(4, 4), nn.Linear(4, 4)
step = pfeife.compile(
    lambda x: work(second(work(first(x)))).square().mean(), microbatches=4, timeout=60
)
step(torch.ones(8, 4))


class Last(logging.Handler):
    def emit(self, record):
        if record.levelno == logging.CRITICAL:
            (folder / "last words").write_text(record.getMessage())
            pool.submit(lambda: (time.sleep(1), (folder / "checkpoint").touch()))


pool = ThreadPoolExecutor(1)
logging.getLogger("pfeife").addHandler(Last())
atexit.register(lambda: (folder / f"atexit {rank}").touch())
left[0] = 2 - rank  # rank 0 ends in its second microbatch, when rank 1 is in its first
step(torch.ones(8, 4))
"""


@functools.cache
def by_hand(how: str) -> tuple[list[int | None], dict[str, str]]:
    """Two ranks that are started without torchrun, so that rank 0 keeps the store; rank 1 gets
    into an endless operation. Their exit codes, and the files that they have written."""
    with socket.socket() as one, tempfile.TemporaryDirectory() as folder:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        one.close()
        names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        mine = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
        command = [sys.executable, "-c", SCRIPT, folder, how]
        ranks = [
            subprocess.Popen(command, env=mine | names | {"RANK": str(rank)}) for rank in range(2)
        ]
        codes, end = list[int | None](), time.monotonic() + 60
        for one_rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one_rank.wait(end - time.monotonic())
            codes.append(one_rank.poll())
            one_rank.kill()
            one_rank.wait()
        return codes, {path.name: path.read_text() for path in Path(folder).iterdir()}


@row(whole=(1,))
def a_rank_in_an_endless_operation_ends_when_the_store_is_gone():
    codes, files = by_hand("at once")
    assert codes == [1, 1] and "inside" in files, (codes, files)
    assert "with it the store of the process group" in files["last words"]


@row(whole=(1,))
def the_last_work_of_a_process_that_is_ended_has_a_chance():
    _, files = by_hand("at once")
    assert "checkpoint" in files and "atexit 1" in files


@row(whole=(1,))
def who_keeps_the_store_ends_after_all_have_heard():
    codes, files = by_hand("told")
    assert codes == [1, 1] and "inside" in files, (codes, files)
    assert "OSError: no more memory" in files["last words"]


@torch.library.custom_op("edges_hang::interrupt", mutates_args=())
def interrupt(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(time.monotonic())
    if ARMED:
        ARMED.clear()
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05 if SLOW else 0.0)
    return x.clone()


CALLS: list[float] = []
ARMED, SLOW = list[bool](), list[bool]()
interrupt.register_fake(torch.empty_like)
interrupt.register_autograd(lambda ctx, gradient: gradient)


@row()
def an_interrupt_ends_the_computing_threads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(64, 4)

    def step(x):
        return model[1](interrupt(model[0](x))).square().mean()

    others = set(threading.enumerate())
    compiled = pfeife.compile(step, microbatches=64, stages=1)  # no messages
    compiled(x)
    CALLS.clear()
    for switch in (ARMED, SLOW):
        switch.append(True)
    # A shell starts what runs in the background with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        compiled(x)
        raise AssertionError("not interrupted")
    except KeyboardInterrupt:
        time.sleep(0.2)
        alive = [
            one.name
            for one in set(threading.enumerate()) - others
            if one.name.startswith("pfeife rank")
        ]
    finally:
        SLOW.clear()
        signal.signal(signal.SIGINT, before)
    assert not alive and len(CALLS) < 32, (alive, len(CALLS))  # of 64, on a busy machine
    expected = eager_accumulation(step, model, [(part,) for part in x.chunk(64)])
    assert torch.equal(compiled(x), expected.loss)


@row("option cache=")
def a_cache_that_is_a_file():
    small(cache=__file__, costs="measure")


@row("option cache=")
def a_cache_below_a_file():
    small(cache=Path(__file__) / "costs")


@row(ranks=(1, 2))
def a_cache_that_cannot_be_written():
    with warnings() as said:
        model, step, compiled, x = small(cache="/proc/pfeife", costs="measure")
        expected = alone(model, step, x)
        assert torch.equal(compiled(x), expected)
    assert any(one.startswith("cache=/proc/pfeife cannot be written") for one in said)


def started(**names: str) -> None:
    given = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    _, _, compiled, x = small(timeout=2)
    with mock.patch.dict(os.environ, given | names):
        compiled(x)


@row("the environment has RANK='2': must be a number from 0 to 1")
def a_rank_beyond_the_world():
    started(RANK="2")


@row("the environment has RANK='-1': must be a number from 0 to 1")
def a_negative_rank():
    started(RANK="-1")


@row("the environment has WORLD_SIZE='-2': must be a number of at least 1")
def a_negative_world():
    started(WORLD_SIZE="-2")


@row("the environment has MASTER_PORT='65536': must be a number from 1 to 65535")
def a_port_out_of_range():
    started(MASTER_PORT="65536")


@row()
def the_machine_is_that_of_the_parameters():
    """The first tensor argument may live elsewhere: an index, a mask, a batch yet to be moved."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    program = capture(lambda x: model(x).square().mean(), x)
    graph = mock.Mock()
    graph.capture.return_value = Captured(program, (None,), (None,), (), ())

    def planned(device: str):
        builder = Builder(Options(), None, None)
        show = shown(LOG, progress=False, rank=0)
        given = (builder, graph, (x,), None, torch.device(device), show, Artifacts(None))
        return build_step(*given).plan

    assert planned("meta") == planned("cpu")
