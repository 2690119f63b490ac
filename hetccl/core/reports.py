# SPDX-License-Identifier: Apache-2.0
"""What a communicator says of itself: what an operation would do, what has been counted, who is where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hetccl.core import _state
from hetccl.core.arguments import block_counts, number
from hetccl.core.explain import Explanation
from hetccl.core.ways import DEVICE_KERNEL
from hetccl.errors import UsageError
from hetccl.types import DType, Op, RedOp

if TYPE_CHECKING:
    from hetccl.core.bootstrap import Joined
    from hetccl.core.connector import Connector
    from hetccl.core.planner import Planner
    from hetccl.core.topology import Topology
    from hetccl.core.tracing import Tracing
    from hetccl.tables import DeviceTable

__all__ = ["Reports"]


class Reports:
    """Mixin of `Communicator`."""

    rank: int
    size: int
    if TYPE_CHECKING:
        _core: Any
        _planner: Planner
        _joined: Joined
        _topology: Topology
        _connector: Connector
        _endpoints: dict[int, tuple[str, int]]
        _direct: bool
        tracing: Tracing

    def explain(
        self, op: str, nbytes: int, dtype: str | DType = "float32", redop: str | RedOp = "sum", root: int = 0,
        counts: Sequence[int] = (),
    ) -> Explanation:  # fmt: skip
        """What an operation on `nbytes` bytes (as `count` in `run`) would do. Sends nothing. With `counts`, the v form
        with blocks of so many elements (all_to_all: from rank i to j at i * size + j), whatever `nbytes`."""
        kind, element, operator = (
            number(Op, op, "operation"),
            number(DType, dtype, "dtype"),
            number(RedOp, redop, "operator"),
        )
        if counts:
            blocks = self.size * self.size if kind == Op.ALL_TO_ALL else self.size
            nbytes = sum(block_counts(counts, blocks, kind.label)) * element.itemsize
        elif not isinstance(nbytes, int) or nbytes < 0:
            raise UsageError(f"explain: {nbytes!r} is no number of bytes; give 0 or more")
        found = self._planner.explain(kind, nbytes, element, operator, root, self.paths(), tuple(counts))
        cache = self._core.cache
        if self._direct and self.tracing.device_path == "host":
            found = replace(found, combined_by=found.combined_by.replace(DEVICE_KERNEL, "host"))
        return replace(found, trace=self.tracing.describe(), plan_cache=(cache.hits, cache.misses))

    def stats(self) -> dict[str, Any]:
        """Counters of this rank since the communicator was made. `past_bytes` are those of results that the core stored
        past the caches, because they are many and nobody reads them soon."""
        raw = _state.counters(self._core.address)
        path_bytes: dict[str, int] = {}
        peer_bytes: dict[int, int] = {}
        for peer, (name, endpoint) in self._endpoints.items():
            sent = self._joined.tables[name].counters(endpoint)["bytes_sent"]
            sent += _state.direct_sent(self._core.address, peer)
            key = self._path(peer) or name
            path_bytes[key] = path_bytes.get(key, 0) + sent
            peer_bytes[peer] = sent
        return {
            "operations": {Op(op).label: n for op, n in raw["operations"].items()},
            "vendor": self._joined.vendor.name,
            "vendor_calls": raw["vendor_calls"],
            "group_calls": raw["group_calls"],
            "device_sums": raw["device_sums"],
            "path_bytes": path_bytes,
            "peer_bytes": peer_bytes,
            "border_bytes": sum(peer_bytes.values()),
            "staged_bytes": raw["staged_bytes"],
            "past_bytes": raw["past_bytes"],
            "plan_cache_hits": self._core.cache.hits,
            "plan_cache_misses": self._core.cache.misses,
        }

    def wire_times(self) -> dict[int, dict[str, dict[str, int]]]:
        """Where the time of transfers between devices goes that share no memory, by peer, in ns since the communicator
        was made. `waits` of the thread that drives: "all" in operations; of the others several may pass at once:
        "copy_out" of the device, "room" (the wire and the peer behind it), "data" that comes in, "copy_in" to the
        device, "sum". `threads`: those of the transport, all sockets together."""
        found = {}
        for peer, (name, endpoint) in self._endpoints.items():
            waits = _state.direct_waits(self._core.address, peer)
            if waits is not None:
                found[peer] = {"waits": waits, "threads": self._joined.tables[name].put_threads(endpoint)}
        return found

    def describe(self) -> list[dict[str, Any]]:
        """Who is where: one dict a rank with rank, host, vendor, device and island."""
        t = self._topology
        return [
            {
                "rank": r,
                "host": t.hosts[r],
                "vendor": t.island_of(r).vendor,
                "device": t.devices[r],
                "island": t.place(r)[0],
            }
            for r in range(self.size)
        ]

    def paths(self) -> dict[tuple[int, int], str]:
        """How this rank reaches each rank of other islands: {(lower rank, higher rank): 'shm'}."""
        found = {}
        for pair in self._topology.border_pairs():
            if self.rank in pair:
                other = pair[0] if pair[1] == self.rank else pair[1]
                found[pair] = self._path(other) or "not connected"
        return found

    def _path(self, peer: int) -> str | None:
        path = self._connector.path(peer)
        return f"{path}, direct" if path and self._direct else path

    def algorithms(self, op: Op) -> tuple[str, ...]:
        """Names of the algorithms that an operation can be done by here; HETCCL_ALGORITHM leaves one."""
        return self._planner.selector.candidates(op)

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def device(self) -> DeviceTable:
        """This rank's device, for memory that its vendor takes as it is."""
        return self._joined.device

    @property
    def islands(self) -> list[list[int]]:
        """Ranks of each island."""
        return [list(i.ranks) for i in self._topology.islands]

    @property
    def vendor(self) -> str:
        """The vendor of this rank."""
        return self._joined.vendor.name
