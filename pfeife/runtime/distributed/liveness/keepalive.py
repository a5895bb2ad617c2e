"""Whether the other nodes are still reached: each node's kernel is asked, not its processes.

    node 0: ranks 0 1       listens <-----------+
                                                | a connection of each rank to each other node,
    node 1: ranks 2 3   ------------------------+ over which nothing but TCP's keepalives goes

A process may give no sign of life while it compiles or is stopped, and is waited for. A node that
has lost its network or its power does not answer keepalives, which its kernel would.
"""

import errno
import logging
import os
import socket
from typing import Any

import attrs

from pfeife.data import plain
from pfeife.runtime.distributed.liveness.interface import own_address

log = logging.getLogger("pfeife")

_IDLE, _EVERY, _COUNT = 2, 1, 4  # seconds before the first question and between them; how many
SILENCE = _IDLE + _EVERY * _COUNT  # seconds after which a node counts as cut off
_CONNECTING = 5.0  # seconds


@attrs.frozen
class Node:
    """Where a node listens, and its ranks."""

    address: str
    port: int
    first: int
    count: int

    def __str__(self) -> str:
        last = self.first + self.count - 1
        return f"its node ({self.address}, ranks {self.first} to {last})"


class Lifelines:
    """Those of one rank (collective: the first rank of each node tells the others by the store).

    On one node there are none, nor between nodes that do not reach one another so.
    """

    def __init__(self, store: Any):
        self.listener: socket.socket | None = None
        self.lines: list[tuple[socket.socket, Node]] = []
        self.cut: Node | None = None
        # As torchrun counts nodes.
        here, nodes = (int(os.environ.get(f"GROUP_{name}", "0")) for name in ("RANK", "WORLD_SIZE"))
        if nodes <= 1:
            return
        if os.environ.get("LOCAL_RANK") == "0":
            address = own_address()
            if address is not None:
                # Connections need not be accepted: the kernel answers on them.
                backlog = int(os.environ["WORLD_SIZE"])
                self.listener = socket.create_server((address, 0), backlog=backlog)
            port = self.listener.getsockname()[1] if self.listener else 0
            rank, count = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
            store.set(f"node {here}", plain.to_json(Node(address or "", port, rank, count)))
        for node in range(nodes):
            if node != here:
                self._connect(plain.from_json(Node, store.get(f"node {node}").decode()))

    def _connect(self, node: Node) -> None:
        if not node.port:
            return
        # A firewall may let Gloo through and not this: then there is only less to see.
        try:
            line = socket.create_connection((node.address, node.port), _CONNECTING)
        except OSError as error:
            log.info("node at %s: no keepalives, since %s", node.address, error)
            return
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = (socket.TCP_KEEPIDLE, _IDLE), (socket.TCP_KEEPINTVL, _EVERY)
        for option, value in (*options, (socket.TCP_KEEPCNT, _COUNT)):
            line.setsockopt(socket.IPPROTO_TCP, option, value)
        self.lines.append((line, node))

    def lost(self) -> Node | None:
        """A node that does not answer any more."""
        for line, node in self.lines:
            error = line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # told once
            if error and error != errno.ECONNRESET:  # its process has ended: that is seen elsewhere
                self.cut = self.cut or node
        return self.cut

    def close(self) -> None:
        """Ends the connections to the other nodes, and listens no more."""
        for line, _ in self.lines:
            line.close()
        if self.listener is not None:
            self.listener.close()
