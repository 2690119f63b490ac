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
from dataclasses import dataclass, field, replace
from typing import Any

from hetccl.core import described, registry
from hetccl.core.config import Config
from hetccl.core.control import Control, ControlListener
from hetccl.core.cost import CostTable
from hetccl.core.proof import check_proofs, proof
from hetccl.core.ranks import RankSpec, check_size, parse_ranks
from hetccl.core.store import Store, StoreView
from hetccl.core.topology import Record, Topology, compute_topology, fitting_chunk
from hetccl.core.topology_file import TopologyFile
from hetccl.core.tuning import adopt, load_tuning, mismatch, published
from hetccl.core.vendor_comms import VendorComms
from hetccl.errors import ConfigError, HetcclError, PeerLostError, UnsupportedError, UsageError
from hetccl.native.handshake import WIRE_VERSIONS
from hetccl.tables import CclTable, DeviceTable, TransportTable
from hetccl.transports.base import Transport, TransportRequest
from hetccl.vendors.base import Vendor, VendorDriver, VendorRequest

__all__ = ["Joined", "join"]

log = logging.getLogger("hetccl.bootstrap")

PLANNER_VERSION = 2
NAN_PROPAGATES, MULTI_COMM = 8, 16  # of HETCCL_CCL_*
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
    comms: VendorComms
    transports: list[Transport]
    tables: dict[str, TransportTable]
    control: Control
    secret_from_store: bool
    deadline: float
    view: StoreView
    combine: str = "auto"  # HETCCL_COMBINE and HETCCL_ORDER of rank 0
    order: str = "program"
    device_types: tuple[str, ...] = ("cpu",)
    device_index: int = 0
    costs: CostTable = field(default_factory=CostTable)

    def check(self) -> None:
        """Raises if waiting for the others has become vain: one could not join, or has died."""
        raise_if_vain(self.view, self.control)


def raise_if_vain(view: StoreView, control: Control) -> None:
    """Raises what another rank said that could not join, or `PeerLostError` if one has died."""
    view.raise_if_failed()
    lost = tuple(r for r in range(control.size) if control.state(r) == 2)
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
    topology: str | TopologyFile | None = None,
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
        file = described.read(topology, config.topology)
        return _join(view, rank, size, name, ranks, transports, config, deadline, undo, device_type, file)
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
    file: TopologyFile | None,
) -> Joined:
    here = host_id()
    job, secret, from_store = _greeting(view, rank, config)
    vendor, spec, driver = _open_vendor(rank, size, ranks, config, here, device_type, file)
    device, ccl = DeviceTable(vendor.device_table), CclTable(vendor.ccl_table)
    request = TransportRequest(rank, size, job, here, secret, os.environ.get("MASTER_ADDR", ""))
    opened = _open_transports(transports, config, request)
    undo += [t.close for t in opened]
    tables = {t.name: TransportTable(t.table) for t in opened}
    if config.border_rate:
        from hetccl.core._shaping import shape

        tables = {name: shape(table, config.border_rate) for name, table in tables.items()}
    tuning = load_tuning(config.tuning) if config.tuning else None
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
        calls=ccl.calls | bool(ccl.caps & MULTI_COMM) << 2 | bool(ccl.caps & NAN_PROPAGATES) << 3,
        place=vendor.device_place,
        topology=file.digest if file else "",
        tuning=tuning.digest if tuning else "",
        border_rate=float(config.border_rate),
        inner_rate=vendor.inner_rate,
    )
    answer = {
        "record": record.to_json(),
        "control": listener.local.name.hex(),
        "proof": "" if from_store else proof(secret, job),
    }
    view.put(f"record/{rank}", json.dumps(answer).encode())
    if rank == 0:
        blob = _publish(view, rank, size, config, listener, file, tuning)
    else:
        blob = json.loads(view.take("topology", "bootstrap", 0))
    topology = Topology.from_json(blob["topology"])
    combine = _agreed("HETCCL_COMBINE", blob["combine"], config.combine, "auto", rank)
    order = _agreed("HETCCL_ORDER", blob["order"], config.order, "program", rank)
    _check_order(order, topology)
    records = [Record.from_json(r) for r in blob["records"]]
    costs = adopt(tuning, blob["tuning"], rank)
    control = Control(rank, topology.host_ids, secret, job)
    undo.append(control.leave)
    control.join(listener, blob["control"][control.leader], blob["rank0"], deadline)
    listener.close()
    vendor.cpu_threads = config.cpu_threads
    comms = VendorComms(ccl, device)
    undo.append(comms.destroy)
    comms.join(view, vendor, topology, rank, deadline, combine == "border", lambda: raise_if_vain(view, control))
    return Joined(
        topology,
        records,
        vendor,
        device,
        ccl,
        comms,
        opened,
        tables,
        control,
        from_store,
        deadline,
        view,
        combine,
        order,
        driver.torch_device_types,
        _device_index(driver, config),
        costs,
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
    rank: int, size: int, ranks: str | None, config: Config, here: str, device_type: str, file: TopologyFile | None
) -> tuple[Vendor, RankSpec, VendorDriver]:
    specs = parse_ranks(ranks) if ranks else config.ranks
    if file is not None:
        specs = described.rank_specs(file, specs, size)
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


