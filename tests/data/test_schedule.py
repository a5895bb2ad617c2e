"""Schedules as text: CSV gives back what was written, as torch writes it, and refuses the rest."""

import csv
import types

import pytest
from decisions import actions, schedules, well_typed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from pfeife.data.schedule import Action, Do, Schedule, parse_action, received_as
from pfeife.lowering.lower import chain, insert_actions
from pfeife.lowering.verify import verify_schedule
from pfeife.sched.families import gpipe, one_f_one_b


@given(actions())
def test_action_text(action):
    assert parse_action(str(action)) == action
    assert parse_action(f" {action}\t") == action


def test_action_text_in_a_chain_is_torchs():
    """The other end of a transfer is written only where torch's text has no place for it."""
    for text, action in {
        "0F1": Action(0, Do.FORWARD, 1),
        "2B0": Action(2, Do.BACKWARD, 0),
        "2I10": Action(2, Do.INPUT_BACKWARD, 10),
        "10W3": Action(10, Do.WEIGHT_BACKWARD, 3),
        "0SEND_F1": Action(0, Do.SEND_F, 1, 1),
        "1RECV_F1": Action(1, Do.RECV_F, 1, 0),
        "1SEND_B1": Action(1, Do.SEND_B, 1, 0),
        "0RECV_B1": Action(0, Do.RECV_B, 1, 1),
        "0SEND_F1@2": Action(0, Do.SEND_F, 1, 2),
        "2RECV_F1@0": Action(2, Do.RECV_F, 1, 0),
        "3REDUCE_GRAD": Action(3, Do.REDUCE_GRAD),
        "1UNSHARD": Action(1, Do.UNSHARD),
        "1RESHARD": Action(1, Do.RESHARD),
    }.items():
        assert str(action) == text and parse_action(text) == action
    assert received_as(Action(0, Do.SEND_F, 1, 2)) == Action(2, Do.RECV_F, 1, 0)
    assert received_as(Action(2, Do.SEND_B, 1, 0)) == Action(0, Do.RECV_B, 1, 2)


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "F0", "0", "0G0", "0f0", "-1F0", "0F-1", "0F0 1", "0.0F0", "0F0@", "0F0@1"),
        *("0SEND_F0@-1", "0RECV_F0", "0SEND_B0", "0SEND0", "0REDUCE_GRAD@1", "0UNSHARD@1"),
        *("\u0663F1", "0F\u00b2", "0F0\x00", "(0F0;1B0)OVERLAP_F_B", "9" * 5000 + "F0"),
    ],
)
def test_what_is_no_action(text):
    with pytest.raises(ValueError):
        parse_action(text)


@given(schedules)
def test_csv_round_trip(schedule):
    assert Schedule.from_csv(schedule.to_csv()) == schedule


@settings(max_examples=200)
@given(st.text(st.sampled_from('019FBIWSENDRECV_@, "\r\n\x00')) | st.text())
def test_any_csv(text):
    """No text makes the reader raise anything but ValueError."""
    try:
        schedule = Schedule.from_csv(text)
    except ValueError:
        return
    assert well_typed(schedule, Schedule)
    assert Schedule.from_csv(schedule.to_csv()) == schedule


def test_a_cell_too_large_is_refused():
    with pytest.raises(ValueError, match="not CSV"):
        Schedule.from_csv("0" * 200_000)


torch_action = torch_schedules._Action.from_str


@pytest.mark.parametrize("order", [gpipe(3, 4), one_f_one_b(3, 4), one_f_one_b(4, 3, (0, 1, 0, 1))])
def test_torch_reads_our_csv(order):
    """torch parses our text, finds it valid, and puts in the same transfers."""
    rows = csv.reader(order.to_csv().splitlines())
    read = {rank: [torch_action(cell) for cell in row] for rank, row in enumerate(rows)}
    assert [[str(a) for a in row] for row in read.values()] == [
        [str(a) for a in rank] for rank in order.ranks
    ]
    placed = torch_schedules._validate_schedule(read, len(read), order.stages, order.microbatches)
    assert placed == dict(enumerate(order.stage_ranks))
    lowered = insert_actions(order, chain(order))
    torchs = torch_schedules._add_send_recv(read, order.stage_ranks.__getitem__, order.stages)
    for rank, ours in zip(torchs.values(), lowered.ranks, strict=True):
        assert sorted(map(str, rank)) == sorted(map(str, ours))


@pytest.mark.parametrize("stages, ranks", [(1, 1), (2, 2), (4, 4), (4, 2), (6, 3)])
def test_we_read_torchs_csv(tmp_path, stages, ranks):
    """A file as torch dumps it, bubbles (empty cells) and torch's own transfers included."""
    order = one_f_one_b(stages, 5, [stage % ranks for stage in range(stages)])
    rows = {
        rank: [None, *(torch_action(str(action)) for action in row), None]
        for rank, row in enumerate(order.ranks)
    }
    dumper = types.SimpleNamespace(pipeline_order=rows, pipeline_order_with_comms=None)
    dump = torch_schedules._PipelineScheduleRuntime._dump_csv
    dump(dumper, tmp_path / "order.csv", "compute_only")
    assert Schedule.from_csv((tmp_path / "order.csv").read_bytes().decode()) == order
    dumper.pipeline_order_with_comms = torch_schedules._add_send_recv(
        {rank: [a for a in row if a] for rank, row in rows.items()},
        order.stage_ranks.__getitem__,
        stages,
    )
    dump(dumper, tmp_path / "lowered.csv", "compute_comms")
    lowered = verify_schedule(Schedule.from_csv((tmp_path / "lowered.csv").read_bytes().decode()))
    assert lowered.computing() == order and lowered.stage_ranks == order.stage_ranks


def test_schedule_counts():
    order = one_f_one_b(4, 3, (0, 1, 0, 1))
    assert (order.stages, order.microbatches, order.stage_ranks) == (4, 3, (0, 1, 0, 1))
    assert insert_actions(order, chain(order)).computing() == order
    assert (Schedule(()).stages, Schedule(()).microbatches) == (0, 0)
    with pytest.raises(ValueError, match="stage 0 runs on ranks 0 and 1"):
        _ = Schedule.from_csv("0F0\n0B0\n").stage_ranks
    with pytest.raises(ValueError, match="stage 1 runs on no rank"):
        _ = Schedule.from_csv("0F0\n2F0\n").stage_ranks
    with pytest.raises(ValueError, match="stage 1 runs on no rank"):  # and takes no memory
        _ = Schedule.from_csv("0F0\n999999999999999F0\n").stage_ranks
