"""Checkpoints over torch.distributed.checkpoint: each rank writes what it trains."""

import contextlib
import copy
import json
import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from rows import row
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import pfeife
from edges.saved import OPTIMIZERS, Pair, alike, norms
from edges.state import PAIR, Tied, refused, rows
from pfeife._torch import is_absent
from pfeife.frontend.deferred.checkpoint_folder import Folder
from pfeife.runtime.distributed.process_group import join_world

RANK = int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def one_folder():
    """A new folder that all ranks see."""
    world = join_world(torch.device("cpu"))
    folder = Path(world.decided_by_rank_zero(tempfile.mkdtemp))
    try:
        yield folder
        dist.barrier()
    finally:
        if RANK == 0:
            shutil.rmtree(folder, ignore_errors=True)


def in_plain_torch(path, model, optimizer, **options):
    """Loads as torch's documentation says, in one process."""
    options = StateDictOptions(**options)
    state, states = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": state, "optim": states}, checkpoint_id=path, no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=states, options=options
    )


def twins_alike(pair, model, optimizer):
    alike(model.state_dict(), pair.twin.state_dict())
    alike(optimizer.state_dict(), pair.theirs.state_dict())


@row(ranks=(2, 3), whole=(3,))
def each_rank_writes_what_it_trains():
    """Once, under the names of one device; plain torch reads that, in both of its ways."""
    pair = Pair(optimizer="adamw")
    pair.train(2)
    with one_folder() as folder:
        pfeife.Checkpoints(folder, pair.model, pair.mine).save(2)
        dist.barrier()
        metadata = Folder(folder / "step-00000002").metadata
        files = {index.fqn: one.relative_path for index, one in metadata.storage_data.items()}
        assert len(files) == len(metadata.storage_data) == len(metadata.state_dict_metadata)
        for name, one in pair.model.named_parameters():
            if one.grad_fn is None and not is_absent(one):
                assert files[f"model.{name}"].startswith(f"__{RANK}_"), (name, files)
                assert files[f"optim.state.{name}.exp_avg"].startswith(f"__{RANK}_")
        model = norms()
        optimizer = OPTIMIZERS["adamw"](model)
        in_plain_torch(folder / "step-00000002", model, optimizer)
        twins_alike(pair, model, optimizer)
        if RANK == 0:
            dcp_to_torch_save(folder / "step-00000002", folder / "one.pt")
            found = torch.load(folder / "one.pt", weights_only=True)
            alike(dict(found["model"]), dict(pair.twin.state_dict()))
    pair.train()
    pair.check()


@row(ranks=(2, 3), whole=(3,))
def what_plain_torch_has_saved():
    """Loaded before the first step and between two later ones, flattened then."""
    pair = Pair(optimizer="adamw")
    pair.train(2)
    with one_folder() as folder:
        for flat in (False, True) if RANK == 0 else ():
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            state, states = get_state_dict(pair.twin, pair.theirs, options=options)
            whole = {"model": state, "optim": states}
            dcp.save(whole, checkpoint_id=folder / str(flat), no_dist=True)
        dist.barrier()
        torch.manual_seed(3)
        again = Pair(optimizer="adamw")
        in_plain_torch(folder / "False", again.twin, again.theirs)
        again.seed = 2
        checkpoints = pfeife.Checkpoints(folder, again.model, again.mine)
        assert checkpoints.load(folder / "False") == 0 and not again.mine.state
        again.train(2)
        assert 0 < len(again.mine.state) < len(again.theirs.state)
        again.check()
        assert checkpoints.load(folder / "True") == 0
        again.twin.load_state_dict(pair.twin.state_dict())
        again.theirs.load_state_dict(copy.deepcopy(pair.theirs.state_dict()))
        again.check()
        again.train(1)
        again.check()