def _publish(
    view: StoreView,
    rank: int,
    size: int,
    config: Config,
    listener: ControlListener,
    file: TopologyFile | None,
    tuning: CostTable | None,
) -> dict[str, Any]:
    """Rank 0: gathers the records, computes who is where and publishes it."""
    found = view.take_all({r: f"record/{r}" for r in range(size)}, "bootstrap")
    answers = [json.loads(found[r]) for r in range(size)]
    records = [Record.from_json(a["record"]) for a in answers]
    check_proofs(records, [a["proof"] for a in answers])
    low, high = max(r.wire[0] for r in records), min(r.wire[1] for r in records)
    if low > high:
        versions = "; ".join(f"rank {r.rank} on {r.host}: {r.wire[0]} to {r.wire[1]}" for r in records)
        raise ConfigError(f"no wire version is spoken by all ranks ({versions}). Install matching versions of hetccl")
    others = [r.rank for r in records if r.tuning and r.tuning != records[0].tuning]
    if others:
        raise ConfigError(mismatch(others, records[0].tuning), variable="HETCCL_TUNING")
    limits = [m for r in records for m in r.max_message.values()]
    chunk = min(limits) if limits else 65536
    if config.chunk_bytes:
        chunk = min(chunk, config.chunk_bytes)
    if file is None and any(r.topology for r in records):
        having = [r.rank for r in records if r.topology]
        raise ConfigError(f"ranks {having} have a topology file, but rank 0 has none: give it to rank 0, or to all")
    if file is not None:
        records = described.labelled(file, records)
    topology = compute_topology(records, chunk - chunk % 64)
    if file is not None:
        topology = described.apply(file, topology, records)
    if not config.chunk_bytes:
        topology = replace(topology, chunk_bytes=fitting_chunk(topology), _place={})
    many = len(set(topology.host_ids)) > 1
    rank0 = listener.listen_remote(config.socket_ifname, os.environ.get("MASTER_ADDR", "")) if many else []
    blob = {
        "topology": topology.to_json(),
        "records": [r.to_json() for r in records],
        "control": [a["control"] for a in answers],
        "rank0": rank0,
        "tuning": published(tuning),
        "combine": config.combine,
        "order": config.order,
    }
    view.put("topology", json.dumps(blob).encode())
    return blob


def _agreed(variable: str, rank0: str, mine: str, default: str, rank: int) -> str:
    """A setting that all ranks must follow alike: rank 0's. Raises `ConfigError` if this rank says otherwise."""
    if mine not in (default, rank0):
        raise ConfigError(
            f"{variable}={mine} on rank {rank}, but {rank0} on rank 0: set the same everywhere, or on rank 0 alone",
            variable=variable,
            value=mine,
        )
    return rank0


def _check_order(order: str, topology: Topology) -> None:
    """Ranks take turns through the memory of their host."""
    for island in topology.islands:
        hosts = sorted({topology.hosts[r] for r in island.ranks})
        if order == "island" and len({topology.host_ids[r] for r in island.ranks}) > 1:
            raise UnsupportedError(
                f"HETCCL_ORDER=island: island {island.index} ({island.name}) lies on several hosts "
                f"({', '.join(hosts)}), but takes turns through the memory of one. Use overlapping communicators in "
                "one order on all ranks (HETCCL_ORDER=program), or make islands of one host each with "
                "labels in HETCCL_RANKS"
            )
