# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels, kept on disk: compiling them takes 7 to 10 s on an H200, reading them some milliseconds.

One file an image, named by what it was made from. It says what it holds, and is read only if that is true and it is
this user's: its content runs on the device. Whatever goes wrong here only costs the time to compile.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["cached", "folder", "forget", "identity"]

log = logging.getLogger("hetccl.kernels")

MAGIC = b"hetccl kernels 1\n"
MOST_FILES = 16  # the oldest go


def folder() -> Path | None:
    """Where images are kept: HETCCL_KERNEL_CACHE, else hetccl in the user's cache folder. None: nowhere ("off")."""
    chosen = os.environ.get("HETCCL_KERNEL_CACHE", "")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "hetccl" if os.path.isabs(base) else None


def identity(path: str) -> str:
    """A file as it is now, the compiler's library for instance: another release has another time or length."""
    try:
        found = os.stat(path)
    except OSError:
        return path
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def cached(parts: Sequence[str], make: Callable[[], bytes]) -> tuple[bytes, bool]:
    """The image made from `parts` (source, options, compiler ...), and whether it was there: else `make` makes it, and
    it is kept."""
    place = _place(parts)
    found = _read(place) if place else None
    if found is not None:
        return found, True
    image = make()
    if place:
        _write(place, image)
    return image, False


def forget(parts: Sequence[str]) -> None:
    """Drops an image that the device refused."""
    place = _place(parts)
    if place:
        place.unlink(missing_ok=True)


def _place(parts: Sequence[str]) -> Path | None:
    where = folder()
    if where is None:
        return None
    key = hashlib.sha256()
    for part in parts:
        data = part.encode()
        key.update(len(data).to_bytes(8, "little") + data)
    return where / f"kernels-{key.hexdigest()[:40]}"


def _read(place: Path) -> bytes | None:
    try:
        with place.open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                log.warning("%s is another user's, so the kernels in it are not used", place)
                return None
            data = file.read()
    except OSError:
        return None
    body = data[len(MAGIC) + 32 :]
    if data[: len(MAGIC)] != MAGIC or not body or hashlib.sha256(body).digest() != data[len(MAGIC) :][:32]:
        log.warning("%s is damaged, so the kernels are compiled once more", place)
        return None
    return body


def _write(place: Path, image: bytes) -> None:
    """A whole file or none: several ranks may do this at once."""
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix="new-", dir=place.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(MAGIC + hashlib.sha256(image).digest() + image)
            os.replace(name, place)
        except OSError:
            os.unlink(name)
            raise
        kept = sorted(place.parent.glob("kernels-*"), key=lambda p: p.stat().st_mtime)
        for old in kept[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("compiled kernels are not kept in %s: %s", place.parent, error)
