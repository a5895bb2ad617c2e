"""Rules for the shapes of connectionist temporal classification."""

import subprocess
import sys

import pytest
from share import whole

GIVEN = """
import torch
library = torch.library.Library("aten", "IMPL")
library.impl("_ctc_loss_backward", lambda *_: torch.empty(7, device="meta"), "{key}")
import pfeife._torch
x, whole = torch.ones(3, 2, 5, device="meta"), torch.ones(2, device="meta").long()
table = torch.ones(2, 3, 5, device="meta")
print(*torch.ops.aten._ctc_loss_backward(whole, x, whole, [3], [2], whole, table, 0).shape)
"""


@pytest.mark.parametrize(
    "key", ["Meta", *map(whole, ("CompositeImplicitAutograd", "CompositeExplicitAutograd"))]
)
def test_a_torch_with_rules_of_its_own_is_left_alone(key):
    """Whichever way it has them."""
    code = GIVEN.format(key=key)
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert found.stdout.split() == ["7"], found.stderr
