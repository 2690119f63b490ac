# SPDX-License-Identifier: Apache-2.0
"""How ranks become a communicator: records out, one topology back, vendor communicators, control plane, links.

Store operations grow with the number of ranks, not with its square: one record a rank, one published answer, one id
an island.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hetccl.core import registry
from hetccl.core.config import Config
from hetccl.core.control import Control, ControlListener
from hetccl.core.ranks import RankSpec, check_size, parse_ranks
from hetccl.core.store import Store, StoreView
from hetccl.core.topology import Record, Topology, compute_topology
from hetccl.errors import ConfigError, HetcclError, PeerLostError, UsageError
from hetccl.native.handshake import WIRE_VERSIONS
from hetccl.tables import CclTable, DeviceTable, TransportTable
from hetccl.transports.base import Transport, TransportRequest
from hetccl.vendors.base import Vendor, VendorDriver, VendorRequest

__all__ = ["Joined", "join"]

log = logging.getLogger("hetccl.bootstrap")

PLANNER_VERSION = 1
_PROCESS = secrets.randbits(48)  # a forked child has another pid
_generation: Counter[str] = Counter()
_vendors: dict[tuple[str, int], Vendor] = {}  # the library of a rank stays open for the life of the process
_vendors_lock = threading.Lock()


@dataclass
class Joined:
    """What joining yields."""

    topology: Topology
    records: list[Record]
    vendor: Vendor
    device: DeviceTable
    ccl: CclTable
    ccl_comm: int
    transports: list[Transport]
    tables: dict[str, TransportTable]
    control: Control
    key: str
    secret_from_store: bool
    deadline: float
    view: StoreView
    device_types: tuple[str, ...] = ("cpu",)
    device_index: int = 0
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises if waiting for the others has become vain: one could not join, or has died."""
        self.view.raise_if_failed()
        lost = tuple(r for r in range(self.topology.size) if self.control.state(r) == 2)
        if lost:
            raise PeerLostError(f"rank {', '.join(map(str, lost))} died while the ranks were joining", ranks=lost)


