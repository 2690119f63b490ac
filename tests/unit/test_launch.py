# SPDX-License-Identifier: Apache-2.0
"""Starting ranks: what they are told, and that nothing outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetccl.cli.launch import LaunchError, run_ranks
from hetccl.errors import UsageError
from hetccl.testing.launch import RankFailed, run, run_results


def test_each_rank_knows_its_place() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "HETCCL_STORE", "X")
    show = f"import os; print(*[os.environ[k] for k in {names}])"
    job = run_ranks(["-c", show], 3, {"X": "y"}, 30).check()
    for rank, r in enumerate(job.ranks):
        words = r.stdout.split()
        assert words[:4] == [str(rank), "3", str(rank), "127.0.0.1"] and words[5] == "y"
        assert words[4].startswith("file:///") and not os.path.exists(words[4].removeprefix("file://"))
    assert len({r.stdout.split()[4] for r in job.ranks}) == 1


def test_the_first_failure_ends_the_others() -> None:
    start = time.monotonic()
    body = "import os,sys,time; print('here',flush=True); time.sleep(60) if os.environ['RANK']=='0' else sys.exit(7)"
    job = run_ranks(["-c", body], 2, {}, 50)
    assert time.monotonic() - start < 20
    assert job.reason == "rank 1 failed with exit code 7"
    assert [r.returncode for r in job.ranks] == [None, 7]
    with pytest.raises(LaunchError, match=r"(?s)rank 1 failed.*rank 0 was stopped.*here"):
        job.check()


def test_a_deadline_ends_all_and_names_who_was_left() -> None:
    job = run_ranks(["-c", "import os,time; time.sleep(60*int(os.environ['RANK']))"], 2, {}, 1.0)
    assert job.reason == "after 1 s, ranks still running: 1"
    assert [r.returncode for r in job.ranks] == [0, None]


def test_a_signal_is_named() -> None:
    job = run_ranks(["-c", "import os; os.kill(os.getpid(), 9)"], 1, {}, 20)
    assert job.reason == "rank 0 failed with signal SIGKILL" and job.ranks[0].returncode == -9


def test_children_of_ranks_are_ended_too(tmp_path: Path) -> None:
    body = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(60)']);"
        f"open({str(tmp_path / 'pid')!r},'w').write(str(p.pid))"
    )
    run_ranks(["-c", body], 1, {}, 30)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    body = "import signal,time; signal.signal(15,signal.SIG_IGN); print('deaf',flush=True); time.sleep(60)"
    start = time.monotonic()
    job = run_ranks(["-c", body], 1, {}, 1.0)
    assert time.monotonic() - start < 15 and "deaf" in job.ranks[0].stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_the_launcher(tmp_path: Path, how: signal.Signals) -> None:
    body = f"import os,time; open({str(tmp_path)!r}+'/'+os.environ['RANK'],'w').write(str(os.getpid())); time.sleep(60)"
    # Whoever starts this in the background of a shell without job control has the interrupt ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"from hetccl.cli.launch import run_ranks; run_ranks(['-c', {body!r}], 2, {{}}, 50)"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, env=env)
    try:
        deadline = time.monotonic() + 20
        while not all((tmp_path / n).exists() and (tmp_path / n).read_text() for n in "01"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        launcher.send_signal(how)
        launcher.wait(20)
        assert all(gone(int((tmp_path / n).read_text())) for n in "01")
        assert how == signal.SIGKILL or list(temporary.iterdir()) == []
    finally:
        launcher.kill()
        launcher.wait()


def body(rank: int, size: int, factor: int) -> Any:
    return {"rank": rank, "value": rank * factor, "ranks": os.environ.get("HETCCL_RANKS")}


class Bodies:
    @staticmethod
    def fails(rank: int, size: int) -> None:
        print("before")
        if rank == 1:
            raise UsageError("rank one says no", code=4)
        time.sleep(30)

    @staticmethod
    def cannot_be_pickled(rank: int, size: int) -> Any:
        return lambda: None


def test_a_function_of_a_test_module_runs_on_every_rank() -> None:
    assert run(body, "host@a:1,host@b:1", 30, args=(10,)) == [
        {"rank": 0, "value": 0, "ranks": "host@a:1,host@b:1"},
        {"rank": 1, "value": 10, "ranks": "host@a:1,host@b:1"},
    ]
    assert run("result = (rank, size, args)", 2, 30, args=(1,)) == [(0, 2, (1,)), (1, 2, (1,))]


def test_a_failure_brings_every_traceback() -> None:
    with pytest.raises(
        RankFailed, match=r"(?s)rank 0 was still running.*before.*rank 1 raised.*rank one says no"
    ) as caught:
        run(Bodies.fails, 2, 30)
    error = caught.value.results[1].error
    assert type(error) is UsageError and error.facts == {"code": 4}


def test_results_of_ranks_that_may_fail() -> None:
    zero, one = run_results("import os\nif rank: os._exit(9)\nresult = 5", 2, 30)
    assert (zero.value, zero.returncode, one.value, one.returncode) == (5, 0, None, 9)


def test_what_cannot_travel_is_said() -> None:
    with pytest.raises(RankFailed, match="cannot be pickled"):
        run(Bodies.cannot_be_pickled, 1, 30)
    with pytest.raises(UsageError, match="lies inside another function"):
        run(lambda rank, size: None, 1)


def gone(pid: int) -> bool:
    """True when the process has ended, waiting a little for the kernel (a zombie of another parent counts as ended)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False
