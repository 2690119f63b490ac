# SPDX-License-Identifier: Apache-2.0
"""What the tests share: endpoints over raw sockets, child processes, a thread that accepts."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
import time

from hetccl_transport_tcp._tcp import CHANNELS, Streams

from hetccl.tables import TransportTable

LIMIT = 20.0  # seconds that any one message may take


class End:
    """One end of an endpoint, with calls that repeat until done or until a deadline."""

    def __init__(self, socks, max_message=256 << 10, peer=1, dialled=True, part=0):
        for sock in socks:
            sock.setblocking(False)
        self.streams = Streams(max_message, part)
        self.table = TransportTable(self.streams.capsule())
        self.ep = self.streams.open(peer, [sock.detach() for sock in socks], dialled)

    def until(self, call, *arguments):
        deadline = time.monotonic() + LIMIT
        while not (answer := call(self.ep, *arguments)):
            assert time.monotonic() < deadline, f"{call.__name__} did not finish"
            os.sched_yield()
        return answer

    def send(self, data, channel=0, fingerprint=0):
        self.until(self.table.send, data, channel, fingerprint)

    def recv(self, nbytes, channel=0, fingerprint=0):
        data = bytearray(nbytes)
        self.until(self.table.recv, data, channel, fingerprint)
        return bytes(data)

    def peek(self, channel=0, index=0, nbytes=0, fingerprint=0):
        address, found = self.until(self.table.peek, channel, index, nbytes, fingerprint)
        assert address % 64 == 0
        return memory(address, found)

    def close(self):
        self.streams.close()


def memory(address, nbytes):
    return ctypes.string_at(address, nbytes)


def payload(number, nbytes):
    return random.Random(number).randbytes(nbytes)


def socket_pairs(host, buffer=0, count=CHANNELS):
    """Connected socket pairs, as two lists."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    left, right = [], []
    with socket.socket(family) as server:
        if buffer:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        server.bind((host, 0))
        server.listen()
        for _ in range(count):
            sock = socket.socket(family)
            if buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
            sock.connect(server.getsockname()[:2])
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left.append(sock)
            right.append(server.accept()[0])
            right[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if buffer:
                right[-1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return left, right


def in_child(function, *arguments):
    """Runs function in a forked child; returns its pid. A child that fails exits with 1."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function(*arguments)
            status = 0
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return pid


def wait_for(pid):
    """Exit status of a child; one that hangs is killed and fails the test."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def open_fds():
    return len(os.listdir("/proc/self/fd"))


class Accepting(threading.Thread):
    """Calls accept of a transport until told to stop; collects the links."""

    def __init__(self, transport):
        super().__init__(daemon=True)
        self.transport, self.links, self.stopping = transport, [], False
        self.start()

    def run(self):
        while not self.stopping:
            link = self.transport.accept(0.1)
            if link is not None:
                self.links.append(link)

    def wait(self, count):
        deadline = time.monotonic() + LIMIT
        while len(self.links) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(self.links) == count
        return self.links

    def stop(self):
        self.stopping = True
        self.join(10)
        assert not self.is_alive()
