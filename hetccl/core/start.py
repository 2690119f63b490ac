# SPDX-License-Identifier: Apache-2.0
"""The communicator of a whole job, as the environment describes it."""

from __future__ import annotations

import os
from typing import Any

from hetccl.core.communicator import Communicator
from hetccl.core.config import Config
from hetccl.core.store import Store, open_store
from hetccl.errors import ConfigError

__all__ = ["init", "meeting"]


def init(**options: Any) -> Communicator:
    """The communicator of all ranks of the job: RANK, WORLD_SIZE and HETCCL_STORE (or MASTER_ADDR and MASTER_PORT)
    say which.

    `options` are those of `Communicator`.
    """
    return Communicator(*meeting(), **options)


def meeting() -> tuple[Store, int, int]:
    """(store, rank, size) as the environment says them."""
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            "RANK and WORLD_SIZE must say which rank this process is; start the job with torchrun or set them"
        ) from error
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK={rank} is no rank of a job of {size} (WORLD_SIZE): they are 0 to {size - 1}. Start {size} of them, "
            "or set WORLD_SIZE to the number that is started",
            variable="WORLD_SIZE",
            value=str(size),
        )
    config = Config.from_env()
    url = config.store
    if not url:
        if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
            raise ConfigError(
                "where do the ranks meet? Set HETCCL_STORE=file:///folder (one host or a shared file system) or "
                "tcp://host:port",
                variable="HETCCL_STORE",
            )
        url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return open_store(url, rank, size, config.timeout), rank, size
