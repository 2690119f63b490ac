# SPDX-License-Identifier: Apache-2.0
"""Connected ends for the tests: endpoints over raw sockets, and whole transports."""

from __future__ import annotations

import gc
import os
import socket
import sys

import pytest
from hetccl_transport_tcp.driver import TcpTransport

from hetccl.transports.base import TransportRequest

sys.path.insert(0, os.path.dirname(__file__))  # for tcp_links, also with --import-mode=importlib
from tcp_links import End, open_fds, socket_pairs


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request):
    if ":" in request.param:
        try:
            with socket.socket(socket.AF_INET6) as sock:
                sock.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"no IPv6 loopback ({error}): ip -6 addr add ::1/128 dev lo")
    return request.param


@pytest.fixture
def ends(host):
    left, right = socket_pairs(host)
    pair = End(left), End(right, peer=0)
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def make_transport():
    """Opens transports and closes them at the end."""
    made = []

    def make(rank, size=2, secret=b"s" * 32, job="job", host_id="host", store_host="127.0.0.1", **more):
        transport = TcpTransport(TransportRequest(rank, size, job, host_id, secret, store_host), **more)
        made.append(transport)
        return transport

    yield make
    for transport in made:
        transport.close()


@pytest.fixture(autouse=True)
def no_descriptor_leaks():
    before = open_fds()
    yield
    gc.collect()
    assert open_fds() <= before, "a descriptor was left open"
