# SPDX-License-Identifier: Apache-2.0
"""TCP keeps the contract of a transport, with one bulk socket and with several."""

from hetccl.testing.transport_suite import TransportSuite


class TestOneSocket(TransportSuite):
    transport = "tcp"
    env = {"HETCCL_SOCKET_IFNAME": "lo"}


class TestFourSockets(TransportSuite):
    transport = "tcp"
    env = {"HETCCL_SOCKET_IFNAME": "lo", "HETCCL_TCP_SOCKETS": "4", "HETCCL_TCP_CHUNK_BYTES": "100000"}
