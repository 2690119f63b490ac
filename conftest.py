# SPDX-License-Identifier: Apache-2.0
"""Rules for every test of the core and of the plug-ins.

Skips. A test that needs something missing calls `require(...)`: it is skipped, with the line that provides what is
missing. Under HETCCL_TEST_STRICT=1 (as in CI) a skip is a failure, so that nothing drops out of the run unseen. Only
hardware that no installation brings may be absent then, and large files of vendors: marks `gpu`, `rdma`, `abi`.

Leftovers. A run that leaves a process or a file in /dev/shm behind has failed, whatever its tests say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

HARDWARE = ("gpu", "rdma", "abi")
SHM = Path("/dev/shm")
# Taken out of the environment, so that the programs under test do not see a variable that is none of theirs.
STRICT = os.environ.pop("HETCCL_TEST_STRICT", "") not in ("", "0")
FULL = os.environ.get("HETCCL_TEST_FULL", "") not in ("", "0")


@pytest.fixture(scope="session")
def require() -> Callable[[object, str, str], None]:
    """`require(found, what, remedy)`: skips unless `found`, e.g. require(path, "oneCCL", "hetccl fetch oneccl")."""
    return _require


@pytest.fixture(scope="session")
def require_vendors() -> Callable[[str], None]:
    """`require_vendors("oneccl:2,host:1")`: skips unless the vendors of these ranks are usable here; what is part of
    hetccl always is."""
    return _require_vendors


@pytest.fixture(scope="session")
def oneccl() -> None:
    """Skips unless oneCCL is usable here."""
    _require_vendors("oneccl")


def pytest_configure(config: pytest.Config) -> None:
    config.full = FULL  # type: ignore[attr-defined]  # for tests that draw their parameters


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether long tests run all that they have (HETCCL_TEST_FULL=1, tox -e full), not a seeded sample."""
    return FULL


def _require(found: object, what: str, remedy: str) -> None:
    if not found:
        pytest.skip(f"{what} is missing; to run this test: {remedy}")


def _require_vendors(spec: str) -> None:
    from hetccl.core import registry
    from hetccl.core.ranks import parse_ranks
    from hetccl.errors import HetcclError

    for name in {rank.vendor for rank in parse_ranks(spec)} - {"host"}:
        try:
            registry.vendor(name)
        except HetcclError as error:
            if name.startswith("sim"):
                raise
            fetched = f" && hetccl fetch {name}" if name == "oneccl" else ""
            _require(False, f"{name} ({error})", f"pip install ./plugins/hetccl-vendor-{name}{fetched}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # An expected failure also reports as skipped; it did run.
    if STRICT and report.skipped and not hasattr(report, "wasxfail") and not _needs_hardware(item):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if STRICT and report.skipped and "hardware" not in collector.path.parts:
        _fail(report)
    return report


def _needs_hardware(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in HARDWARE)


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"HETCCL_TEST_STRICT: may not be skipped here. {reason}"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_BEFORE] = _shared_memory()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    left = _children() + sorted(_shared_memory() - session.config.stash[_BEFORE])
    session.config.stash[_LEFT] = left
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"LEFT BEHIND {line}", red=True)


_BEFORE = pytest.StashKey[set[str]]()
_LEFT = pytest.StashKey[list[str]]()


def _children() -> list[str]:
    """Processes that this one started and that still live; multiprocessing's own helper ends by itself."""
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if command and "multiprocessing.resource_tracker" not in command and "forkserver" not in command:
                found.append(f"process {pid}: {command.strip()}")
    return found


def _shared_memory() -> set[str]:
    """Files of hetccl, and those that a vendor's library named after a process that is gone."""
    found = set()
    for path in SHM.glob("*") if SHM.is_dir() else ():
        owner = re.match(r"(\d+):", path.name)
        if "hetccl" in path.name or (owner and not Path(f"/proc/{owner[1]}").exists()):
            found.add(f"file {path}")
    return found
