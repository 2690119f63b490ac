# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, or leaves without destroying its communicators, leaves a file of 64 MiB in shared memory."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["remove", "remove_at_exit"]

SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"([1-9]\d*):\d+:\d+")  # pid, and two numbers of libfabric's shm provider
_at_exit_of: set[int] = set()


def remove(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> list[str]:
    """Removes the files of those of `pids` that are dead, or our own. Only files of this user; returns their names."""
    wanted = {pid for pid in pids if pid == os.getpid() or _dead(pid)}
    removed = []
    try:
        entries = list(os.scandir(folder)) if wanted else []
    except OSError:
        return []
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None or int(match[1]) not in wanted:
            continue
        try:
            if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                os.unlink(entry.path)
                removed.append(entry.name)
        except FileNotFoundError:  # another survivor was faster
            continue
    return sorted(removed)


def remove_at_exit() -> None:
    """Removes this process's own file when the interpreter ends, if a communicator was not destroyed by then."""
    pid = os.getpid()
    if pid not in _at_exit_of:
        _at_exit_of.add(pid)
        atexit.register(_remove_own, pid)


def _remove_own(pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        remove([pid])


def _dead(pid: int) -> bool:
    """True if no process has that pid, or only the remains of one that nobody has waited for."""
    if pid <= 0:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    except (OSError, IndexError):
        return False
    return state in ("Z", "X")
