# SPDX-License-Identifier: Apache-2.0
"""Addresses, dialling, accepting; and strangers, who are refused while the job goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time

import pytest
from hetccl_transport_tcp import listener as listener_module
from hetccl_transport_tcp.driver import TcpDriver
from tcp_links import Accepting, in_child, open_fds, wait_for

from hetccl.errors import ClosedError, ConfigError, HetcclError, TransportError
from hetccl.native import handshake
from hetccl.tables import TransportTable
from hetccl.transports.base import TransportRequest

SOCKS = 6  # of a collective link: the channels, one for words, one bulk a direction
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def served(make_transport):
    """A transport of rank 0 whose accept runs in a thread."""
    transport = make_transport(0, size=4)
    thread = Accepting(transport)
    yield transport, thread
    thread.stop()


def talk(a, link_a, b, link_b):
    """One message each way on each channel."""
    tables = TransportTable(a.table), TransportTable(b.table)
    ends = [(tables[0], link_a.endpoint), (tables[1], link_b.endpoint)]
    for (to, to_ep), (of, of_ep) in (ends, ends[::-1]):
        for channel in range(3):
            data, got = os.urandom(9), bytearray(9)
            assert to.send(to_ep, data, channel)
            while not of.recv(of_ep, got, channel):
                pass
            assert got == data


def test_dial_and_accept(served, make_transport):
    transport, thread = served
    other = make_transport(1, size=4)
    address = json.loads(json.dumps(transport.address()))
    links = [other.dial(0, address, purpose, 5) for purpose in ("collective", "p2p")]
    accepted = thread.wait(2)
    assert [(link.peer, link.purpose) for link in links] == [(0, "collective"), (0, "p2p")]
    assert [(link.peer, link.purpose) for link in accepted] == [(1, "collective"), (1, "p2p")]
    for link, mate in zip(links, accepted, strict=True):
        talk(other, link, transport, mate)


def test_many_dialers_at_once(served, make_transport):
    transport, thread = served
    others = [make_transport(rank, size=4) for rank in (1, 2, 3)]
    threads = [
        threading.Thread(target=other.dial, args=(0, transport.address(), purpose, 20))
        for other in others
        for purpose in ("collective", "p2p")
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted((link.peer, link.purpose) for link in thread.wait(6)) == [
        (rank, purpose) for rank in (1, 2, 3) for purpose in ("collective", "p2p")
    ]


def test_fileno_is_readable_until_everything_is_taken(make_transport):
    """Somebody who polls fileno and calls accept(0) once a wake-up gets every link."""
    transport, other = make_transport(0), make_transport(1)
    dialer = threading.Thread(target=lambda: [other.dial(0, transport.address(), "collective", 10) for _ in range(3)])
    dialer.start()
    links, end = [], time.monotonic() + 10
    while len(links) < 3 and time.monotonic() < end:
        if select.select([transport.fileno()], [], [], 0.5)[0]:
            link = transport.accept(0)
            links += [link] if link else []
    dialer.join()
    assert len(links) == 3 and not select.select([transport.fileno()], [], [], 0)[0]


def raw(transport):
    _, host, port, _ = transport.address()["addrs"][0]
    return socket.create_connection((host, port))


def test_strangers_are_refused_and_logged_and_the_job_goes_on(served, make_transport, caplog):
    transport, thread = served
    caplog.set_level(logging.WARNING, "hetccl.transports.tcp")
    garbage, short, silent, big = (raw(transport) for _ in range(4))
    garbage.sendall(b"x" * 400)
    short.sendall(b"x")
    short.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        big.sendall(b"y" * (8 << 20))
    wrong = make_transport(2, size=4, secret=b"other" * 7)
    with pytest.raises(TransportError, match="HETCCL_SECRET"):
        wrong.dial(0, transport.address(), "collective", 3)
    outsider = make_transport(9, size=10)
    outsider.dial(0, transport.address(), "collective", 3)  # it holds the secret, but is no rank of this job
    start = time.monotonic()
    other = make_transport(1, size=4)
    link = other.dial(0, transport.address(), "collective", 5)
    (accepted,) = thread.wait(1)
    assert time.monotonic() - start < 1, "a silent stranger held up a rank"
    talk(other, link, transport, accepted)
    text = caplog.text
    where = "{}:{}".format(*garbage.getsockname())
    assert f"refused a connection from {where}" in text
    assert "closed after 1 of" in text and "rank 9 is not one of the 4 ranks" in text
    for sock in (garbage, short, silent, big):
        sock.close()


def test_replay_of_a_whole_connection(served, make_transport, caplog):
    """A recording of a rank's dialling, sent again, is refused."""
    transport, thread = served
    recorded = []
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def relay():
            for _ in range(SOCKS):
                inner, _ = proxy.accept()
                outer = raw(transport)
                inner.sendall(outer.recv(32, socket.MSG_WAITALL))
                hello = inner.recv(handshake._HELLO.size + 32, socket.MSG_WAITALL)
                recorded.append(hello)
                outer.sendall(hello)
                inner.sendall(outer.recv(handshake._WELCOME.size + 32, socket.MSG_WAITALL))
                kept.extend((inner, outer))

        kept = []
        relaying = threading.Thread(target=relay)
        relaying.start()
        address = transport.address()
        address["addrs"] = [["inet", "127.0.0.1", proxy.getsockname()[1], 0]]
        make_transport(1, size=4).dial(0, address, "collective", 5)
        relaying.join()
    thread.wait(1)
    for hello in recorded:
        with raw(transport) as sock:
            sock.sendall(hello)
            sock.settimeout(5)
            answer = b""
            try:
                while part := sock.recv(4096):
                    answer += part
            except ConnectionResetError:
                pass
            assert len(answer) == 32
    thread.wait(1)
    assert caplog.text.count("did not prove") == SOCKS
    for sock in kept:
        sock.close()


