# SPDX-License-Identifier: Apache-2.0
"""A topology file in a running job: what it says is done, and what contradicts it ends the start with the file's
line."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetccl
from hetccl.errors import ConfigError, UnsupportedError
from hetccl.testing.launch import RankResult, run, run_results

TWO = "islands:\n  a: {vendor: host, ranks: [0, 2], border: [2]}\n  b: {vendor: sim-a, ranks: [1]}\n"


def body(rank: int, size: int, path: str = "", env_of: dict[int, str] | None = None) -> Any:
    import os

    if env_of and rank in env_of:
        os.environ["HETCCL_TOPOLOGY"] = env_of[rank]
    with hetccl.init(**({"topology": path} if path else {}), timeout=20) as comm:
        x = np.full(1000, rank + 1, np.float32)
        comm.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()
        comm.barrier()
        e = comm.explain("all_reduce", 4000)
        return (
            comm.islands,
            [(d["vendor"], d["island"]) for d in comm.describe()],
            e,
            sorted(comm.stats()["peer_bytes"]),
        )


def write(folder: Path, text: str, name: str = "hetccl.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def failed(results: list[RankResult], words: str) -> None:
    texts = [str(r.error) for r in results]
    assert all(r.error is not None for r in results), texts
    assert any(isinstance(r.error, ConfigError) and words in str(r.error) for r in results), texts


def test_islands_and_borders_are_those_of_the_file(tmp_path: Path) -> None:
    results = run(body, 3, 60, args=(write(tmp_path, TWO),))
    islands, who, explained, _ = results[0]
    assert islands == [[0, 2], [1]]
    assert who == [("host", 0), ("sim-a", 1), ("host", 0)]
    assert "rank 2 at the border (named in " in explained.borders[0]
    assert "hetccl.yaml:2:44" in explained.borders[0]
    assert [peers for _, _, _, peers in results] == [[], [2], [1]]


def test_rank_0_alone_may_have_the_file(tmp_path: Path) -> None:
    env = {"HETCCL_RANKS": "host,sim-a,host"}
    results = run(body, 3, 60, env, args=("", {0: write(tmp_path, TWO)}))
    assert results[2][0] == [[0, 2], [1]] and results[2][3] == [1]


def test_relays_are_explained(tmp_path: Path) -> None:
    row = "islands:\n" + "".join(f"  {n}: {{vendor: host, ranks: 1}}\n" for n in "abc")
    path = write(tmp_path, row + "links:\n  - {between: [a, c], rate: none}\n")
    results = run(body, 3, 60, {"HETCCL_TOPOLOGY": path})
    explained = results[0][2]
    assert explained.relays == ["islands 0 and 2 have no direct link: over island 1 (host@b)"]
    assert explained.border_bytes == explained.border_bound == 4 * 4000
    assert "relayed: islands 0 and 2" in str(explained)
    assert [peers for _, _, _, peers in results] == [[1], [0, 2], [1]]


@pytest.mark.parametrize(
    ("text", "env", "words"),
    [
        (TWO + "  c: {vendor: host, ranks: 1}\n", {}, "describes 4 ranks, but the job has 3 (WORLD_SIZE)"),
        (TWO, {"HETCCL_RANKS": "host,host,host"}, "hetccl.yaml:3:3: rank 1 is sim-a@b in "),
        (TWO, {"HETCCL_RANKS": "host@x,sim-a,host"}, "rank 0 is host@a in "),
        (TWO.replace("ranks: [1]", "ranks: [1], memory: host"), {}, "hetccl.yaml:3:3: island b has host memory in"),
        (TWO.replace("border: [2]", "hosts: {m1: 1, m2: 1}"), {}, f"is on host {socket.gethostname()}, not on m1"),
        (TWO.replace("border: [2]", "hosts: 2"), {}, "ranks 0 and 2 of island a share a host, unlike in"),
        (TWO.replace("sim-a", "simm"), {}, "simm"),
    ],
)  # fmt: skip
def test_what_contradicts_the_file(text: str, env: dict[str, str], words: str, tmp_path: Path) -> None:
    env = {**env, "HETCCL_TOPOLOGY": write(tmp_path, text)}
    results = run_results(body, 3, 60, env)
    texts = [str(r.error) for r in results]
    assert all(r.error is not None for r in results) and any(words in t for t in texts), texts


def test_ranks_with_another_file(tmp_path: Path) -> None:
    mine, other = write(tmp_path, TWO), write(tmp_path, TWO.replace(", border: [2]", ""), "other.yaml")
    failed(run_results(body, 3, 60, args=("", {0: mine, 1: other, 2: mine})), "ranks [1] have another topology file")
    env = {"HETCCL_RANKS": "host@a,sim-a@b,host@a"}
    failed(run_results(body, 3, 60, env, args=("", {1: mine})), "ranks [1] have a topology file, but rank 0 has none")


def test_an_algorithm_that_needs_all_links_is_refused(tmp_path: Path) -> None:
    row = "islands:\n" + "".join(f"  {n}: {{vendor: host, ranks: 1}}\n" for n in "abc")
    path = write(tmp_path, row + "links:\n  - {between: [a, c], rate: none}\n")
    env = {"HETCCL_TOPOLOGY": path, "HETCCL_ALGORITHM": "all_reduce=ring"}
    results = run_results(body, 3, 60, env)
    assert all(isinstance(r.error, UnsupportedError) for r in results), [str(r.error) for r in results]
