"""Values that are brought to a device, as far as a machine without GPUs can tell."""

import torch

from pfeife.runtime.local.peer_copy import PeerCopies


def test_only_what_is_elsewhere_is_copied():
    here, there = torch.ones(2, device="meta"), torch.ones(3)
    stayed, came = PeerCopies(torch.device("meta"))((here, there), None)
    assert stayed is here and came.device.type == "meta" and came.shape == there.shape