def test_slow_stranger_is_dropped(make_transport, monkeypatch, caplog):
    defaults = {**handshake.Acceptor.__init__.__kwdefaults__, "timeout": 0.3}
    monkeypatch.setattr(handshake.Acceptor.__init__, "__kwdefaults__", defaults)
    transport = make_transport(0)
    with raw(transport) as sock:
        assert transport.accept(1.0) is None
        sock.settimeout(1)
        assert len(sock.recv(100)) == 32 and sock.recv(100) == b""
    assert "in time" in caplog.text


def test_flood_of_strangers_is_bounded(make_transport, caplog):
    transport = make_transport(0)
    thread = Accepting(transport)
    before = open_fds()
    socks = [raw(transport) for _ in range(listener_module.MOST_PENDING + 40)]
    deadline = time.monotonic() + 10
    while caplog.text.count("too many connections") < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert caplog.text.count("too many connections") == 40
    assert open_fds() - before <= len(socks) + listener_module.MOST_PENDING
    other = make_transport(1)
    other.dial(0, transport.address(), "collective", 5)
    thread.wait(1)
    thread.stop()
    for sock in socks:
        sock.close()


def test_half_a_link_is_dropped(make_transport, monkeypatch, caplog):
    monkeypatch.setattr(listener_module, "ASSEMBLY_TIMEOUT", 0.3)
    transport = make_transport(0)
    thread = Accepting(transport)
    sock = raw(transport)
    handshake.dial(sock, secret=b"s" * 32, job="job", rank=1, peer=0, purpose="collective|1:0|abc", timeout=5)
    again = raw(transport)
    handshake.dial(again, secret=b"s" * 32, job="job", rank=1, peer=0, purpose="collective|1:0|abc", timeout=5)
    sock.settimeout(5)
    assert sock.recv(1) == b"" and again.recv(1) == b""
    thread.stop()
    assert "only channels [1] of 3" in caplog.text and "twice" in caplog.text and not thread.links
    sock.close()
    again.close()


@pytest.mark.parametrize(
    "purpose",
    ["collective", "|"]
    + [f"collective|{n}|n" for n in ("3:0", "-1:0", "x:0", "1", "0/5", "0:17", "6:1", "0:1:1", "0:0001", "3:", ":1")],
)
def test_purpose_that_is_no_channel(make_transport, purpose, caplog):
    transport = make_transport(0)
    thread = Accepting(transport)
    with raw(transport) as sock:
        handshake.dial(sock, secret=b"s" * 32, job="job", rank=1, peer=0, purpose=purpose, timeout=5)
        sock.settimeout(5)
        assert sock.recv(1) == b""
    thread.stop()
    assert "no channel of a link" in caplog.text


