"""Two nodes on one machine: network namespaces, and a border between them that carries less.

    sudo python benchmarks/nodes.py [--mbit 400] [--json FILE]

Each node is a namespace of the network and of processes, with two ranks and an interface; the
border is a pair of interfaces that tc limits (token bucket filters; no delay, which takes a module
that few kernels have at hand). Shown are the links as bench-network and as plain sockets see them;
plans that know the border and that believe all links alike, predicted and measured; that the
numbers are those of one device; and what becomes of the ranks when a node is cut off or killed. The
ranks are in benchmarks/nodes_ranks.py.

Namespaces have the prefix pfeife- and this process's number; what a run that was killed has left
is removed by the next one.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from pfeife import report

HERE = Path(__file__).parent
PREFIX = "pfeife-"
ADDRESSES = ("198.18.0.1", "198.18.0.2")  # of a block for benchmarks of networks (RFC 2544)
RANKS = 2  # a node
# Processes of one node do not see those of the other, whose memory they could map.
APART = "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"
MESSAGE = 2**21  # bytes of a message over plain sockets
OFTEN = 20  # times


class Refused(RuntimeError):
    """The machine does not allow what is needed."""


def ip(*words: str) -> str:
    found = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if found.returncode:
        raise Refused(f"ip {' '.join(words)}: {found.stderr.strip()}")
    return found.stdout


@attrs.frozen
class Nodes:
    """Two namespaces, and what is started in them."""

    names: tuple[str, str]

    def start(self, node: int, *command: str) -> "subprocess.Popen[str]":
        """A process of a node, with its output in one pipe."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[node], *APART, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def torchrun(self, *arguments: str) -> "list[subprocess.Popen[str]]":
        """The ranks of both nodes."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        os.environ["OMP_NUM_THREADS"] = "1"
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr"]
        words += [ADDRESSES[0], "--master-port", port, "--nproc-per-node", str(RANKS)]
        file = str(HERE / "nodes_ranks.py")
        return [self.start(n, *words, "--node-rank", str(n), file, *arguments) for n in range(2)]

    def processes(self, node: int) -> list[int]:
        return [int(one) for one in ip("netns", "pids", self.names[node]).split()]

    def kill(self, node: int) -> None:
        for one in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)

    def link(self, state: str) -> None:
        """The first node's interface "up" or "down"."""
        ip("-n", self.names[0], "link", "set", "border0", state)


def removed(names: "tuple[str, ...] | list[str]") -> None:
    for name in names:
        with contextlib.suppress(Refused):
            for one in ip("netns", "pids", name).split():
                os.kill(int(one), signal.SIGKILL)
            ip("netns", "del", name)


@contextlib.contextmanager
def two_nodes(mbit: int) -> Iterator[Nodes]:
    """Raises Refused where namespaces cannot be made."""
    if not all(map(shutil.which, ("ip", "tc", "unshare"))):
        raise Refused("two nodes need ip, tc and unshare (Debian's iproute2 and util-linux)")
    if os.geteuid():
        raise Refused("two nodes need network namespaces, which take root: run it with sudo")
    removed([one for one in re.findall(rf"^({PREFIX}\d+-\d)", ip("netns", "list"), re.MULTILINE)])
    nodes = Nodes((f"{PREFIX}{os.getpid()}-0", f"{PREFIX}{os.getpid()}-1"))
    try:
        for name in nodes.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        pair = ("type", "veth", "peer", "name", "border1", "netns", nodes.names[1])
        ip("link", "add", "border0", "netns", nodes.names[0], *pair)
        for at, (name, address) in enumerate(zip(nodes.names, ADDRESSES, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", f"border{at}")
            ip("-n", name, "link", "set", f"border{at}", "up")
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            tc = ["tc", "qdisc", "add", "dev", f"border{at}", "root", *limit]
            found = subprocess.run(["ip", "netns", "exec", name, *tc], check=False)
            if found.returncode:
                raise Refused("tc cannot limit an interface here")
        yield nodes
    finally:
        removed(nodes.names)


_RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7777)) as server:
    print("here", flush=True)
    line, _ = server.accept()
    for _ in range(int(sys.argv[3])):
        left = int(sys.argv[2])
        while left:
            left -= len(line.recv(min(left, 2**20)))
        line.sendall(b"!")
