"""The network interface by which the ranks of several nodes reach one another."""

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator

log = logging.getLogger("pfeife")

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS = 0x8915  # SIOCGIFADDR: an interface's IPv4 address (man 7 netdevice)


def choose_interface(host: str, port: int) -> None:
    """Tells Gloo by which interface to listen, where nobody has and it would take loopback: it goes
    by the address of the node's name, which many systems have in /etc/hosts as 127.0.0.1 or
    127.0.1.1. It is that which reaches `host`, where the ranks meet. The variable stays, since
    torch reads it for each Gloo group of this process, the user's own too.

    Raises ValueError if there is none.
    """
    if os.environ.get(_VARIABLE) or _address_of_name() is not None:
        return
    interface = interface_to(host, port)
    if interface is None:
        raise ValueError(
            f"this node's name {socket.gethostname()} has a loopback address, at which other nodes "
            f"do not find its ranks, and {host}, where ranks meet, is reached by no interface that "
            f"they could find them at: set {_VARIABLE} to the one that the nodes share"
        )
    log.info("Gloo listens at %s, which reaches %s", interface, host)
    os.environ[_VARIABLE] = interface


def interface_to(host: str, port: int) -> str | None:
    """The name of the interface that reaches a host, None for loopback or if that is not known."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, port))  # sends nothing
        address = asking.getsockname()[0]
        if not ipaddress.ip_address(address).is_loopback:
            return next((name for name, assigned in _interfaces() if assigned == address), None)
    return None


def own_address() -> str | None:
    """The IPv4 address at which Gloo listens on this node, None if that is not known."""
    chosen = os.environ.get(_VARIABLE, "").partition(",")[0]
    return dict(_interfaces()).get(chosen) if chosen else _address_of_name()


def _interfaces() -> Iterator[tuple[str, str]]:
    """The names and IPv4 addresses of those that have one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking, _ADDRESS, struct.pack("16s24x", name.encode()))
                # 16 bytes of the name, then a sockaddr_in, whose address starts at its fifth byte.
                yield name, socket.inet_ntoa(answer[20:24])


def _address_of_name() -> str | None:
    """That of this node's name, None where it has none but loopback's."""
    with contextlib.suppress(OSError):
        entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        addresses = [str(entry[4][0]) for entry in entries]
        return next((a for a in addresses if not ipaddress.ip_address(a).is_loopback), None)
    return None
