"""A loop with Accelerate on ranks beside the same on one device."""

import accelerate
import pytest
from accelerate.utils import DistributedType
from logged import logged

from pfeife.integrations.accelerate import joined

SCRIPT = "hf_accelerate.py"


@pytest.mark.whole
def test_two_ranks_have_the_losses_of_one_device(tmp_path):
    """Within rounding: one device does not cut its batches. These have many lengths. What they
    save, they and one device load."""
    (log,) = logged(SCRIPT, "--one-device", "--lengths")
    found = logged(SCRIPT, "--save", tmp_path, "--lengths", ranks=2)
    assert found == [pytest.approx(log, rel=1e-5)] * 2
    again = logged(SCRIPT, "--load", tmp_path, "--lengths", ranks=2)
    assert again == [one[4:] for one in found]
    (alone,) = logged(SCRIPT, "--one-device", "--load", tmp_path, "--lengths")
    assert alone == pytest.approx(log[4:], rel=1e-5)


def test_plugins_that_distribute_the_model_are_refused():
    found = accelerate.Accelerator(cpu=True)
    found.state.distributed_type = DistributedType.FSDP
    with pytest.raises(ValueError, match="distributes the model itself"):
        joined(found)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
