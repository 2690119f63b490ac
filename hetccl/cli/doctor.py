# SPDX-License-Identifier: Apache-2.0
"""`hetccl doctor`: what works on this host, what does not, and the line that mends it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import hetccl
from hetccl.cli import doctor_topology
from hetccl.core import registry
from hetccl.core.config import Config, render, variables
from hetccl.errors import HetcclError

__all__ = ["Check", "add_parser", "checks", "run"]

OK, WARNING, MISSING, INFO = "ok", "warning", "unavailable", "info"
MIN_MEMLOCK = 64 << 20
MIN_NOFILE = 4096
MIN_SHM = 1 << 30


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, and what mends it."""

    section: str
    name: str
    state: str
    text: str
    remedy: str = ""
    details: dict[str, str] = field(default_factory=dict)


def add_parser(commands: Any) -> None:
    p = commands.add_parser("doctor", help="show what works on this host and how to mend the rest", description=__doc__)
    p.add_argument("--json", action="store_true", help="as JSON")
    p.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="exit with 1 unless this vendor or transport is usable (may be given again)",
    )
    p.add_argument(
        "--variables",
        nargs="?",
        const="markdown",
        choices=["markdown", "rst", "json"],
        help="only list every environment variable, as markdown (default), rst or json",
    )
    p.add_argument("--keys", action="store_true", help="only list the keys of a topology file, as markdown")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the checks. Exit code 0, or 1 if something that --require names is not usable."""
    if args.variables:
        table = variables()
        if args.variables == "json":
            rows = [{f.name: getattr(v, f.name) for f in dataclasses.fields(v) if f.name != "parse"} for v in table]
            print(json.dumps(rows, indent=1))
        else:
            print(render(table, args.variables), end="")
        return 0
    if args.keys:
        from hetccl.core.topology_keys import KEYS
        from hetccl.core.yaml_keys import render_keys

        print(render_keys(KEYS), end="")
        return 0
    found = checks()
    lacking = {name: why for name in args.require if (why := _lacks(name))}
    if args.json:
        print(
            json.dumps(
                {"version": hetccl.__version__, "checks": [dataclasses.asdict(c) for c in found], "lacking": lacking},
                indent=1,
            )
        )
    else:
        show(found)
    for name, why in lacking.items():
        print(f"hetccl doctor: required {name!r}: {why}", file=sys.stderr)
    return 1 if lacking else 0


def checks() -> list[Check]:
    """Everything that doctor looks at. A part that fails is a line of its own, never the end of the others."""
    parts: tuple[tuple[str, Callable[[], list[Check]]], ...] = (
        ("host", _host),
        ("vendors", lambda: _drivers(registry.vendors())),
        ("transports", lambda: _drivers(registry.transports())),
        ("interfaces", _interfaces),
        ("memory", _memory),
        ("limits", _limits),
        ("torch", _torch),
        ("settings", _settings),
        ("topology", lambda: [Check("topology", *row) for row in doctor_topology.rows()]),
        ("security", _security),
    )
    found: list[Check] = []
    for section, part in parts:
        try:
            found += part()
        except Exception as error:
            found.append(Check(section, "check", WARNING, f"could not be looked at: {type(error).__name__}: {error}"))
    return found


def show(found: list[Check]) -> None:
    """As aligned text; with rich's colours where rich is installed and stdout is a terminal."""
    width = max((len(c.name) for c in found), default=0)
    paint: Callable[[str, str], None] = lambda text, state: print(text)  # noqa: E731 - replaced below
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.text import Text

        console, styles = Console(highlight=False), {OK: "green", WARNING: "yellow", MISSING: "red"}
        paint = lambda text, state: console.print(Text(text, styles.get(state, "")), soft_wrap=True)  # noqa: E731
    section = ""
    for check in found:
        if check.section != section:
            section = check.section
            paint(f"\n{section}" if section != found[0].section else section, "")
        details = "; ".join(f"{key} {value}" for key, value in check.details.items() if value)
        text = ". ".join(filter(None, [check.text, details]))
        paint(f"  {check.name:<{width}}  {check.state:<11}  {text}", check.state)
        if check.remedy:
            paint(f"  {'':<{width}}  {'':<11}  -> {check.remedy}", check.state)


def _host() -> list[Check]:
    cores = len(os.sched_getaffinity(0))
    few = cores < 2
    return [
        Check(
            "host", "hetccl", INFO, f"{hetccl.__version__}, Python {platform.python_version()}, {platform.platform()}"
        ),
        Check(
            "host",
            "cores",
            WARNING if few else OK,
            f"{cores} usable of {os.cpu_count()}",
            "give the ranks a core each: waiting ranks share this one" if few else "",
        ),
    ]


def _drivers(listed: list[registry.Listed]) -> list[Check]:
    found = []
    for one in listed:
        a = one.availability
        marks = [one.distribution]
        if getattr(one.driver, "simulated_only", False):
            marks.append("never run on real hardware")
        if getattr(one.driver, "variants", False):
            marks.append(f"variants: {one.name}-a, {one.name}-b, ...")
        if one.driver is not None and not getattr(one.driver, "automatic", True):
            marks.append("only used when named")
        text = ", ".join(filter(None, [a.reason or "usable", *marks]))
        state = OK if a.ok else MISSING
        found.append(Check(f"{one.kind}s", one.name, state, text, "" if a.ok else a.remedy, dict(a.details)))
    kind = "transport" if listed and listed[0].kind == "transport" else "vendor"
    if not listed:
        found.append(
            Check(
                "drivers",
                "none",
                MISSING,
                "no driver is installed, not even hetccl's own",
                "install hetccl itself: pip install hetccl",
            )
        )
    elif not any(one.availability.ok for one in listed):
        found.append(Check(f"{kind}s", "any", MISSING, f"no {kind} is usable", registry.install_hint(kind, "NAME")))
    return found


