# SPDX-License-Identifier: Apache-2.0
"""Which interface a rank uses, and what it says when there is none."""

from __future__ import annotations

import socket

import pytest

from hetccl.errors import ConfigError
from hetccl.native import interfaces as module
from hetccl.native.interfaces import Address, Interface, choose, interfaces, is_loopback

V4, V6 = socket.AF_INET, socket.AF_INET6


def interface(name, index, *hosts, up=True, speed=0):
    addresses = tuple(
        Address(V6 if ":" in host else V4, host, index if host.startswith("fe80") else 0, name) for host in hosts
    )
    return Interface(name, index, up, name == "lo", speed, addresses)


LO = interface("lo", 1, "127.0.0.1", "::1")
DOCKER = interface("docker0", 2, "172.17.0.1", speed=10000)
SLOW = interface("aslow0", 3, "10.1.0.5", speed=1000)
ETH0 = interface("eth0", 4, "fe80::5", "fd00::5", "10.0.0.5", speed=25000)
ETH1 = interface("eth1", 5, "10.2.0.5", up=False, speed=100000)
BARE = interface("eth2", 6)


@pytest.fixture
def host(monkeypatch):
    """Sets the interfaces of a pretended host, and its routes."""

    def pretend(*found, routes=None):
        monkeypatch.setattr(module, "interfaces", lambda: list(found))
        monkeypatch.setattr(module, "_route_sources", lambda target: list((routes or {}).get(target, ())))

    return pretend


def hosts(addresses):
    return [a.host for a in addresses]


def test_this_host_has_loopback():
    found = {i.name: i for i in interfaces()}
    assert found["lo"].loopback and found["lo"].up
    assert Address(V4, "127.0.0.1", 0, "lo") in found["lo"].addresses
    assert all(i.index == socket.if_nametoindex(i.name) for i in found.values())


def test_unknown_name_says_variable_value_and_what_exists(host):
    host(LO, ETH0)
    with pytest.raises(ConfigError) as caught:
        choose("ib7", "", True)
    text = str(caught.value)
    assert "HETCCL_SOCKET_IFNAME=ib7" in text and "eth0" in text and "lo" in text and "10.0.0.5" in text
    assert caught.value.interfaces == ["lo", "eth0"]


def test_exact_name_before_prefix_and_list_in_order(host):
    host(LO, ETH0, interface("eth0.100", 7, "10.9.0.5"), SLOW)
    assert hosts(choose("eth0", "", True)) == ["10.0.0.5", "fd00::5", "fe80::5"]
    assert hosts(choose("aslow, eth0.", "", True)) == ["10.1.0.5", "10.9.0.5"]
    assert hosts(choose("nothing,eth", "", True)) == ["10.0.0.5", "fd00::5", "fe80::5", "10.9.0.5"]


@pytest.mark.parametrize("name", ["eth1", "eth2"])
def test_named_but_down_or_without_address(host, name):
    host(LO, ETH0, ETH1, BARE)
    with pytest.raises(ConfigError, match=f"HETCCL_SOCKET_IFNAME={name}"):
        choose(name, "", True)


def test_loopback_by_name(host):
    host(LO, ETH0)
    assert hosts(choose("lo", "10.0.0.9", False)) == ["127.0.0.1", "::1"]


def test_route_to_the_store_decides(host):
    host(LO, DOCKER, ETH0, SLOW, routes={"store": ["10.1.0.5"], "v6store": ["fd00::5"]})
    assert hosts(choose("", "store", True)) == ["10.1.0.5"]
    assert hosts(choose("", "v6store", True)) == ["fd00::5", "10.0.0.5", "fe80::5"]


@pytest.mark.parametrize("store", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_store_on_loopback(host, store):
    host(LO, ETH0)
    assert hosts(choose("", store, True)) == ["127.0.0.1", "::1"]
    assert hosts(choose("", store, False))[0] == "10.0.0.5"


def test_own_name_that_resolves_to_loopback_does_not_choose_loopback(monkeypatch):
    """Debian's 127.0.1.1: other hosts resolve the same name to something they can reach."""
    monkeypatch.setattr(module, "interfaces", lambda: [LO, ETH0])
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, **_: [(V4, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", port))]
    )
    assert hosts(choose("", "node7", True))[0] == "10.0.0.5"


@pytest.mark.parametrize("store", ["", "0.0.0.0", "::"])
def test_unknown_store_takes_the_fastest_real_interface(host, store, monkeypatch):
    host(LO, DOCKER, SLOW, ETH0, ETH1, BARE)
    assert hosts(choose("", store, True))[0] == "10.0.0.5"


def test_container_bridges_come_last(host):
    host(LO, DOCKER)
    assert hosts(choose("", "", False)) == ["172.17.0.1"]


def test_only_loopback(host):
    host(LO, ETH1)
    assert hosts(choose("", "", True)) == ["127.0.0.1", "::1"]
    with pytest.raises(ConfigError, match=r"eth1 .down"):
        choose("", "", False)


def test_real_route_to_own_address():
    """The kernel's answer for an address of this very host is that address's interface."""
    for found in interfaces():
        for address in found.addresses:
            if not found.loopback and found.up and address.family == V4:
                assert hosts(choose("", address.host, True))[0] == address.host


def test_wildcards_have_no_route():
    assert [module._route_sources(host) for host in ("0.0.0.0", "::", "")] == [[], [], []]


def test_ipv6_missing_in_the_kernel(monkeypatch):
    real = socket.socket

    def no_v6(family=-1, *rest, **more):
        if family == V6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *rest, **more)

    monkeypatch.setattr(socket, "socket", no_v6)
    assert module._route_sources("fd00::1") == []


def test_link_local_carries_its_scope():
    address = Address(V6, "fe80::1", 4, "eth0")
    assert address.link_local and str(address) == "fe80::1%eth0"
    assert address.sockaddr(80) == ("fe80::1", 80, 0, 4)
    assert Address(V4, "10.0.0.5", 0, "eth0").sockaddr(80) == ("10.0.0.5", 80)
    assert not Address(V6, "fd00::1", 0, "eth0").link_local


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("a", False),
    ],
)
def test_is_loopback(text, expected):
    assert is_loopback(text) is expected
