import os
import socket

import pytest

from pfeife.runtime.distributed.liveness import interface
from pfeife.runtime.distributed.liveness.interface import (
    choose_interface,
    interface_to,
    own_address,
)


@pytest.fixture
def loopback_name(monkeypatch):
    """A node whose name is that of loopback, as /etc/hosts often has it."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")


def test_the_interface_that_reaches_the_others(loopback_name, monkeypatch):
    for name, address in interface._interfaces():
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        if name == "lo":
            assert interface_to(address, 1) is None
            continue
        choose_interface(address, 1)
        assert os.environ["GLOO_SOCKET_IFNAME"] == name and own_address() == address


def test_none_reaches_them(loopback_name):
    with pytest.raises(ValueError, match=r"localhost has a loopback address.*GLOO_SOCKET_IFNAME"):
        choose_interface("127.0.0.1", 1)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
