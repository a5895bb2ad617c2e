"""The state of an optimizer, whole."""

import pytest
import torch

from pfeife.integrations.whole import full_optimizer_state_dict, whole_state_dicts


@pytest.fixture
def optimizer():
    net = torch.nn.Linear(2, 2)
    found = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    found.step()
    return found


def test_in_one_process_it_is_the_optimizers_own(optimizer):
    assert str(full_optimizer_state_dict(optimizer)) == str(optimizer.state_dict())


def test_it_is_that_of_the_beginning_until_the_end(optimizer):
    before = str(optimizer.state_dict())
    with whole_state_dicts([optimizer]):
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.state.clear()
        assert str(optimizer.state_dict()["state"]) in before
    assert not optimizer.state_dict()["state"]
