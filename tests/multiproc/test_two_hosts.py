# SPDX-License-Identifier: Apache-2.0
"""Two hosts played by two network namespaces, torchrun in each with its own agent, one vendor a host, TCP between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.netns, pytest.mark.timeout(240)]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts(require: Callable[[object, str, str], None]) -> Iterator[list[str]]:
    names = [f"hetccl-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"10.78.0.{number + 1}/24", "dev", f"cable{number}")
            ip("-n", name, "link", "set", f"cable{number}", "up")
    except (OSError, subprocess.SubprocessError) as error:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], timeout=20)
        require(False, f"permission to make network namespaces ({error})", "as root, with iproute2: pytest -m netns")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], timeout=20, check=True)


def on_each(
    hosts: list[str], seconds: float, job: Callable[[int], tuple[list[str], dict[str, str]]]
) -> tuple[list[subprocess.Popen[str]], list[str]]:
    """Runs command and environment `job(number)` on each host: the processes, ended, and what they said."""
    processes = []
    for number, name in enumerate(hosts):
        command, env = job(number)
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        deadline = time.monotonic() + seconds
        return processes, [p.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def test_demo_trains_across_two_hosts(hosts: list[str], tmp_path: Path, oneccl: None) -> None:
    result = tmp_path / "result.json"
    env = {
        **os.environ,
        "HETCCL_RANKS": "oneccl:2,host:2",
        "HETCCL_LOG": "info",
        "OMP_NUM_THREADS": "1",
        "HETCCL_TIMEOUT": "60",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr",
        "10.78.0.1", "--master-port", "29777", "--node-rank",
    ]  # fmt: skip
    program = ["-m", "hetccl.demo.train", "--steps", "12", "--width", "32", "--layers", "1", "--every", "4", "--result"]
    agents, outputs = on_each(hosts, 200, lambda number: ([*launcher, str(number), *program, str(result)], env))
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    found = json.loads(result.read_text())
    assert found["identical"]
    assert found["last_loss"] < found["first_loss"]
    paths = {path for _, _, path in found["paths"]}
    assert all(path.startswith("tcp cable") for path in paths), paths
    assert {m["vendor"] for m in found["members"]} == {"oneccl", "host"}
    border = sum(t["border_bytes"] for t in found["traffic"])
    assert border > 0


def test_devices_of_two_hosts_take_the_direct_path(hosts: list[str]) -> None:
    """Windows over sockets: what one puts lies in the other's memory."""
    code = (
        "import json, os, direct_bodies\n"
        "found = direct_bodies.sums(int(os.environ['RANK']), 2)\n"
        "print('RESULT', json.dumps({'wrong': found['wrong'], 'paths': sorted(found['paths'])}))\n"
    )
    env = {
        **os.environ, "HETCCL_RANKS": "sim-a:1,sim-b:1", "HETCCL_TCP_SOCKETS": "3", "HETCCL_TIMEOUT": "60",
        "WORLD_SIZE": "2", "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29778",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *(p for p in sys.path if p)]),
    }  # fmt: skip
    _, outputs = on_each(hosts, 100, lambda n: ([sys.executable, "-c", code], {**env, "RANK": str(n)}))
    for number, output in enumerate(outputs):
        said = [line for line in output.splitlines() if line.startswith("RESULT ")]
        assert said, output
        path = f"tcp cable{number} 10.78.0.{number + 1}, 3 sockets, direct"
        assert json.loads(said[0].removeprefix("RESULT ")) == {"wrong": [], "paths": [path]}
