"""Folders of torch.distributed.checkpoint that appear at once, when they are complete."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult

from pfeife.runtime.distributed.liveness.heartbeat import Activity
from pfeife.runtime.distributed.world.world import World
from pfeife.runtime.failure import CollectiveError

log = logging.getLogger("pfeife")
_SLOWEST = timedelta(hours=2)  # of a rank that writes; one that is gone is noticed at once


def complete(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their steps, in order. All are complete: while one is written
    it has another name."""
    by_step = {}
    for path in folder.glob("step-*"):
        number = re.fullmatch(r"step-(\d+)", path.name)
        if number:
            by_step[int(number.group(1))] = path
    return dict(sorted(by_step.items()))


class Writer(dcp.FileSystemWriter):
    """Writes the checkpoint of a step beside the others, renames it when it is complete, and then
    removes all but the `keep` latest ones.

        .step-00000040.new    being written, or left behind by a save that was interrupted
        step-00000040         complete
        .step-00000020.old    being removed
    """

    def __init__(self, folder: Path, step: int, keep: int | None):
        self.folder, self.keep = folder, keep
        self.final = folder / f"step-{step:08}"
        super().__init__(folder / f".{self.final.name}.new")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On one rank, before anybody writes: removes what interrupted saves have left."""
        for path in self.folder.glob(".step-*"):
            # The folder to write to has been made before this: what is older in it goes.
            for entry in path.iterdir() if path == Path(self.path) else [path]:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank, when all have written."""
        super().finish(metadata, results)
        # In this order: after a crash the name is there only if all behind it is on the disk.
        _sync(Path(self.path))
        Path(self.path).rename(self.final)
        _sync(self.folder)
        for path in [] if self.keep is None else list(complete(self.folder).values())[: -self.keep]:
            old = path.rename(path.with_name(f".{path.name}.old"))
            shutil.rmtree(old)


class Writing:
    """Writes checkpoints, in this process alone or with the ranks of a world.

    They have a process group for nothing else, so that they may be written while the ranks train.
    """

    def __init__(self, world: World | None):
        self.world, self.group = world, None
        self.now: Future[Any] | None = None
        if world is not None:
            with world.busy(lambda: Activity("the connections for checkpoints")):
                self.group = dist.new_group(backend="gloo", timeout=_SLOWEST)

    def start(self, state: Mapping[str, Any], writer: Writer, wait: bool) -> None:
        """Writes what each rank gives of a state (collective). It is copied, and written by a
        thread, unless this is to `wait`. Raises as `wait`."""
        options: dict[str, Any] = {"storage_writer": writer, "process_group": self.group}
        if wait:
            with self._failures():
                _alone(state, writer) if self.world is None else dcp.save(dict(state), **options)
            return
        # Copied before this returns, and not by a thread: the script goes on and writes to it.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        with self._failures():
            if self.world is None:
                threads, copied = ThreadPoolExecutor(1, "pfeife writing"), stager.stage(dict(state))
                saving: Any = threads.submit(_alone, copied, writer)  # type: ignore[arg-type]
                threads.shutdown(wait=False)
            else:
                saving = dcp.async_save(dict(state), async_stager=stager, **options)
        self.now = saving if isinstance(saving, Future) else saving.upload_completion
        # Whatever comes of it: a script that never waits must not keep the copy.
        self.now.add_done_callback(lambda _: stager.close())
        self.now.add_done_callback(_say)

    def wait(self) -> None:
        """Waits until what is being written is complete. Raises CollectiveError, on all ranks, if
        one could not write, PipelineError if one is gone."""
        now, self.now = self.now, None
        if now is not None:
            with self._failures():
                now.result()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.world is not None:
                stack.enter_context(self.world.busy(lambda: Activity("Checkpoints.save")))
            try:
                yield
            except dcp.CheckpointException as error:
                rank, (cause, _) = next(iter(error.failures.items()))
                raise CollectiveError(
                    f"the checkpoint was not written: rank {rank}: {type(cause).__name__}: {cause}"
                ) from error
            except RuntimeError as error:
                if self.world is None:
                    raise
                raise self.world.lost(None, error) from error


def _say(writing: Future[Any]) -> None:
    error = writing.exception()
    if error is not None:
        log.error("a checkpoint was not written: %s: %s", type(error).__name__, error)


def _alone(state: Mapping[str, Any], writer: Writer) -> None:
    """`dcp.save` in one process, which warns of that."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(state), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan(
        [writer.prepare_local_plan(planner.create_local_plan())]
    )
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def _sync(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
