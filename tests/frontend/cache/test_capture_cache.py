"""Captured programs on disk: used by all who may, never trusted."""

import copy
import importlib.util
import json
import logging
import os
import sys

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from processes import bounded
from share import some
from torch import nn

import pfeife
from pfeife.data import plain
from pfeife.frontend.cache.capture_cache import FOLDER, find, keep
from pfeife.frontend.cache.program_json import StoredProgram, restore, store
from pfeife.ir.digest import fingerprint, program_digest
from pfeife.testing import assert_same


class Net(nn.Module):
    """Embedding, convolution, batch norm, dropout, a constant, attention, a checkpoint, a tie."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.1)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.norm(self.convolution(self.embedding(tokens).mT)).mT
        x = torch.utils.checkpoint.checkpoint(self.inner, self.drop(x), use_reentrant=False)
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        first, *_ = (y * torch.tensor([1.0, float("inf"), 2.0, 0.5]).clamp(max=3)).split(2, -1)
        return self.head(pfeife.stage_boundary(y)) + first.sum(-1, keepdim=True)


def a_step(open_sizes=False):
    torch.manual_seed(0)
    net = Net()
    batch = torch.randint(7, (4, 3)), torch.randint(7, (4, 3))
    for value in batch if open_sizes else ():
        for dim in range(2):
            torch._dynamo.mark_dynamic(value, dim)

    def step(tokens, targets):
        return F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

    return step, batch


@pytest.fixture
def lines(lines):
    logging.getLogger("pfeife").setLevel(logging.DEBUG)
    return lines


def having(lines, text):
    return [one for one in lines.records if text in one.getMessage()]


def files(folder):
    return sorted((folder / FOLDER).glob("*.json"))


def said(program):
    """What nodes say of themselves, but for the numbers that autograd counts on in a process."""
    metas = [node.meta for node in program.module.graph.nodes]
    return [{key: str(meta[key]) for key in meta if key != "seq_nr"} for meta in metas]


def same(one, other):
    """The same text, ports, counts, down to what nodes say of themselves."""
    texts = str(one) == str(other) and fingerprint(one) == fingerprint(other)
    return texts and said(one) == said(other)


def test_the_second_capture_is_taken_from_the_first(tmp_path, lines):
    step, batch = a_step()
    alone = pfeife.capture(step, *batch)
    first = pfeife.capture(step, *batch, cache=tmp_path)
    assert not having(lines, "captured before") and len(files(tmp_path)) == 2  # at twice the rows
    copy.deepcopy(step.__closure__[0].cell_contents)  # notes something in torch.Tensor
    again = pfeife.capture(step, *batch, cache=str(tmp_path))
    assert len(having(lines, "captured before")) == 2 and len(files(tmp_path)) == 2
    assert same(first, again) and fingerprint(alone) == fingerprint(again)
    state = pfeife.state_of(alone, step.__closure__[0].cell_contents)
    results = [pfeife.evaluate(one, state, [batch, batch], seed=3) for one in (alone, again)]
    assert torch.equal(results[0].loss, results[1].loss)
    for name, gradient in results[0].gradients.items():
        assert torch.equal(gradient, results[1].gradients[name]), name
    for name, buffer in results[0].buffers.items():
        assert torch.equal(buffer, results[1].buffers[name]), name
    assert str(pfeife.fuse()(alone)) == str(pfeife.fuse()(again))


def test_a_compiled_step_takes_it_too(tmp_path, lines):
    """A restart: the same numbers, and nothing traced again."""
    found = []
    for cache in (None, tmp_path, tmp_path):
        torch._dynamo.reset()
        step, batch = a_step()
        torch.manual_seed(1)
        compiled = pfeife.compile(step, microbatches=2, stages=2, cache=cache)
        loss = compiled(*batch)
        loss.backward()
        net = step.__closure__[0].cell_contents
        found.append([loss, *(one.grad for one in net.parameters()), *net.buffers()])
    assert having(lines, "captured before")
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_numbers_that_kernels_read_are_kept(tmp_path, lines):
    """A batch norm that averages over all batches has its momentum from a buffer."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    programs = [
        pfeife.capture(lambda x: net(x).square().mean(), torch.ones(2, 4), cache=tmp_path)
        for _ in range(2)
    ]
    assert having(lines, "captured before") and same(*programs)


