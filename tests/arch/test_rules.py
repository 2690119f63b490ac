# SPDX-License-Identifier: Apache-2.0
"""The rules of the root's conftest.py: skips fail under HETCCL_TEST_STRICT=1 unless they need hardware, and a run that
leaves something behind has failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import pytest

def test_needs_a_library(require):
    require(None, "libfoo", "pip install foo")

def test_plain_skip():
    pytest.skip("just so")

@pytest.mark.gpu
def test_needs_a_gpu():
    pytest.skip("no GPU")

@pytest.mark.xfail(reason="known")
def test_known_failure():
    assert False

def test_runs(require):
    require("/lib/libfoo.so", "libfoo", "pip install foo")
"""


@pytest.fixture
def project(tmp_path: Path, root: Path) -> Path:
    shutil.copy(root / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    return tmp_path


def test_skips_are_allowed_by_default(project: Path) -> None:
    output = run(project, strict="0")
    assert "1 passed, 4 skipped, 1 xfailed" in output
    assert "libfoo is missing; to run this test: pip install foo" in output


def test_skips_fail_when_strict(project: Path) -> None:
    output = run(project, strict="1")
    assert "error" in output and "no_such_module" in output
    (project / "test_module.py").unlink()
    output = run(project, strict="1")
    assert "2 failed, 1 passed, 1 skipped, 1 xfailed" in output
    assert "libfoo is missing; to run this test: pip install foo" in output


def test_a_process_left_behind_fails_the_run(project: Path) -> None:
    for cases in project.glob("test_*.py"):
        cases.unlink()
    leak = "import subprocess\n\ndef test_leak():\n    globals()['p'] = subprocess.Popen(['sleep', '3'])\n"
    (project / "test_leak.py").write_text(leak)
    output = run(project, strict="0", code=1)
    assert "1 passed" in output
    assert "LEFT BEHIND process" in output and "sleep 3" in output


def run(project: Path, strict: str, code: int | None = None) -> str:
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", str(project)]
    environment = {**os.environ, "HETCCL_TEST_STRICT": strict}
    done = subprocess.run(command, cwd=project, env=environment, stdout=subprocess.PIPE, text=True, timeout=100)
    assert code in (None, done.returncode)
    return done.stdout