def test_dead_address_first_is_passed_over(served, make_transport, caplog):
    """An address that never answers costs two seconds, one that refuses none; the log says why."""
    transport, thread = served
    with socket.socket() as full:  # its backlog is full, so that a connection is never completed
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            address = transport.address()
            dead = [["inet", "127.0.0.1", s.getsockname()[1], 0] for s in (nobody, full)]
            address["addrs"] = [["unknown-family", "x", 1, 0], *dead, *address["addrs"]]
            start = time.monotonic()
            make_transport(1, size=4).dial(0, address, "collective", 10)
        for filler in fillers:
            filler.close()
    assert 1.5 < time.monotonic() - start < 4
    thread.wait(1)
    assert "refused" in caplog.text and "timed out" in caplog.text


def test_no_address_works(make_transport):
    other = make_transport(1)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(TransportError) as caught:
            other.dial(0, {"addrs": [["inet", "127.0.0.1", port, 0]], "host": "host"}, "collective", 2)
    text = str(caught.value)
    assert f"127.0.0.1:{port}" in text and "refused" in text and "HETCCL_SOCKET_IFNAME" in text
    assert caught.value.peer == 0


def test_deadline_of_dial(make_transport):
    """Nobody calls accept: dial gives up in time."""
    transport, other = make_transport(0), make_transport(1)
    address = transport.address()
    address["addrs"] = address["addrs"][:1]
    start = time.monotonic()
    with pytest.raises(TransportError, match="in time"):
        other.dial(0, address, "collective", 0.5)
    assert time.monotonic() - start < 2


def test_versions_that_do_not_meet(served, make_transport, monkeypatch):
    transport, _ = served
    real = handshake.dial
    monkeypatch.setattr(
        "hetccl_transport_tcp.driver.dial", lambda sock, **more: real(sock, versions=handshake.Versions(7, 9), **more)
    )
    with pytest.raises(handshake.HandshakeError, match=r"7 to 9.*speaks 1"):
        make_transport(1, size=4).dial(0, transport.address(), "collective", 5)


def test_reachable_is_symmetric_and_loopback_stays_at_home(make_transport, monkeypatch):
    here, there = make_transport(0, host_id="a"), make_transport(1, host_id="b")
    neighbour = make_transport(2, host_id="a")
    assert here.address()["loopback"] is True
    assert not here.reachable(there.address()) and not there.reachable(here.address())
    assert here.reachable(neighbour.address()) and neighbour.reachable(here.address())
    routed = {"addrs": [["inet", "10.0.0.1", 1, 0]], "host": "b", "loopback": False}
    assert not here.reachable(routed)
    assert not here.reachable({**routed, "addrs": [], "host": "a"})


def test_loopback_of_another_host_is_not_dialled(make_transport):
    here, there = make_transport(0, host_id="a"), make_transport(1, host_id="b")
    with pytest.raises(TransportError, match="none of its addresses"):
        here.dial(1, there.address(), "collective", 1)


def test_chunk_bytes_must_agree(served, make_transport):
    transport, _ = served
    with pytest.raises(ConfigError, match="HETCCL_TCP_CHUNK_BYTES is 8192 on rank 1 and 262144 on rank 0"):
        make_transport(1, size=4, chunk_bytes=8192).dial(0, transport.address(), "collective", 1)


def test_sockets_must_agree(served, make_transport):
    transport, _ = served
    with pytest.raises(ConfigError, match="HETCCL_TCP_SOCKETS is 4 on rank 1 and 1 on rank 0"):
        make_transport(1, size=4, sockets=4).dial(0, transport.address(), "collective", 1)


@pytest.mark.parametrize("text", ["0", "17", "x", "1.5"])
def test_bad_number_of_sockets(monkeypatch, text):
    monkeypatch.setenv("HETCCL_TCP_SOCKETS", text)
    with pytest.raises(ConfigError, match=f"HETCCL_TCP_SOCKETS={text} is not a number of sockets from 1 to 16"):
        TcpDriver().open(TransportRequest(0, 2, "job", "host", b"s" * 32))


