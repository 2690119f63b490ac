# SPDX-License-Identifier: Apache-2.0
"""The direct path between devices, over shared memory and sockets, on stand-ins of CUDA and pretend accelerators."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, os.path.dirname(__file__))
import direct_bodies

from hetccl.core.direct import shares_device
from hetccl.core.topology import Record
from hetccl.testing.launch import run, run_results

PAIR = "nccl@a:1,nccl@b:1"
WIRES = {
    "shm": {"HETCCL_TRANSPORTS": "shm"},
    "tcp": {"HETCCL_TRANSPORTS": "tcp", "HETCCL_SOCKET_IFNAME": "lo"},
    "tcp-4": {"HETCCL_TRANSPORTS": "tcp", "HETCCL_SOCKET_IFNAME": "lo", "HETCCL_TCP_SOCKETS": "4"},
}


@pytest.fixture(params=list(WIRES))
def wired(request: pytest.FixtureRequest, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, **WIRES[request.param]}


def path(env: dict[str, str], direct: bool = True) -> set[str]:
    sockets = env.get("HETCCL_TCP_SOCKETS")
    tcp = "tcp lo 127.0.0.1" + (f", {sockets} sockets" if sockets else "")
    way = "shm" if env["HETCCL_TRANSPORTS"] == "shm" else tcp
    return {way + ", direct" * direct}


@pytest.mark.parametrize("way", ["auto", "resident", "kernel", "host", "staged"])
def test_every_way_gives_the_same_bits(wired: dict[str, str], way: str) -> None:
    found = run(direct_bodies.sums, PAIR, timeout=100, env={**wired, "HETCCL_DEVICE_PATH": way})
    assert [f["wrong"] for f in found] == [[], []]
    direct = way != "staged"
    assert all(f["paths"] == path(wired, direct) for f in found)
    assert all(f["stats"]["border_bytes"] > 0 for f in found)


@pytest.mark.parametrize("ranks", ["nccl:1,host:1", "nccl@a:1,host:1,nccl@b:1", "nccl@a:2,nccl@b:2", "nccl:2,host:2"])
def test_with_hosts_and_larger_islands(wired: dict[str, str], ranks: str) -> None:
    found = run(direct_bodies.sums, ranks, timeout=100, env={**wired, "HETCCL_CPU_THREADS": "2"})
    assert all(f["wrong"] == [] and f["paths"] == path(wired) for f in found)


@pytest.mark.parametrize("way", ["auto", "staged"])
def test_explain_says_that_the_direct_path_leaves_no_trace(environment: dict[str, str], way: str) -> None:
    env = {**environment, "HETCCL_DEVICE_PATH": way, "HETCCL_VERIFY": "always"}
    for r in run_results(direct_bodies.sums, PAIR, timeout=100, env=env):
        assert r.value["wrong"] == []
        assert ("leaves no trace; HETCCL_DEVICE_PATH=staged" in r.value["trace"]) == (way == "auto")
        assert r.value["trace"].startswith("no: " if way == "auto" else "yes, and replayed")
        assert ("operations are not replayed" in r.stderr) == (way == "auto")


@pytest.mark.parametrize(("ranks", "threads"), [("nccl:1,host:1", 1), ("host:1,nccl:1", 3), ("sim-a:1,host:1", 4)])
def test_a_host_sums_past_the_caches(wired: dict[str, str], ranks: str, threads: int) -> None:
    env = {**wired, "HETCCL_CPU_THREADS": str(threads), "HETCCL_ALGORITHM": "all_reduce=exchange"}
    assert run(direct_bodies.past_the_caches, ranks, timeout=100, env=env) == [[], []]


@pytest.mark.parametrize("ranks", ["nccl:2,host:2", "host@a:1,nccl:2,host@b:2", "host:1,nccl:1,host:1"])
def test_a_star(wired: dict[str, str], ranks: str) -> None:
    """Ranks in host memory around an island of devices: these call their library, those do not."""
    env = {**wired, "HETCCL_CPU_THREADS": "2", "HETCCL_ALGORITHM": "all_reduce=star", "HETCCL_VERIFY": "always"}
    found = run(direct_bodies.star, ranks, timeout=100, env=env)
    assert [(f["wrong"], f["algorithm"], f["share"]) for f in found] == [([], "star", 1)] * len(found)
    for f in found:
        assert (f["calls"] > 0) == (f["vendor"] == "nccl" and "nccl:2" in ranks)
        assert (f["past"] > 0) == (f["vendor"] == "host")


@pytest.mark.parametrize("ranks", ["host:1,sim-a:1,sim-b:1", "host:1,nccl:2,host:1", "nccl:1,host:1"])
def test_ranks_that_are_ahead(wired: dict[str, str], ranks: str) -> None:
    found = run(direct_bodies.ahead, ranks, timeout=100, env=wired)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("way", ["auto", "staged"])
def test_a_rank_that_has_done_its_part_may_leave(wired: dict[str, str], way: str) -> None:
    """However long another one takes: the root waits for that one, and blames nobody."""
    env = {**wired, "HETCCL_DEVICE_PATH": way, "HETCCL_ALGORITHM": "reduce_scatter=direct"}
    assert run(direct_bodies.early, "host@a:1,host@b:1,nccl@c:1", timeout=60, env=env) == [[True] * 3] * 3


def test_a_message_does_not_wait_for_a_kernel_that_waits(environment: dict[str, str]) -> None:
    """Whoever drives the messages drives the sum, too: to give memory back would be to wait for its kernel."""
    assert run(direct_bodies.messages_beside_a_sum, PAIR, timeout=100, env=environment) == [(True, True)] * 2


def test_an_island_that_owns_nothing_cuts_as_the_others_do(environment: dict[str, str], tmp_path: Path) -> None:
    rates = {"a": 50, "b": 50, "c": 25}
    islands = "".join(f"  {n}: {{vendor: nccl, ranks: 1, rails: [{r}GB/s]}}\n" for n, r in rates.items())
    (tmp_path / "t.yaml").write_text("islands:\n" + islands)
    env = {**environment, "HETCCL_TOPOLOGY": str(tmp_path / "t.yaml"), "HETCCL_ALGORITHM": "all_reduce=owners"}
    assert run(direct_bodies.large, 3, timeout=100, env=env, args=(18_000_001,)) == [True] * 3


def test_a_transport_that_takes_a_few_parts_at_a_time(environment: dict[str, str]) -> None:
    """The queue of a link of sockets is full after a few chunks of so small parts. Whoever comes late finds all
    contributions there, so sums end before earlier ones have left."""
    env = {**environment, **WIRES["tcp"], "HETCCL_TCP_CHUNK_BYTES": "4096", "HETCCL_ALGORITHM": "all_reduce=exchange"}
    assert run(direct_bodies.large, "nccl:1,host:1", timeout=100, env=env, args=(6_000_001, 0.5)) == [True] * 2


def test_kernels_that_see_the_window_elsewhere_do_not_spin(environment: dict[str, str]) -> None:
    found = run(direct_bodies.sums, PAIR, timeout=100, env={**environment, "STANDIN_ELSEWHERE": "4096"})
    assert [f["wrong"] for f in found] == [[], []]


@pytest.mark.parametrize("ranks", ["nccl:1,host:1", "nccl@a:1,nccl@b:1"])
def test_a_block_of_the_kernel_that_begins_late(environment: dict[str, str], ranks: str) -> None:
    """The others may go a whole ring of chunks ahead of it; a chunk is done only when it, too, has done its part."""
    env = {**environment, "HETCCL_CPU_THREADS": "2", "STANDIN_LATE_BLOCK": "30"}
    found = run(direct_bodies.star, ranks, timeout=100, env=env)
    assert [f["wrong"] for f in found] == [[], []]


@pytest.mark.parametrize("ranks", ["nccl:2,host:2", "host:1,nccl:1"])
def test_a_star_is_chosen_for_much_data(environment: dict[str, str], ranks: str) -> None:
    found = run(direct_bodies.star, ranks, timeout=100, env=environment)
    assert all(f["wrong"] == [] and f["algorithm"] == "star" for f in found)


@pytest.mark.parametrize("ranks", [PAIR, "sim-a:1,sim-b:1", "sim-a:1,host:1"])
def test_messages(wired: dict[str, str], ranks: str) -> None:
    assert run(direct_bodies.messages, ranks, timeout=60, env=wired) == [[], []]


@pytest.mark.parametrize("counts", [(1000, 1001), (1000, 1_500_000), (1_500_000, 1_500_001)])
def test_ranks_that_call_different_things_find_out(wired: dict[str, str], counts: tuple[int, int]) -> None:
    names = run(direct_bodies.differ, PAIR, timeout=60, env=wired, args=counts)
    assert "MismatchError" in names and set(names) <= {"MismatchError", "AbortedError"}


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        (PAIR, direct_bodies.SMALL),
        (PAIR, direct_bodies.LARGE),
        ("host:1,nccl:1", direct_bodies.LARGE),
        ("host:2,nccl:2", direct_bodies.LARGE),
        ("nccl:2,host:2", direct_bodies.LARGE),
    ],
)
def test_a_dead_peer_ends_the_wait(wired: dict[str, str], ranks: str, count: int) -> None:
    """The kernel that waits for the peer's words, or chunks, is told to stop; a host's helpers drop what they have."""
    env = {**wired, "HETCCL_CPU_THREADS": "3"}
    if ranks == "nccl:2,host:2":
        env["HETCCL_ALGORITHM"] = "all_reduce=star"
    found = run_results(direct_bodies.dies, ranks, timeout=60, env=env, args=(count,))
    name, seconds = found[0].value
    assert name == "PeerLostError" and seconds < 20


def test_one_that_cannot_register_makes_all_stage(environment: dict[str, str]) -> None:
    env = {**environment, "STANDIN_FAIL": "cudaHostRegister:2:2"}  # the first is of a page, as the device is opened
    found = run_results(direct_bodies.sums, PAIR, timeout=60, env=env)
    assert all(f.value["wrong"] == [] and f.value["paths"] == {"shm"} for f in found)
    assert all(f.stderr.count("cannot take the direct path") == 1 for f in found)


def test_kernels_do_not_spin_on_a_shared_device() -> None:
    def record(rank: int, place: str, host: str = "h") -> Record:
        return Record(
            rank, host, host, 1, "x", "", ("", "", "", ""), 1, "", False, False, True, 1, (), 0, {}, {}, place=place
        )

    apart = [record(0, "0000:01:00.0"), record(1, "0000:02:00.0")]
    assert not shares_device(apart, 0) and not shares_device(apart, 1)
    assert shares_device([record(0, "0000:01:00.0"), record(1, "0000:01:00.0")], 1)
    assert not shares_device([record(0, "0000:01:00.0"), record(1, "0000:01:00.0", "other")], 1)
    assert shares_device([record(0, ""), record(1, "0000:02:00.0")], 0)  # unknown: it might


@pytest.mark.parametrize("pending", [False, True])
def test_a_device_that_hangs_does_not_keep_close(environment: dict[str, str], pending: bool) -> None:
    found = run_results(direct_bodies.hangs, "host:1,nccl:1", timeout=60, env=environment, args=(pending,))
    assert found[0].value < 8 and 4 < found[1].value < 20
    assert "leaving at once" in found[1].stderr
