"""Tensors that other ranks train."""

import pytest
import torch

from pfeife.data.machine import Mesh
from pfeife.runtime.distributed.state import remote_parameters
from pfeife.runtime.distributed.state.owned import Owned


def test_an_interrupt_while_values_are_let_go_is_what_is_raised(monkeypatch):
    """Ctrl-C comes anywhere: what counts writes afterwards does not fail instead."""

    def interrupted(*_):
        raise KeyboardInterrupt

    here = remote_parameters.Foreign()
    tensor = torch.zeros(2)
    monkeypatch.setattr(remote_parameters, "become_absent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        here.add(tensor, Owned(4, "0.weight", (1,), Mesh(2)))
    assert here.data_writes(tensor) == 0