def bare(program):
    """A program whose microbatches nobody has said how to put together."""
    ports = [attrs.evolve(port, reduction=None, counts=()) for port in program.outputs]
    return attrs.evolve(program, outputs=tuple(ports), counts=())


@pytest.fixture(scope="module", params=[False, True], ids=["one size", "open sizes"])
def stored(request):
    torch._dynamo.reset()
    step, batch = a_step(request.param)
    return store(bare(pfeife.capture(step, *batch, loss_reduction="sum")), "a key")


def test_a_program_comes_back_as_it_was(stored):
    assert store(restore(stored), "a key") == stored
    assert any(constant.data for constant in stored.constants)


class Sizes(nn.Module):
    """Sizes that are divided, rounded, compared, and multiplied with one another."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.Linear(4, 2)

    def forward(self, x):
        hidden = self.layer(x).relu()[..., None]  # max_pool1d takes its length for a number
        hidden = F.max_pool2d(hidden, (2, 1), ceil_mode=True).squeeze(-1)
        pairs = hidden.mT @ hidden / hidden.shape[-1] + torch.ones(hidden.shape[-1]).diag()
        return self.head((hidden @ pairs).flatten(0).reshape(-1, 4))


def test_open_sizes_come_back_as_they_were(tmp_path, lines):
    """From the cache: the same program, and the same numbers at sizes that were not captured."""
    torch.manual_seed(0)
    net = Sizes()
    batch = torch.randn(4, 3, 16)
    for dim in (0, 2):
        torch._dynamo.mark_dynamic(batch, dim)
    programs = []
    for cache in (None, tmp_path, tmp_path):
        torch._dynamo.reset()
        step = lambda x: net(x).square().sum()  # noqa: E731  of one line of this file
        programs.append(pfeife.capture(step, batch, cache=cache, loss_reduction="sum"))
    assert having(lines, "captured before")
    assert len(programs[0].ports(pfeife.Role.SIZE)) == 2
    state = pfeife.state_of(programs[0], net)
    assert same(*programs[1:])
    for other in programs[1:]:
        assert str(programs[0]) == str(other) and programs[0].limits == other.limits
        digests = [program_digest(pfeife.fuse()(one)) for one in (programs[0], other)]
        assert digests[0] == digests[1]
        for rows, length in ((4, 16), (5, 23), (2, 40)):
            parts = [torch.randn(rows, 3, length) for _ in range(2)]
            assert_same(*(pfeife.evaluate(one, state, parts) for one in (programs[0], other)))


def test_what_a_file_says_of_sizes_must_be_so():
    torch._dynamo.reset()
    step, batch = a_step(open_sizes=True)
    good = store(bare(pfeife.capture(step, *batch, loss_reduction="sum")), "a key")
    said = '{"size":["Mul","tokens_size_0","tokens_size_1"]}'
    at = next(at for at, text in enumerate(good.texts) if said in text)
    others = {
        '{"size":["Mul",2,"tokens_size_0"]}': "and was captured with",
        '{"size":["Mul",2,"others"]}': "and was captured with",
        '{"size":["FloorDiv","tokens_size_0",0]}': "and was captured with",
        '{"size":["Pow","tokens_size_0",1000]}': "no power of a size",
        '{"size":["exec","import os"]}': "no size",
        '{"size":"__import__(os)"}': "no size",
    }
    for other, reason in others.items():
        texts = list(good.texts)
        texts[at] = texts[at].replace(said, other)
        with pytest.raises(ValueError, match=reason):
            restore(attrs.evolve(good, texts=tuple(texts)))
    for limits in ((0,), (10**6,), (at,)):
        with pytest.raises(ValueError, match=r"does not hold|no text"):
            restore(attrs.evolve(good, limits=limits))


DAMAGE = ["cut", "flipped", "another key", "empty", "a folder", "text"]


@pytest.mark.parametrize("damage", some(DAMAGE, 4))
def test_damaged_files_are_left_out(tmp_path, lines, damage):
    """And replaced."""
    step, batch = a_step()
    first = pfeife.capture(step, *batch, cache=tmp_path)
    for path in files(tmp_path):
        text = path.read_text()
        path.unlink()
        if damage == "another key":
            plain.save(attrs.evolve(plain.from_json(StoredProgram, text), key="other"), path)
        elif damage == "a folder":
            path.mkdir()
        else:
            half = len(text) // 2
            flipped = text[:half] + chr(ord(text[half]) ^ 1) + text[half + 1 :]
            damaged = {"cut": text[:half], "flipped": flipped, "empty": "", "text": "[1, 2]"}
            path.write_text(damaged[damage])
    for _ in range(2):
        assert same(pfeife.capture(step, *batch, cache=tmp_path), first)
    left = len(having(lines, "left out of the cache"))
    assert left == (4 if damage == "a folder" else 2)
    assert len(having(lines, "captured before")) == 4 - left


@given(st.data())
def test_foreign_files_do_no_harm(stored, data):
    """Whatever stands in a file, with whatever checksum: an error in words, or a program."""
    tree = json.loads(plain.to_json(stored))
    for _ in range(data.draw(st.integers(1, 3))):
        holder = tree
        while True:
            places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            at = data.draw(st.sampled_from(places))
            if not isinstance(holder[at], dict | list) or not holder[at]:
                break
            holder = holder[at]
        kinds = st.sampled_from(["", "x", "import os", "if", "aten.add.Tensor", "call_module"])
        spelled = st.sampled_from(['{"node":"x"}', "[[", '{"tuple":[]}', '{"float":"1e999"}', "{}"])
        spelled |= st.sampled_from(['{"size":"tokens_size_0"}', '{"size":["Pow",9,-1]}'])
        other = data.draw(kinds | spelled | st.integers(-(2**63), 2**63 - 1) | st.none())
        near = data.draw(st.sampled_from(list(holder) if isinstance(holder, list) else [other]))
        holder[at] = data.draw(st.sampled_from([other, near]))
    try:
        program = restore(plain.from_json(StoredProgram, json.dumps(tree)))
    except ValueError:
        return
    assert isinstance(program, pfeife.Program)


def test_what_was_not_used_for_longest_goes_first(tmp_path, stored):
    size = len(plain.to_json(stored)) + 200
    for number, name in enumerate("abcd"):
        keep(tmp_path, attrs.evolve(stored, key=name), most_bytes=10 * size)
        os.utime(tmp_path / f"{name}.json", (number, number))
    assert find(tmp_path, "a") is not None
    (tmp_path / "mine.txt").write_text("not a program")
    keep(tmp_path, attrs.evolve(stored, key="e"), most_bytes=3 * size)
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "d.json", "e.json", "mine.txt"}


def test_a_cache_that_cannot_be_written_is_only_slow(tmp_path, lines):
    step, batch = a_step()
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    found = pfeife.capture(step, *batch, cache=tmp_path)
    assert fingerprint(found) == fingerprint(pfeife.capture(step, *batch))
    assert having(lines, "not kept")


PROCESS = """
import os
import sys
from pathlib import Path

