"""What torchrun's last lines say of a process that has failed."""

import json
import sys

import pytest
from processes import bounded

from pfeife.runtime.distributed.liveness.last_words import tell_torchrun
from pfeife.runtime.failure import Failure, PipelineError

SCRIPT = """
import os
import torch
import pfeife

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
calls = []


@torch.library.custom_op("mine::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    calls.append(x)
    if len(calls) > 6:
        raise RuntimeError("of the kernel")
    return x.clone()


fails.register_fake(torch.empty_like)
fails.register_autograd(lambda ctx, gradient: gradient)
step = pfeife.compile(lambda x: fails(net(x)).square().mean(), microbatches=4, progress=False)
for _ in range(5):
    step(torch.ones(8, 8)).backward()
"""


@pytest.mark.whole
def test_torchrun_ends_with_what_has_happened(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    code, _, error = bounded(command, 120)
    end = error.rpartition("FAILED")[2]
    assert code and "traceback : RuntimeError: of the kernel" in end
    assert "traceback : pfeife: rank 1, action 1F" in end and "the forward of stage 1" in end


def test_who_has_written_before_is_left(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    tell_torchrun()
    assert not path.exists()
    failure = Failure(1, "the forward of stage 1, microbatch 3", "out of\nmemory")
    for error in (PipelineError(failure), KeyError("later")):
        monkeypatch.setattr(sys, "last_value", error)
        tell_torchrun()
    told = json.loads(path.read_text())["message"]
    assert told["message"] == "pfeife: rank 1, the forward of stage 1, microbatch 3: out of memory"
    assert told["extraInfo"]["py_callstack"] == told["message"]
