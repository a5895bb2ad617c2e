"""The command line."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from nodes import two_nodes
from processes import bounded

import pfeife
from pfeife.__main__ import main
from pfeife.cost import machines
from pfeife.data import plain
from pfeife.data.link import link_kinds
from pfeife.data.network import Network


def test_what_is_not_asked_for_is_not_imported():
    """Not even torch, for help and the version; every name is there all the same."""
    said = "import sys, pfeife; from pfeife.__main__ import main; print('torch' in sys.modules)"
    code, out, error = bounded(["-c", f"{said}; main(['--version'])"], 60)
    assert (code, out.split()) == (0, ["False", "pfeife", version("pfeife")]), error
    assert {name for name in pfeife.__all__ if not hasattr(pfeife, name)} == set()
    assert pfeife.sched.plan is sys.modules["pfeife.sched"].plan and pfeife.ir is not None
    assert not hasattr(pfeife, "no_such_name")
    folders = {"cost", "integrations", "report", "runtime", "sched", "testing"}
    assert {*dir(pfeife)} == {*pfeife.__all__, *folders, "__version__"}
    assert all(hasattr(pfeife, name) for name in dir(pfeife))
    assert pfeife.__version__ == version("pfeife")


def test_the_machines_on_the_command_line(capsys):
    assert main(["machines"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*machines(), *link_kinds()))
    with pytest.raises(SystemExit):
        main(["no such command"])


@pytest.mark.whole
def test_the_network_on_the_command_line(tmp_path):
    """Under torchrun it writes what the planner reads."""
    out = tmp_path / "network.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "pfeife", "bench-network"]
    command += ["--out", str(out), "--repeats", "2", "--largest", "4096"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    assert "0 -> 1" in run.stdout and "residual" in run.stdout
    network = plain.load(Network, out)
    assert {(link.source, link.destination) for link in network.links} == {(0, 1), (1, 0)}


def test_a_network_without_ranks_or_damaged(tmp_path, capsys):
    """Alone the command says what to do; the planner reads no file that is wrong."""
    assert main(["bench-network"]) == 2 and "torchrun" in capsys.readouterr().err
    out = tmp_path / "network.json"
    plain.save(two_nodes(2), out)
    damaged = json.loads(out.read_text())
    damaged["links"][0]["seconds"][1] = -1.0
    out.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match="seconds"):
        plain.load(Network, out)
    with pytest.raises(ValueError, match="network=3"):
        pfeife.backend(network=3)
    with pytest.raises(ValueError, match="seconds"):
        pfeife.backend(network=str(out))


@pytest.mark.parametrize("argument", ["0", "-1", "x", "", "1e3", "\u0663", "9" * 5000, "1.5"])
def test_counts_on_the_command_line(argument, capsys):
    from pfeife.__main__ import main

    with pytest.raises(SystemExit) as stopped:
        main(["bench-network", f"--repeats={argument}"])
    assert stopped.value.code == 2 and "--repeats" in capsys.readouterr().err
    assert main(["bench-network", "--out", "/no/such/folder/x.json"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
