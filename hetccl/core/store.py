# SPDX-License-Identifier: Apache-2.0
"""The store that ranks meet through. Three calls are all we need, so torch's TCPStore, FileStore and HashStore fit
as they are."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import quote, urlparse

from hetccl.errors import ConfigError, HetcclError, TimedOutError

__all__ = ["DirectoryStore", "Store", "StoreView", "open_store"]


class Store(Protocol):
    """Key and value; values are bytes."""

    def set(self, key: str, value: bytes) -> Any: ...

    def get(self, key: str) -> bytes:
        """The value; may block until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there, at once."""


class DirectoryStore:
    """A folder that all ranks see, one file a key. For jobs without torch on one host or a shared file system."""

    def __init__(self, path: str) -> None:
        self.path = path
        os.makedirs(path, mode=0o700, exist_ok=True)

    def _file(self, key: str) -> str:
        return os.path.join(self.path, quote(key, safe=""))

    def set(self, key: str, value: bytes) -> None:
        fd, temporary = tempfile.mkstemp(dir=self.path, prefix=".")
        with os.fdopen(fd, "wb") as file:
            file.write(value)
        os.rename(temporary, self._file(key))  # readers see all of it or nothing

    def get(self, key: str) -> bytes:
        with open(self._file(key), "rb") as file:
            return file.read()

    def check(self, keys: list[str]) -> bool:
        return all(os.path.exists(self._file(key)) for key in keys)

    def enter(self, rank: int, size: int, timeout: float) -> DirectoryStore:
        """A folder of this job's own inside, though an earlier job may have left its keys here. Blocks until all ranks
        have come, at most `timeout` seconds; raises `TimedOutError` that names the missing.

        Every rank leaves a token that it draws; rank 0 answers with all tokens and the new folder's name, again and
        again until every rank has read its own token there. So nobody follows an answer to ranks of another job.
        """
        deadline = time.monotonic() + timeout
        mine, job = secrets.token_hex(16), secrets.token_hex(8)
        self.set(f"here-{rank}", mine.encode())
        pause, told = 0.0005, b""
        while True:
            if rank == 0:
                tokens = {str(r): self._text(f"here-{r}") for r in range(size)}
                answer = json.dumps({"job": job, "tokens": tokens}).encode()
                if answer != told:
                    self.set("answer", answer)
                    told = answer
                missing = [r for r in range(1, size) if self._text(f"seen-{r}") != job]
            else:
                found = json.loads(self._text("answer") or "{}")
                missing = [] if found and found["tokens"].get(str(rank)) == mine else [0]
                if not missing:
                    job = found["job"]
                    self.set(f"seen-{rank}", job.encode())
            if not missing:
                return DirectoryStore(os.path.join(self.path, f"job-{job}"))
            if time.monotonic() >= deadline:
                raise TimedOutError(
                    f"phase bootstrap: ranks {missing} did not come to the folder {self.path} within {timeout:g} s. "
                    "Look at their output, and whether they see the same folder",
                    phase="bootstrap",
                    missing=tuple(missing),
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _text(self, key: str) -> str:
        try:
            return self.get(key).decode()
        except FileNotFoundError:
            return ""


class StoreView:
    """One communicator's corner of a store, with deadlines that name who is missing and a key for the first failure."""

    FAILED = "failed"

    def __init__(self, store: Store, prefix: str, deadline: float, say: Callable[[str], None]) -> None:
        self._store = store
        self._prefix = prefix
        self._deadline = deadline
        self._say = say

    def put(self, key: str, value: bytes) -> None:
        # torch's stores take str or bytes-like values; str keeps pickled byte objects out of the wire format
        self._store.set(self._prefix + key, value)

    def fail(self, text: str) -> None:
        """Lets the other ranks stop waiting. The first failure stays: those that follow from it say nothing new."""
        with contextlib.suppress(Exception):  # it is on its way up already
            if not self._store.check([self._prefix + self.FAILED]):
                self.put(self.FAILED, text.encode())

    def raise_if_failed(self) -> None:
        """Raises what another rank said when it could not join."""
        if self._store.check([self._prefix + self.FAILED]):
            raise HetcclError(
                "another rank could not join: "
                + bytes(self._store.get(self._prefix + self.FAILED)).decode(errors="replace")
            )

    def take(self, key: str, phase: str, rank: int, check: Callable[[], None] | None = None) -> bytes:
        """The value of a key that `rank` will put. Raises `TimedOutError` that names it, and what `check` raises
        meanwhile."""
        return self.take_all({rank: key}, phase, check)[rank]

    def take_all(self, keys: dict[int, str], phase: str, check: Callable[[], None] | None = None) -> dict[int, bytes]:
        """The values of several ranks' keys. Says whom it waits for every ten seconds."""
        missing = dict(keys)
        found: dict[int, bytes] = {}
        pause, spoken = 0.0005, time.monotonic()
        while True:
            for rank, key in list(missing.items()):
                if self._store.check([self._prefix + key]):
                    found[rank] = bytes(self._store.get(self._prefix + key))
                    del missing[rank]
            if not missing:
                return found
            self.raise_if_failed()
            if check is not None:
                check()
            now = time.monotonic()
            if now >= self._deadline:
                ranks = sorted(missing)
                raise TimedOutError(
                    f"phase {phase}: ranks {ranks} did not arrive in time. Look at their output; "
                    "HETCCL_TIMEOUT sets how many seconds to wait",
                    phase=phase,
                    missing=tuple(ranks),
                )
            if now - spoken > 10:
                spoken = now
                self._say(f"waiting for ranks {sorted(missing)} in phase {phase}")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)


def open_store(url: str, rank: int, size: int, timeout: float) -> Store:
    """The store that HETCCL_STORE names: file:///folder, or tcp://host:port (torch's TCPStore, which needs torch)."""
    parts = urlparse(url)
    if parts.scheme == "file" and parts.path:
        return DirectoryStore(parts.path).enter(rank, size, timeout)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        try:
            return _tcp_store(parts.hostname, parts.port, rank, size, timeout)
        except ImportError as error:
            raise ConfigError(
                f"HETCCL_STORE={url} needs torch, which is not installed; use file:///folder, or pip install torch",
                variable="HETCCL_STORE",
                value=url,
            ) from error
    raise ConfigError(
        f"HETCCL_STORE={url!r} is neither file:///folder nor tcp://host:port", variable="HETCCL_STORE", value=url
    )


_tcp_stores: dict[tuple[str, int, int, int], Store] = {}


def _tcp_store(host: str, port: int, rank: int, size: int, timeout: float) -> Store:
    """One for all communicators of the process: a second one could not listen on the port. Under torchrun, which says
    so in TORCHELASTIC_USE_AGENT_STORE, its own store listens there and no rank does."""
    from datetime import timedelta
    from importlib import import_module

    key = host, port, rank, size
    if key not in _tcp_stores:
        listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        c10d = import_module("torch.distributed")
        _tcp_stores[key] = cast(Store, c10d.TCPStore(host, port, size, listens, timedelta(seconds=timeout)))
    return _tcp_stores[key]
