"""Artifacts in torch's trace, where there is one."""

import os

import torch

from pfeife import _torch


def test_what_is_not_traced_is_not_written():
    """Once Dynamo has seen that there is no trace."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    asked = []
    _torch.trace_artifact("pfeife_none", "string", lambda: asked.append(1) or "", None)
    assert bool(asked) == ("TORCH_TRACE" in os.environ)
