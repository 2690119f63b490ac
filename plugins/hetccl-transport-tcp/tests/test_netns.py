# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a virtual cable: two hosts as far as TCP can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.timeout(90)]

RANK = """
import json, os, sys, time
from hetccl.errors import PeerLostError
from hetccl.tables import TransportTable
from hetccl.transports.base import TransportRequest
from hetccl_transport_tcp.driver import TcpDriver

rank, store = int(sys.argv[1]), sys.argv[2]
transport = TcpDriver().open(TransportRequest(rank, 2, "job", f"host{rank}", b"s" * 32, store))
print(json.dumps([transport.address(), transport.describe()]), flush=True)
address = json.loads(sys.stdin.readline())
assert transport.reachable(address), address
if rank == 0:
    link = None
    while link is None:
        link = transport.accept(10)
else:
    link = transport.dial(0, address, "collective", 10)
table, data = TransportTable(transport.table), bytearray(100000)
mine = bytes([rank + 1]) * len(data)
sent = got = False
while not (sent and got):
    sent = sent or table.send(link.endpoint, mine, 0, 1)
    got = got or table.recv(link.endpoint, data, 0, 1)
assert data == bytes([2 - rank]) * len(data)
print("ok", flush=True)
sys.stdin.readline()
if "CUT" in os.environ:  # the cable has been cut: rank 0 has data under way, rank 1 has not
    start = time.monotonic()
    if rank == 0:
        table.send(link.endpoint, mine, 0, 1)
    try:
        while time.monotonic() - start < 60:
            table.progress(link.endpoint)
            table.ep_error(link.endpoint)
            time.sleep(0.1)
        print("still there", flush=True)
    except PeerLostError as error:
        print(json.dumps([time.monotonic() - start, str(error)]), flush=True)
transport.close()
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces():
    names = [f"hetccl-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
    except (OSError, subprocess.SubprocessError) as error:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], timeout=20)
        detail = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"no network namespaces ({detail.decode().strip()}); as root, with iproute2: pytest -m netns")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], timeout=20, check=True)


def configure(names, addresses, lo=True):
    for number, name in enumerate(names):
        if lo:
            ip("-n", name, "link", "set", "lo", "up")
        for address in addresses[number]:
            ip("-n", name, "addr", "add", address, "dev", f"cable{number}", *(["nodad"] if ":" in address else []))
        ip("-n", name, "link", "set", f"cable{number}", "up")


def run_ranks(names, stores, variables, before_end=lambda: None):
    """Both ranks to their end; their addresses and descriptions, and what they said last."""
    procs = []
    try:
        for rank, name in enumerate(names):
            procs.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, "-c", RANK, str(rank), stores[rank]],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **variables[rank], "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            )
        told = [json.loads(proc.stdout.readline()) for proc in procs]
        for proc, (address, _) in zip(procs, told[::-1], strict=True):
            proc.stdin.write(json.dumps(address) + "\n")
            proc.stdin.flush()
        assert [proc.stdout.readline() for proc in procs] == ["ok\n", "ok\n"]
        before_end()
        for proc in procs:
            proc.stdin.write("\n")
            proc.stdin.flush()
        last = [proc.communicate(timeout=70)[0] for proc in procs]
        assert [proc.returncode for proc in procs] == [0, 0]
        return told if not any(last) else last
    finally:
        for proc in procs:
            if proc.poll() is None:
                proc.kill()
            proc.communicate()


def test_ipv4_by_route(namespaces):
    configure(namespaces, [["10.77.0.1/24"], ["10.77.0.2/24"]])
    told = run_ranks(namespaces, ["10.77.0.1", "10.77.0.1"], [{}, {}])
    assert [text for _, text in told] == ["tcp cable0 10.77.0.1", "tcp cable1 10.77.0.2"]
    assert not any(address["loopback"] for address, _ in told)


def test_dual_stack_with_ipv4_only(namespaces):
    configure(namespaces, [["10.77.0.1/24", "fd77::1/64"], ["10.77.0.2/24"]])
    run_ranks(namespaces, ["", ""], [{"HETCCL_SOCKET_IFNAME": "cable0"}, {"HETCCL_SOCKET_IFNAME": "cable"}])


def test_ipv6_only(namespaces):
    configure(namespaces, [["fd77::1/64"], ["fd77::2/64"]])
    told = run_ranks(namespaces, ["fd77::1", "fd77::1"], [{}, {}])
    assert [[a[:2] for a in address["addrs"]] for address, _ in told] == [
        [["inet6", "fd77::1"]],
        [["inet6", "fd77::2"]],
    ]


def test_link_local_only(namespaces):
    """Addresses with a scope: each side dials by its own interface's number."""
    configure(namespaces, [["fe80::77:1/64"], ["fe80::77:2/64"]])
    told = run_ranks(namespaces, ["", ""], [{}, {}])
    for address, _ in told:
        assert address["addrs"] and all(a[1].startswith("fe80") and a[3] > 0 for a in address["addrs"])


def test_store_name_that_means_loopback_is_not_advertised(namespaces):
    """Rank 0 knows the store by a name that resolves to 127.0.1.1, as Debian's /etc/hosts has it."""
    configure(namespaces, [["10.77.0.1/24"], ["10.77.0.2/24"]])
    told = run_ranks(namespaces, ["127-0-1-1.invalid", "10.77.0.1"], [{}, {}])
    assert told[0][1] == "tcp cable0 10.77.0.1"


@pytest.mark.slow
def test_host_that_vanishes(namespaces):
    """A cut cable closes no socket. With data under way and without, the loss is told within half a minute."""
    configure(namespaces, [["10.77.0.1/24"], ["10.77.0.2/24"]])
    cut = {"CUT": "1"}
    last = run_ranks(
        namespaces, ["10.77.0.1"] * 2, [cut, cut], lambda: ip("-n", namespaces[1], "addr", "flush", "dev", "cable1")
    )
    for seconds, text in map(json.loads, last):
        assert 5 < seconds < 30, (seconds, text)
        assert "rank" in text
