"""benchmarks/nodes.py has two nodes and cuts one off; it takes root."""

import socket

import torch.distributed as dist

from pfeife.data import plain
from pfeife.runtime.distributed.liveness.keepalive import Lifelines, Node


def test_a_node_that_ends_is_not_one_that_is_cut_off(monkeypatch):
    """Each node's first rank listens; the lines of one that closes break otherwise."""
    store = dist.HashStore()
    monkeypatch.setattr(
        "pfeife.runtime.distributed.liveness.keepalive.own_address", lambda: "127.0.0.1"
    )
    given = {"GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    made = {}

    def join(rank):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("GROUP_RANK", str(rank))
        made[rank] = Lifelines(store)

    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        store.set("node 0", plain.to_json(Node("127.0.0.1", port, 0, 1)))
        join(1)
    join(0)
    told = [str(node) for _, node in made[0].lines]
    assert told == ["its node (127.0.0.1, ranks 1 to 1)"]
    made[1].close()
    assert made[0].lost() is None and made[1].cut is None
    made[0].close()
