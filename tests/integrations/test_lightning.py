"""Lightning's Trainer on ranks beside the same on one device. Batches have many lengths."""

import pytest
import torch
from logged import logged

SCRIPT = "lightning_gpt.py"
LAST = "epoch=2-step=12.ckpt"


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The folder and the log of a run without Pfeife, in which four batches are one."""
    folder = tmp_path_factory.mktemp("one")
    (log,) = logged(SCRIPT, "--lengths", "--one-device", "--save", folder)
    return folder, [together(log[at : at + 4]) for at in range(0, len(log), 4)]


def together(lines):
    """What a batch logs, by what its parts have."""
    return {name: sum(one[name] for one in lines) / len(lines) for name in lines[0]}


def same_checkpoints(folder, other):
    """The model's and the optimizer's states, bit for bit."""
    mine, theirs = (torch.load(one / LAST, weights_only=True) for one in (folder, other))
    assert mine["global_step"] == theirs["global_step"]
    assert mine["lr_schedulers"] == theirs["lr_schedulers"]
    torch.testing.assert_close(mine["state_dict"], theirs["state_dict"], rtol=0, atol=0)
    pairs = zip(mine["optimizer_states"], theirs["optimizer_states"], strict=True)
    for one, another in pairs:
        assert one["param_groups"] == another["param_groups"]
        torch.testing.assert_close(one["state"], another["state"], rtol=0, atol=0)


def close(found, log):
    for line, expected in zip(found, log, strict=True):
        assert line == pytest.approx({name: expected[name] for name in line}, rel=1e-5)


def test_two_ranks_log_and_save_what_one_device_does(one_device, tmp_path):
    """The logs within rounding: one device logs the parts of a batch."""
    folder, log = one_device
    for found in logged(SCRIPT, "--lengths", "--save", tmp_path, ranks=2):
        close(found, log)
    same_checkpoints(folder, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_one_device(one_device, tmp_path, ranks):
    """As if nobody had interrupted it."""
    folder, log = one_device
    first = folder / "epoch=0-step=4.ckpt"
    for found in logged(SCRIPT, "--lengths", "--save", tmp_path, "--resume", first, ranks=ranks):
        close(found, log[4:])
    same_checkpoints(folder, tmp_path)
