"""What becomes of a step when a process fails: real processes."""

import re
from pathlib import Path

import pytest
import restart
import torch
from processes import bounded
from share import whole

from pfeife.testing import eager_accumulation

ROOT = Path(__file__).parent.parent


def test_a_rank_that_fails(record_property):
    """All survivors stop in time and blame the right one; the next step has the right bits. On a
    busy machine a survivor may be ended before it has told its reason: a few launches where nothing
    else is wrong may be done twice, and the summary of the tests says how many."""
    command = [str(ROOT / "benchmarks" / "faults.py"), "--quick", "--reaction", "30"]
    code, out, error = bounded([*command, "--again", "3"], 400)
    assert code == 0, out[-4000:] + error[-6000:]
    counts = re.findall(r"(\d+) (?:trials|ended|launches)", out.splitlines()[-1])
    trials, wrong, again = map(int, counts)
    assert trials == 88 and not wrong
    if again:
        record_property("done twice", f"{again} launches of benchmarks/faults.py")


def last_loss() -> str:
    """Of the same training without ranks and without a fault."""
    model = restart.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(restart.STEPS):
        parts = [(part,) for part in restart.batch(number).chunk(2)]
        found = eager_accumulation(lambda x: model(x).square().mean(), model, parts)
        for name, parameter in model.named_parameters():
            parameter.grad = found.gradients[name]
        optimizer.step()
    return float(found.loss).hex()


@pytest.mark.parametrize("fault", ["SIGKILL", whole("exception"), whole("none")])
def test_torchrun_starts_again_from_a_checkpoint(tmp_path, fault):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", restart.__file__, str(tmp_path), fault]
    code, _, error = bounded(command, 200)
    assert code == 0, error[-4000:]
    assert ("failed (exitcode" in error) == (fault != "none")
    assert {(tmp_path / f"loss {rank}").read_text() for rank in range(2)} == {last_loss()}
