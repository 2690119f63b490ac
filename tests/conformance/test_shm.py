# SPDX-License-Identifier: Apache-2.0
"""Shared memory keeps the contract of a transport."""

from hetccl.testing.transport_suite import TransportSuite


class TestTransport(TransportSuite):
    transport = "shm"
    notices_death = False
