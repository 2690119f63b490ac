# SPDX-License-Identifier: Apache-2.0
"""hetccl's log: `logging.getLogger("hetccl")` with the rank in front, on stderr, at the level of HETCCL_LOG.

A program that sets up logging itself is left alone: ours writes only while neither "hetccl" nor the root logger has a
handler of the program's own.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

__all__ = ["LEVELS", "get_logger", "set_rank", "set_up"]

LEVELS = {
    "off": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}

_who = ""


def get_logger(part: str = "") -> logging.Logger:
    """Logger "hetccl" or "hetccl.<part>"."""
    return logging.getLogger(f"hetccl.{part}" if part else "hetccl")


def set_up(level: str = "warning") -> None:
    """Sets the level, and a handler for stderr unless the program has given the logger one. May be called again."""
    logger = get_logger()
    logger.setLevel(LEVELS[level])
    if not logger.handlers:
        logger.addHandler(_RankHandler())


def set_rank(rank: int, size: int, host: str = "") -> None:
    """Puts "rank 2/4 host7" in front of this process's lines from now on."""
    global _who
    _who = f" rank {rank}/{size} {host or socket.gethostname()}"


class _RankHandler(logging.Handler):
    """Writes to the present sys.stderr, as pytest and daemons replace it, unless the root logger writes already."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        text = f"[hetccl{_who or f' pid {os.getpid()}'}] {record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        try:
            print(text, file=sys.stderr, flush=True)
        except (OSError, ValueError):  # stderr is closed: a log line must never fail an operation
            self.handleError(record)
