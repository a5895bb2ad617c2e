"""Measured costs on disk: used by all who may, never trusted."""

import multiprocessing
from pathlib import Path

import torch
from programs import distinct_bodies, small_program
from torch import nn

import pfeife
from pfeife.cost import measure
from pfeife.cost.cache import Measured
from pfeife.cost.measure import processor
from pfeife.data import plain


def test_the_cache_tells_processors_apart(tmp_path):
    """Python knows no processor on Linux: a folder shared by machines mixed their times up."""
    listed, arm = tmp_path / "cpuinfo", tmp_path / "arm"
    listed.write_text("processor\t: 0\nmodel name\t: Fast 9000 @ 3GHz\nflags\t\t: fpu\n" * 2)
    assert processor(listed) == "Fast 9000 @ 3GHz"
    arm.write_text("CPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert processor(arm) == "0x41, 0xd0c"
    assert processor(tmp_path / "none")
    measure(small_program(), repeats=1, cache=tmp_path / "costs")
    for path in (tmp_path / "costs").iterdir():
        assert processor() in plain.load(Measured, path).key


def test_the_cache_is_used_and_never_trusted(tmp_path):
    """Measured once for all; whatever happens to the files, it is measured again."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5)))
    program = pfeife.fuse()(pfeife.capture(lambda x: model(x).square().sum(), torch.randn(2, 3)))
    runs = []

    def measured():
        return measure(program, repeats=2, cache=tmp_path, progress=lambda *n: runs.append(n))

    first = measured()
    assert runs[-1] == (len(runs), len(runs)) and len(runs) < 3 * len(program.calls)
    assert measured() == first, "the second time comes from the cache"
    for damage in (b"", b"{", b"[]", b"\xff\xfe", b'{"key": "", "seconds": 1, "spread": 0}'):
        for path in tmp_path.glob("*.json"):
            path.write_bytes(damage)
        again = measured()
        assert again != first and measured() == again
    one, other = sorted(tmp_path.glob("*.json"))[:2]
    one.write_bytes(other.read_bytes())
    assert measured() != first, "an entry of another body"
    for path in tmp_path.glob("*.json"):
        path.write_text(path.read_text().replace('"seconds": ', '"seconds": -'))
    assert all(seconds > 0 for seconds in measured().seconds.values())
    more = measure(program, repeats=3, cache=tmp_path)
    assert more != again, "fewer runs than asked for are not enough"


def write_costs(folder: Path, barrier, results) -> None:
    """One of several processes that measure the same again and again, each time with more runs."""
    program = small_program()
    barrier.wait()
    found = [measure(program, repeats=repeats, cache=folder) for repeats in range(2, 7)]
    calls = {call.node for call in program.calls}
    results.put(all(set(costs.seconds) == calls for costs in found))


def test_writers_of_one_cache(tmp_path):
    """Whoever reads meanwhile finds whole files or none, and nothing else is left behind."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    writers = [
        context.Process(target=write_costs, args=(tmp_path, barrier, results)) for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    barrier.wait(120)
    read = 0
    while any(writer.is_alive() for writer in writers):
        for path in tmp_path.glob("*.json"):
            read += plain.load(Measured, path).repeats >= 2
        for writer in writers:
            writer.join(0.01)
    assert [results.get(timeout=60) for _ in writers] == [True] * 2 and read
    assert all(writer.exitcode == 0 for writer in writers)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}
    assert len(list(tmp_path.iterdir())) == distinct_bodies(small_program())
    assert all(plain.load(Measured, path).repeats == 6 for path in tmp_path.glob("*.json"))
