"""Threads of one process: what a failure leaves, and what lasts from step to step."""

import gc
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from programs import pipelined

from pfeife.testing import assert_same


class Boom(Exception):
    pass


def raising(victim, at):
    """An observer that raises after the `at`th action of a rank."""

    def watch(rank):
        left = [at]

        def see(action):
            if rank == victim and left[0] == 0:
                raise Boom(str(action))
            left[0] -= 1

        return see

    return watch


def ours():
    """The threads that compute."""
    return {one for one in threading.enumerate() if one.name.startswith("pfeife rank")}


def test_threads_at_every_action():
    """The first exception comes out with its own traceback, the threads end, the step says that
    it has failed, and the next one gives the same bits."""
    others = ours()  # that wait for the next step of another test's pipeline
    pipeline, state, microbatches = pipelined("interleaved")
    expected = pipeline(state, microbatches)
    before = {name: value.clone() for name, value in state.items()}
    for victim, actions in enumerate(pipeline.schedule.ranks):
        for at, action in enumerate(actions):
            step = pipeline.start(state, microbatches)
            with pytest.raises(Boom, match=str(action)) as caught:
                step.run(watch=raising(victim, at))
            assert caught.traceback[-1].name == "see"
            assert f"on rank {victim}, in action {action} " in caught.value.__notes__[0]
            assert ours() <= others
            with pytest.raises(RuntimeError, match=r"this step has failed.*Boom"):
                step.result()
            with pytest.raises(RuntimeError, match="this step has failed"):
                step.run()
    assert_same(expected, pipeline(state, microbatches))
    for name, value in state.items():
        assert torch.equal(before[name], value), name


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_threads_are_kept_between_steps():
    """Each rank keeps its thread, which computes as its caller would; steps at the same time do not
    wait for one another's messages; in a fork there are new threads; they end with the pipeline."""
    gc.collect()  # what other tests have left
    before = ours()
    pipeline, state, microbatches = pipelined("interleaved")
    expected = pipeline(state, microbatches)
    kept = ours() - before
    assert len(kept) == 2
    assert_same(expected, pipeline(state, microbatches))
    assert ours() - before == kept
    for flush in (True, False):
        seen = []
        torch.set_flush_denormal(flush)
        pipeline.start(state, microbatches).run(
            watch=lambda rank, seen=seen: lambda _: seen.append(sys.float_info.min / 2 == 0.0)
        )
        torch.set_flush_denormal(False)
        assert set(seen) == {flush}

    with ThreadPoolExecutor(4) as users:
        for found in users.map(pipeline, [state] * 16, [microbatches] * 16):
            assert_same(expected, found)

    child = os.fork()
    if not child:
        signal.alarm(60)  # ends a child that waits for threads which only its parent has
        os._exit(0 if torch.equal(pipeline(state, microbatches).loss, expected.loss) else 1)
    assert os.waitpid(child, 0)[1] == 0

    ended = ours() - before
    del pipeline
    for thread in ended:
        thread.join(20)
    assert not ours() - before
