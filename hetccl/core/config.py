# SPDX-License-Identifier: Apache-2.0
"""Every environment variable of hetccl, declared once: what it is called, what it accepts, its default and its text.

Plug-ins declare theirs as `options` of their driver; `variables()` shows both.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hetccl.core import log
from hetccl.core.ranks import RankSpec, parse_ranks
from hetccl.errors import ConfigError, HetcclError

__all__ = ["VARIABLES", "Config", "Variable", "parse_bytes", "parse_rate", "render", "variables"]


@dataclass(frozen=True)
class Variable:
    """One environment variable. `accepts` says in words what may be written; `parse` raises `ValueError` otherwise."""

    name: str
    accepts: str
    default: str
    text: str
    parse: Callable[[str], Any] = str
    owner: str = "hetccl"


@dataclass(frozen=True)
class Config:
    """What the environment says, checked. Attributes bear the variables' names in lower case."""

    ranks: list[RankSpec] | None = None
    transports: tuple[str, ...] | None = None
    log: str = "warning"
    timeout: float = 300.0
    secret: str = field(default="", repr=False)
    secret_file: str = ""
    require_secret: bool = False
    check: str = "always"
    home: str = ""
    device: int | None = None
    algorithm: dict[str, str] = field(default_factory=dict)
    tuning: str = ""
    chunk_bytes: int | None = None
    store: str = ""
    verify: str = "first"
    trace_steps: int | None = None
    combine: str = "auto"
    order: str = "program"
    socket_ifname: str = ""
    border_rate: int = 0
    device_path: str = "auto"
    cpu_threads: int = 1
    kernel_cache: str = ""
    topology: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Reads the environment. Raises `ConfigError` that names the variable, its value and what is accepted.

        An unknown HETCCL_* variable gets one warning with the nearest known name.
        """
        env = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for variable in VARIABLES:
            text = env.get(variable.name, "").strip() or variable.default
            if text:
                values[variable.name.removeprefix("HETCCL_").lower()] = _parse(variable, text)
        _warn_unknown(env)
        return cls(**values)

    def read_secret(self) -> bytes | None:
        """The job's secret from HETCCL_SECRET_FILE or else HETCCL_SECRET; None if neither is set.

        Raises `ConfigError` if the file cannot be read or is empty, or if HETCCL_REQUIRE_SECRET asks for a secret.
        """
        secret = self.secret.encode()
        source = "HETCCL_SECRET"
        if self.secret_file:
            source = f"HETCCL_SECRET_FILE={self.secret_file}"
            try:
                with open(self.secret_file, "rb") as file:
                    secret = file.read(4097).strip()
            except OSError as error:
                raise ConfigError(
                    f"{source} cannot be read: {error.strerror}; name a file that every rank may read",
                    variable="HETCCL_SECRET_FILE",
                    value=self.secret_file,
                ) from error
            if not secret or len(secret) > 4096:
                raise ConfigError(
                    f"{source} is {'empty' if not secret else 'longer than 4096 bytes'}; put 32 random "
                    "bytes there, e.g. openssl rand -hex 32",
                    variable="HETCCL_SECRET_FILE",
                    value=self.secret_file,
                )
        if not secret:
            if self.require_secret:
                raise ConfigError(
                    "HETCCL_REQUIRE_SECRET is set, but there is no secret: set HETCCL_SECRET_FILE to a "
                    "file with 32 random bytes that only the job's user can read",
                    variable="HETCCL_REQUIRE_SECRET",
                    value="1",
                )
            return None
        if len(secret) < 16:
            log.get_logger("config").warning(
                "%s has only %d bytes, which can be guessed; use 32 random ones", source, len(secret)
            )
        return secret


def parse_bytes(text: str) -> int:
    """ "64M" is 64 MiB; K, M and G are powers of 1024, "iB" or "B" may follow. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ValueError(text)
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def parse_rate(text: str) -> int:
    """ "400M" is 400 million bytes a second; K, M and G are powers of 1000, as for links. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:B(?:/S)?)?", text.strip().upper())
    if not match:
        raise ValueError(text)
    return int(match[1]) * int(1000 ** " KMG".index(match[2] or " "))


def variables(plugins: bool = True) -> list[Variable]:
    """Our variables, and with `plugins` those of every installed driver."""
    found = list(VARIABLES)
    ours = {v.name for v in VARIABLES}
    if plugins:
        from hetccl.core import registry

        for listed in [*registry.vendors(), *registry.transports()]:
            for option in listed.driver.options if listed.driver else ():
                owner = f"{listed.kind} {listed.name}"
                if option.name in ours:  # a plug-in may say that it reads one of ours
                    continue
                found.append(Variable(option.name, "", option.default, option.text, owner=owner))
    return found


def render(table: list[Variable], style: str = "markdown") -> str:
    """The table of variables as "markdown" or "rst" text."""
    head = ("variable", "accepts", "default", "meaning", "of")
    rows = [(f"`{v.name}`", v.accepts, v.default or "-", v.text, v.owner) for v in table]
    if style == "markdown":
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, *rows)]
        lines.insert(1, "|" + " --- |" * len(head))
        return "\n".join(lines) + "\n"
    if style == "rst":
        lines = [".. list-table::", "   :header-rows: 1", ""]
        for row in (head, *rows):
            for i, cell in enumerate(row):
                lines.append(("   * - " if i == 0 else "     - ") + cell.replace("`", "``"))
        return "\n".join(lines) + "\n"
    raise ConfigError(f"no table style {style!r}; there are markdown and rst")


def _parse(variable: Variable, text: str) -> Any:
    shown = "***" if variable.name == "HETCCL_SECRET" else text
    try:
        return variable.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{variable.name}: {error}", variable=variable.name, value=shown) from None
    except ValueError as error:
        why = f" ({error})" if str(error) and str(error) != text else ""
        raise ConfigError(
            f"{variable.name}={shown} cannot be used{why}; it accepts {variable.accepts}",
            variable=variable.name,
            value=shown,
        ) from None


_warned: set[str] = set()
_DEVELOPERS = {"HETCCL_EXT", "HETCCL_TEST_STRICT", "HETCCL_TEST_SEED", "HETCCL_TEST_FULL"}  # of setup.py and the tests


def _warn_unknown(env: Mapping[str, str]) -> None:
    known = {v.name for v in VARIABLES}
    strange = {name for name in env if name.startswith("HETCCL_")} - known - _warned - _DEVELOPERS
    if not strange:
        return
    _warned.update(strange)
    try:
        known |= {v.name for v in variables()}  # a plug-in's own variable is not unknown; asks only when needed
    except HetcclError as error:
        log.get_logger("config").debug("cannot list the plug-ins' variables: %s", error)
    for name in sorted(strange - known):
        near = difflib.get_close_matches(name.removeprefix("HETCCL_"), [k.removeprefix("HETCCL_") for k in known], 1)
        log.get_logger("config").warning(
            "%s is no variable of hetccl or of an installed plug-in%s",
            name,
            f"; did you mean HETCCL_{near[0]}?" if near else "",
        )


def _threads(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise ValueError
    return int(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError
        return text.lower()

    return parse


def _names(text: str) -> tuple[str, ...]:
    names = tuple(piece.strip() for piece in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) for name in names):
        raise ValueError
    if len(set(names)) != len(names):
        raise ValueError("a name stands there twice")
    return names


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    if text.lower() not in ("0", "1", "no", "yes", "false", "true", "off", "on"):
        raise ValueError
    return text.lower() in ("1", "yes", "true", "on")


def _device(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError
    return int(text)


def _algorithm(text: str) -> dict[str, str]:
    forced = {}
    for piece in text.split(","):
        op, equals, name = (part.strip() for part in piece.partition("="))
        if not (equals and re.fullmatch(r"[a-z_]+", op) and re.fullmatch(r"[a-z][a-z0-9_]*", name)):
            raise ValueError
        if op in forced:
            raise ValueError(f"{op} stands there twice")
        forced[op] = name
    return forced


def _chunk(text: str) -> int:
    value = parse_bytes(text)
    if not 4096 <= value <= 1 << 30:
        raise ValueError
    return value


def _store(text: str) -> str:
    if not re.fullmatch(r"file://(/.+)|tcp://([^/:\s]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}/?", text):
        raise ValueError
    return text


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "HETCCL_RANKS",
        'vendors in rank order, as in "oneccl:2,host:2" or "host@a:1,host@b:1"',
        "",
        "The job's make-up. A label after @ splits one vendor's ranks into several islands, for tests. Unset: each "
        "rank takes the best usable vendor of its device.",
        parse_ranks,
    ),
    Variable(
        "HETCCL_TOPOLOGY",
        "path of a YAML file",
        "",
        "Describes islands, borders, rails and links (see the topology file's keys). Rank 0 needs it; ranks that have "
        "one too must have the same. Unset: islands are found from the ranks, all of them are at the border, and "
        "every two islands reach each other.",
        os.path.expanduser,
    ),
    Variable(
        "HETCCL_TRANSPORTS",
        'names separated by commas, best first, as in "shm,tcp"',
        "",
        "Transports to use, in this order. Unset: all usable ones, by preference.",
        _names,
    ),
    Variable(
        "HETCCL_LOG",
        "off, error, warning, info or debug",
        "warning",
        "What is written to stderr.",
        _one_of(*log.LEVELS),
    ),
    Variable(
        "HETCCL_TIMEOUT", "seconds, more than 0", "300", "How long an operation may wait for other ranks.", _seconds
    ),
    Variable(
        "HETCCL_SECRET",
        "text, best 32 random bytes in hexadecimal",
        "",
        "The job's secret, with which connections are authenticated. Prefer HETCCL_SECRET_FILE: other users of a "
        "host may be able to read a process's environment.",
    ),
    Variable(
        "HETCCL_SECRET_FILE",
        "path of a file that every rank can read",
        "",
        "File with the job's secret; goes before HETCCL_SECRET. With neither, rank 0 draws a secret and hands it "
        "out through the store, so connections are as trustworthy as the store.",
    ),
    Variable("HETCCL_REQUIRE_SECRET", "0 or 1", "0", "1: refuse to start without a secret of one's own.", _flag),
    Variable(
        "HETCCL_CHECK",
        "always, async or off",
        "always",
        "Whether ranks compare what they call: before the data moves, beside it, or not at all.",
        _one_of("always", "async", "off"),
    ),
    Variable(
        "HETCCL_HOME",
        "path of a folder",
        "~/.cache/hetccl",
        "Where `hetccl fetch` puts vendor libraries.",
        os.path.expanduser,
    ),
    Variable(
        "HETCCL_DEVICE",
        "a number, 0 or more",
        "",
        "Index of the device that this rank uses. Unset: LOCAL_RANK, on vendors with devices.",
        _device,
    ),
    Variable(
        "HETCCL_ALGORITHM",
        'op=name pairs separated by commas, as in "all_reduce=owners"',
        "",
        "Forces algorithms, e.g. all_reduce=owners (bandwidth) or all_reduce=exchange (latency). Unset: the one that "
        "the cost model says takes least time.",
        _algorithm,
    ),
    Variable(
        "HETCCL_TUNING",
        "path of a tuning file",
        "",
        "What paths and libraries cost, as `hetccl tune` measured it. Rank 0's table is adopted by all; a rank that "
        "names another one is refused.",
    ),
    Variable("HETCCL_CHUNK_BYTES", "4K to 1G", "", "Forces the size of one wire message.", _chunk),
    Variable(
        "HETCCL_STORE",
        "file:///folder or tcp://host:port",
        "",
        "Where ranks meet when a communicator is made without a store. Unset: tcp://MASTER_ADDR:MASTER_PORT.",
        _store,
    ),
    Variable(
        "HETCCL_VERIFY",
        "first, always or off",
        "first",
        "When plans are proved correct, before anything is sent: each class of operation once, up to 64 ranks (first), "
        "every plan of any size, and the executor's trace after each operation too (always), or never (off).",
        _one_of("first", "always", "off"),
    ),
    Variable(
        "HETCCL_TRACE_STEPS",
        "a number of events, 0: none",
        "",
        "For debugging: the executor writes down what it does, and after each blocking operation that is replayed "
        "through the checker. 64 bytes an event and communicator. Unset: 65536 under HETCCL_VERIFY=always, else none. "
        "A number given here also stages data of devices (HETCCL_DEVICE_PATH=staged), whose direct path is not traced.",
        _device,
    ),
    Variable(
        "HETCCL_COMBINE",
        "device, border, host or auto",
        "auto",
        "Who combines what comes from other islands: the device's own kernel, the vendor's library on a communicator "
        "of as many ranks as there are contributions, or the host. auto: the cheapest that can. Rank 0's setting "
        "holds for all.",
        _one_of("device", "border", "host", "auto"),
    ),
    Variable(
        "HETCCL_ORDER",
        "program or island",
        "program",
        "Who says in which order the operations of several communicators come. program: all ranks call overlapping "
        "ones in one order. island: they need not, for the first process of each island says in which order they go "
        "onto the devices; costs every call a meeting of the island, which must lie on one host. Rank 0's setting "
        "holds for all.",
        _one_of("program", "island"),
    ),
    Variable(
        "HETCCL_SOCKET_IFNAME",
        'interfaces or prefixes of their names separated by commas, as in "eth0,ib"',
        "",
        "Network interfaces for sockets, in order of preference. Unset: the one on the route to the store.",
    ),
    Variable(
        "HETCCL_BORDER_RATE",
        'bytes a second, as in "100M" for 100 million',
        "",
        "Slows down what this rank sends and receives between islands, all communicators together, each way: for "
        "experiments. Unset: as fast as the transports are.",
        parse_rate,
    ),
    Variable(
        "HETCCL_CPU_THREADS",
        "1 to 64",
        "1",
        "Threads of a CPU rank that copy and sum what it exchanges with devices of its host, and as many in the "
        "library of the vendor host, at most 8 and its share of the cores, for large operations of its island. They spin "
        "for a while as they wait.",
        _threads,
    ),
    Variable(
        "HETCCL_DEVICE_PATH",
        "auto, resident, kernel, host or staged",
        "auto",
        "How data of devices crosses between islands of one host: straight between device and shared pinned memory, "
        "summed by a resident kernel, by a kernel a chunk, or by the host; or staged through private memory. auto: the "
        "fastest that works on all ranks. Where one rank says staged, all are.",
        _one_of("auto", "resident", "kernel", "host", "staged"),
    ),
    Variable(
        "HETCCL_KERNEL_CACHE",
        "off, or a folder",
        "",
        "Where kernels that were compiled for a device are kept. Unset: hetccl in the user's cache folder.",
    ),
)