def test_sockets_show(make_transport):
    assert make_transport(0, sockets=8).describe() == "tcp lo 127.0.0.1, 8 sockets"


@pytest.mark.parametrize("text", ["0", "4095", "x", "99999999999"])
def test_bad_chunk_bytes(monkeypatch, text):
    monkeypatch.setenv("HETCCL_TCP_CHUNK_BYTES", text)
    with pytest.raises(ConfigError, match=f"HETCCL_TCP_CHUNK_BYTES={text}"):
        TcpDriver().open(TransportRequest(0, 2, "job", "host", b"s" * 32))


def test_chunk_bytes_from_the_environment(monkeypatch):
    monkeypatch.setenv("HETCCL_TCP_CHUNK_BYTES", "65536")
    transport = TcpDriver().open(TransportRequest(0, 2, "job", "host", b"s" * 32))
    assert TransportTable(transport.table).max_message == 65536
    transport.close()


def test_bad_interface_name(monkeypatch):
    monkeypatch.setenv("HETCCL_SOCKET_IFNAME", "nope0")
    with pytest.raises(ConfigError, match=r"HETCCL_SOCKET_IFNAME=nope0.*lo"):
        TcpDriver().open(TransportRequest(0, 2, "job", "host", b"s" * 32))


def test_listens_at_the_chosen_interface_only(make_transport):
    transport = make_transport(0)
    for family, host, port, _ in transport.address()["addrs"]:
        assert host in ("127.0.0.1", "::1")
        with pytest.raises(OSError), socket.socket(socket.AF_INET if family == "inet" else socket.AF_INET6) as sock:
            sock.settimeout(1)
            sock.connect(("127.0.0.2", port) if family == "inet" else ("fe80::1", port, 0, 1))
    assert transport.describe() == "tcp lo 127.0.0.1"


def test_probe_and_declarations():
    driver = TcpDriver()
    availability = driver.probe()
    assert availability.ok and "127.0.0.1" in availability.details["lo"]
    assert (driver.name, driver.preference) == ("tcp", 10)
    assert {o.name for o in driver.options} == {"HETCCL_TCP_CHUNK_BYTES", "HETCCL_TCP_SOCKETS"}


def test_probe_says_why_not(monkeypatch):
    monkeypatch.setattr("hetccl_transport_tcp.driver.interfaces", lambda: [])
    availability = TcpDriver().probe()
    assert not availability.ok and "no network interface" in availability.reason and availability.remedy


def test_close_wakes_accept_and_is_idempotent(make_transport):
    transport = make_transport(0)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(transport.accept(30)))
    thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    transport.close()
    thread.join(5)
    assert answers == [None] and time.monotonic() - start < 2
    transport.close()
    for call in (lambda: transport.accept(0), lambda: transport.dial(1, {}, "p2p", 1)):
        with pytest.raises(ClosedError):
            call()


def test_fork(served, make_transport):
    """A forked child is told off, and its exit or close leaves the parent's listener and links alone."""
    transport, thread = served
    other = make_transport(1, size=4)
    link = other.dial(0, transport.address(), "collective", 5)
    (accepted,) = thread.wait(1)

    def child():
        for call in (lambda: other.dial(0, {}, "p2p", 1), lambda: transport.accept(0)):
            try:
                call()
            except ClosedError:
                continue
            raise AssertionError("allowed")
        transport.close()
        other.close()

    assert wait_for(in_child(child)) == 0
    talk(other, link, transport, accepted)
    other.dial(0, transport.address(), "p2p", 5)
    thread.wait(2)


def test_no_descriptors_are_left(make_transport):
    before = open_fds()
    for _ in range(5):
        transport, other = make_transport(0), make_transport(1)
        thread = Accepting(transport)
        other.dial(0, transport.address(), "collective", 5)
        thread.wait(1)
        with raw(transport), pytest.raises(HetcclError):
            make_transport(1, secret=b"x" * 32).dial(0, transport.address(), "p2p", 2)
        thread.stop()
        for opened in (transport, other):
            opened.close()
    # The refused dialers are closed with the fixture; each holds its listeners, an eventfd and an epoll descriptor.
    assert open_fds() - before <= 5 * 4