def tools_of_torch(name):
    """Its own functions and a script's plain lines; loaded before the first step, and in place."""
    pair = Pair(optimizer=name)
    pair.train(2)
    with one_folder() as folder:
        state, states = get_state_dict(pair.model, pair.mine)
        dcp.save({"model": state, "optim": states}, checkpoint_id=folder / "named")
        dcp.save({"model": pair.model, "optim": pair.mine}, checkpoint_id=folder / "plain")
        pair.train()
        pair.check()
        again = Pair(optimizer=name)
        in_plain_torch(folder / "named", again.model, again.mine)
        in_plain_torch(folder / "named", again.twin, again.theirs)
        again.seed = 2
        again.train()
        twins_alike(pair, again.twin, again.theirs)
        again.check()
        dcp.load({"model": again.model, "optim": again.mine}, checkpoint_id=folder / "plain")
        in_plain_torch(folder / "named", again.twin, again.theirs)
        again.seed = 2
        again.check()
        again.train()
        again.check()


@row(ranks=(2,))
def tools_of_torch_with_adamw():
    tools_of_torch("adamw")


@row(ranks=(2,), whole=(2,))
def tools_of_torch_without_state():
    tools_of_torch("sgd")


@row(ranks=(2,))
def a_model_without_memory_reads_its_own():
    """At the first step, and the optimizer's state when it steps."""
    pair = Pair(optimizer="adamw")
    pair.train(2)
    with one_folder() as folder:
        pfeife.Checkpoints(folder, pair.model, pair.mine).save(2)
        torch.manual_seed(9)
        with pfeife.deferred_init():
            model = norms()
        again = Pair(make=lambda: copy.deepcopy(pair.twin), optimizer="adamw")
        again.model, again.mine = model, OPTIMIZERS["adamw"](model)
        again.theirs.load_state_dict(copy.deepcopy(pair.theirs.state_dict()))
        again.step, again.seed = pfeife.compile(again.loss_of(model), microbatches=2), 2
        read, original = [], Folder._read
        Folder._read = lambda self, found: [read.extend(found), original(self, found)][1]
        try:
            assert pfeife.Checkpoints(folder, model, again.mine).load() == 2
            again.train(2)
        finally:
            Folder._read = original
        again.check()
        mine = {name for name, one in model.named_parameters() if not is_absent(one)}
        assert 0 < len(mine) < len(list(model.parameters()))
        found = {key[6:] for key in read if key.startswith("model.")}
        assert {name for name in found if "running" not in name and "num_" not in name} == mine
        assert {key[12:-8] for key in read if key.endswith(".exp_avg")} == mine


@row(ranks=(2,))
def written_while_the_ranks_train():
    pair = Pair(optimizer="adamw")
    pair.train(2)
    expected = copy.deepcopy((pair.twin.state_dict(), pair.theirs.state_dict()))
    with one_folder() as folder:
        checkpoints = pfeife.Checkpoints(folder, pair.model, pair.mine)
        checkpoints.save(2, wait=False)
        pair.train(3)
        checkpoints.wait()
        pair.check()
        model = norms()
        optimizer = OPTIMIZERS["adamw"](model)
        in_plain_torch(checkpoints.latest(), model, optimizer)
        alike(model.state_dict(), expected[0])
        alike(optimizer.state_dict(), expected[1])


@row(ranks=(2,), whole=(2,))
def tied_weights_have_both_names():
    torch.manual_seed(0)
    model = Tied()
    step = pfeife.compile(lambda x: model(x).square().mean(), **PAIR)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(rows(0)).backward()
    optimizer.step()
    whole = pfeife.full_state_dict(model)
    with one_folder() as folder:
        pfeife.Checkpoints(folder, model, optimizer).save(1)
        dist.barrier()
        other = Tied()
        in_plain_torch(folder / "step-00000001", other, torch.optim.SGD(other.parameters(), lr=0.1))
        alike(dict(other.state_dict()), whole)


