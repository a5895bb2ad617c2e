"""Checkpoints in one process: what a folder has after all that may happen to it."""

import contextlib
import errno
import io
import os
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties

import pfeife
from pfeife import _torch
from pfeife.frontend.deferred.checkpoint_folder import METADATA
from pfeife.frontend.deferred.tensors import deferred_tensors
from pfeife.runtime.distributed.world import writing


class State:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def trained(steps=1):
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_what_is_kept(tmp_path):
    """The latest ones; what an interrupted save has left is removed by the next one."""
    checkpoints = pfeife.Checkpoints(tmp_path, *trained(), keep=2)
    for left in (".step-00000003.new", ".step-00000001.old"):
        (tmp_path / left / "within").mkdir(parents=True)
    (tmp_path / ".step-00000003.new" / "__7_0.distcp").write_text("half")
    (tmp_path / "step-of-somebody-else").mkdir()
    for step in (3, 5, 8):
        checkpoints.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("step-00000005", "step-00000008", "step-of-somebody-else")
    ]
    assert checkpoints.latest() == tmp_path / "step-00000008"
    assert checkpoints.load(tmp_path / "step-00000005") == 5
    with pytest.raises(
        ValueError, match="step-00000008 is there already, and this would be step 6"
    ):
        checkpoints.save(6)
    with pytest.raises(ValueError, match="is no complete checkpoint: it has no"):
        checkpoints.load(tmp_path / "step-of-somebody-else")


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_fails(tmp_path, monkeypatch, wait):
    """It is said, and the last checkpoint stays."""
    model, optimizer = trained()
    checkpoints = pfeife.Checkpoints(tmp_path, model, optimizer)
    checkpoints.save(1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trained_more(model)

    def no_space(*args):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(writing, "_sync", no_space)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(2, wait=wait)
        checkpoints.wait()
    monkeypatch.undo()
    assert checkpoints.load() == 1
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def trained_more(model):
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1)


VALUES = [
    None,
    {"steps": 3, "rate": 0.1, "name": "x", "on": True, "nothing": None, "inf": float("inf")},
    {"milestones": Counter({30: 1, 80: 2}), "by number": {1: [1, (2.5,)], 2: {}}},
    {"numbers": torch.arange(3), "inner": {"more": [torch.ones(2, 2).t(), torch.tensor(1.5)]}},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value}"[:20])
def test_a_state_beside_the_model(tmp_path, value):
    """Types and values are those that were saved."""
    pfeife.Checkpoints(tmp_path, *trained(0), other=State(value)).save(1)
    found = State()
    pfeife.Checkpoints(tmp_path, *trained(0), other=found).load()
    assert repr(found.value) == repr(value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"path": Path()}, "the state of other cannot be saved: it has a Pos"),
        ({range(2): 1}, "range"),
    ],
)
def test_a_state_that_is_refused(tmp_path, value, words):
    with pytest.raises(ValueError, match=words):
        pfeife.Checkpoints(tmp_path, *trained(0), other=State(value)).save(1)
    assert not list(tmp_path.iterdir())


class Code:
    """What runs something where it is unpickled, and makes what torch writes there."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["code", "cut", "other data"])
def test_nothing_of_a_folder_is_run(tmp_path, kind):
    checkpoints = pfeife.Checkpoints(tmp_path / "run", *trained())
    checkpoints.save(1)
    names = checkpoints.latest() / METADATA
    harm = {"code": pickle.dumps(Code(tmp_path / "made")), "other data": pickle.dumps([1])}
    names.write_bytes(harm.get(kind, names.read_bytes()[:-9]))
    with pytest.raises(ValueError, match=r"\.metadata is no list of a checkpoint"):
        checkpoints.load()
    assert not (tmp_path / "made").exists()


class OfLater(pickle.Pickler):
    """Writes a checkpoint's list as later releases do, which know more of each tensor."""

    def reducer_override(self, one):
        if not isinstance(one, TensorProperties):
            return NotImplemented
        return TensorProperties, (), (*one.__getstate__(), "more")


def test_a_list_that_a_later_release_has_written(tmp_path):
    """One more property of each tensor, as in torch 2.15; paths from where Python 3.13 has them."""
    model, optimizer = trained()
    checkpoints = pfeife.Checkpoints(tmp_path, model, optimizer)
    checkpoints.save(1)
    names, later = checkpoints.latest() / METADATA, io.BytesIO()
    OfLater(later, protocol=2).dump(_torch.listed(names))
    written = later.getvalue()
    names.write_bytes(written.replace(b"cpathlib\n", b"cpathlib._local\n"))
    assert b"cpathlib" in written and b"more" in written
    before = {name: one.clone() for name, one in model.state_dict().items()}
    trained_more(model)
    assert checkpoints.load() == 1
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_several_optimizers_and_a_compiled_model(tmp_path):
    """By the names that the model has without torch.compile."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = torch.compile(net, backend="eager")
    halves = [torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in net]
    model(torch.ones(2, 3)).sum().backward()
    halves[1].step()
    pfeife.Checkpoints(tmp_path, model, halves).save(1)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    both = torch.optim.SGD(plain.parameters(), 0.5, momentum=0.1)
    pfeife.Checkpoints(tmp_path, plain, both).load()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    expected = halves[1].state_dict()["state"][0]["momentum_buffer"]
    assert list(both.state_dict()["state"]) == [2, 3] and both.param_groups[0]["lr"] == 0.1
    assert torch.equal(both.state_dict()["state"][2]["momentum_buffer"], expected)


class Counted(nn.Linear):
    """With a state of its own, which is no parameter."""

    def __init__(self, extra):
        super().__init__(3, 3)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, extra):
        self.extra = extra


EXTRA = {
    "tensor": torch.arange(3),
    "number": 7,
    "dict": {"a.b": 1, "inner": {"more": torch.ones(2), "names": ["x", None]}},
    "list": [torch.ones(2), {"x": 1}],
}


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", EXTRA)
def test_all_of_a_model_is_read(tmp_path, kind, deferred):
    """What is made without values, what has values beside it, buffers and extra state."""

    def made(extra, seed):
        torch.manual_seed(seed)
        with pfeife.deferred_init() if seed and deferred else contextlib.nullcontext():
            body = nn.Sequential(Counted(extra), nn.BatchNorm1d(3), nn.Linear(3, 3))
        if seed and deferred:
            pfeife.materialize(body, keep=lambda name: name == "2.weight")
        return nn.Sequential(body, nn.Linear(3, 3))

    saved, found = made(EXTRA[kind], 0), made(None, 1)
    saved(torch.randn(4, 3))
    pfeife.Checkpoints(tmp_path, saved).save(1)
    assert pfeife.Checkpoints(tmp_path, found).load() == 1
    assert torch.equal(found[0][2].weight, saved[0][2].weight)
    assert torch.equal(found[1].weight, saved[1].weight)
    assert (len(deferred_tensors(found)) > 0) == deferred
    pfeife.materialize(found)
    assert repr(found.state_dict()) == repr(saved.state_dict())
    with pytest.raises(ValueError, match=r"the model has no \['1.weight', '1.bias'\] \(2 in all\)"):
        pfeife.Checkpoints(tmp_path, found[:1]).load()