"""
_SEND = """
import socket, statistics, sys, time
line, data, times = socket.create_connection((sys.argv[1], 7777)), bytes(int(sys.argv[2])), []
for _ in range(int(sys.argv[3])):
    start = time.perf_counter()
    line.sendall(data)
    line.recv(1)
    times.append(time.perf_counter() - start)
print(len(data) / statistics.median(times))
"""


def plain_sockets(nodes: Nodes, sender: int) -> float:
    """Bytes a second of a message to node 1 over one TCP connection, by the median."""
    given = ADDRESSES[1], str(MESSAGE), str(OFTEN)
    receiver = nodes.start(1, sys.executable, "-c", _RECEIVE, *given)
    assert receiver.stdout is not None and receiver.stdout.readline() == "here\n"
    out, _ = nodes.start(sender, sys.executable, "-c", _SEND, *given).communicate()
    receiver.communicate()
    return float(out)


def measured(nodes: Nodes) -> dict:
    """What rank 0 of the ranks has found."""
    first, second = nodes.torchrun("measure")
    out, _ = first.communicate(timeout=300)
    second.communicate(timeout=60)
    line = next((one for one in out.splitlines() if one.startswith("FOUND ")), None)
    if line is None:
        raise RuntimeError(out[-4000:])
    return json.loads(line.removeprefix("FOUND "))


def cut_off(nodes: Nodes, how: str) -> list[tuple[str, str, str]]:
    """A node's ranks and what they say, after the border went down or the other node's processes
    were killed in a step; the seconds until its last process had ended."""
    started = nodes.torchrun("train")
    time.sleep(15.0)
    begun, ended = time.monotonic(), dict[int, float]()
    if how == "link down":
        nodes.link("down")
    else:
        nodes.kill(1)
    while len(ended) < 2 and time.monotonic() < begun + 60:
        for node in {0, 1} - set(ended):
            if not nodes.processes(node):
                ended[node] = time.monotonic() - begun
        time.sleep(0.1)
    for node in range(2):
        nodes.kill(node)
    nodes.link("up")
    rows = []
    for node in range(2 if how == "link down" else 1):
        out = started[node].communicate()[0]
        said = re.findall(r"PipelineError: (rank \d+: .*?)(?:\. Every|\n)", out)
        late = f"{ended[node]:.1f} s" if node in ended else "not in 60 s"
        rows.append((f"{how}: node {node}", late, said[0] if said else out[-300:]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mbit", type=int, default=400, help="megabits a second of the border")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    try:
        with two_nodes(arguments.mbit) as nodes:
            raw = {"inside": plain_sockets(nodes, 1), "border": plain_sockets(nodes, 0)}
            found = measured(nodes)
            ends = [row for how in ("link down", "killed") for row in cut_off(nodes, how)]
    except Refused as error:
        sys.exit(str(error))
    links = [
        (kind, *(f"{found['links'][kind][at]:.3g}" for at in range(3)), f"{raw[kind] / 1e9:.3g}")
        for kind in raw
    ]
    head = ("links", "GB/s: slowest", "median", "fastest", "plain sockets")
    print(report.table(links, head))
    rows = [
        (
            one["name"],
            one["cut"],
            f"{1e3 * one['predicted']:.0f} ms",
            f"{1e3 * one['measured']:.0f} ms",
            f"{100 * (one['predicted'] / one['measured'] - 1):+.1f} %",
            "yes" if one["same"] else "NO",
        )
        for one in found["plans"]
    ]
    print(report.table(rows, ("plan", "layers", "predicted", "step", "error", "bitwise")))
    print(report.table(ends, ("what happens", "all ended after", "what its ranks raise")))
    if arguments.json:
        arguments.json.write_text(json.dumps({**found, "sockets": raw, "ends": ends}, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
