"""Files of decisions: whole or not there, and named where they are damaged."""

import json
import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import pytest
from damage import VALUES
from decisions import ANYTHING, CPU_CORE, ENDLESS
from hypothesis import given

import pfeife
from pfeife.cost import machine
from pfeife.data import files, plain
from pfeife.data.files import read_text
from pfeife.data.plan import Costs


@given(ANYTHING)
def test_save_and_load(tmp_path, value):
    plain.save(value, tmp_path / "value.json")
    assert plain.load(type(value), str(tmp_path / "value.json")) == value


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "costs.json"
    plain.save(Costs("old", {}), path)
    with pytest.raises(ValueError):
        plain.save(ENDLESS, path)
    assert plain.load(Costs, path) == Costs("old", {})
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_readers_never_see_half_a_file(tmp_path):
    path = tmp_path / "costs.json"
    versions = [Costs(name, {str(i): float(i) for i in range(300)}) for name in ("one", "two")]
    plain.save(versions[0], path)
    done = threading.Event()

    def write():
        for turn in range(100):
            plain.save(versions[turn % 2], path)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert plain.load(Costs, path) in versions
    writer.join()


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "costs.json"
    path.write_bytes(b'{"source": "\xff", "seconds": {}}')
    with pytest.raises(ValueError, match=r"costs\.json: .*utf-8"):
        plain.load(Costs, path)
    path.write_text(json.dumps([1] * 100_000))
    with pytest.raises(ValueError, match=r"costs\.json: Costs: expected an object") as error:
        plain.load(Costs, path)
    assert len(str(error.value)) < 1000, "a large file does not make a large message"
    with path.open("wb") as file:
        file.truncate(plain.LARGEST_FILE + 1)
    with pytest.raises(ValueError, match=r"costs\.json: larger than \d+ bytes"):
        plain.load(Costs, path)
    with pytest.raises(FileNotFoundError):
        plain.load(Costs, tmp_path / "none.json")


def test_what_load_refuses_is_not_saved(tmp_path):
    path = tmp_path / "value.json"
    for value, message in (
        (attrs.evolve(CPU_CORE, memory=8e9), "Machine.memory: expected int"),
        (Costs("x" * plain.LARGEST_FILE, {}), "more than 67108864 bytes"),
        (Costs("\ud800", {}), "surrogate"),
        (attrs.evolve(CPU_CORE, sources={"memory": [1]}), "no list goes into JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            plain.save(value, path)
        assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_refused(a_gigabyte, tmp_path):
    """At once: a pipe that nobody writes to, a device without end, a folder."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "folder", "endless", "null"):
        before = os.stat(tmp_path / name).st_mode
        for act in (
            lambda path: plain.load(Costs, path),
            lambda path: plain.save(VALUES["costs"], path),
            machine,
            lambda path: pfeife.backend(network=path),
        ):
            with pytest.raises(ValueError, match=f"{name}: not a regular file"):
                act(tmp_path / name)
        assert os.stat(tmp_path / name).st_mode == before
    assert len(list(tmp_path.iterdir())) == 4


def test_names_that_no_file_has(tmp_path):
    for name in ("none.json", "x" * 5000, "a/b/c", "\0", "", "."):
        with pytest.raises(ValueError):
            machine(name)
        with pytest.raises(ValueError):
            pfeife.backend(network=name)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_new_file_has_what_open_gives(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        plain.save(VALUES["costs"], tmp_path / "costs.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "costs.json").stat().st_mode) == mode


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    path, link = tmp_path / "costs.json", tmp_path / "link.json"
    plain.save(VALUES["costs"], path)
    for mode in (0o600, 0o664):
        path.chmod(mode)
        plain.save(VALUES["costs"], path)
        assert stat.S_IMODE(path.stat().st_mode) == mode
    link.symlink_to(path)
    plain.save(attrs.evolve(VALUES["costs"], source="other"), link)
    assert not link.is_symlink() and plain.load(Costs, path) == VALUES["costs"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_may_not_be_written_is_kept(tmp_path):
    path = tmp_path / "costs.json"
    plain.save(VALUES["costs"], path)
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"costs\.json"):
        plain.save(attrs.evolve(VALUES["costs"], source="other"), path)
    assert plain.load(Costs, path) == VALUES["costs"]


def test_a_write_that_fails_midway(tmp_path):
    """The disk takes a part of the file: the old one is whole, and no other is left."""
    path = tmp_path / "costs.json"
    plain.save(VALUES["costs"], path)
    large = Costs("large", {str(i): 1.0 for i in range(10_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            plain.save(large, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert plain.load(Costs, path) == VALUES["costs"] and list(tmp_path.iterdir()) == [path]


WRITER = """
import runpy
import sys
from pathlib import Path
write_text = runpy.run_path(sys.argv[3])["write_text"]
turn = 0
while True:
    turn += 1
    write_text(Path(sys.argv[1]), f"{sys.argv[2]} {turn}\\n" * 20_000)
"""


def test_processes_that_write_until_they_are_killed(tmp_path):
    """A reader finds whole files all the time, and when the writers are gone."""
    path = tmp_path / "text"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name, files.__file__]) for name in ("one", "two")]
    seen: set[str] = set()
    try:
        while len(seen) < 50 or len({name.split()[0] for name in seen}) < 2:
            assert all(writer.poll() is None for writer in writers)
            if path.exists():
                seen.add(whole(path))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    whole(path)


def whole(path: Path) -> str:
    """The version that a file is of, all of it."""
    lines = read_text(path, 2**20).splitlines()
    assert len(lines) == 20_000 and len(set(lines)) == 1, "a torn file"
    return lines[0]
