"""What becomes of a step when something fails: real processes, then threads of one process."""

import gc
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch
from models import case
from processes import bounded
from share import WHOLE

import pfeife
from pfeife import sched
from pfeife.cost import estimate, machine
from pfeife.runtime.distributed.diagnosis import Wait
from pfeife.runtime.distributed.heartbeat import ALL, OUTSIDE, Heartbeat
from pfeife.runtime.local.pipeline import LocalPipeline
from pfeife.testing import assert_same

ROOT = Path(__file__).parent.parent


def test_a_rank_that_fails():
    """All survivors stop in time and blame the right one; the next step has the right bits. Twice,
    if need be: on a busy machine a survivor may be ended before it has told its reason."""
    command = [str(ROOT / "benchmarks" / "faults.py"), "--quick", "--reaction", "30"]
    code, out, error = bounded(command, 280)
    if code != 0:
        code, out, error = bounded(command, 280)
    assert code == 0, out[-4000:] + error[-6000:]
    assert " 0 ended wrong" in out


STEP, BUILD = "action 0F1", "building: a step"


def waiting(awaited, beats, before=None, size=3):
    """Rank 0 has waited 10 s for another one, or for all; `beats` has those of the others."""
    given = {rank: Heartbeat(8, *beat) for rank, beat in enumerate(beats, start=1)}
    early = {rank: attrs.evolve(beat, count=2) for rank, beat in given.items()} | (before or {})
    return Wait(0, size, awaited, 10.0, 4.0, early, {0: Heartbeat(1, STEP, 10.0, awaited), **given})


@pytest.mark.parametrize(
    ("wait", "blamed"),
    [
        # Who lives may be outside of a step for as long as it likes, and build for long.
        (waiting(1, [(OUTSIDE, 500.0), (STEP, 1.0)]), None),
        (waiting(ALL, [(OUTSIDE, 500.0), (STEP, 9.0, ALL)]), None),
        (waiting(ALL, [(BUILD, 39.0), (BUILD, 9.0, ALL)]), None),
        (waiting(ALL, [(BUILD, 41.0), (BUILD, 9.0, ALL)]), 1),
        # In a step it must come on, wherever it stands among those that wait for one another.
        (waiting(1, [(STEP, 3.0), (OUTSIDE, 9.0)]), None),
        (waiting(1, [(STEP, 5.0), (OUTSIDE, 9.0)]), 1),
        (waiting(1, [(STEP, 9.0, 2), (STEP, 5.0)]), 2),
        (waiting(ALL, [(STEP, 9.0, ALL), (STEP, 5.0)]), 2),
        # A dead one is blamed, also if another one is busy.
        (waiting(1, [(OUTSIDE, 9.0), (STEP, 1.0)], {2: Heartbeat(8, STEP, 1.0)}), 2),
        (waiting(2, [(OUTSIDE, 9.0)]), 2),
        # All wait: for one that waits for all, in a circle, or in other operations of all.
        (waiting(1, [(BUILD, 9.0, ALL), (STEP, 9.0, 0)]), 1),
        (waiting(1, [(BUILD, 3.0, ALL), (STEP, 9.0, 0)]), None),
        (waiting(1, [(STEP, 9.0, 2), (STEP, 9.0, 1)]), 2),
        (waiting(ALL, [(STEP, 9.0, ALL), (STEP, 9.0, ALL)]), 0),
        (waiting(ALL, [(STEP, 9.0, 0), (STEP, 9.0, ALL)]), 0),
        (attrs.evolve(waiting(ALL, [(STEP, 9.0), (STEP, 9.0)]), now=None), 0),
    ],
)
def test_what_becomes_of_a_wait(wait, blamed):
    failure = wait.failure()
    assert (failure and failure.rank) == blamed, failure
    assert failure is None or "rank 0 has waited 10 s (timeout=4)" in failure.cause


def pipelined(name="1f1b", stages=4, ranks=2):
    one = case("GPT")
    microbatches = [one.batch(2, seed) for seed in range(3)]
    program = pfeife.capture(one.step, *microbatches[0])
    core = machine("cpu-core")
    clusters = pfeife.fuse()(program)
    clusters = pfeife.annotate(estimate(clusters, core))(clusters)
    plan = sched.plan(
        clusters, machine=core, microbatches=3, stages=stages, ranks=ranks, schedule=name
    )
    sent = pfeife.compose(pfeife.partition(plan), pfeife.insert_send_recv())(clusters)
    schedule = sched.verify_schedule(sched.lower(plan.schedule, sent))
    state = pfeife.state_of(sent, one.model)
    return LocalPipeline(sent, schedule), state, microbatches


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


def test_the_line_of_the_model():
    """An operation that fails is named by the model's own line."""
    pipeline, state, microbatches = pipelined()
    name = next(name for name in state if name.endswith("weight") and state[name].dim() == 2)
    step = pipeline.start({**state, name: state[name][:, 1:]}, microbatches)
    with pytest.raises(RuntimeError) as caught:
        step.run()
    assert any("models.py" in note for note in caught.value.__notes__)


def test_parts_of_a_step():
    """Each part runs once, in order, and results wait for it."""
    pipeline, state, microbatches = pipelined("gpipe")
    step = pipeline.start(state, microbatches)
    with pytest.raises(RuntimeError, match="has not run"):
        step.result()
    with pytest.raises(RuntimeError, match="before its forward"):
        step.run(forward=False)
    step.run(backward=False)
    with pytest.raises(RuntimeError, match="the forward of this step has run already"):
        step.run()
    step.run(forward=False)
    assert_same(pipeline(state, microbatches), step.result())
    with pytest.raises(RuntimeError, match="has run already"):
        step.run(forward=False)


def test_torchrun_starts_again_from_a_checkpoint(tmp_path):
    losses = {}
    for fault in ("none", "SIGKILL", *["exception"] * WHOLE):
        (tmp_path / fault).mkdir()
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = str(ROOT / "tests" / "restart.py")
        command += ["--max-restarts", "1", script, str(tmp_path / fault), fault]
        code, _, error = bounded(command, 200)
        assert code == 0, error[-4000:]
        assert ("failed (exitcode" in error) == (fault != "none")
        losses[fault] = [(tmp_path / fault / f"loss {rank}").read_text() for rank in range(2)]
    assert all(found == losses["none"] for found in losses.values())