def host_id() -> str:
    """Equal for processes that may share memory and abstract sockets: one kernel, one network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def join(
    store: Store,
    rank: int,
    size: int,
    name: str,
    ranks: str | None,
    transports: str | None,
    config: Config,
    timeout: float,
    device_type: str = "cpu",
) -> Joined:
    """Blocks until all ranks have joined, at most `timeout` seconds. Raises typed errors; other ranks then stop
    waiting."""
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} is not within 0 .. {size - 1}")
    _generation[name] += 1
    deadline = time.monotonic() + timeout
    view = StoreView(store, f"hetccl/{name}/{_generation[name]}/", deadline, lambda text: log.warning("%s", text))
    undo: list[Any] = []
    try:
        return _join(view, rank, size, name, ranks, transports, config, deadline, undo, device_type)
    except BaseException as error:
        for close in reversed(undo):
            close()
        if not isinstance(error, GeneratorExit):  # also an interrupt: the others must not wait for this rank
            view.fail(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def _join(
    view: StoreView,
    rank: int,
    size: int,
    name: str,
    ranks: str | None,
    transports: str | None,
    config: Config,
    deadline: float,
    undo: list[Any],
    device_type: str,
) -> Joined:
    here = host_id()
    job, secret, from_store = _greeting(view, rank, config)
    vendor, spec, driver = _open_vendor(rank, size, ranks, config, here, device_type)
    device, ccl = DeviceTable(vendor.device_table), CclTable(vendor.ccl_table)
    request = TransportRequest(rank, size, job, here, secret, os.environ.get("MASTER_ADDR", ""))
    opened = _open_transports(transports, config, request)
    undo += [t.close for t in opened]
    tables = {t.name: TransportTable(t.table) for t in opened}
    if config.border_rate:
        from hetccl.core._shaping import shape

        tables = {name: shape(table, config.border_rate) for name, table in tables.items()}
    listener = ControlListener()
    undo.append(listener.close)
    record = Record(
        rank=rank,
        host=socket.gethostname(),
        host_id=here,
        pid=os.getpid(),
        vendor=vendor.name,
        label=spec.label,
        island_key=vendor.island_key,
        max_island=vendor.max_island,
        device=f"{vendor.name}:{_device_index(driver, config)}",
        host_memory=device.host_memory,
        blocking=bool(ccl.caps & 1),
        kernels=bool(device.caps & 4),
        segment_bytes=vendor.segment_bytes,
        reduce_mask=tuple(ccl.reduce_mask(d) for d in range(19)),
        move_mask=ccl.move_mask,
        transports={t.name: t.address() for t in opened},
        max_message={n: t.max_message for n, t in tables.items()},
        process=(_PROCESS, os.getpid()),
        wire=WIRE_VERSIONS,
        calls=ccl.calls,
        place=vendor.device_place,
    )
    view.put(f"record/{rank}", json.dumps({"record": record.to_json(), "control": listener.local.name.hex()}).encode())
    blob = (
        _publish(view, rank, size, config, listener) if rank == 0 else json.loads(view.take("topology", "bootstrap", 0))
    )
    topology = Topology.from_json(blob["topology"])
    records = [Record.from_json(r) for r in blob["records"]]
    control = Control(rank, topology.host_ids, secret, job)
    undo.append(control.leave)
    control.join(listener, blob["control"][control.leader], blob["rank0"], deadline)
    listener.close()
    ccl_comm = _island_comm(view, vendor, topology, rank, deadline)
    return Joined(
        topology,
        records,
        vendor,
        device,
        ccl,
        ccl_comm,
        opened,
        tables,
        control,
        f"{name}/{_generation[name]}",
        from_store,
        deadline,
        view,
        driver.torch_device_types,
        _device_index(driver, config),
    )


def _greeting(view: StoreView, rank: int, config: Config) -> tuple[str, bytes, bool]:
    """The job's name, fresh for this communicator, and its secret: the user's, or one that rank 0 draws (design D8)."""
    mine = config.read_secret()
    if rank == 0:
        hello: dict[str, Any] = {
            "job": secrets.token_hex(16),
            "drawn": "" if mine else secrets.token_hex(32),
            "planner": PLANNER_VERSION,
        }
        view.put("hello", json.dumps(hello).encode())
    else:
        hello = json.loads(view.take("hello", "bootstrap", 0))
    if hello["planner"] != PLANNER_VERSION:
        raise ConfigError(
            f"rank 0 plans with version {hello['planner']}, rank {rank} with {PLANNER_VERSION}: "
            "install the same hetccl everywhere"
        )
    if mine and hello["drawn"]:
        raise ConfigError(
            "this rank has a secret, rank 0 has none: set HETCCL_SECRET or HETCCL_SECRET_FILE on every rank"
        )
    if not mine and not hello["drawn"]:
        raise ConfigError(
            "rank 0 has a secret, this rank has none: set HETCCL_SECRET or HETCCL_SECRET_FILE on every rank"
        )
    return hello["job"], mine or bytes.fromhex(hello["drawn"]), not mine


def _open_vendor(
    rank: int, size: int, ranks: str | None, config: Config, here: str, device_type: str
) -> tuple[Vendor, RankSpec, VendorDriver]:
    specs = parse_ranks(ranks) if ranks else config.ranks
    if specs is not None:
        check_size(specs, size)
        spec = specs[rank]
        named = registry.vendor(spec.vendor)
    else:
        named = registry.best_vendor(device_type)
        spec = RankSpec(named.name)
    index = _device_index(named.driver, config)
    with _vendors_lock:
        key = (named.name, index)
        if key not in _vendors:
            _vendors[key] = named.driver.open(VendorRequest(named.variant, index, here, config.socket_ifname))
        return _vendors[key], spec, named.driver


def _device_index(driver: VendorDriver, config: Config) -> int:
    """HETCCL_DEVICE, else LOCAL_RANK where ranks have devices of their own."""
    if config.device is not None:
        return config.device
    local = os.environ.get("LOCAL_RANK", "")
    return int(local) if local.isdigit() and "cpu" not in driver.torch_device_types else 0


def _open_transports(transports: str | None, config: Config, request: TransportRequest) -> list[Transport]:
    wanted = tuple(t.strip() for t in transports.split(",") if t.strip()) if transports else config.transports
    if wanted:
        return [registry.transport(name).open(request) for name in wanted]
    usable = [t for t in registry.transports() if t.availability.ok and t.driver is not None]
    usable.sort(key=lambda t: -t.driver.preference)  # type: ignore[union-attr]
    opened = []
    for listed in usable:
        try:
            opened.append(listed.driver.open(request))  # type: ignore[union-attr, arg-type]
        except HetcclError as error:
            log.warning("transport %s is left out: %s", listed.name, error)
    return opened  # type: ignore[return-value]


def _publish(view: StoreView, rank: int, size: int, config: Config, listener: ControlListener) -> dict[str, Any]:
    """Rank 0: gathers the records, computes who is where and publishes it."""
    found = view.take_all({r: f"record/{r}" for r in range(size)}, "bootstrap")
    answers = [json.loads(found[r]) for r in range(size)]
    records = [Record.from_json(a["record"]) for a in answers]
    low, high = max(r.wire[0] for r in records), min(r.wire[1] for r in records)
    if low > high:
        versions = "; ".join(f"rank {r.rank} on {r.host}: {r.wire[0]} to {r.wire[1]}" for r in records)
        raise ConfigError(f"no wire version is spoken by all ranks ({versions}). Install matching versions of hetccl")
    limits = [m for r in records for m in r.max_message.values()]
    chunk = min(limits) if limits else 65536
    if config.chunk_bytes:
        chunk = min(chunk, config.chunk_bytes)
    topology = compute_topology(records, chunk - chunk % 64)
    many = len(set(topology.host_ids)) > 1
    rank0 = listener.listen_remote(config.socket_ifname, os.environ.get("MASTER_ADDR", "")) if many else []
    blob = {
        "topology": topology.to_json(),
        "records": [r.to_json() for r in records],
        "control": [a["control"] for a in answers],
        "rank0": rank0,
    }
    view.put("topology", json.dumps(blob).encode())
    return blob


def _island_comm(view: StoreView, vendor: Vendor, topology: Topology, rank: int, deadline: float) -> int:
    """Joins the vendor's communicator of my island. An island of one rank needs none."""
    island = topology.island_of(rank)
    if island.size == 1:
        return 0
    key = f"island/{island.index}"
    if rank == island.ranks[0]:
        unique_id = vendor.new_id()
        view.put(key, unique_id)
    else:
        unique_id = view.take(key, "island", island.ranks[0])
    vendor.local_ranks = topology.host_ids.count(topology.host_ids[rank])
    left = max(1.0, deadline - time.monotonic())
    return vendor.create_comm(island.ranks.index(rank), island.size, unique_id, left)