import torch

import pfeife
from pfeife.data import plain
from pfeife.frontend.cache.capture_cache import FOLDER, find, keep
from pfeife.frontend.cache.program_json import StoredProgram

net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())


def step(x):
    return net(x).square().sum()


def capture(cache):
    return pfeife.capture(step, torch.ones(2, 3), cache=cache)


def main(own, shared):
    capture(own)
    (path,) = (own / FOLDER).iterdir()
    mine = plain.load(StoredProgram, path)
    for _ in range(60):
        keep(shared / FOLDER, mine, most_bytes=10)  # removes what the other one has just written
        found = find(shared / FOLDER, mine.key)
        assert found is None or len(found.module.graph.nodes) == len(mine.nodes) + 1
    keep(shared / FOLDER, mine)


def both():
    other = os.fork()
    folder = Path(__file__).parent
    main(folder / ("b" if other else "a"), folder / "cache")
    if other:
        sys.exit(os.waitpid(other, 0)[1])
"""


def test_processes_share_it(tmp_path, lines, monkeypatch):
    """Two that write and remove one file at a time do not disturb one another, and what they leave
    is found by a third."""
    script, cache = tmp_path / "script.py", tmp_path / "cache"
    script.write_text(PROCESS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    code, _, error = bounded(["-c", "import script; script.both()"], 300, PYTHONPATH=path)
    assert code == 0, error
    assert len(list((cache / FOLDER).iterdir())) == 1
    spec = importlib.util.spec_from_file_location("script", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "script", module)
    spec.loader.exec_module(module)
    found = module.capture(cache)
    assert having(lines, "captured before") and not having(lines, "left out")
    assert fingerprint(found) == fingerprint(module.capture(None))