@row(ranks=(2,))
def files_of_safetensors():
    """Each rank writes and reads its own; a tied tensor is there once."""
    torch.manual_seed(0)
    model = Tied()
    step = pfeife.compile(lambda x: model(x).square().mean(), **PAIR)
    step(rows(0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    whole = pfeife.full_state_dict(model)
    with one_folder() as folder:
        pfeife.save_safetensors(model, folder / "tied", shard_bytes=100)
        refused(lambda: pfeife.save_safetensors(model, folder / "tied"), f"{folder}/tied has model")
        twice = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        twice[1].weight = nn.Parameter(twice[0].weight.data)  # which no file can say
        words = ["", "rank 0: ValueError: "][RANK] + "the model was not written: RuntimeError: "
        refused(lambda: pfeife.save_safetensors(twice, folder / "twice"), words)
        index = json.loads((folder / "tied" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        assert "first.weight" in index["weight_map"] and "last.weight" not in index["weight_map"]
        with pfeife.deferred_init():
            other = Tied()
        pfeife.materialize(other, checkpoint=folder / "tied", later=True)
        again = pfeife.compile(lambda x: other(x).square().mean(), **PAIR)
        assert torch.equal(again(rows(1)), step(rows(1)))
        alike(pfeife.full_state_dict(other), whole)


class Run:
    """A model with dropout, and all that its loop goes on with."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], 0.5)
        self.loader = StatefulDataLoader(rows(1, 20), batch_size=4, shuffle=True)
        self.step = pfeife.compile(lambda x: self.model(x).square().mean(), microbatches=2)

    def train(self, steps, save):
        losses, draws = [], []
        while len(losses) < steps:
            for batch in self.loader:
                loss = self.step(batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                losses.append((loss.item(), self.optimizer.param_groups[0]["lr"]))
                draws.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
                save(len(losses))
                if len(losses) == steps:
                    break
        return list(zip(losses, draws, strict=True))

    def checkpoints(self, folder):
        return pfeife.Checkpoints(
            folder, self.model, self.optimizer, loader=self.loader, schedule=self.schedule
        )


@row(ranks=(2,))
def a_run_that_goes_on_is_the_same():
    """Draws, learning rates, the place in the data, in the middle of an epoch."""
    with one_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's own
        random.seed(4)
        numpy.random.seed(4)
        first = Run()
        checkpoints = first.checkpoints(folder)
        expected = first.train(9, lambda done: done == 3 and checkpoints.save(done, wait=False))
        checkpoints.wait()
        again = Run()
        random.seed(5)
        numpy.random.seed(5)
        assert again.checkpoints(folder).load() == 3
        assert again.train(6, lambda done: None) == expected[3:]
        assert checkpoints.load() == 3
        assert first.train(6, lambda done: None) == expected[3:]


class Clock:
    """Its state is a time, which is no plain data."""

    def state_dict(self):
        return {"now": Path()}

    def load_state_dict(self, state):
        raise NotImplementedError


@row(ranks=(2,))
def what_is_refused():
    """On all ranks; they go on."""
    pair = Pair()
    pair.train()
    with one_folder() as folder:
        checkpoints = pfeife.Checkpoints(folder, pair.model, pair.mine)
        checkpoints.save(5)
        refused(lambda: checkpoints.save(5), f"{folder}/step-00000005 is there already, and this")
        clocks = pfeife.Checkpoints(folder, pair.model, pair.mine, clock=Clock())
        refused(lambda: clocks.save(6), "the state of clock cannot be saved: it has a Posi")
        refused(clocks.load, f"{folder}/step-00000005 has no state of clock")
        words = "rank 1 is at the names in Checkpoints.save(7) and rank 0 at the names in Ch"
        refused(lambda: checkpoints.save(6 + RANK), words)
        other = pfeife.Checkpoints(folder, nn.Linear(6, 6), ())
        refused(other.load, "the model has no ['0.0.weight', '0.0.bias', '0.1.weight'] (21 in all)")
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000005"]
        pair.train()
        pair.check()
