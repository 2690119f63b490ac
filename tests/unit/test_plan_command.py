# SPDX-License-Identifier: Apache-2.0
"""`hetccl plan`: text, what-if, picture and trace."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from hetccl.cli.main import main

CLUSTER = """
islands:
  amd: {vendor: rccl, ranks: 4, hosts: 1, rails: 4, rate: 10GB/s, latency: 5us, inside: {rate: 100GB/s, latency: 10us}}
  nvidia: {vendor: nccl, ranks: 4, hosts: 1, rails: 4, rate: 10GB/s, latency: 5us}
  cpu: {vendor: oneccl, ranks: 2, hosts: [head], rails: 1, rate: 3GB/s}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


def test_it_says_what_would_happen(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "all_reduce", "--bytes", "1G", "--topology", cluster, "--steps", "9"]) == 0
    text = capsys.readouterr().out
    words = ("10 ranks in 3 islands", "algorithm:", "instead:", "predicted time:", "<- bottleneck", "(1.000 of it)")
    for word in words:
        assert word in text
    assert "steps of rank 9" in text


def test_what_if(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "all_reduce", "--bytes", "1G", "--topology", cluster, "--json"]
    assert main(arguments) == 0
    before = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--set", "islands.cpu.rails=2", "--set", "islands.cpu.rate=10GB/s"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["seconds_without_set"] == pytest.approx(before["seconds"])
    assert after["seconds"] < before["seconds"] and before["seconds_without_set"] is None
    assert after["border_bytes"] == after["border_bound"] == 2 * 2 << 30


def test_the_picture_and_the_trace(cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "plan.svg", tmp_path / "plan.json"
    assert main(["plan", "reduce_scatter", "--bytes", "8M", "--topology", cluster, "--picture", str(picture),
                 "--trace", str(trace)]) == 0  # fmt: skip
    svg = ElementTree.parse(picture).getroot()
    assert svg.tag.endswith("svg")
    labels = {t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert any(str(text).startswith("rank 9 ") for text in labels)
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == set(range(10)) and all(e["dur"] >= 0 for e in spans)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"island lane", "border lane"}
    for pid in range(10):  # steps of one lane do not overlap
        for tid in (0, 1):
            lane = sorted((e["ts"], e["dur"]) for e in spans if (e["pid"], e["tid"]) == (pid, tid))
            for (t0, d0), (t1, _) in pairwise(lane):
                assert t0 + d0 <= t1 + 1e-6


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["--bytes", "much"], "much is no size"),
        (["--set", "islands.amd.rals=2"], "did you mean rails"),
        (["--algorithm", "magic"], "there are"),
        (["--root", "77"], "root 77 is not a rank"),
        (["--dtype", "bool", "--op", "avg"], "has no meaning"),
        (["--steps", "10"], "there are ranks 0 to 9"),
        (["--picture", "/nowhere/x.svg"], "cannot be written"),
    ],
)
def test_mistakes(cluster: str, arguments: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "all_reduce", "--topology", cluster, *arguments]) == 2
    assert wrong in capsys.readouterr().err
