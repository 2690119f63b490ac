# SPDX-License-Identifier: Apache-2.0
"""Islands of one to four processes against an exact oracle; late, dead and unwanted peers. See island_worker.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hetccl.errors import HetcclError, PeerLostError, TimedOutError, UsageError
from hetccl.native import fdpass
from hetccl.native.island import RANKS_MAX, Island, join, new_id
from hetccl.native.island_join import HELLO, MAGIC, SECRET

WORKER = Path(__file__).with_name("island_worker.py")
SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("size", SIZES)
def test_every_operation_count_and_form(size: int) -> None:
    assert _run("every_operation", size) == ["done"] * size


@pytest.mark.parametrize("threads", ("2", "1,3,2"))
def test_large_operations_go_by_several_threads(threads: str) -> None:
    assert _run("every_operation", 3, threads) == ["done"] * 3


def test_threads_end_with_an_abort() -> None:
    *alive, dead = _run("killed", 2, "4")
    assert dead is None
    assert [one[:2] for one in alive] == [["aborted", 0]]


def test_an_island_with_threads_can_be_forked() -> None:
    kinds = ["UsageError", "UsageError", "UnsupportedError", "UsageError", "UsageError"]
    assert _run("misuse", 2, "3") == [[kinds, 7]] * 2


@pytest.mark.parametrize("size", (2, 3))
def test_results_that_go_past_the_caches(size: int) -> None:
    """As if a million ranks shared the host: then every result is more than its caches keep."""
    assert _run("every_operation", size, sharers=1 << 20) == ["done"] * size


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_hold_the_bits_of_rank_order(size: int) -> None:
    digests = _run("same_bits", size)
    assert digests == [digests[0]] * size


@pytest.mark.parametrize("size", (2, 3, 4))
def test_random_sequence(size: int) -> None:
    assert _run("soak", size) == ["done"] * size


@pytest.mark.parametrize("size", (2, 4))
def test_messages(size: int) -> None:
    told = _run("messages", size)
    assert "another length" in str(told[1])
    assert not any(told[:1] + told[2:])


@pytest.mark.parametrize("size", (2, 3))
def test_a_late_rank_is_named(size: int) -> None:
    results = _run("late", size)
    timed_out = [r for r in results[:-1] if r[0] == "timed out"]
    assert timed_out, results
    for _, missing, waiting_for, seconds in timed_out:
        assert missing == [waiting_for]
        assert seconds < 2.4
    assert any(r[1] == [size - 1] for r in timed_out), results
    assert results[-1][0] == "aborted", "who comes after the deadline is told at once"
    assert results[-1][2] == 6  # HETCCL_ABORTED


@pytest.mark.parametrize("size", (2, 4))
def test_abort_frees_everybody_after_a_death(size: int) -> None:
    *alive, dead = _run("killed", size)
    assert dead is None
    for state, rank, seconds in alive:
        assert (state, rank) == ("aborted", 0)
        assert seconds < 2


def test_misuse_is_refused_and_survived() -> None:
    kinds = ["UsageError", "UsageError", "UnsupportedError", "UsageError", "UsageError"]
    assert _run("misuse", 2) == [[kinds, 7]] * 2


def test_joining_names_who_is_missing() -> None:
    island_id, found = new_id(), {}

    def come(rank: int) -> None:
        try:
            join(island_id, rank, 4, 0.6)
        except TimedOutError as error:
            found[rank] = error.missing

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == {0: (1, 3), 2: (1, 3)}
    begin = time.monotonic()
    with pytest.raises(TimedOutError, match="rank 0 did not come") as caught:
        join(new_id(), 1, 2, 0.3)
    assert caught.value.missing == (0,)
    assert time.monotonic() - begin < 2


def test_strangers_and_the_dead_do_not_stop_a_join() -> None:
    island_id = new_id()
    name, token = island_id[len(MAGIC) : len(MAGIC) + SECRET], island_id[len(MAGIC) + SECRET :]
    result: list[object] = []
    server = threading.Thread(target=lambda: result.append(_try(lambda: Island(island_id, 0, 3, 10.0))))
    server.start()
    held = []
    for message in (HELLO.pack(bytes(SECRET), 1, 3), b"short", b"", HELLO.pack(token, 1, 2), HELLO.pack(token, 1, 3)):
        held.append(_connect(name).socket)
        if message:
            fdpass.send(held[-1], message)
    reply, fds = fdpass.recv(held[3], 1, 5.0)
    assert (b"one came as rank 1 of 2" in reply, fds) == (True, [])
    held[-1].close()  # rank 1 dies while it waits; it may come again
    time.sleep(0.2)
    assert server.is_alive()
    other = threading.Thread(target=lambda: result.append(_try(lambda: Island(island_id, 2, 3, 10.0))))
    other.start()
    with Island(island_id, 1, 3, 10.0) as island:
        assert island.error == 0
    for thread in (server, other):
        thread.join(10)
    assert [type(r) for r in result] == [Island, Island], result
    for sock in held:
        sock.close()


def test_joining_refuses_nonsense() -> None:
    for island_id, rank, size, timeout in (
        (b"x", 0, 1, 1.0),
        (new_id(), 2, 2, 1.0),
        (new_id(), -1, 2, 1.0),
        (new_id(), 0, 0, 1.0),
        (new_id(), 0, RANKS_MAX + 1, 1.0),
        (new_id(), 0, 1, 0.0),
    ):
        with pytest.raises(UsageError):
            join(island_id, rank, size, timeout)


def test_rank_0_that_leaves_is_noticed() -> None:
    island_id = new_id()
    result: list[object] = []
    with fdpass.FdListener(island_id[len(MAGIC) : len(MAGIC) + SECRET]) as listener:
        client = threading.Thread(target=lambda: result.append(_try(lambda: join(island_id, 1, 2, 10.0))))
        client.start()
        listener.accept(5).socket.close()
    client.join(5)
    assert isinstance(result[0], PeerLostError)


# ------------------------------------------------------------------------------------------------------ helpers


def _run(case: str, size: int, threads: str = "1", timeout: float = 80.0, sharers: int = 0) -> list:
    """What each rank said; None if it said nothing. No rank outlives the call."""
    island_id = new_id().hex()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), case, island_id, str(rank), str(size), str(sharers), threads],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + timeout
    try:
        said = [p.communicate(timeout=max(deadline - time.monotonic(), 0.1)) for p in ranks]
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
                p.communicate()
    for p, (_, problems) in zip(ranks, said, strict=True):
        assert p.returncode == 0, problems
    return [json.loads(out) if out else None for out, _ in said]


def _try(call):  # type: ignore[no-untyped-def]
    try:
        return call()
    except HetcclError as error:
        return error


def _connect(name: bytes) -> fdpass.Peer:
    deadline = time.monotonic() + 5
    while True:
        try:
            return fdpass.connect(name, 1.0)
        except fdpass.FdPassError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