def _interfaces() -> list[Check]:
    from hetccl.native import interfaces

    name = os.environ.get("HETCCL_SOCKET_IFNAME", "")
    try:
        chosen, trouble = {a.interface for a in interfaces.choose(name, "", True)}, None
    except HetcclError as error:
        chosen, trouble = set(), error
    found = []
    for i in interfaces.interfaces():
        words = ["up" if i.up else "down", *map(str, i.addresses)]
        if i.speed:
            words.append(f"{i.speed} Mbit/s")
        if i.name in chosen:
            words.append("used between hosts" if not i.loopback else "used: this host only")
        found.append(Check("interfaces", i.name, OK if i.up and i.addresses else INFO, ", ".join(words)))
    if trouble:
        found.append(Check("interfaces", "choice", WARNING, str(trouble)))
    elif not any(i.name in chosen and not i.loopback for i in interfaces.interfaces()):
        found.append(
            Check(
                "interfaces",
                "choice",
                WARNING,
                "only loopback: no other host can be reached",
                "bring an interface up, or set HETCCL_SOCKET_IFNAME",
            )
        )
    return found


def _memory() -> list[Check]:
    found = []
    try:
        os.close(os.memfd_create("hetccl-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        found.append(Check("memory", "memfd", OK, "shared memory by passed descriptors works"))
    except OSError as error:
        found.append(
            Check(
                "memory",
                "memfd",
                MISSING,
                f"memfd_create fails: {error.strerror}; shm needs it",
                "allow memfd_create in the container's seccomp profile",
            )
        )
    try:
        s = os.statvfs("/dev/shm")
        total, free = s.f_blocks * s.f_frsize, s.f_bavail * s.f_frsize
        small = free < MIN_SHM
        found.append(
            Check(
                "memory",
                "/dev/shm",
                WARNING if small else OK,
                f"{_size(free)} free of {_size(total)} (vendors' own libraries use it; hetccl does not)",
                "docker run --shm-size=2g" if small else "",
            )
        )
    except OSError as error:
        found.append(Check("memory", "/dev/shm", WARNING, f"not there: {error.strerror}", "mount a tmpfs on /dev/shm"))
    return found


def _limits() -> list[Check]:
    def line(name: str, which: int, least: int, say: Callable[[int], str], why: str, remedy: str) -> Check:
        soft, hard = resource.getrlimit(which)
        low = soft != resource.RLIM_INFINITY and soft < least
        text = f"{say(soft)} (hard limit {say(hard)}){', ' + why if low else ''}"
        return Check("limits", name, WARNING if low else OK, text, remedy if low else "")

    return [
        line(
            "memlock",
            resource.RLIMIT_MEMLOCK,
            MIN_MEMLOCK,
            _size,
            "too little for RDMA",
            "ulimit -l unlimited, or docker run --ulimit memlock=-1",
        ),
        line(
            "nofile", resource.RLIMIT_NOFILE, MIN_NOFILE, str, "few for a job of many ranks", f"ulimit -n {MIN_NOFILE}"
        ),
    ]


def _torch() -> list[Check]:
    try:
        version = importlib.metadata.version("torch")  # its version without the seconds that importing it takes
    except importlib.metadata.PackageNotFoundError:
        return [Check("torch", "torch", INFO, "not installed; hetccl works without it", "pip install torch")]
    registered = any(e.name == "hetccl" for e in importlib.metadata.entry_points(group="torch.backends"))
    if not registered:
        return [
            Check(
                "torch",
                "torch",
                WARNING,
                f"{version}, but hetccl is not installed as a back end: "
                "`import hetccl.torch` must stand before init_process_group",
                "pip install hetccl",
            )
        ]
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        return [
            Check(
                "torch",
                "torch",
                WARNING,
                f"{version}, but TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps hetccl from being registered",
                "unset it, or import hetccl.torch",
            )
        ]
    return [Check("torch", "torch", OK, f'{version}; init_process_group("hetccl")')]


def _settings() -> list[Check]:
    found = []
    try:
        Config.from_env()
    except HetcclError as error:
        found.append(Check("settings", "error", MISSING, str(error)))
    for name in sorted(n for n in os.environ if n.startswith("HETCCL_")):
        value = "***" if name == "HETCCL_SECRET" else os.environ[name]
        found.append(Check("settings", name, INFO, value))
    return found or [Check("settings", "HETCCL_*", OK, "none set, all defaults (see hetccl doctor --variables)")]


def _security() -> list[Check]:
    try:
        secret = Config.from_env({k: v for k, v in os.environ.items() if k.startswith("HETCCL_")}).read_secret()
    except HetcclError as error:
        return [Check("security", "secret", MISSING, str(error))]
    if secret is None:
        return [
            Check(
                "security",
                "secret",
                INFO,
                "none is set: rank 0 draws one; connections are as trustworthy as the store that hands it out",
                "openssl rand -hex 32 > FILE; chmod 600 FILE; HETCCL_SECRET_FILE=FILE on every rank",
            )
        ]
    return [
        Check(
            "security",
            "secret",
            OK,
            f"{len(secret)} bytes; connections are authenticated with it, payload is not encrypted",
        )
    ]


def _lacks(name: str) -> str:
    """Why a vendor or transport of that name cannot be used; "" if it can."""
    kinds = (registry.transport, registry.vendor)
    known = {one.name for one in registry.transports()}
    try:
        kinds[0 if name in known else 1](name)
    except HetcclError as error:
        return str(error)
    return ""


def _size(nbytes: int) -> str:
    if nbytes == resource.RLIM_INFINITY:
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}"
        nbytes //= 1024
    return ""
